"""Checks the arguments of MindSpore's `flash_attention_score`, and plans how msops' operators compute it."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import mindspore
import numpy as np
from mindspore import Tensor, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import as_int32, spec_of
from msops.core.spec import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from msops.core.inputs import Description, Sizes

    Plan = tuple[
        Sizes, Sizes, Sizes, Sizes, tuple[int, int], tuple[int, int], int | None, bool, Tensor | None, Tensor | None
    ]

_NAME = "flash_attention_score"
# The layouts, and how many axes they have. TH may have another one before T.
_AXES = {"BSH": 3, "SBH": 3, "BNSD": 4, "BSND": 4, "TND": 3, "TH": 2}
# The values of sparse_mode mean: a mask and a band, a mask, causal from the first key, causal to the last key, a band,
# causal after a prefix.
_MODES = (0, 1, 2, 3, 4, 5)
_OPEN = 2**31 - 1  # a number of tokens from here on is no limit
_END = 1024  # so many last rows of a triangle tell all of ALiBi's shift


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
    reasons = (("drop_mask", "draws its own mask for keep_prob"), ("padding_mask", "does not have it"))
    for (argument, reason), is_absent in zip(reasons, absent):
        if not is_absent:
            raise NotImplementedError(f"{_NAME}: {argument} must be None: msops {reason}")
    if not 0 < settings.number(_NAME, "keep_prob", keep_prob) <= 1:
        raise ValueError(f"{_NAME}: keep_prob must be above 0 and at most 1, got {keep_prob}")
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
def is_end_of_triangle(
    shift: Description | None, sizes: tuple[int, int], is_packed: bool, input_layout: str, sparse_mode: int
) -> bool:
    """Tells whether real_shift has the last rows of ALiBi's shift alone, and requires it to have these or all.

    `sizes` are S1 and S2 or, for packed sequences, the most queries and keys that one may have.
    """
    if shift is None:
        return False
    spec = spec_of(shift)
    if isinstance(spec, str):
        raise TypeError(f"{_NAME}: real_shift must be a Tensor, got {spec}")
    queries, keys = sizes
    shape = spec.shape
    if len(shape) == 4 and None not in shape:
        if shape[2:] == (queries, keys) or (is_packed and shape[2] >= queries and shape[3] >= keys):
            return False
        is_causal = sparse_mode == 3 or (sparse_mode == 2 and (is_packed or queries == keys))
        if shape[2] == _END < queries and shape[3] >= keys and is_causal:
            return True
    raise NotImplementedError(
        f"{_NAME}: real_shift must have shape (B, N1, S1, S2) or (1, N1, S1, S2), with S1 and S2 = {sizes}, or S1 = "
        f"{_END} for ALiBi's last rows where sparse_mode is 3, or 2 with S1 = S2, got {shape}"
    )


@ops.constexpr
def check_triangle(name: str, mask: Tensor, sparse_mode: int) -> None:
    """Requires the mask of the modes 2, 3 and 4 to be the one that they imply."""
    if sparse_mode in (0, 1, 5) or _triangles.get(id(mask)) is mask:
        return
    if not np.array_equal(mask.asnumpy() != 0, np.triu(np.ones(mask.shape, bool), 1)):
        raise NotImplementedError(
            f"{name}: attn_mask must be np.triu(np.ones({mask.shape}), 1), or None, with sparse_mode 2, 3 and 4 and "
            "with the layout TH: msops has no other mask there"
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
    """Returns the shapes that q, k, v and the result get, (S1, S2), the window, how many keys count (None: all), if
    attn_mask is used, a band that is combined with it and, for prefixes, the places of the keys."""
    shapes = given = _shapes(described, input_layout)
    place = "".join(input_layout)
    _check_key_and_value(shapes, None if place in ("BSH", "SBH") else shapes[0][-1])
    if place in ("BSH", "SBH"):
        if shapes[0][2] % head_num:
            raise ValueError(f"{_NAME}: query must have a multiple of head_num = {head_num} features, got {shapes[0]}")
        width = max(1, shapes[0][2] // head_num)
        if shapes[1][2] % width:
            raise ValueError(f"{_NAME}: key must have heads of {width} features as query has, got {shapes[1]}")
        widths = width, width, _width_of_value(shapes[1][2] // width, shapes[2])
        shapes = [(*shape[:2], shape[2] // of_head, of_head) for shape, of_head in zip(shapes, widths)]
    row = {"BSH": 1, "BSND": 1, "SBH": 0, "BNSD": 2}[place]
    _check_heads(shapes[0], 1 if place == "BNSD" else 2, head_num)
    queries, keys = shapes[0][row], shapes[1][row]
    masks, places = _uses_mask(described[3], sparse_mode), None
    window, first_keys, band = window_of_mode(_NAME, sparse_mode, (queries, keys), masks, pre_tokens, next_tokens)
    if sparse_mode == 5:
        places = Tensor(np.arange(keys, dtype=np.int32))
        band = Tensor(np.triu(np.ones((queries, keys), bool), 1 + keys - queries))
    result = _shape_of_result(given[0], shapes[0][-1], shapes[2][-1])
    return shapes[0], shapes[1], shapes[2], result, (queries, keys), window, first_keys, masks, band, places


def window_of_mode(
    name: str, sparse_mode: int, sizes: tuple[int, int], masks: bool, pre_tokens: int, next_tokens: int
) -> tuple[tuple[int, int], int | None, Tensor | None]:
    """Returns the window of the modes 0 to 4, how many keys count (None: all), and a band that no window describes."""
    queries, keys = sizes
    if sparse_mode == 0 and masks:  # the band begins at the first query and key
        window, band = _band(queries, keys, pre_tokens, next_tokens)
        return window, None, band
    if sparse_mode == 2 and keys <= queries:
        return (-1, queries - keys), None, None
    if sparse_mode == 2:  # no query sees the keys after the last query
        return (-1, 0), queries, None
    if sparse_mode == 3:
        return (-1, 0), None, None
    if sparse_mode == 4:
        return _window(name, pre_tokens, next_tokens), None, None
    return _open_window(), None, None


def as_column(prefix: Any) -> Tensor:
    """Returns prefix with the axes (B, 1, 1, 1)."""
    if not isinstance(prefix, Tensor):
        prefix = known_column("prefix", prefix)
    return ops.cast(as_int32(prefix), mindspore.int32).reshape(-1, 1, 1, 1)


@once
def known_column(name: str, numbers: Sequence[int] | None) -> Tensor:
    """Returns Python's numbers as a Tensor."""
    if numbers is None:
        where = "sparse_mode is 5" if name == "prefix" else "input_layout is 'TH'"
        raise ValueError(f"{_NAME}: {name} must be given if {where}")
    if not isinstance(numbers, (tuple, list)) or not all(map(settings.whole, numbers)):
        raise TypeError(f"{_NAME}: {name} must be a Tensor or a tuple of ints, got {numbers!r}")
    return Tensor(np.array(numbers, np.int32))


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
    return _window(_NAME, pre_tokens, next_tokens) if sparse_mode == 4 else _open_window()


@once
def plan_of_rows(
    described: tuple[Description | None, ...], has_more: bool, head_num: int, sparse_mode: int
) -> tuple[Sizes, Sizes, Sizes, Sizes, tuple[int, int]]:
    """Returns the shapes (T, N, D) of query, key and value of the layout TH, the result's shape, and the window, which
    is causal with a mask."""
    if has_more or sparse_mode != 0:
        raise NotImplementedError(f"{_NAME}: msops has no real_shift, dropout or sparse_mode with input_layout 'TH'")
    shapes = _shapes(described, "TH")
    (*rows_q, features), (*rows_k, features_k) = shapes[:2]
    _check_key_and_value(shapes, None)
    width = features // head_num
    if features != head_num * width or width == 0 or features_k % width:
        raise ValueError(
            f"{_NAME}: query must have head_num = {head_num} heads, and key heads of as many features, got {features} "
            f"and {features_k} features"
        )
    window = _open_window() if described[3] is None else (-1, 0)
    heads, last = features_k // width, _width_of_value(features_k // width, shapes[2])
    of_key, of_value = ((math.prod(rows_k), heads, each) for each in (width, last))
    return (math.prod(rows_q), head_num, width), of_key, of_value, _shape_of_result(shapes[0], width, last), window


def starts_of_lengths(name: str, lengths: Any) -> Tensor:
    """Returns where sequences of these lengths begin and end. The layout TH tells lengths, where TND tells ends."""
    if not isinstance(lengths, Tensor):
        lengths = known_column(name, lengths)
    lengths = ops.cast(as_int32(lengths), mindspore.int32).reshape(-1)
    return ops.concat((ops.zeros(1, mindspore.int32), ops.cumsum(lengths, 0)))


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


@once
def known_lengths(lengths_q: tuple[int, ...] | None, lengths_k: tuple[int, ...] | None) -> tuple[tuple[int, int], ...]:
    """Returns how many queries and keys each sequence has."""
    if lengths_q is None or lengths_k is None:
        raise NotImplementedError(
            f"{_NAME}: with input_layout 'TND' and real_shift or keep_prob < 1, actual_seq_qlen and actual_seq_kvlen "
            "must be tuples"
        )
    if len(lengths_q) != len(lengths_k) or min(*lengths_q, *lengths_k) < 1:
        raise ValueError(
            f"{_NAME}: with real_shift or keep_prob < 1, actual_seq_qlen and actual_seq_kvlen must tell of as many "
            f"sequences, each of which has a query and a key, got the lengths {lengths_q} and {lengths_k}"
        )
    return tuple(zip(lengths_q, lengths_k))


def _shapes(described: tuple[Description | None, ...], input_layout: str) -> list[tuple[int, ...]]:
    shapes = []
    for name, description in zip(("query", "key", "value"), described):
        spec = spec_of(description or (None, None))
        if isinstance(spec, str):
            raise TypeError(f"{_NAME}: {name} must be a Tensor, got {spec}")
        if len(spec.shape) != _AXES[input_layout] and (input_layout != "TH" or len(spec.shape) != 3):
            raise ValueError(f"{_NAME}: {name} must have the axes {', '.join(input_layout)}, got {spec.shape}")
        if None in spec.shape:
            raise ValueError(f"{_NAME}: {name} must have known sizes, got {spec.shape}")
        shapes.append(spec.shape)
    return shapes


def _check_key_and_value(shapes: list[tuple[int, ...]], width: int | None) -> None:
    _, key, value = shapes
    if width is not None and key[-1] != width:
        raise ValueError(f"{_NAME}: key must have {width} features as query has, got {key}")
    if value[:-1] != key[:-1]:
        raise ValueError(f"{_NAME}: value must have the shape of key, {key}, except for its features, got {value}")


def _width_of_value(heads: int, value: tuple[int, ...]) -> int:
    """Returns how many features a head of value has, which may be others than those of key, as in latent attention."""
    if value[-1] % max(1, heads):
        raise ValueError(f"{_NAME}: value must have {heads} heads as key has, got {value}")
    return value[-1] // max(1, heads)


def _shape_of_result(query: tuple[int, ...], width: int, width_of_value: int) -> tuple[int, ...]:
    return (*query[:-1], query[-1] // max(1, width) * width_of_value)


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


def _window(name: str, pre_tokens: int, next_tokens: int) -> tuple[int, int]:
    if pre_tokens < 0 or next_tokens < 0:
        raise NotImplementedError(
            f"{name}: pre_tokens and next_tokens must be at least 0 with sparse_mode 4, got {pre_tokens} and "
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
