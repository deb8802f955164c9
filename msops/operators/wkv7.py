from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from msops.core.compiled import once
from msops.core.factory import Operators, custom_op
from msops.core.inputs import describe, present, spec_of
from msops.core.library import of_package
from msops.core.spec import Spec

if TYPE_CHECKING:
    from msops.core.inputs import Description
    from msops.core.operator import Operator

_NAME, _MOST = "wkv7", 128
_library = of_package(_NAME)


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Computes the time mixing of RWKV-7: each head has a matrix S as its memory, which every step changes and reads.

    .. math::
        S_t &= S_{t-1}\, \mathrm{diag}(e^{-e^{w_t}}) + (S_{t-1} a_t)\, b_t^T + v_t k_t^T \\
        y_t &= S_t r_t

    The decay w lets each column of S fade, `a` and `b` replace what it holds for one direction, as the delta rule
    does (RWKV-7 has a = -k̂ and b = k̂ times a rate, with k̂ a key of length 1), `k` and `v` add a pair of key and value,
    and the receptance `r` reads. Another call that takes the last state goes on with the sequence.

    S and all sums are float32, or float64 beside float64. On GPUs from sm_80 on, float16 with 64 features goes in
    chunks of 16 steps, whose products are of numbers of 11 bits, on tensor cores. All inputs have gradients, of
    first order; results do not vary from run to run. The gradient of `w` is a running sum along up to 32 steps,
    times e^w, so that its error is that of the sum's terms, also where the gradient itself is small; where the
    decay is below the dtype's precision, it is 0. For the gradient, :math:`S_{t-1} a_t` of every step is written,
    in inference, too: B T H D numbers.

    Args:
        r (Tensor): Receptances, shape (B, T, H, D): B sequences of T steps, any T, with H heads of D features, D up to
            128; float16, float32 or float64.
        w (Tensor): Raw decays, with the shape and dtype of `r`, as the next four: a step's decay is exp(-exp(w)).
        k (Tensor): Keys.
        v (Tensor): Values.
        a (Tensor): What a step reads from the state before it.
        b (Tensor): Where the step adds that.
        state (Tensor): The state before the first step, shape (B, H, D, D) for (value, key); the dtype of `r`, or
            float32. Default: ``None`` , zeros.

    Returns:
        Tuple of y, with the shape and dtype of `r`, and the last state, shape (B, H, D, D), float64 for float64 inputs
        and float32 otherwise. Without steps, this is the given state.

    Raises:
        TypeError: If an input is not a Tensor of one of these dtypes, or the dtypes differ.
        ValueError: If an input has another shape, or D is larger than 128.

    Source:
        Peng et al., "RWKV-7 'Goose' with expressive dynamic state evolution", 2025.

    Examples:
        >>> import mindspore, msops, numpy as np
        >>> from mindspore import Tensor
        >>> def vectors(*rows):
        ...     return Tensor(np.array(rows, np.float32).reshape(1, 2, 1, 2))
        >>> keys, values, never = vectors([1, 0], [1, 0]), vectors([1, 2], [3, 4]), vectors([-100, -100], [-100, -100])
        >>> y, state = msops.wkv7(keys, never, keys, values, -keys, keys)  # the second value replaces the first
        >>> print(y.reshape(2, 2))
        [[1. 2.]
         [3. 4.]]
        >>> print(state.reshape(2, 2))
        [[3. 0.]
         [4. 0.]]
    """
    return _call(r, w, k, v, a, b, state)


class WKV7(nn.Cell):
    """Computes the time mixing of RWKV-7. See :func:`msops.wkv7`."""

    def construct(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return _call(r, w, k, v, a, b, state)

    construct.__doc__ = wkv7.__doc__  # for help()


def _call(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_features(describe(r))
    results = operators.primitive(state is not None)(r, w, k, v, a, b, *present((state,)))
    return results[0], results[1]


@once
def _check_features(r: Description) -> None:
    """Requires few features. All else is the operator's own check."""
    spec = spec_of(r)
    features = spec.shape[-1] if isinstance(spec, Spec) and len(spec.shape) == 4 else None
    if features is not None and features > _MOST:
        raise ValueError(f"{_NAME}: r must have at most {_MOST} features, got {features}")


@Operators
def operators() -> Operator:
    """Returns the operator, whose third output is S a, for the gradient."""
    vectors, gradients = (", ".join(f"{d}{name}(B, T, H, D)" for name in "rwkvab") for d in ("", "d"))
    given, last = f"{vectors}, state(B, H, D, D, dtype=common|float32)?", "last(B, H, D, D, dtype=accumulator)"
    s = "s(B, T, H, D, dtype=accumulator)"
    backward = custom_op(
        _library.WKV7Backward,
        f"{given}, {s}, dy(B, T, H, D), d{last} -> {gradients}, dstate(B, H, D, D, dtype=state)?; "
        "g(B, T, H, D), terms(B, T, H, D), kept(B, H, (T + 31) // 32, D, D)",
    )
    return custom_op(_library.WKV7Forward, f"{given} -> y(B, T, H, D), {last}, {s}", gradient=backward)
