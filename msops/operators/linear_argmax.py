from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import mindspore
from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import cast_as
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.settings import Init
    from msops.core.spec import Spec

_NAME = "linear_argmax"
_library = of_package(_NAME)


def linear_argmax(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Computes a linear layer, and where each row of its outputs is largest: the scores of tokens, and the best one.

    .. math::
        y = x\, \text{weight}^T + \text{bias}, \qquad \text{index} = \operatorname{argmax}_v y_v

    The first of equal numbers counts, and NaN counts as larger than all. Sums are in float32 (float64 for float64), and
    are rounded to the dtype of `x` before and after the bias is added. There is no gradient: train with
    :func:`msops.linear_cross_entropy`, and choose tokens by this.

    Args:
        x (Tensor): Shape (..., C); float16, float32 or float64.
        weight (Tensor): Shape (V, C), with V of at least 1 and less than 2^31; of the dtype of `x`.
        bias (Tensor): Shape (V,), of the dtype of `x`. Default: ``None`` .

    Returns:
        tuple of two Tensors: y, shape (..., V), of the dtype of `x`; index, shape (...), int32.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Examples:
        >>> import mindspore, msops
        >>> weight = mindspore.Tensor([[1, 0], [0, 1], [1, 1]], mindspore.float32)
        >>> y, index = msops.linear_argmax(mindspore.Tensor([[2, 3], [2, -1]], mindspore.float32), weight)
        >>> print(y)
        [[ 2.  3.  5.]
         [ 2. -1.  1.]]
        >>> print(index)
        [2 0]
    """
    op = operators.primitive(bias is not None)
    found = op(x, weight) if bias is None else op(x, weight, bias)
    return found[0], found[1]


class LinearArgmax(nn.Cell):
    r"""A linear layer that also tells where its outputs are largest. See :func:`msops.linear_argmax`.

    Args:
        hidden_size (int): C, the length of the last axis of x.
        vocab_size (int): V, the number of outputs.
        has_bias (bool): Whether there is a bias. Default: ``False`` .
        weight_init (Tensor, str, Initializer, number): The initial weight. Default: ``None`` , ``HeUniform(sqrt(5))``
            as in ``nn.Dense`` .
        bias_init (Tensor, str, Initializer, number): The initial bias. Default: ``None`` , uniform in
            :math:`\pm 1 / \sqrt{C}` as in ``nn.Dense`` .
        dtype (mindspore.dtype): The parameters' dtype; they are cast to that of x. Default: ``mindspore.float32`` .

    Attributes:
        weight (Parameter): Shape (V, C).
        bias (Parameter): Shape (V,), or None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a size is less than 1.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import ops
        >>> y, index = msops.LinearArgmax(8, 100, weight_init="ones")(ops.ones((2, 3, 8)))
        >>> print(y.shape, index)
        (2, 3, 100) [[0 0 0]
         [0 0 0]]
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        has_bias: bool = False,
        weight_init: Init | None = None,
        bias_init: Init | None = None,
        dtype: mindspore.Type = mindspore.float32,
    ) -> None:
        name = "LinearArgmax"
        super().__init__()
        self.hidden_size = settings.positive(name, "hidden_size", hidden_size)
        self.vocab_size = settings.positive(name, "vocab_size", vocab_size)
        self.has_bias = settings.boolean(name, "has_bias", has_bias)
        shape = (self.vocab_size, self.hidden_size)
        self.weight, self.bias = settings.weight_and_bias(name, shape, has_bias, weight_init, bias_init, dtype)

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = cast_as(self.weight, x)
        if self.bias is None:
            return linear_argmax(x, weight)
        return linear_argmax(x, weight, cast_as(self.bias, x))

    construct.__doc__ = linear_argmax.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "hidden_size", "vocab_size", "has_bias")


def _no_gradient(*_: object) -> NoReturn:
    raise ValueError("linear_argmax: it is for inference and has no gradient; train with linear_cross_entropy")


@Operators
def operators() -> Operator:
    return custom_op(
        _library.LinearArgmaxForward,
        "x(*B, C), weight(V, C), bias(V)? -> y, index; work",
        infer=_infer,
        gradient=_no_gradient,
    )


def _infer(x: Spec, weight: Spec, bias: Spec | None) -> list[Spec]:
    rows = weight.shape[0]
    if not 0 < rows < 2**31:
        raise ValueError(f"weight must have at least 1 row and less than 2^31, got {rows}")
    return [x._replace(shape=(*x.shape[:-1], rows)), x._replace(shape=x.shape[:-1], dtype=mindspore.int32)]
