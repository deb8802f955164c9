"""Holds what `patch_mindspore` puts in place of MindSpore's `flash_attention_score` and of its primitive.

MindSpore documents their arguments and results, as in `help(mindspore.ops.flash_attention_score)`. What msops lacks is
refused.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor, ops

from msops.core import settings
from msops.core.attention import packed_operators
from msops.core.compiled import compiling, once
from msops.core.inputs import as_int32, describe, spec_of
from msops.core.spec import dtype_name
from msops.operators.flash_attention import flash_attention

from .replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from msops.core.inputs import Description, Sizes

    Plan = tuple[Sizes, Sizes, Sizes, tuple[int, int], int | None, bool, Tensor | None, Tensor | None]

_NAME = "flash_attention_score"
_AXES = {"BSH": 3, "SBH": 3, "BNSD": 4, "BSND": 4, "TND": 3}  # the layouts, and how many axes they have
# The values of sparse_mode mean: a mask and a band, a mask, causal from the first key, causal to the last key, a band,
# causal after a prefix.
_MODES = (0, 1, 2, 3, 4, 5)
_OPEN = 2**31 - 1  # a number of tokens from here on is no limit


def flash_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    real_shift: Tensor | None = None,
    drop_mask: Tensor | None = None,
    padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    prefix: object = None,
    actual_seq_qlen: object = None,
    actual_seq_kvlen: object = None,
    keep_prob: float = 1.0,
    scalar_value: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    inner_precise: int = 0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
) -> Tensor:
    """Returns the attention of the layout and shape of `query`.

    Nobody looks at the numbers of lengths that are Tensors nor, in graph mode, at those of an `attn_mask` that
    `sparse_mode` 2, 3 or 4 implies. As MindSpore does, it ignores lengths if the layout is not TND, and `prefix` if
    `sparse_mode` is not 5.
    """
    settings_ = head_num, keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode
    out, _ = attend(
        (query, key, value),
        (real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen, actual_seq_kvlen),
        settings_,
    )
    return out


class FlashAttentionScore(Replacement):
    """Calls flash_attention_score with the settings that it was made with, and returns statistics, too.

    `softmax_max` and `softmax_sum`, (B, N1, S1, 8) or, for TND, (T1, N1, 8), hold eight times the logarithm of the sum
    of exponentials, lse, and eight times 1. Ascend gives the greatest score m and the sum of the e^(x - m). Both have
    softmax_max + log(softmax_sum) = lse, by which programs combine blocks of keys. They have no gradient.
    `softmax_out` is 0, of shape (): MindSpore tells to ignore it.
    """

    def __init__(
        self,
        head_num: int,
        keep_prob: float = 1.0,
        scale_value: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        inner_precise: int = 0,
        input_layout: str = "BSH",
        sparse_mode: int = 0,
    ) -> None:
        self.input_layout = input_layout
        self.settings = (
            head_num,
            keep_prob,
            scale_value,
            pre_tokens,
            next_tokens,
            inner_precise,
            input_layout,
            sparse_mode,
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real_shift: Tensor | None = None,
        drop_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        prefix: object = None,
        actual_seq_qlen: object = None,
        actual_seq_kvlen: object = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, lse = attend(
            (query, key, value),
            (real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen, actual_seq_kvlen),
            self.settings,
        )
        if self.input_layout == "TND":
            lse = lse.transpose(1, 0)
        largest = ops.broadcast_to(ops.stop_gradient(lse).expand_dims(-1), (*lse.shape, 8))
        return largest, ops.ones_like(largest), _zero(query.dtype), out


def attend(
    inputs: tuple[Tensor, Tensor, Tensor], others: tuple[Any, ...], settings_: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Returns the attention of the layout and shape of `query`, and lse of shape (B, N1, S1), or (N1, T1) for TND.

    It takes (query, key, value), then MindSpore's optional inputs and its settings, in MindSpore's order.
    """
    query, key, value = inputs
    real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen, actual_seq_kvlen = others
    head_num, _, scalar_value, pre_tokens, next_tokens, _, input_layout, sparse_mode = settings_
    check_settings((drop_mask is None, padding_mask is None), *settings_)
    described = (describe(query), describe(key), describe(value), None if attn_mask is None else describe(attn_mask))
    check_shift(None if real_shift is None else describe(real_shift), described, input_layout)
    if input_layout == "TND":
        starts_q, most_q, lengths_q = starts_of("actual_seq_qlen", actual_seq_qlen, described, 0)
        starts_k, most_k, lengths_k = starts_of("actual_seq_kvlen", actual_seq_kvlen, described, 1)
        window = window_of_packed(described, lengths_q, lengths_k, head_num, pre_tokens, next_tokens, sparse_mode)
        if attn_mask is not None and not compiling():
            check_triangle(attn_mask, sparse_mode)
        packed = packed_operators.primitive(most_q, most_k, False, scalar_value, window, 0.0)
        results = packed(query, key, value, starts_q, starts_k)
        return results[0], results[1]
    plan = make_plan(described, head_num, pre_tokens, next_tokens, input_layout, sparse_mode)
    if attn_mask is not None and not compiling():
        check_triangle(attn_mask, sparse_mode)
    of_query, of_key, of_value, window, keys, masks, band, places = plan
    q, k, v = query.reshape(of_query), key.reshape(of_key), value.reshape(of_value)
    if input_layout == "SBH":
        q, k, v = q.transpose(1, 0, 2, 3), k.transpose(1, 0, 2, 3), v.transpose(1, 0, 2, 3)
    layout = "BHTD" if input_layout == "BNSD" else "BTHD"
    if keys is not None:
        k, v = (k[:, :, :keys], v[:, :, :keys]) if layout == "BHTD" else (k[:, :keys], v[:, :keys])
    mask = ops.cast(attn_mask, mindspore.bool_) if masks else None
    if sparse_mode == 5:
        band = ops.logical_and(band, places >= as_column(prefix))
    if band is not None:
        mask = ops.logical_or(mask, band) if masks else band
    bias = None
    if real_shift is not None:  # MindSpore adds it before the scale
        bias = real_shift if keys is None else real_shift[..., :keys]
        scale = scale_tensor(scalar_value, bias.dtype == mindspore.float64)
        bias = ops.mul(ops.cast(bias, scale.dtype), scale)
    out, lse = flash_attention(
        q, k, v, scale=scalar_value, window=window, mask=mask, layout=layout, return_lse=True, bias=bias
    )
    if input_layout == "SBH":
        out = out.transpose(1, 0, 2, 3)
    return out.reshape(query.shape), lse


@once
def check_settings(
    absent: tuple[bool, ...],
    head_num: int,
    keep_prob: float,
    scalar_value: float,
    pre_tokens: int,
    next_tokens: int,
    inner_precise: int,
    input_layout: str,
    sparse_mode: int,
) -> None:
    """Requires settings that msops has."""
    for argument, is_absent in zip(("drop_mask", "padding_mask"), absent):
        if not is_absent:
            raise NotImplementedError(f"{_NAME}: {argument} must be None: msops does not have it")
    if settings.number(_NAME, "keep_prob", keep_prob) != 1.0:
        raise NotImplementedError(f"{_NAME}: keep_prob must be 1.0: the patch has no dropout here, got {keep_prob}")
    settings.number(_NAME, "scalar_value", scalar_value)
    settings.positive(_NAME, "head_num", head_num)
    wholes = (("pre_tokens", pre_tokens), ("next_tokens", next_tokens), ("inner_precise", inner_precise))
    for argument, number in (*wholes, ("sparse_mode", sparse_mode)):
        settings.integer(_NAME, argument, number)
    if not isinstance(input_layout, str):
        raise TypeError(f"{_NAME}: input_layout must be a str, got {type(input_layout).__name__}")
    settings.one_of(_NAME, "input_layout", input_layout, tuple(_AXES))
    if sparse_mode not in _MODES:
        raise NotImplementedError(f"{_NAME}: sparse_mode must be one of 0, 1, 2, 3, 4, 5 here, got {sparse_mode}")


@once
def scale_tensor(scale: float, is_double: bool) -> Tensor:
    return Tensor(scale, mindspore.float64 if is_double else mindspore.float32)


@once
def check_shift(shift: Description | None, described: tuple[Description | None, ...], input_layout: str) -> None:
    """Requires real_shift to be a tensor that `flash_attention` adds."""
    if shift is None:
        return
    spec = spec_of(shift)
    if isinstance(spec, str):
        raise TypeError(f"{_NAME}: real_shift must be a Tensor, got {spec}")
    if input_layout == "TND":
        raise NotImplementedError(f"{_NAME}: real_shift must be None with input_layout 'TND'")
    rows = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2}[input_layout]
    lengths = tuple(shape[rows] for shape in _shapes(described, input_layout)[:2])
    if len(spec.shape) != 4 or spec.shape[2:] != lengths:
        raise NotImplementedError(
            f"{_NAME}: real_shift must have shape (B, N1, S1, S2) or (1, N1, S1, S2), with S1 and S2 = {lengths}: "
            f"msops does not have the last 1024 rows of a triangle, got {spec.shape}"
        )


@once
def _zero(dtype: Any) -> Tensor:
    return Tensor(0, dtype)


@ops.constexpr
def check_triangle(mask: Tensor, sparse_mode: int) -> None:
    """Requires the mask of the modes 2, 3 and 4 to be the one that they imply."""
    if sparse_mode in (0, 1, 5) or _triangles.get(id(mask)) is mask:
        return
    if not np.array_equal(mask.asnumpy() != 0, np.triu(np.ones(mask.shape, bool), 1)):
        raise NotImplementedError(
            f"{_NAME}: attn_mask must be np.triu(np.ones((2048, 2048)), 1), or None, if sparse_mode is {sparse_mode}: "
            "msops has no other mask there"
        )
    _triangles[id(mask)] = mask


# The masks that `check_triangle` has read: reading waits for the device.
_triangles: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


@once
def make_plan(
    described: tuple[Description | None, ...],
    head_num: int,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
) -> Plan:
    """Returns the shapes that q, k and v get, the window, how many keys count (None: all), whether attn_mask is used,
    a band that is combined with it and, for prefixes, the places of the keys."""
    shapes = _shapes(described, input_layout)
    place = "".join(input_layout)
    _check_key_and_value(shapes, None if place in ("BSH", "SBH") else shapes[0][-1])
    if place in ("BSH", "SBH"):
        if shapes[0][2] % head_num:
            raise ValueError(f"{_NAME}: query must have a multiple of head_num = {head_num} features, got {shapes[0]}")
        width = max(1, shapes[0][2] // head_num)
        if shapes[1][2] % width:
            raise ValueError(f"{_NAME}: key must have heads of {width} features as query has, got {shapes[1]}")
        shapes = [(*shape[:2], shape[2] // width, width) for shape in shapes]
    row = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2}[place]
    _check_heads(shapes[0], 1 if place == "BNSD" else 2, head_num)
    queries, keys = shapes[0][row], shapes[1][row]
    masks = _uses_mask(described[3], sparse_mode)
    window, first_keys, band, places = _open_window(), None, None, None
    if sparse_mode == 0 and masks:  # the band begins at the first query and key
        window, band = _band(queries, keys, pre_tokens, next_tokens)
    if sparse_mode == 2 and keys <= queries:
        window = (-1, queries - keys)
    elif sparse_mode == 2:  # no query sees the keys after the last query
        window, first_keys = (-1, 0), queries
    if sparse_mode == 3:
        window = (-1, 0)
    if sparse_mode == 4:
        window = _window(pre_tokens, next_tokens)
    if sparse_mode == 5:
        places = Tensor(np.arange(keys, dtype=np.int32))
        band = Tensor(np.triu(np.ones((queries, keys), bool), 1 + keys - queries))
    return shapes[0], shapes[1], shapes[2], window, first_keys, masks, band, places


def as_column(prefix: Any) -> Tensor:
    """Returns prefix with the axes (B, 1, 1, 1)."""
    if not isinstance(prefix, Tensor):
        prefix = known_prefix(prefix)
    return ops.cast(as_int32(prefix), mindspore.int32).reshape(-1, 1, 1, 1)


@once
def known_prefix(prefix: Sequence[int] | None) -> Tensor:
    if prefix is None:
        raise ValueError(f"{_NAME}: prefix must be given if sparse_mode is 5")
    if not isinstance(prefix, (tuple, list)) or not all(map(settings.whole, prefix)):
        raise TypeError(f"{_NAME}: prefix must be a Tensor or a tuple of ints, got {prefix!r}")
    return Tensor(np.array(prefix, np.int32))


@once
def window_of_packed(
    described: tuple[Description | None, ...],
    lengths_q: tuple[int, ...] | None,
    lengths_k: tuple[int, ...] | None,
    head_num: int,
    pre_tokens: int,
    next_tokens: int,
    sparse_mode: int,
) -> tuple[int, int]:
    """Returns the window of all sequences."""
    shapes = _shapes(described, "TND")
    _check_key_and_value(shapes, shapes[0][-1])
    _check_heads(shapes[0], 1, head_num)
    if sparse_mode == 5:
        raise NotImplementedError(f"{_NAME}: sparse_mode must not be 5 with input_layout 'TND'")
    if _uses_mask(described[3], sparse_mode):
        raise NotImplementedError(f"{_NAME}: attn_mask must be None with input_layout 'TND' and sparse_mode 0 or 1")
    if sparse_mode == 2 and (lengths_q is None or lengths_q != lengths_k):
        raise NotImplementedError(
            f"{_NAME}: with input_layout 'TND', sparse_mode 2 needs actual_seq_qlen and actual_seq_kvlen to be equal "
            "tuples; sparse_mode 3 takes any"
        )
    if sparse_mode in (2, 3):
        return -1, 0
    return _window(pre_tokens, next_tokens) if sparse_mode == 4 else _open_window()


def starts_of(
    name: str, ends: Any, described: tuple[Description | None, ...], index: int
) -> tuple[Tensor, int, tuple[int, ...] | None]:
    """Returns where sequences begin, the length of the longest or a bound for it, and the lengths if they are known."""
    rows = rows_of(described, index)
    if isinstance(ends, Tensor):
        return ops.concat((ops.zeros(1, mindspore.int32), ops.cast(as_int32(ends), mindspore.int32))), rows, None
    return known_starts(name, ends, rows)


@once
def rows_of(described: tuple[Description | None, ...], index: int) -> int:
    """Returns how many rows query (0) or key (1) has."""
    return _shapes(described, "TND")[index][0]


@once
def known_starts(name: str, ends: Sequence[int] | None, rows: int) -> tuple[Tensor, int, tuple[int, ...]]:
    if ends is None:
        raise ValueError(f"{_NAME}: {name} must be given if input_layout is 'TND'")
    if not isinstance(ends, (tuple, list)) or not all(map(settings.whole, ends)):
        raise TypeError(f"{_NAME}: {name} must be a Tensor or a tuple of ints, got {ends!r}")
    lengths = tuple(int(end - start) for start, end in zip((0, *ends), ends))
    if min(lengths, default=0) < 0:
        raise ValueError(f"{_NAME}: {name} must not decrease, got {ends}")
    if sum(lengths) != rows:
        what = "query" if name == "actual_seq_qlen" else "key"
        raise ValueError(f"{_NAME}: {name} must end with the {rows} rows of {what}, got {ends}")
    return Tensor(np.array((0, *ends), np.int32)), max(lengths, default=0), lengths


def _shapes(described: tuple[Description | None, ...], input_layout: str) -> list[tuple[int, ...]]:
    shapes = []
    for name, description in zip(("query", "key", "value"), described):
        spec = spec_of(description or (None, None))
        if isinstance(spec, str):
            raise TypeError(f"{_NAME}: {name} must be a Tensor, got {spec}")
        if len(spec.shape) != _AXES[input_layout]:
            raise ValueError(f"{_NAME}: {name} must have the axes {', '.join(input_layout)}, got {spec.shape}")
        if None in spec.shape:
            raise ValueError(f"{_NAME}: {name} must have known sizes, got {spec.shape}")
        shapes.append(spec.shape)
    return shapes


def _check_key_and_value(shapes: list[tuple[int, ...]], width: int | None) -> None:
    _, key, value = shapes
    if width is not None and key[-1] != width:
        raise ValueError(f"{_NAME}: key must have {width} features as query has, got {key}")
    if value != key:
        raise ValueError(f"{_NAME}: value must have the shape of key, {key}, got {value}")


def _check_heads(query: tuple[int, ...], axis: int, head_num: int) -> None:
    if query[axis] != head_num:
        raise ValueError(f"{_NAME}: query must have head_num = {head_num} heads, got {query[axis]}")


def _uses_mask(described: Description | None, sparse_mode: int) -> bool:
    """Tells whether attn_mask hides keys. In the modes 2, 3 and 4 it is a triangle of 2048, which the mode implies."""
    if described is None:
        if sparse_mode == 1:
            raise ValueError(f"{_NAME}: attn_mask must be given if sparse_mode is 1")
        return False
    shape, dtype = described
    if shape is None:
        raise TypeError(f"{_NAME}: attn_mask must be a Tensor, got {spec_of(described)}")
    if dtype not in (mindspore.bool_, mindspore.uint8):
        raise TypeError(f"{_NAME}: attn_mask must be bool or uint8, got {dtype_name(dtype)}")
    if sparse_mode in (0, 1, 5):
        return True
    if shape != (2048, 2048):
        raise ValueError(
            f"{_NAME}: attn_mask must have shape (2048, 2048), or be None, if sparse_mode is {sparse_mode}, got {shape}"
        )
    return False


def _open_window() -> tuple[int, int]:
    return -1, -1


def _window(pre_tokens: int, next_tokens: int) -> tuple[int, int]:
    if pre_tokens < 0 or next_tokens < 0:
        raise NotImplementedError(
            f"{_NAME}: pre_tokens and next_tokens must be at least 0 with sparse_mode 4, got {pre_tokens} and "
            f"{next_tokens}"
        )
    left, right = (-1 if tokens >= _OPEN else tokens for tokens in (pre_tokens, next_tokens))
    return left, right


def _band(queries: int, keys: int, pre_tokens: int, next_tokens: int) -> tuple[tuple[int, int], Tensor | None]:
    """Returns the window of a band that begins at the first query and key, or else the band as a mask."""
    later = keys - queries  # windows begin at the last query and key
    left = -1 if pre_tokens >= _OPEN else pre_tokens + later
    right = -1 if next_tokens >= _OPEN else next_tokens - later
    if (left >= 0 or pre_tokens >= _OPEN) and (right >= 0 or next_tokens >= _OPEN):
        return (left, right), None
    i, j = np.ogrid[:queries, :keys]
    return _open_window(), Tensor((j < i - pre_tokens) | (j > i + next_tokens))
