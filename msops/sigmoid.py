from mindspore import nn

from . import check
from .custom import Operator, load, shared

_LIBRARY = load("sigmoid")


def sigmoid(x):
    r"""Logistic sigmoid of each element.

    .. math:: y = \frac{1}{1 + e^{-x}}, \qquad \frac{dy}{dx} = y (1 - y)

    Exact where it saturates: 0 or 1 for large :math:`|x|`, NaN only for NaN.

    Args:
        x (Tensor): Any shape; float16, float32 or float64.

    Returns:
        Tensor of the shape and dtype of `x`, in [0, 1].

    Raises:
        TypeError: If `x` is not a Tensor of one of these dtypes.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.sigmoid(mindspore.Tensor([-1000.0, 0.0, 1000.0], mindspore.float32)))
        [0.  0.5 1. ]
    """
    return _sigmoid()(x)


class Sigmoid(nn.Cell):
    """See :func:`msops.sigmoid`."""

    def __init__(self):
        super().__init__()
        self.forward_op = Operator(_LIBRARY, "SigmoidForward", _infer, bprop=self.backward)
        self.backward_op = Operator(_LIBRARY, "SigmoidBackward", _infer_backward)

    def construct(self, x):
        return self.forward_op(x)

    def backward(self, x, y, dy):
        return (self.backward_op(y, dy),)


@shared
def _sigmoid():
    return Sigmoid().forward_op


def _infer(x):
    check.tensors("sigmoid", x=x)
    return x


def _infer_backward(y, dy):
    return y
