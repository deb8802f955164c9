"""Holds what `patch_mindspore` puts in place of MindSpore's attention for inference: `incre_flash_attention`,
`prompt_flash_attention`, `fused_infer_attention_score` and their primitives.

MindSpore documents their arguments and results, as in `help(mindspore.ops.incre_flash_attention)`. What msops lacks is
refused. `pse_shift` is added after the scale, unlike `real_shift` of `flash_attention_score`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor

from msops.core.compiled import constant
from msops.core.inputs import describe

from .inference_attention import attend, attend_blocks
from .inference_plan import check_absent, check_lengths, check_one
from .replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OPEN = 2**31 - 1  # a number of tokens that is no limit
# The names of the inputs that must be None, in the order of each primitive.
_CODES = ("dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2")
_OFFSETS = ("antiquant_scale", "antiquant_offset")
_OF_INCRE = (*_CODES, *_OFFSETS, "kv_padding_size")
_OF_PROMPT = ("deq_scale1", "quant_scale1", "deq_scale2", "quant_scale2", "quant_offset2")
_OF_FUSED = (
    *(*_CODES, *_OFFSETS, "query_padding_size", "kv_padding_size"),
    *("key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale", "value_antiquant_offset"),
    *("key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len"),
)


def incre_flash_attention(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    actual_seq_lengths: Any = None,
    pse_shift: Tensor | None = None,
    dequant_scale1: Any = None,
    quant_scale1: Any = None,
    dequant_scale2: Any = None,
    quant_scale2: Any = None,
    quant_offset2: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    input_layout: str = "BSH",
    scale_value: float = 1.0,
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    kv_padding_size: Any = None,
) -> Tensor:
    """Returns the attention of one query of each sample, of the shape of `query`."""
    return _incre(
        (
            *(query, key, value, attn_mask, actual_seq_lengths, pse_shift, dequant_scale1, quant_scale1),
            *(dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset),
            *(block_table, kv_padding_size),
        ),
        (num_heads, input_layout, scale_value, num_key_value_heads, block_size, inner_precise),
    )


def incre_flash_attention_of_all(*inputs: Any) -> Tensor:
    """Takes the primitive's inputs and then its settings."""
    return _incre(inputs[:15], inputs[15:])


class IncreFlashAttention(Replacement):
    """Calls incre_flash_attention with the settings that it was made with."""

    def __init__(
        self,
        num_heads: int = 1,
        input_layout: str = "BSH",
        scale_value: float = 1.0,
        num_key_value_heads: int = 0,
        block_size: int = 0,
        inner_precise: int = 1,
    ) -> None:
        self.settings = num_heads, input_layout, scale_value, num_key_value_heads, block_size, inner_precise

    def __call__(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        attn_mask: Tensor | None = None,
        actual_seq_lengths: Any = None,
        pse_shift: Tensor | None = None,
        dequant_scale1: Any = None,
        quant_scale1: Any = None,
        dequant_scale2: Any = None,
        quant_scale2: Any = None,
        quant_offset2: Any = None,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        block_table: Tensor | None = None,
        kv_padding_size: Any = None,
    ) -> Tensor:
        return _incre(
            (
                *(query, key, value, attn_mask, actual_seq_lengths, pse_shift, dequant_scale1, quant_scale1),
                *(dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset),
                *(block_table, kv_padding_size),
            ),
            self.settings,
        )


def prompt_flash_attention(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    pse_shift: Tensor | None = None,
    deq_scale1: Any = None,
    quant_scale1: Any = None,
    deq_scale2: Any = None,
    quant_scale2: Any = None,
    quant_offset2: Any = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 1,
) -> Tensor:
    """Returns the attention of whole prompts, of the shape of `query`."""
    name = "prompt_flash_attention"
    check_absent(name, _OF_PROMPT, _given((deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2)))
    settings_ = (num_heads, num_key_value_heads, scale_value, pre_tokens, next_tokens, input_layout, sparse_mode)
    terms = (attn_mask, pse_shift, actual_seq_lengths, actual_seq_lengths_kv)
    return attend(name, query, _only(name, "key", key), _only(name, "value", value), terms, settings_)[0]


class PromptFlashAttention(Replacement):
    """Calls prompt_flash_attention with the settings that it was made with."""

    def __init__(
        self,
        num_heads: int = 1,
        scale_value: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 0,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        inner_precise: int = 1,
    ) -> None:
        numbers = num_heads, scale_value, pre_tokens, next_tokens
        self.settings: tuple[Any, ...] = *numbers, input_layout, num_key_value_heads, sparse_mode, inner_precise

    def __call__(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        attn_mask: Tensor | None = None,
        actual_seq_lengths: Any = None,
        actual_seq_lengths_kv: Any = None,
        pse_shift: Tensor | None = None,
        deq_scale1: Any = None,
        quant_scale1: Any = None,
        deq_scale2: Any = None,
        quant_scale2: Any = None,
        quant_offset2: Any = None,
    ) -> Tensor:
        return prompt_flash_attention(
            *(query, key, value, attn_mask, actual_seq_lengths, actual_seq_lengths_kv, pse_shift),
            *(deq_scale1, quant_scale1, deq_scale2, quant_scale2, quant_offset2),
            *self.settings,
        )


def fused_infer_attention_score(
    query: Tensor,
    key: Any,
    value: Any,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    dequant_scale1: Any = None,
    quant_scale1: Any = None,
    dequant_scale2: Any = None,
    quant_scale2: Any = None,
    quant_offset2: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    key_antiquant_scale: Any = None,
    key_antiquant_offset: Any = None,
    value_antiquant_scale: Any = None,
    value_antiquant_offset: Any = None,
    block_table: Tensor | None = None,
    query_padding_size: Any = None,
    kv_padding_size: Any = None,
    key_shared_prefix: Any = None,
    value_shared_prefix: Any = None,
    actual_shared_prefix_len: Any = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 1,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the attention, of the shape of `query`, and lse (B, N, S, 1), or a 0 where it is not asked for."""
    return _fused(
        (
            *(query, key, value, pse_shift, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, dequant_scale1),
            *(quant_scale1, dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset),
            *(block_table, query_padding_size, kv_padding_size, key_antiquant_scale, key_antiquant_offset),
            *(value_antiquant_scale, value_antiquant_offset, key_shared_prefix, value_shared_prefix),
            actual_shared_prefix_len,
        ),
        (
            *(num_heads, scale, pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode),
            *(inner_precise, block_size, antiquant_mode, softmax_lse_flag),
        ),
    )


def fused_infer_attention_score_of_all(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Takes the primitive's inputs and then its settings."""
    return _fused(inputs[:24], inputs[24:])


class FusedInferAttentionScore(Replacement):
    """Calls fused_infer_attention_score with the settings that it was made with."""

    def __init__(
        self,
        num_heads: int = 1,
        scale_value: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        inner_precise: int = 1,
        block_size: int = 0,
        antiquant_mode: int = 0,
        softmax_lse_flag: bool = False,
        key_antiquant_mode: int = 0,
        value_antiquant_mode: int = 0,
    ) -> None:
        tokens, modes = (pre_tokens, next_tokens), (sparse_mode, inner_precise, block_size, antiquant_mode)
        self.settings = num_heads, scale_value, *tokens, input_layout, num_key_value_heads, *modes, softmax_lse_flag

    def __call__(
        self,
        query: Tensor,
        key: Any,
        value: Any,
        pse_shift: Tensor | None = None,
        attn_mask: Tensor | None = None,
        actual_seq_lengths: Any = None,
        actual_seq_lengths_kv: Any = None,
        dequant_scale1: Any = None,
        quant_scale1: Any = None,
        dequant_scale2: Any = None,
        quant_scale2: Any = None,
        quant_offset2: Any = None,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        block_table: Tensor | None = None,
        query_padding_size: Any = None,
        kv_padding_size: Any = None,
        key_antiquant_scale: Any = None,
        key_antiquant_offset: Any = None,
        value_antiquant_scale: Any = None,
        value_antiquant_offset: Any = None,
        key_shared_prefix: Any = None,
        value_shared_prefix: Any = None,
        actual_shared_prefix_len: Any = None,
    ) -> tuple[Tensor, Tensor]:
        return _fused(
            (
                *(query, key, value, pse_shift, attn_mask, actual_seq_lengths, actual_seq_lengths_kv, dequant_scale1),
                *(quant_scale1, dequant_scale2, quant_scale2, quant_offset2, antiquant_scale, antiquant_offset),
                *(block_table, query_padding_size, kv_padding_size, key_antiquant_scale, key_antiquant_offset),
                *(value_antiquant_scale, value_antiquant_offset, key_shared_prefix, value_shared_prefix),
                actual_shared_prefix_len,
            ),
            self.settings,
        )


def _incre(inputs: tuple[Any, ...], settings_: tuple[Any, ...]) -> Tensor:
    name = "incre_flash_attention"
    query, key, value, mask, lengths, shift = inputs[:6]
    heads, layout, scale, kv_heads, block_size, _ = settings_
    check_absent(name, _OF_INCRE, _given(inputs[6:13] + inputs[14:]))
    key, value = _only(name, "key", key), _only(name, "value", value)
    check_one(name, describe(query), layout)
    own = (heads, kv_heads, scale, _OPEN, _OPEN, layout, 0)
    if inputs[13] is not None:
        return attend_blocks(name, query, key, value, (mask, shift, lengths, inputs[13], block_size), own)[0]
    return attend(name, query, key, value, (mask, shift, None, lengths), own)[0]


def _fused(inputs: tuple[Any, ...], settings_: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    name = "fused_infer_attention_score"
    query, key, value, shift, mask, lengths_q, lengths_k = inputs[:7]
    heads, scale, pre_tokens, next_tokens, layout, kv_heads, sparse_mode = settings_[:7]
    check_absent(name, _OF_FUSED, _given(inputs[7:14] + inputs[15:]))
    key, value = _only(name, "key", key), _only(name, "value", value)
    own = (heads, kv_heads, scale, pre_tokens, next_tokens, layout, sparse_mode)
    if inputs[14] is not None:
        check_one(name, describe(query), layout)
        out, lse = attend_blocks(name, query, key, value, (mask, shift, lengths_k, inputs[14], settings_[8]), own)
    else:
        out, lse = attend(name, query, key, value, (mask, shift, lengths_q, lengths_k), own)
    return out, lse.expand_dims(-1) if settings_[10] else constant(0, mindspore.float32, (1,))


def _given(inputs: tuple[Any, ...]) -> tuple[bool, ...]:
    given = ()  # type: tuple[bool, ...]
    for each in inputs:
        given += (each is not None,)
    return given


def _only(name: str, argument: str, tensors: Any) -> Tensor:
    """Returns a Tensor, or the only one of a list."""
    if isinstance(tensors, (tuple, list)):
        check_lengths(name, argument, len(tensors), 1)
        return tensors[0]
    return tensors


# `patch_mindspore` puts these in place of names of mindspore.ops.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "incre_flash_attention": incre_flash_attention,
    "auto_generate.incre_flash_attention_impl": incre_flash_attention_of_all,
    "auto_generate.IncreFlashAttention": IncreFlashAttention,
    "prompt_flash_attention": prompt_flash_attention,
    "auto_generate.prompt_flash_attention_impl": prompt_flash_attention,
    "auto_generate.PromptFlashAttention": PromptFlashAttention,
    "fused_infer_attention_score": fused_infer_attention_score,
    "auto_generate.fused_infer_attention_score_impl": fused_infer_attention_score_of_all,
    "auto_generate.FusedInferAttentionScore": FusedInferAttentionScore,
}
