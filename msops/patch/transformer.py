"""Holds what `patch_mindspore` puts in place of MindSpore's operators: the same arguments and outputs, msops' kernels.

MindSpore documents the arguments and outputs, as in `help(mindspore.ops.rms_norm)`. The statistics of the norms, which
MindSpore returns for its own gradients, have no gradient here, nor there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mindspore import Tensor, int32, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import check_inputs, describe, spec_of, widened
from msops.core.signature import Signature
from msops.operators.add_rms_norm import add_rms_norm as add_normalize
from msops.operators.ms_deform_attn import forward as sample
from msops.operators.reciprocal_rms import reciprocal_rms
from msops.operators.rms_norm import rms_norm as normalize
from msops.operators.rotary_position_embedding import rotary_position_embedding as turn
from msops.operators.swiglu import swiglu as gated

from .attention_plan import starts_of_lengths
from .replacement import Replacement

if TYPE_CHECKING:
    from msops.core.inputs import Description, Sizes

_NORM = Signature("x(*S), gamma(*G) -> y(*S)")
_ADD_NORM = Signature("x1(*S), x2(*S), gamma(*G) -> y(*S)")
_GATE = Signature("input(*S) -> out(*S)")
_TURN = Signature("query(*Q), key(*K), cos(T, D), sin(T, D) -> out(*Q)")


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Returns the normalized x, and the reciprocal root mean square."""
    rows, kept = _norm_shapes("rms_norm", (describe(x),), describe(gamma), epsilon)
    if rows is None:
        return normalize(x, gamma, epsilon), reciprocal_rms(x, epsilon).expand_dims(-1)
    x_rows = x.reshape(rows)
    y, rstd = normalize(x_rows, gamma.reshape(rows[-1:]), epsilon), reciprocal_rms(x_rows, epsilon)
    return y.reshape(x.shape), rstd.reshape(kept)


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normalized sum, its reciprocal root mean square, and the sum."""
    rows, kept = _norm_shapes("add_rms_norm", (describe(x1), describe(x2)), describe(gamma), epsilon)
    if rows is None:
        y, total = add_normalize(x1, x2, gamma, epsilon)
        return y, reciprocal_rms(total, epsilon).expand_dims(-1), total
    y, total = add_normalize(x1.reshape(rows), x2.reshape(rows), gamma.reshape(rows[-1:]), epsilon)
    return y.reshape(x1.shape), reciprocal_rms(total, epsilon).reshape(kept), total.reshape(x1.shape)


def swiglu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002 (MindSpore's name)
    """Returns the product of the second half of the input and the sigmoid linear unit of the first, along an axis."""
    rows, shape = _shapes_of_halves("swiglu", describe(input), dim)
    if shape is None:
        gate, up = ops.split(input, rows[1], dim)
        return gated(gate, up)
    return gated(input.reshape(rows)).reshape(shape)


def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    """Returns x cos + rotate(x) sin. Mode 0 rotates the halves of the features, mode 1 neighbours."""
    return turn(x, cos, sin, _turns_neighbours("rotary_position_embedding", mode))


def multi_scale_deformable_attn_function(
    value: Tensor, shape: Tensor, offset: Tensor, locations: Tensor, weight: Tensor
) -> Tensor:
    """Returns the weighted sums of samples of several feature maps."""
    return sample(value, shape, offset, widened(locations, value), widened(weight, value))


class RmsNorm(Replacement):
    """Calls rms_norm with the `epsilon` that it was made with."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        self.epsilon = epsilon

    def __call__(self, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, gamma, self.epsilon)


class AddRmsNorm(Replacement):
    """Calls add_rms_norm."""

    def __call__(self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
        return add_rms_norm(x1, x2, gamma, epsilon)


class MultiScaleDeformableAttn(Replacement):
    """Calls multi_scale_deformable_attn_function."""

    def __call__(self, value: Tensor, shape: Tensor, offset: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
        return multi_scale_deformable_attn_function(value, shape, offset, locations, weight)


class Swiglu(Replacement):
    """Calls swiglu."""

    def __call__(self, input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
        return swiglu(input, dim)


class RotaryPositionEmbedding(Replacement):
    """Calls rotary_position_embedding."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
        return rotary_position_embedding(x, cos, sin, mode)


class ApplyRotaryPosEmb(Replacement):
    """Turns the halves of each head's features of queries and keys, which are (T, N D) or (B, S, N D), by tables (T, D)
    that have a row for each of the T = B S tokens. Tables with another number of rows, or with a known one where T is
    open, have a row for each place: there each text begins at the first row, and in (T, N D) `position_ids` has the
    lengths of the texts."""

    def __init__(self, cos_format: int = 0) -> None:
        self.cos_format = cos_format

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        described = describe(query), describe(key), describe(cos), describe(sin)
        of_query, of_key, table, has_places = _shapes_of_tokens(*described, self.cos_format)
        if has_places:
            places = places_in_texts(query, position_ids, cos.shape[0])
            cos, sin = ops.gather(cos, places, 0), ops.gather(sin, places, 0)
        cos, sin = cos.reshape(table), sin.reshape(table)
        return (
            turn(query.reshape(of_query), cos, sin, False).reshape(query.shape),
            turn(key.reshape(of_key), cos, sin, False).reshape(key.shape),
        )


def places_in_texts(x: Tensor, lengths: Tensor, most: int) -> Tensor:
    """Returns the place of each token in its text, below `most`, for tokens (B, S, ...), or (T, ...) of texts of these
    lengths one after another."""
    if x.ndim == 3:
        return ops.arange(x.shape[1])
    starts = starts_of_lengths("position_ids", lengths)
    rows = ops.cumsum(ops.ones_like(x[:, :1], dtype=int32), 0) - 1
    texts = (rows >= starts).astype(int32).sum(1) - 1
    return ops.minimum(rows.reshape(-1) - ops.gather(starts, texts, 0), most - 1)


@once
def _norm_shapes(
    name: str, inputs: tuple[Description, ...], gamma: Description, epsilon: float
) -> tuple[Sizes | None, Sizes | None]:
    """Returns the shape of x with gamma's axes as one, and that of the statistics; None, None if gamma has one axis."""
    check_inputs(_ADD_NORM if len(inputs) > 1 else _NORM, name, [spec_of(each) for each in (*inputs, gamma)])
    shape, axes = inputs[0][0], gamma[0]
    if not axes or len(axes) > len(shape) or shape[-len(axes) :] != axes:
        raise ValueError(
            f"{name}: gamma must have the last axes of {'x1' if len(inputs) > 1 else 'x'}, {shape}, got {axes}"
        )
    if not 0 < settings.number(name, "epsilon", epsilon) <= 1:
        raise ValueError(f"{name}: epsilon must be in (0, 1], got {epsilon}")
    if len(axes) == 1:
        return None, None
    outer = shape[: -len(axes)]
    return (*outer, math.prod(axes)), (*outer, *(1 for _ in axes))


@once
def _shapes_of_halves(name: str, described: Description, dim: int) -> tuple[Sizes, Sizes | None]:
    """Returns the shape that has the halves along the axis `dim` in its last axis, and the shape of the result.

    If a size is open, it returns a tuple whose second number is half the length of that axis, and None.
    """
    check_inputs(_GATE, name, [spec_of(described)])
    settings.integer(name, "dim", dim)
    shape = described[0]
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{name}: dim must be an axis of the input, of shape {shape}, got {dim}")
    if shape[dim] is None:
        raise ValueError(f"{name}: the axis dim, {dim}, must not be open")
    if shape[dim] % 2:
        raise ValueError(f"{name}: the axis dim must have an even length, got {dim} of shape {shape}")
    half, dim = shape[dim] // 2, dim % len(shape)
    if None in shape:
        return (2, half), None
    before, after = shape[:dim], shape[dim + 1 :]
    return (math.prod(before), 2 * half * math.prod(after)), (*before, half, *after)


@once
def _turns_neighbours(name: str, mode: int) -> bool:
    if settings.integer(name, "mode", mode) not in (0, 1):
        raise ValueError(f"{name}: mode must be 0 (halves) or 1 (neighbours), got {mode}")
    return mode == 1


@once
def _shapes_of_tokens(
    query: Description, key: Description, cos: Description, sin: Description, cos_format: int
) -> tuple[Sizes, Sizes, Sizes, bool]:
    """Returns the shapes of query and key with their heads, and of the tables beside them, where -1 is an open size,
    and whether the tables have rows of places."""
    name = "ApplyRotaryPosEmb"
    if settings.integer(name, "cos_format", cos_format) not in (0, 2):
        raise NotImplementedError(
            f"{name}: cos_format must be 0 or 2 here, which turn halves, got {cos_format}: MindSpore documents no "
            "other; msops.rotary_embedding(interleaved=True) turns neighbours"
        )
    check_inputs(_TURN, name, [spec_of(each) for each in (query, key, cos, sin)])
    outer, (rows, width) = query[0][:-1], cos[0]
    for argument, (shape, _) in (("query", query), ("key", key)):
        if len(shape) not in (2, 3) or not width or not shape[-1] or shape[-1] % width:
            raise ValueError(f"{name}: {argument} must have the axes T, N D or B, S, N D with D = {width}, got {shape}")
        if shape[:-1] != outer:
            raise ValueError(f"{name}: {argument} must have the tokens of query, {outer}, got {shape}")
    tokens = None if None in outer else math.prod(outer)
    has_places = rows is not None and tokens != rows
    if not has_places or len(outer) == 1:
        outer = 1, tokens
    elif outer[1] is None or outer[1] > rows:
        raise ValueError(f"{name}: cos must have a row for each place of a text, of {outer[1]}, got {cos[0]}")
    outer = tuple(-1 if size is None else size for size in outer)
    of_query, of_key = ((*outer, shape[-1] // width, width) for shape, _ in (query, key))
    return of_query, of_key, (1, -1 if rows is None else outer[1], 1, width), has_places
