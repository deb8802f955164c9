from mindspore import nn

from . import check
from .custom import Operator, load, scratch, shared

_LIBRARY = load("add")
_MAX_RANK = 16  # kMaxRank in aot_kernels/common/axes.h


def add(x, y):
    r"""Sum of two tensors with NumPy's broadcasting.

    .. math:: \text{out}_i = x_i + y_i

    The gradient of each input is that of the output, summed over the axes along which the input was broadcast.

    Args:
        x (Tensor): Any shape of at most 16 axes; float16, float32 or float64.
        y (Tensor): A shape that broadcasts with that of `x`; the dtype of `x`.

    Returns:
        Tensor of the broadcast shape, with the dtype of `x`.

    Raises:
        TypeError: If `x` or `y` is not a Tensor of one of these dtypes, or their dtypes differ.
        ValueError: If the shapes do not broadcast, or have more than 16 axes.

    Examples:
        >>> import mindspore, msops
        >>> column = mindspore.Tensor([[1.0], [2.0]], mindspore.float32)
        >>> print(msops.add(column, mindspore.Tensor([10.0, 20.0], mindspore.float32)))
        [[11. 21.]
         [12. 22.]]
    """
    return _add()(x, y)


class Add(nn.Cell):
    """See :func:`msops.add`."""

    def __init__(self):
        super().__init__()
        self.forward_op = Operator(_LIBRARY, "AddForward", _infer, bprop=self.backward)
        self.backward_op = Operator(_LIBRARY, "AddBackward", _infer_backward)

    def construct(self, x, y):
        return self.forward_op(x, y)

    def backward(self, x, y, out, dout):
        return self.sum_to(dout, x), self.sum_to(dout, y)

    def sum_to(self, dout, x):
        if x.shape == dout.shape:
            return dout
        return self.backward_op(dout, x)[0]


@shared
def _add():
    return Add().forward_op


def _infer(x, y):
    check.tensors("add", x=x, y=y)
    rank = max(len(x.shape), len(y.shape))
    if rank > _MAX_RANK:
        raise ValueError(f"add: x and y must have at most {_MAX_RANK} axes, got {rank}")
    padded_x, padded_y = ((1,) * (rank - len(shape)) + shape for shape in (x.shape, y.shape))
    if any(a != b and 1 not in (a, b) for a, b in zip(padded_x, padded_y)):
        raise ValueError(f"add: y must have a shape that broadcasts with {x.shape} of x, got {y.shape}")
    return x._replace(shape=tuple(b if a == 1 else a for a, b in zip(padded_x, padded_y)))


def _infer_backward(dout, x):
    # Enough parts for the threads of a GPU, but of enough terms each, which a warp shares if they are neighbours.
    share, most = (2048, 4096) if dout.shape[-1:] != x.shape[-1:] else (512, 2048)
    parts = max(1, min(dout.size // max(1, x.size) // share, most, 2**19 // max(1, x.size)))
    return [x, scratch(x.dtype, parts, x.size if parts > 1 else 1)]
