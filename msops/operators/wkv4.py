from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core.factory import Operators, custom_op
from msops.core.inputs import present
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator

_library = of_package("wkv4")


def wkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Computes the time mixing of RWKV-4: a mean of each channel's values up to now.

    .. math::
        y_t &= \frac{P_t + e^{u + k_t} v_t}{Q_t + e^{u + k_t}} \\
        P_{t+1} &= e^{-e^w} P_t + e^{k_t} v_t, \qquad Q_{t+1} = e^{-e^w} Q_t + e^{k_t}

    A value weighs more with a larger key `k`, and :math:`e^{-e^w}` times less after each step, while the step's own key
    has a bonus `u`. The sums of a channel are kept as :math:`P = p e^o` and :math:`Q = q e^o`, where o is the largest
    exponent of a weight so far, so that nothing overflows:
    :math:`o_{t+1} = \max(o_t - e^w, k_t)`. Another call that takes the last state goes on with the sequence.

    All inputs have gradients, of first order; results do not vary from run to run. The results depend on p e^o and
    q e^o alone, hence the gradient of the given o is p dp + q dq. A loss may also take the last state's p, q and o
    themselves: o's gradient then goes to the key or to the decay, whichever :math:`\max` has taken. For the gradient,
    every 32nd state is written, in inference, too: 3 B T C / 32 numbers.

    Args:
        w (Tensor): Raw decays, shape (C,): a channel's decay in a step is exp(-exp(w)); float16, float32 or float64.
        u (Tensor): Bonuses, shape (C,), the dtype of `w`.
        k (Tensor): Keys, shape (B, T, C): B sequences of T steps with C channels, any T; the dtype of `w`.
        v (Tensor): Values, with the shape and dtype of `k`.
        state (Tensor): The state before the first step, shape (B, 3, C): numerator p, denominator q, exponent o; the
            dtype of `w`, or float32. Default: ``None`` , no steps before: p = q = 0 and o = -1e38.

    Returns:
        Tuple of y, with the shape and dtype of `k`, and the last state, shape (B, 3, C), float64 for float64 inputs and
        float32 otherwise. Without steps, this is the given state.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape.

    Source:
        Peng et al., "RWKV: Reinventing RNNs for the transformer era", 2023.

    Examples:
        >>> import mindspore, msops
        >>> from mindspore import Tensor
        >>> w, u = Tensor([0.0], mindspore.float32), Tensor([0.0], mindspore.float32)
        >>> k, v = Tensor([[[0.0], [0.0]]], mindspore.float32), Tensor([[[2.0], [4.0]]], mindspore.float32)
        >>> y, state = msops.wkv4(w, u, k, v)
        >>> print(y.reshape(-1))
        [2. 3.]
        >>> print(state.asnumpy().round(3).reshape(-1))
        [4.736 1.368 0.   ]
    """
    return _call(w, u, k, v, state)


class WKV4(nn.Cell):
    """Computes the time mixing of RWKV-4. See :func:`msops.wkv4`."""

    def construct(
        self, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _call(w, u, k, v, state)

    construct.__doc__ = wkv4.__doc__  # for help()


def _call(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    results = operators.primitive(state is not None)(w, u, k, v, *present((state,)))
    return results[0], results[1]


@Operators
def operators() -> Operator:
    """Returns the operator, whose third output is every 32nd state, for the gradient."""
    given = "w(C), u(C), k(B, T, C), v(B, T, C), state(B, 3, C, dtype=common|float32)?"
    results = "last(B, 3, C, dtype=accumulator), kept(B, T // 32 + 1, 3, C, dtype=accumulator)"
    backward = custom_op(
        _library.WKV4Backward,
        f"{given}, {results}, dy(B, T, C), dlast(B, 3, C, dtype=accumulator) -> "
        "dw(C), du(C), dk(B, T, C), dv(B, T, C), dstate(B, 3, C, dtype=state)?; sums, parts",
    )
    return custom_op(_library.WKV4Forward, f"{given} -> y(B, T, C), {results}; parts", gradient=backward)
