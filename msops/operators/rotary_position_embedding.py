"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, ops

from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from msops.core.operator import Operator
    from msops.core.spec import Spec

_library = of_package("rotary_position_embedding")
_TABLES = "cos(I, J, K, D), sin(I, J, K, D)"


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r"""Turns pairs of features (a, b) by tables that have a cosine and a sine for each feature of a pair.

    .. math:: (a, b) \mapsto (a \cos_a - b \sin_a,\; b \cos_b + a \sin_b)

    This is what MindSpore's function of this name computes, whose tables have all features of `x`, and along the other
    axes its size or 1. Where both features of a pair have the same angle, `rotary_embedding` reads half as much. The
    tables have no gradient.
    """
    return operators.primitive(interleaved)(x, cos, sin)


@Operators
def operators(interleaved: bool) -> Operator:
    def gradient_of_backward(
        dout: Tensor, cos: Tensor, sin: Tensor, dx: Tensor, ddx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(ddx, cos, sin), ops.zeros_like(cos), ops.zeros_like(sin)

    backward = custom_op(
        _library.RotaryPositionEmbeddingBackward,
        f"dout(A, B, C, D), {_TABLES} -> dx",
        infer=_infer,
        gradient=gradient_of_backward,
        interleaved=int(interleaved),
    )
    forward = custom_op(
        _library.RotaryPositionEmbeddingForward,
        f"x(A, B, C, D), {_TABLES} -> out",
        infer=_infer,
        gradient=backward,
        interleaved=int(interleaved),
    )
    return forward


def _infer(x: Spec, cos: Spec, sin: Spec, interleaved: int) -> Spec:
    if not all(n in (1, size) for n, size in zip(cos.shape, x.shape)):
        raise ValueError(f"cos must have the sizes of x, {x.shape}, or 1 in their place, got {cos.shape}")
    if x.shape[3] % 2:
        raise ValueError(f"x must have an even number of features, got shape {x.shape}")
    return x
