from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Uniform

from msops.core import settings
from msops.core.compiled import once
from msops.core.factory import custom_op
from msops.core.inputs import cast_as, check_inputs, check_pair, describe, describe_pair, has_zero, spec_of
from msops.core.library import of_package
from msops.core.signature import Signature

if TYPE_CHECKING:
    from msops.core.inputs import Description

    State = tuple[Tensor, Tensor]


def lltm_cell(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor) -> State:
    r"""Computes one step of the LLTM ("long long-term memory"), a recurrent cell without a forget gate.

    .. math::
        (i, o, g) &= [h, x]\, \text{weight}^T + \text{bias} \\
        c' &= c + \sigma(i) \odot \operatorname{ELU}(g) \\
        h' &= \tanh(c') \odot \sigma(o)

    :math:`[h, x]` has the columns of `h`, then the columns of `x`. ELU has :math:`\alpha = 1`. MindSpore's matmul
    computes the product, and one kernel all the rest. Every input has a gradient. The backward kernel computes the
    activations again instead of keeping them.

    Args:
        x (Tensor): The step's input, shape (B, I); float16, float32 or float64. All inputs have the same dtype.
        h (Tensor): Hidden state, shape (B, H).
        c (Tensor): Cell state, shape (B, H).
        weight (Tensor): Shape (3H, H + I). The first H rows are for i, the next for o, the last for g.
        bias (Tensor): Shape (3H,), in the same order.

    Returns:
        Tuple (h', c') of Tensors of shape (B, H), with the dtype of the inputs.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Source:
        PyTorch's tutorial "Custom C++ and CUDA extensions" defines the cell.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> x, h, c = ops.ones((4, 8)), ops.zeros((4, 2)), ops.ones((4, 2))
        >>> new_h, new_c = msops.lltm_cell(x, h, c, weight=ops.zeros((6, 10)), bias=ops.zeros(6))
        >>> print(new_c[0], new_h[0])
        [1. 1.] [0.3807971 0.3807971]
    """
    return _step(x, h, c, weight, bias)


def _step(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor) -> State:
    _check(describe(x), describe(h), describe(c), describe(weight), describe(bias))
    if has_zero(c.shape[0], c.shape[1]):
        product = ops.zeros((c.shape[0], bias.shape[0]), c.dtype)
    elif has_zero(x.shape[1]):
        product = ops.matmul(h, weight.T)
    else:
        product = ops.matmul(ops.concat((h, x), 1), weight.T)
    return forward(cast_as(product, c), bias, c)


@once
def _check(*inputs: Description) -> None:
    check_inputs(_STEP, "lltm_cell", [spec_of(each) for each in inputs])


_STEP = Signature("x(B, I), h(B, H), c(B, H), weight(3 * H, H + I), bias(3 * H) -> new_h(B, H), new_c(B, H)")
_library = of_package("lltm_cell")
# Each row of `partial` holds the sums over one group of samples. CUDA blocks add up each group, and there are enough
# groups to fill a GPU.
backward = custom_op(
    _library.LLTMCellBackward,
    "product(B, 3 * H), bias(3 * H), c(B, H), dnew_h(B, H), dnew_c(B, H) -> "
    "dproduct(B, 3 * H), dbias(3 * H), dc(B, H); partial",
)
forward = custom_op(
    _library.LLTMCellForward,
    "product(B, 3 * H), bias(3 * H), c(B, H) -> new_h(B, H), new_c(B, H)",
    gradient=backward,
)


def _cell(self: LLTMCell, x: Tensor, state: State) -> State:
    check_pair("LLTMCell", "(h, c)", describe_pair(state))
    h, c = state
    return _step(x, cast_as(h, x), cast_as(c, x), cast_as(self.weight, x), cast_as(self.bias, x))


class LLTMCell(nn.Cell):
    r"""An LLTM cell with its parameters: `cell(x, (h, c))` returns `(new_h, new_c)`. See :func:`msops.lltm_cell`.

    State and parameters are cast to the dtype of `x`, which is also the dtype of the results, so that the cell works in
    mixed precision. Each gradient has the dtype of the input or parameter to which it belongs.

    Args:
        input_size (int): I, the number of columns of `x`.
        hidden_size (int): H, the number of columns of `h` and `c`.
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (3H, H + I). Its initial values are uniform in :math:`\pm 1 / \sqrt{H}`.
        bias (Parameter): Shape (3H,), with initial values from the same range.

    Raises:
        TypeError: If a size is not an int, or the dtype is not one of float16, float32 and float64.
        ValueError: If a size is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> cell = msops.LLTMCell(8, 2)
        >>> new_h, new_c = cell(ops.ones((4, 8)), (ops.zeros((4, 2)), ops.zeros((4, 2))))
        >>> print(new_h.shape, new_c.shape)
        (4, 2) (4, 2)
    """

    def __init__(self, input_size: int, hidden_size: int, dtype: mindspore.Type = mindspore.float32) -> None:
        super().__init__()
        self.input_size = input_size = settings.positive("LLTMCell", "input_size", input_size)
        self.hidden_size = hidden_size = settings.positive("LLTMCell", "hidden_size", hidden_size)
        init = Uniform(1 / math.sqrt(hidden_size))
        shape = (3 * hidden_size, hidden_size + input_size)
        self.weight = settings.parameter("LLTMCell", "weight", init, shape, dtype)
        self.bias = settings.parameter("LLTMCell", "bias", init, shape[:1], dtype)

    _forward = _cell  # level O1 of amp rewrites the functions that it finds in a class, and fails at this one

    def construct(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        return self._forward(x, state)

    construct.__doc__ = lltm_cell.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "input_size", "hidden_size")
