"""Computes MindSpore's attention for inference by msops' operators, with the plans of `inference_plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import compiling
from msops.core.inputs import as_int32, describe
from msops.operators.flash_attention import flash_attention
from msops.operators.paged_attention import paged_attention

from .attention_plan import check_triangle
from .inference_plan import check_lengths, known_lengths, make_plan, plan_of_blocks

if TYPE_CHECKING:
    from typing import Any

    from msops.core.inputs import Description

    from .inference_plan import Plan, Settings


def attend(
    name: str, query: Tensor, key: Tensor, value: Tensor, terms: tuple[Any, ...], settings_: Settings
) -> tuple[Tensor, Tensor]:
    """Returns the attention of the shape of `query`, and lse (B, N, S)."""
    mask, shift, lengths_q, lengths_k = terms
    described = _described(query, key, value, mask, shift)
    plan = make_plan(name, described, (lengths_q is not None, lengths_k is not None), settings_)
    if mask is not None and not compiling():
        check_triangle(name, mask, plan.sparse_mode)
    batch, queries, keys = plan.sizes
    rows_q = _lengths(name, "actual_seq_lengths", lengths_q if plan.counts_queries else None, batch, queries)
    rows_k = _lengths(name, _name_of_lengths(name), lengths_k, batch, keys)
    k, v = key.reshape(plan.of_key), value.reshape(plan.of_key)
    if plan.keys is not None:
        k, v = (
            (k[:, :, : plan.keys], v[:, :, : plan.keys]) if plan.axis == 2 else (k[:, : plan.keys], v[:, : plan.keys])
        )
    hidden = None if plan.of_mask is None else ops.cast(mask, mindspore.bool_).reshape(plan.of_mask)
    hidden = _either(hidden, plan.band)
    if rows_q is not None:
        hidden = _either(hidden, _beyond(plan, rows_q, rows_k))
    bias = None if shift is None else _bias_of(shift, query)[:, :, :queries, : keys if plan.keys is None else plan.keys]
    scale, layout = settings_[2], "BHTD" if plan.axis == 2 else "BTHD"
    q = query.reshape(plan.of_query)
    out, lse = flash_attention(q, k, v, False, scale, plan.window, rows_k, hidden, 0.0, layout, True, bias)
    return out.reshape(query.shape), lse


def _beyond(plan: Plan, lengths_q: Tensor, lengths_k: Tensor | None) -> Tensor:
    """Hides all keys of the rows after the last query, and what is outside of a band that ends with the lengths."""
    ends = lengths_q.reshape(-1, 1, 1, 1)
    hidden = ops.greater_equal(plan.rows, ends)
    if plan.distances is None:
        return hidden
    later = (plan.sizes[2] if lengths_k is None else lengths_k.reshape(-1, 1, 1, 1)) - ends
    left, right = plan.limits
    if left >= 0:
        hidden = ops.logical_or(hidden, plan.distances < later - left)
    if right >= 0:
        hidden = ops.logical_or(hidden, plan.distances > later + right)
    return hidden


def attend_blocks(
    name: str, query: Tensor, key: Tensor, value: Tensor, terms: tuple[Any, ...], settings_: Settings
) -> tuple[Tensor, Tensor]:
    """Attends to keys in blocks. Where a block holds its heads apart, each head is a sequence with its own blocks."""
    mask, shift, lengths, tables, block_size = terms
    described = _described(query, key, value, mask, shift)
    plan = plan_of_blocks(name, described, describe(tables), block_size, lengths is not None, settings_)
    batch, heads, width = plan.of_query
    lengths = _lengths(name, _name_of_lengths(name), lengths, batch, None)
    q, k, v = query.reshape(plan.of_query), key.reshape(plan.of_key), value.reshape(plan.of_key)
    hidden = None if mask is None else ops.cast(mask, mindspore.bool_).reshape((-1, 1, plan.widths[0]))
    bias = None if shift is None else ops.broadcast_to(_bias_of(shift, query)[:, :, 0], (batch, heads, plan.widths[1]))
    if plan.splits > 1:
        pairs, sequences, columns = (batch, plan.splits), batch * plan.splits, tables.shape[1]
        heads_apart = ops.cast(ops.arange(plan.splits), mindspore.int32).reshape((1, plan.splits, 1))
        tables = ops.cast(tables, mindspore.int32).reshape((batch, 1, columns)) * plan.splits + heads_apart
        tables, q = tables.reshape((sequences, columns)), q.reshape((sequences, heads // plan.splits, width))
        lengths = ops.broadcast_to(lengths.reshape((batch, 1)), pairs).reshape(sequences)  # type: ignore[union-attr]
        if hidden is not None:
            hidden = ops.broadcast_to(hidden, (*pairs, plan.widths[0])).reshape((sequences, 1, plan.widths[0]))
        bias = None if bias is None else bias.reshape((sequences, heads // plan.splits, plan.widths[1]))
    out, lse = paged_attention(
        q, k, v, tables, lengths, None, False, settings_[2], None, hidden, 0.0, bias, return_lse=True
    )
    return out.reshape(query.shape), lse.transpose(1, 0).reshape((batch, heads, 1))


def _described(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shift: Tensor | None
) -> tuple[Description | None, ...]:
    of_mask, of_shift = (None if mask is None else describe(mask)), (None if shift is None else describe(shift))
    return describe(query), describe(key), describe(value), of_mask, of_shift


def _bias_of(shift: Tensor, query: Tensor) -> Tensor:
    """Returns a bias that the attention of `query` takes."""
    return shift if shift.dtype == query.dtype else ops.cast(shift, mindspore.float32)


def _either(hidden: Tensor | None, more: Tensor | None) -> Tensor | None:
    if hidden is None:
        return more
    return hidden if more is None else ops.logical_or(hidden, more)


def _name_of_lengths(name: str) -> str:
    """Returns what the function calls the lengths of the keys."""
    return "actual_seq_lengths" if name == "incre_flash_attention" else "actual_seq_lengths_kv"


def _lengths(name: str, argument: str, lengths: Any, batch: int, most: int | None) -> Tensor | None:
    """Returns the length of each sample."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor):
        return known_lengths(name, argument, tuple(lengths), batch, most)
    lengths = ops.cast(as_int32(lengths), mindspore.int32).reshape(-1)
    check_lengths(name, argument, lengths.shape[0], batch)
    return ops.broadcast_to(lengths, (batch,))
