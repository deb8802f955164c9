import math

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Uniform

from . import check
from .custom import Operator, load, scratch, shared

_NAME = "lltm_cell"
_LIBRARY = load("lltm")


def lltm_cell(x, h, c, weight, bias):
    r"""One step of the LLTM ("long long-term memory"), a recurrent cell without a forget gate.

    .. math::
        (i, o, g) &= [h, x]\, \text{weight}^T + \text{bias} \\
        c' &= c + \sigma(i) \odot \operatorname{ELU}(g) \\
        h' &= \tanh(c') \odot \sigma(o)

    :math:`[h, x]` are the columns of `h` followed by those of `x`; ELU has :math:`\alpha = 1`. The product is
    MindSpore's matmul; all the rest is one kernel. Every input has a gradient; the backward kernel computes the
    activations again instead of keeping them.

    Args:
        x (Tensor): The step's input, shape (B, I); float16, float32 or float64. All inputs have one dtype.
        h (Tensor): Hidden state, shape (B, H).
        c (Tensor): Cell state, shape (B, H).
        weight (Tensor): Shape (3H, H + I), the rows of i, then those of o, then those of g.
        bias (Tensor): Shape (3H,).

    Returns:
        Tuple (h', c') of Tensors of shape (B, H).

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Source:
        The cell of PyTorch's tutorial "Custom C++ and CUDA extensions".

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x, h, c = ops.ones((4, 8)), ops.zeros((4, 2)), ops.ones((4, 2))
        >>> new_h, new_c = msops.lltm_cell(x, h, c, weight=ops.zeros((6, 10)), bias=ops.zeros(6))
        >>> print(new_c[0], new_h[0])
        [1. 1.] [0.3807971 0.3807971]
    """
    return _step(_pointwise(), x, h, c, weight, bias)


class _Pointwise(nn.Cell):
    """What follows the product, as an operator."""

    def __init__(self):
        super().__init__()
        self.forward_op = Operator(_LIBRARY, "LLTMForward", _infer, bprop=self.backward)
        self.backward_op = Operator(_LIBRARY, "LLTMBackward", _infer_backward)

    def construct(self, product, bias, c):
        return self.forward_op(product, bias, c)

    def backward(self, product, bias, c, out, dout):
        return self.backward_op(product, bias, c, dout[0], dout[1])[:3]


class LLTMCell(nn.Cell):
    r"""An LLTM cell with its parameters: `cell(x, (h, c))` is `(new_h, new_c)`. See :func:`msops.lltm_cell`.

    Args:
        input_size (int): I, the number of columns of `x`.
        hidden_size (int): H, the number of columns of `h` and `c`.
        dtype (mindspore.dtype): Of the parameters. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (3H, H + I), uniform in :math:`\pm 1 / \sqrt{H}`.
        bias (Parameter): Shape (3H,), likewise.

    Raises:
        TypeError: If a size is not an int, or the dtype is none of float16, float32, float64.
        ValueError: If a size is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> cell = msops.LLTMCell(8, 2)
        >>> new_h, new_c = cell(ops.ones((4, 8)), (ops.zeros((4, 2)), ops.zeros((4, 2))))
        >>> print(new_h.shape, new_c.shape)
        (4, 2) (4, 2)
    """

    def __init__(self, input_size, hidden_size, dtype=mindspore.float32):
        super().__init__()
        self.input_size = check.positive("LLTMCell", "input_size", input_size)
        self.hidden_size = check.positive("LLTMCell", "hidden_size", hidden_size)
        init = Uniform(1 / math.sqrt(hidden_size))
        shape = (3 * hidden_size, hidden_size + input_size)
        self.weight = check.parameter("LLTMCell", "weight", init, shape, dtype)
        self.bias = check.parameter("LLTMCell", "bias", init, shape[:1], dtype)
        self.forward_op = _pointwise()

    def construct(self, x, state):
        if not isinstance(state, (tuple, list)):
            raise TypeError("LLTMCell: state must be a tuple (h, c)")
        h, c = state
        return _step(self.forward_op, x, h, c, self.weight, self.bias)

    def extend_repr(self):
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


@shared
def _pointwise():
    return _Pointwise().forward_op


def _step(pointwise, x, h, c, weight, bias):
    _check(_describe(x), _describe(h), _describe(c), _describe(weight), _describe(bias))
    product = ops.matmul(ops.concat((h, x), 1), weight.T)
    return pointwise(product, bias, c)


def _describe(x):
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return None, type(x)


@ops.constexpr
def _check(x, h, c, weight, bias):
    specs = [check.Spec(shape, getattr(kind, "__name__", kind)) for shape, kind in (x, h, c, weight, bias)]
    x, h, c, weight, bias = specs
    check.tensors(_NAME, x=x, h=h, c=c, weight=weight, bias=bias)
    check.shape(_NAME, "x", x, "B", "I")
    batch, inputs = x.shape
    check.shape(_NAME, "h", h, batch, "H")
    hidden = h.shape[1]
    check.shape(_NAME, "c", c, batch, hidden)
    check.shape(_NAME, "weight", weight, 3 * hidden, hidden + inputs)
    check.shape(_NAME, "bias", bias, 3 * hidden)


def _infer(product, bias, c):
    return [c, c]  # _check has seen all inputs of the step


def _infer_backward(product, bias, c, dnew_h, dnew_c):
    batch, hidden = c.shape
    # Groups of the batch, each summed by blocks of a GPU's threads, of which these are enough to fill it.
    groups = max(1, min(batch // 64, 2**16 // max(1, hidden), 4096))
    return [product, bias, c, scratch(c.dtype, groups, 3 * hidden)]
