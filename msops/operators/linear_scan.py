from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package

if TYPE_CHECKING:
    from typing import Any

    from msops.core.operator import Operator

_NAME = "linear_scan"
_library = of_package(_NAME)


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    r"""Computes a linear recurrence along a sequence, for each channel by itself.

    .. math::
        h_t &= a_t\, h_{t-1} + b_t, \qquad h_{-1} = \text{h0} \\
        \text{db}_t &= \text{dh}_t + a_{t+1}\, \text{db}_{t+1}, \qquad
        \text{da}_t = \text{db}_t\, h_{t-1}, \qquad \text{dh0} = a_0\, \text{db}_0

    This is the core of recurrent layers that are linear in their state: gated linear recurrences, S5, minGRU. The last
    state is ``h[:, -1]`` , and a sequence may be cut anywhere: the second call takes the last state of the first as
    `h0`. The state is kept in float32, or in float64 beside float64, and each :math:`h_t` is rounded once. All inputs
    have gradients, of first order; results do not vary from run to run.

    Args:
        a (Tensor): Factors of the state, shape (B, L, D): B sequences of L steps with D channels, any L; float16,
            float32 or float64.
        b (Tensor): Terms, with the shape and dtype of `a`.
        h0 (Tensor): The state before the first step, shape (B, D), the dtype of `a`, or float32. Default: ``None`` ,
            zeros.
        reverse (bool): Whether to go from the last step to the first, :math:`h_t = a_t\, h_{t+1} + b_t`, so that `h0`
            is the state after the last step. Default: ``False`` .

    Returns:
        Tensor of the shape and dtype of `a`.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, the dtypes differ, or `reverse` is not a bool.
        ValueError: If an input has another shape.

    Source:
        Martin and Cundy, "Parallelizing linear recurrent neural nets over sequence length", 2018.

    Examples:
        >>> import mindspore, msops
        >>> a = mindspore.Tensor([[[0.5], [0.5], [2.0]]], mindspore.float32)
        >>> b = mindspore.Tensor([[[1.0], [0.0], [1.0]]], mindspore.float32)
        >>> print(msops.linear_scan(a, b).reshape(-1))
        [1.  0.5 2. ]
        >>> print(msops.linear_scan(a, b, mindspore.Tensor([[8.0]], mindspore.float32)).reshape(-1))
        [5.  2.5 6. ]
    """
    return _call(reverse, a, b, h0)


class LinearScan(nn.Cell):
    """Computes a linear recurrence along a sequence. See :func:`msops.linear_scan`.

    Args:
        reverse (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If `reverse` is not a bool.
    """

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse = settings.boolean(_NAME, "reverse", reverse)

    def construct(self, a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
        return _call(self.reverse, a, b, h0)

    construct.__doc__ = linear_scan.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "reverse")


def _call(reverse: bool, a: Tensor, b: Tensor, h0: Tensor | None) -> Tensor:
    return operators.primitive(reverse, h0 is not None)(a, b, *present((h0,)))[0]


@Operators
def operators(reverse: bool) -> Operator:
    attributes: dict[str, Any] = dict(reverse=int(settings.boolean(_NAME, "reverse", reverse)))
    state = "h0(B, D, dtype=common|float32)?"
    backward = custom_op(
        _library.LinearScanBackward,
        f"a(B, L, D), {state}, h(B, L, D), dh(B, L, D) -> da(B, L, D), db(B, L, D), dh0(B, D, dtype=h0)?; partial",
        **attributes,
    )
    return custom_op(
        _library.LinearScanForward,
        f"a(B, L, D), b(B, L, D), {state} -> h(B, L, D); partial",
        gradient=backward,
        **attributes,
    )
