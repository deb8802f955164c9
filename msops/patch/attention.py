"""Holds what `patch_mindspore` puts in place of MindSpore's `flash_attention_score` and of its primitive.

MindSpore documents their arguments and results, as in `help(mindspore.ops.flash_attention_score)`. What msops lacks is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import compiling, constant
from msops.core.inputs import describe
from msops.operators.flash_attention import draw_seed, flash_attention
from msops.shared.attention import packed_operators

from .attention_plan import (
    as_column,
    check_settings,
    check_triangle,
    is_end_of_triangle,
    known_lengths,
    make_plan,
    plan_of_rows,
    starts_of,
    starts_of_lengths,
    window_of_packed,
)
from .replacement import Replacement

if TYPE_CHECKING:
    from typing import Any


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
    """Returns the attention in the layout of `query`. Its heads have as many features as those of `value`.

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
        numbers = head_num, keep_prob, scale_value, pre_tokens, next_tokens, inner_precise
        self.settings = *numbers, input_layout, sparse_mode

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
        if self.input_layout in ("TND", "TH"):
            lse = lse.transpose(1, 0)
        largest = ops.broadcast_to(ops.stop_gradient(lse).expand_dims(-1), (*lse.shape, 8))
        return largest, ops.ones_like(largest), constant(0, query.dtype), out


def attend(
    inputs: tuple[Tensor, Tensor, Tensor], others: tuple[Any, ...], settings_: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Returns the attention in the layout of `query`, and lse of shape (B, N1, S1), or (N1, T1) for TND.

    It takes (query, key, value), then MindSpore's optional inputs and its settings, in MindSpore's order.
    """
    query, key, value = inputs
    real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen, actual_seq_kvlen = others
    head_num, keep_prob, scalar_value, pre_tokens, next_tokens, _, input_layout, sparse_mode = settings_
    check_settings((drop_mask is None, padding_mask is None), *settings_)
    described = (describe(query), describe(key), describe(value), None if attn_mask is None else describe(attn_mask))
    shift = None if real_shift is None else describe(real_shift)
    if input_layout == "TH":
        has_more = real_shift is not None or keep_prob < 1
        of_query, of_key, of_value, of_result, window = plan_of_rows(described, has_more, head_num, sparse_mode)
        if attn_mask is not None and not compiling():
            check_triangle("flash_attention_score", attn_mask, 3)
        packed = packed_operators.primitive(of_query[0], of_key[0], False, scalar_value, window, 0.0)
        starts_q = starts_of_lengths("actual_seq_qlen", actual_seq_qlen)
        starts_k = starts_of_lengths("actual_seq_kvlen", actual_seq_kvlen)
        results = packed(query.reshape(of_query), key.reshape(of_key), value.reshape(of_value), starts_q, starts_k)
        return results[0].reshape(of_result), results[1]
    if input_layout == "TND":
        starts_q, most_q, lengths_q = starts_of("actual_seq_qlen", actual_seq_qlen, described, 0)
        starts_k, most_k, lengths_k = starts_of("actual_seq_kvlen", actual_seq_kvlen, described, 1)
        window = window_of_packed(described, lengths_q, lengths_k, head_num, pre_tokens, next_tokens, sparse_mode)
        if attn_mask is not None and not compiling():
            check_triangle("flash_attention_score", attn_mask, sparse_mode)
        if real_shift is not None or keep_prob < 1:
            lengths = known_lengths(lengths_q, lengths_k)
            is_end = is_end_of_triangle(shift, (most_q, most_k), True, input_layout, sparse_mode)
            return attend_one_by_one(inputs, real_shift, is_end, lengths, (scalar_value, window, keep_prob))
        packed = packed_operators.primitive(most_q, most_k, False, scalar_value, window, 0.0)
        results = packed(query, key, value, starts_q, starts_k)
        return results[0], results[1]
    plan = make_plan(described, head_num, pre_tokens, next_tokens, input_layout, sparse_mode)
    if attn_mask is not None and not compiling():
        check_triangle("flash_attention_score", attn_mask, sparse_mode)
    of_query, of_key, of_value, of_result, sizes, window, keys, masks, band, places = plan
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
    bias, slopes = None, None
    if real_shift is not None:
        if is_end_of_triangle(shift, sizes, False, input_layout, sparse_mode):
            slopes = slopes_of(real_shift, scalar_value)
        else:
            bias = scaled(real_shift if keys is None else real_shift[..., :keys], scalar_value)
    dropout_p, seed = (1 - keep_prob, draw_seed()) if keep_prob < 1 else (0.0, None)
    out, lse = flash_attention(
        q, k, v, False, scalar_value, window, None, mask, 0.0, layout, True, bias, slopes, dropout_p, seed
    )
    if input_layout == "SBH":
        out = out.transpose(1, 0, 2, 3)
    return out.reshape(of_result), lse


def attend_one_by_one(
    inputs: tuple[Tensor, Tensor, Tensor],
    real_shift: Tensor | None,
    is_end: bool,
    lengths: tuple[tuple[int, int], ...],
    settings_: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Computes packed sequences with a shift or dropout, which msops' operator of packed sequences does not have."""
    scalar_value, window, keep_prob = settings_
    outs, lses = [], []
    begin, first = 0, 0
    for i in range(len(lengths)):
        queries, keys = lengths[i]
        q = inputs[0][begin : begin + queries].expand_dims(0)
        k, v = inputs[1][first : first + keys].expand_dims(0), inputs[2][first : first + keys].expand_dims(0)
        begin, first = begin + queries, first + keys
        bias, slopes = None, None
        if real_shift is not None:
            part = real_shift if real_shift.shape[0] == 1 else real_shift[i : i + 1]
            if is_end:
                slopes = slopes_of(part, scalar_value)
            else:
                bias = scaled(part[:, :, :queries, :keys], scalar_value)
        dropout_p, seed = (1 - keep_prob, draw_seed()) if keep_prob < 1 else (0.0, None)
        out, lse = flash_attention(
            q, k, v, False, scalar_value, window, None, None, 0.0, "BTHD", True, bias, slopes, dropout_p, seed
        )
        outs.append(out[0])
        lses.append(lse[0])
    return ops.concat(outs, 0), ops.concat(lses, 1)


def scaled(real_shift: Tensor, scale: float) -> Tensor:
    """Returns the bias: MindSpore adds the shift before it scales."""
    dtype = mindspore.float64 if real_shift.dtype == mindspore.float64 else mindspore.float32
    return ops.mul(ops.cast(real_shift, dtype), constant(scale, dtype))


def slopes_of(end: Tensor, scale: float) -> Tensor:
    """Returns ALiBi's slopes, (B, N1) or (N1,), of the last rows of its shift, which grows by equal steps in a row."""
    dtype = mindspore.float64 if end.dtype == mindspore.float64 else mindspore.float32
    row = ops.cast(end[:, :, -1], dtype)
    slopes = ops.mul(row[..., -1] - row[..., 0], constant(scale / (end.shape[3] - 1), dtype))
    return slopes[0] if end.shape[0] == 1 else slopes
