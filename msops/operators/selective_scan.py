# ruff: noqa: N803 (the names of matrices in the field)
from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, nn, ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.inputs import present, widened
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_NAME = "selective_scan"
_library = of_package(_NAME)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Computes Mamba's selective scan: a state of N numbers for each channel, whose decay and input vary from step to
    step.

    .. math::
        h_t &= e^{\text{dt}_t A}\, h_{t-1} + \text{dt}_t\, u_t\, B_t, \qquad
        \text{dt}_t = \text{softplus}(\text{delta}_t + \text{delta\_bias}) \\
        \text{out}_t &= (C_t \cdot h_t + D\, u_t)\; \text{silu}(z_t)

    Channel d is of group d // (D / G), whose :math:`B_t` and :math:`C_t` it takes. Without `delta_softplus`,
    :math:`\text{dt}_t` is the sum itself; what is not given is left out.

    The states and all sums are in float32, or float64 beside float64, and each output is rounded once. A sequence may
    be cut anywhere: the second call takes the last state of the first as `initial_state`. All inputs have gradients, of
    first order, also through the last state; their sums have a fixed order. For the gradient, the states before every
    64th step are written, in inference, too: B N D L / 64 numbers.

    Args:
        u (Tensor): Shape (B, D, L): B sequences of L steps with D channels, any L; float16, float32 or float64.
        delta (Tensor): The lengths of steps, with the shape and dtype of `u`.
        A (Tensor): Shape (D, N), any N; the dtype of `u`, or float32. Mamba's A is negative, so that states decay.
        B (Tensor): Shape (B, N, L), or (B, G, N, L) for G groups, of which D is a multiple; the dtype of `u`, or
            float32: then copies of the others in float32 are read.
        C (Tensor): The shape of `B`, and one of these dtypes.
        D (Tensor): Shape (D,), the dtype of `u`, or float32. Default: ``None`` .
        z (Tensor): A gate, with the shape and dtype of `u`. Default: ``None`` .
        delta_bias (Tensor): Shape (D,), the dtype of `u`, or float32. Default: ``None`` .
        delta_softplus (bool): Whether dt is the softplus. Default: ``False`` .
        initial_state (Tensor): The state before the first step, shape (B, D, N), the dtype of `u`, or float32.
            Default: ``None`` , zeros.
        return_last_state (bool): Whether the state after the last step is returned, too. Default: ``False`` .

    Returns:
        Tensor of the shape and dtype of `u`. With `return_last_state`, a tuple of it and the last state, of shape
        (B, D, N) and float32, or float64 beside float64.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or `delta_softplus` or `return_last_state` is not
            a bool.
        ValueError: If an input has another shape.

    Source:
        Gu and Dao, "Mamba: Linear-time sequence modeling with selective state spaces", 2023.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor
        >>> u = Tensor([[[1.0, 0.0, 2.0]]], mindspore.float32)
        >>> ones, A = Tensor([[[1.0, 1.0, 1.0]]], mindspore.float32), Tensor([[-0.6931472]], mindspore.float32)
        >>> print(msops.selective_scan(u, ones, A, ones, ones).asnumpy().round(4))
        [[[1.   0.5  2.25]]]
        >>> out, state = msops.selective_scan(u, ones, A, ones, ones, return_last_state=True)
        >>> print(msops.selective_scan(u, ones, A, ones, ones, initial_state=state).asnumpy().round(4))
        [[[2.125  1.0625 2.5312]]]
    """
    settings.boolean(_NAME, "return_last_state", return_last_state)
    return _call(delta_softplus, return_last_state, u, delta, A, B, C, D, z, delta_bias, initial_state)


class SelectiveScan(nn.Cell):
    """Computes Mamba's selective scan. See :func:`msops.selective_scan`.

    The Cell is called as the function, without the settings: ``(u, delta, A, B, C, D, z, delta_bias, initial_state)`` ,
    where the last four may be left out or be None.

    Args:
        delta_softplus (bool): As in the function. Default: ``False`` .
        return_last_state (bool): As in the function. Default: ``False`` .

    Raises:
        TypeError: If an argument is not a bool.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor
        >>> net = msops.SelectiveScan(delta_softplus=True)
        >>> u, A = Tensor([[[1.0, 0.0, 2.0]]], mindspore.float32), Tensor([[-1.0, -2.0]], mindspore.float32)
        >>> B = Tensor([[[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]], mindspore.float32)
        >>> print(net(u, u, A, B, B).shape)
        (1, 1, 3)
    """

    def __init__(self, delta_softplus: bool = False, return_last_state: bool = False) -> None:
        super().__init__()
        self.delta_softplus = settings.boolean(_NAME, "delta_softplus", delta_softplus)
        self.return_last_state = settings.boolean(_NAME, "return_last_state", return_last_state)

    def construct(
        self,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        initial_state: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        softplus, both = self.delta_softplus, self.return_last_state
        return _call(softplus, both, u, delta, A, B, C, D, z, delta_bias, initial_state)

    construct.__doc__ = selective_scan.__doc__  # for help()

    def extend_repr(self) -> str:
        return settings.shown(self, "delta_softplus", "return_last_state")


def _call(
    delta_softplus: bool,
    return_last_state: bool,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    scan = operators.primitive(
        delta_softplus, D is not None, z is not None, delta_bias is not None, initial_state is not None
    )
    if _is_wide(B, u):
        wide = B
    elif _is_wide(C, u):
        wide = C
    else:
        results = scan(u, delta, A, B, C, *present((D, z, delta_bias, initial_state)))
        return (results[0], results[1]) if return_last_state else results[0]
    further = present((widened(D, wide), widened(z, wide), widened(delta_bias, wide), widened(initial_state, wide)))
    steps = widened(u, wide), widened(delta, wide)
    results = scan(*steps, widened(A, wide), widened(B, wide), widened(C, wide), *further)
    out = ops.cast(results[0], u.dtype)
    return (out, results[1]) if return_last_state else out


def _is_wide(x: object, u: object) -> bool:
    """Tells whether a tensor is float32 beside a u of float16."""
    if not isinstance(x, Tensor) or not isinstance(u, Tensor):
        return False
    return bool(x.dtype == mindspore.float32 and u.dtype == mindspore.float16)


@Operators
def operators(delta_softplus: bool) -> Operator:
    softplus = int(settings.boolean(_NAME, "delta_softplus", delta_softplus))
    inputs = (
        "u(B, D, L), delta(B, D, L), A(D, N, dtype=common|float32), B(B, *G, N, L), C(B, *G, N, L), "
        "D(D, dtype=common|float32)?, z(B, D, L)?, delta_bias(D, dtype=common|float32)?, "
        "initial_state(B, D, N, dtype=common|float32)?"
    )
    states = "states(B, (L + 63) // 64, D, N, dtype=accumulator)"
    backward = custom_op(
        _library.SelectiveScanBackward,
        f"{inputs}, {states}, dout(B, D, L), dlast_state(B, D, N, dtype=accumulator) -> du(B, D, L), ddelta(B, D, L), "
        "dA(D, N, dtype=A), dB(B, *G, N, L), dC(B, *G, N, L), dD(D, dtype=D)?, dz(B, D, L)?, "
        "ddelta_bias(D, dtype=delta_bias)?, dinitial_state(B, D, N, dtype=initial_state)?; "
        "ends, sums, dA_parts, vectors, carry, held",
        delta_softplus=softplus,
    )
    return custom_op(
        _library.SelectiveScanForward,
        f"{inputs} -> out(B, D, L), last_state(B, D, N, dtype=accumulator), {states}; ends",
        gradient=backward,
        delta_softplus=softplus,
    )
