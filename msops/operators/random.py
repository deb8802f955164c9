"""This operator serves patch_mindspore alone: msops has no public name for it.

It draws random numbers, which depend on a seed, an offset and the element's index alone.

Both are tensors of int64 and rank 0, as MindSpore's generator gives them. Equal ones give equal numbers on both devices
and in both modes: bit for bit, except that the devices' logarithm, cosine and sine of normal numbers may differ in the
last bit. A tensor of the common dtype gives the shape; its elements are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import ops

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator

_library = of_package("random")
_SOURCE = "seed(dtype=int64), offset(dtype=int64)"


def _no_gradient(x: Tensor, seed: Tensor, offset: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return ops.zeros_like(x), ops.zeros_like(seed), ops.zeros_like(offset)


uniform = custom_op(_library.RandomUniform, f"x(*S), {_SOURCE} -> y(*S)", gradient=_no_gradient)
normal = custom_op(_library.RandomNormal, f"x(*S), {_SOURCE} -> y(*S)", gradient=_no_gradient)
integers = custom_op(
    _library.RandomIntegers, f"x(*S), {_SOURCE}, low(dtype=int64), high(dtype=int64) -> y(*S, dtype=int64)"
)
permutation = custom_op(_library.RandomPermutation, f"x(N), {_SOURCE} -> y(N, dtype=int64)")


def dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor) -> Tensor:
    r"""Sets elements to zero with the probability p, and scales the others, so that the mean stays.

    .. math:: y = \frac{x}{1 - p} [w \ge 2^{32} p]

    where w is an element's random word. The gradient draws the same words again, so that no mask is kept.
    """
    return dropouts.primitive(p)(x, seed, offset)


@Operators
def dropouts(p: float) -> Operator:
    p = float(settings.number("dropout", "p", p))
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p must be from 0 to 1, got {p}")
    entries = _library.RandomDropout, _library.RandomDropoutBackward, _library.RandomDropoutBackwardBackward
    signatures = "x(*S), {} -> y(*S)", "dy(*S), {} -> dx(*S)", "ddx(*S), {} -> ddy(*S)"
    operator = None
    for entry, signature in zip(reversed(entries), reversed(signatures)):
        operator = custom_op(entry, signature.format(_SOURCE), gradient=operator, name="dropout", p=p)
    assert operator
    return operator
