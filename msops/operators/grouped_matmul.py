from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn
from mindspore.common.initializer import Uniform

from msops.core import settings
from msops.core.compiled import wants_gradient
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as, present, widened
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "grouped_matmul"
_LIBRARY = of_package(_NAME)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    transpose_weight: bool = False,
) -> Tensor:
    r"""Multiplies groups of neighbouring rows, each group by a matrix of its own, such as the tokens of each expert.

    .. math::
        \text{out}_n = x_n\, \text{weight}_{e(n)} + \text{bias}_{e(n)}

    The first ``group_sizes[0]`` rows are group 0, the next ``group_sizes[1]`` rows are group 1, and so on: e(n) is the
    group of row n. Rows after the last group give 0; whatever they hold, it is not used, and they get a gradient of 0.
    A group may have no rows; then its `weight` and `bias` are not used, and get a gradient of 0.

    Sums are in float32, or in float64 beside float64; the bias is added before they are rounded once. A row's result
    has the same bits wherever the row is and whatever the other rows and the sizes of groups are. One operator serves
    all groups, and nothing waits for the sizes. The inputs x, `weight` and `bias` have gradients, of first order, which
    do not vary from run to run. In PyNative mode, the gradient of a `weight` with ``requires_grad=False`` is not
    computed where there is no bias.

    Args:
        x (Tensor): Shape (N, K): N rows; float16, float32 or float64.
        weight (Tensor): Shape (E, K, M), or (E, M, K) with `transpose_weight` : a matrix for each group; the dtype of
            x.
        group_sizes (Tensor): Shape (E,): how many rows each group has; int32 or int64. On the CPU, a negative size, or
            sizes that add up to more than N, are an error; on a GPU, a negative size is 0, and groups end at row N.
        bias (Tensor): Shape (E, M), the dtype of x or float32. Default: ``None`` , no bias.
        transpose_weight (bool): Whether the matrices of `weight` are to be transposed. Default: ``False`` .

    Returns:
        Tensor of shape (N, M) with the dtype of x.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or `transpose_weight` is not a
            bool.
        ValueError: If an input has another shape.

    Source:
        Gale et al., "MegaBlocks: efficient sparse training with mixture-of-experts", 2022, computes all experts' layers
        as one product.

    Examples:
        >>> import mindspore, msops
        >>> x = mindspore.Tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> weight = mindspore.Tensor([[[1.0, 10.0]], [[100.0, 0.5]]])
        >>> print(msops.grouped_matmul(x, weight, mindspore.Tensor([1, 2])))
        [[  1.   10. ]
         [200.    1. ]
         [300.    1.5]
         [  0.    0. ]]
    """
    is_frozen = bias is None and not wants_gradient(weight)
    multiply = operators.primitive(transpose_weight, is_frozen, bias is not None)
    return multiply(x, weight, group_sizes, *present((widened(bias, x),)))[0]


class GroupedMatmul(nn.Cell):
    r"""A matrix, and perhaps a bias, for each group of rows. See :func:`msops.grouped_matmul`.

    Args:
        num_groups (int): E, the number of groups.
        in_channels (int): K, the length of rows.
        out_channels (int): M, the length of the results' rows.
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        transpose_weight (bool): Whether the weight has shape (E, M, K) instead of (E, K, M). Default: ``False`` .
        dtype (mindspore.dtype): The parameters' dtype: float16, float32 or float64. The weight is cast to that of x.
            Default: ``mindspore.float32`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{K}` , as in ``nn.Dense`` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , likewise.

    Inputs:
        - **x** (Tensor) - Shape (N, K).
        - **group_sizes** (Tensor) - Shape (E,).

    Attributes:
        weight (Parameter): Shape (E, K, M), or (E, M, K) with `transpose_weight` .
        bias (Parameter): Shape (E, M), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> net = msops.GroupedMatmul(4, 8, 16)
        >>> print(net(ops.ones((10, 8)), mindspore.Tensor([3, 0, 5, 2])).shape)
        (10, 16)
    """

    def __init__(
        self,
        num_groups: int,
        in_channels: int,
        out_channels: int,
        has_bias: bool = False,
        transpose_weight: bool = False,
        dtype: mindspore.Type = mindspore.float32,
        weight_init: settings.Init | None = None,
        bias_init: settings.Init | None = None,
    ) -> None:
        name = "GroupedMatmul"
        super().__init__()
        self.num_groups = settings.positive(name, "num_groups", num_groups)
        self.in_channels = settings.positive(name, "in_channels", in_channels)
        self.out_channels = settings.positive(name, "out_channels", out_channels)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        self.transpose_weight = settings.boolean(name, "transpose_weight", transpose_weight)
        matrix = (out_channels, in_channels) if transpose_weight else (in_channels, out_channels)
        spread = Uniform(1 / math.sqrt(in_channels))
        weight_init = spread if weight_init is None else weight_init
        self.weight = settings.parameter(name, "weight", weight_init, (num_groups, *matrix), dtype)
        self.bias = None
        if has_bias:
            bias_init = spread if bias_init is None else bias_init
            self.bias = settings.parameter(name, "bias", bias_init, (num_groups, out_channels), dtype)

    def construct(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        return grouped_matmul(x, cast_as(self.weight, x), group_sizes, self.bias, self.transpose_weight)

    construct.__doc__ = grouped_matmul.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "num_groups", "in_channels", "out_channels", "has_bias", "transpose_weight")


@Operators
def operators(transpose_weight: bool, is_frozen: bool = False) -> Operator:
    transposes = int(settings.boolean(_NAME, "transpose_weight", transpose_weight))
    weight = "weight(E, M, K)" if transposes else "weight(E, K, M)"
    others = f"{weight}, group_sizes(E, dtype=index)"
    inputs = f"x(N, K), {others}, bias(E, M, dtype=common|float32)?"
    if is_frozen:  # the gradient of x is a product by the transposed matrices, and there is no bias
        backward = custom_op(
            _LIBRARY.GroupedMatmulForward,
            f"dout(N, M), {others}, bias(E, K, dtype=common|float32)? -> dx(N, K); bounds(3 * E + 6, dtype=int64)",
            transpose_weight=1 - transposes,
        )
    else:
        backward = custom_op(
            _LIBRARY.GroupedMatmulBackward,
            f"{inputs}, dout(N, M) -> dx(N, K), d{weight}, dbias(E, M, dtype=bias)?; bounds(3 * E + 6, dtype=int64)",
            transpose_weight=transposes,
        )
    return custom_op(
        _LIBRARY.GroupedMatmulForward,
        f"{inputs} -> out(N, M); bounds(3 * E + 6, dtype=int64)",
        gradient=backward,
        transpose_weight=transposes,
    )
