"""Holds what `patch_mindspore` puts in place of MindSpore's operators of experts, which run on Ascend alone.

MindSpore documents the arguments and outputs, as in `help(mindspore.ops.moe_token_permute)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core import settings
from msops.core.compiled import once
from msops.core.inputs import describe, fits, has_zero
from msops.operators.embedding import embedding
from msops.operators.grouped_matmul import grouped_matmul as multiply
from msops.operators.moe_permute import moe_permute
from msops.operators.moe_unpermute import moe_unpermute
from msops.operators.topk_gating import topk_gating

from .mint.shape import searchsorted
from .quantized_experts import products_of_int8, products_with_codes
from .replacement import Replacement, refuse_given

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from msops.core.inputs import Description

    Tensors = Sequence[Tensor]

_LISTS = ("x", "weight", "bias", "scale", "pre_token_scale", "antiquant_scale", "antiquant_offset")
_BITS = 8  # of a digit of a sort
_RADIX = 2**_BITS


def grouped_matmul(
    x: Tensors,
    weight: Tensors,
    bias: Tensors | None = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int = -1,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tuple[Tensor, ...]:
    """Multiplies groups of rows, which end where group_list says, by a matrix each, or pairs of matrices."""
    name = "GroupedMatmul"
    refuse_given(name, "transpose_a", transpose_a)
    refuse_given(name, "offset", offset is not None)
    factors, codes = (x, weight, bias), (scale, None, antiquant_scale, antiquant_offset)
    return _products(name, factors, codes, _sizes(group_list, False), (split_item, group_type), transpose_b)


class GroupedMatmulV2(Replacement):
    """Computes grouped_matmul, also with a group_list of Python's numbers."""

    def __call__(
        self,
        x: Tensors,
        weight: Tensors,
        bias: Tensors | None = None,
        scale: Any = None,
        offset: Any = None,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        group_list: Tensor | Sequence[int] | None = None,
        split_item: int = 0,
        group_type: int = -1,
    ) -> tuple[Tensor, ...]:
        name = "GroupedMatmulV2"
        refuse_given(name, "offset", offset is not None)
        factors, codes = (x, weight, bias), (scale, None, antiquant_scale, antiquant_offset)
        return _products(name, factors, codes, _sizes(group_list, False), (split_item, group_type), False)


class GroupedMatmulV4(Replacement):
    """Computes grouped_matmul. With group_list_type 1, group_list counts the rows of each group."""

    def __call__(
        self,
        x: Tensors,
        weight: Tensors,
        bias: Tensors | None = None,
        scale: Any = None,
        offset: Any = None,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        pre_token_scale: Any = None,
        group_list: Tensor | None = None,
        activation_input: Any = None,
        activation_quant_scale: Any = None,
        activation_quant_offset: Any = None,
        split_item: int = 0,
        group_type: int = -1,
        group_list_type: int = 0,
        act_type: int = 0,
        output_dtype: Any = None,
    ) -> tuple[Tensor, ...]:
        name = "GroupedMatmulV4"
        refuse_given(name, "offset", offset is not None)
        refuse_given(name, "activation_input", activation_input is not None)
        refuse_given(name, "activation_quant_scale", activation_quant_scale is not None)
        refuse_given(name, "activation_quant_offset", activation_quant_offset is not None)
        refuse_given(name, "act_type", act_type != 0)
        _check_kind(name, group_list_type)
        factors, codes = (x, weight, bias), (scale, pre_token_scale, antiquant_scale, antiquant_offset)
        sizes, kind = _sizes(group_list, group_list_type == 1), (split_item, group_type)
        return _products(name, factors, codes, sizes, kind, False, output_dtype)


def _products(
    name: str,
    factors: tuple[Tensors, Tensors, Tensors | None],
    codes: tuple[Any, Any, Any, Any],
    sizes: Tensor | None,
    kind: tuple[int, int],
    transposed: bool,
    dtype: Any = None,
) -> tuple[Tensor, ...]:
    """Multiplies floats, floats by codes, or int8. `codes` are scale, pre_token_scale, antiquant_scale and -offset."""
    x, weight, bias = factors
    scale, of_rows, antiquant_scale, antiquant_offset = codes
    lengths = (*map(_length, factors), *map(_length, codes))
    _check_lists(name, lengths, sizes is None, kind)
    if scale is None and dtype is not None:
        _check_dtype(name, dtype, describe(x[0]))
    if antiquant_scale is not None:
        return products_with_codes(name, x, weight, bias, (antiquant_scale, antiquant_offset), sizes, transposed)
    if scale is not None:
        return products_of_int8(name, x, weight, bias, (scale, of_rows), sizes, transposed, dtype)
    if sizes is not None:
        return (multiply(x[0], weight[0], sizes, None if bias is None else bias[0], transposed),)
    results = ()  # type: tuple[Tensor, ...]
    for i in range(len(x)):
        product = ops.matmul(x[i], ops.swapaxes(weight[i], 0, 1) if transposed else weight[i])
        results += (product if bias is None else ops.cast(product + bias[i], product.dtype),)
    return results


def _length(tensors: Tensors | None) -> int | None:
    return None if tensors is None else len(tensors)


def _sizes(group_list: Tensor | Sequence[int] | None, are_counts: bool) -> Tensor | None:
    """Returns how many rows each group has."""
    if group_list is None or (isinstance(group_list, Tensor) and are_counts):
        return group_list
    if not isinstance(group_list, Tensor):
        return _constant_sizes(tuple(group_list))
    return group_list - ops.concat((ops.zeros((1,), group_list.dtype), group_list[:-1]))


@once
def _constant_sizes(ends: tuple[int, ...]) -> Tensor:
    for end in ends:
        settings.integer("GroupedMatmul", "group_list", end)
    return Tensor([end - begin for begin, end in zip((0, *ends), ends)], mindspore.int64)


class MoeGatingTopKSoftmax(Replacement):
    """Returns the weights and the experts of each token, and the numbers of their slots by columns."""

    def __call__(self, x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts = topk_gating(x, k)
        if finished is not None:
            experts = ops.masked_fill(experts, ops.expand_dims(finished, -1), x.shape[-1])
        slots = experts.size
        numbers = ops.transpose(ops.reshape(ops.arange(slots), (k, slots // k)), (1, 0))
        return weights, experts, ops.cast(ops.reshape(numbers, experts.shape), mindspore.int32)


class FusedAddTopKDiv(Replacement):
    """Returns the weights, in float32, and the experts that sigmoid and a bias choose from groups."""

    def __call__(
        self,
        x: Tensor,
        add_num: Tensor,
        group_num: int,
        group_topk: int,
        n: int,
        k: int,
        activate_type: int = 0,
        is_norm: bool = True,
        scale: float = 2.5,
        mapping_num: Any = None,
        mapping_table: Any = None,
        enable_expert_mapping: bool = False,
    ) -> tuple[Tensor, Tensor]:
        name = "FusedAddTopKDiv"
        refuse_given(name, "activate_type", activate_type != 0)
        refuse_given(name, "enable_expert_mapping", enable_expert_mapping)
        x = ops.cast(x, mindspore.float32)
        bias = ops.cast(add_num, mindspore.float32)
        return topk_gating(x, k, "sigmoid", is_norm, bias, group_num, group_topk, n, scale if is_norm else 1.0)


class MoeInitRouting(Replacement):
    """Returns rows sorted by expert, the place of each number of row_idx in them, and the sorted experts."""

    def __call__(
        self, x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        _check_tokens("MoeInitRouting", describe(x), "expert_idx", describe(expert_idx))
        _check_active(active_num)
        order, places = _sort(ops.reshape(expert_idx, (-1,)))
        tokens, k = expert_idx.shape
        rows = _rows(x, order[: min(tokens, active_num) * k], k)
        places = ops.tensor_scatter_elements(ops.zeros_like(places), ops.reshape(row_idx, (-1,)), places)
        return rows, places, ops.gather(ops.reshape(expert_idx, (-1,)), order, 0)


class MoeInitRoutingV2(Replacement):
    """Returns rows sorted by expert, the place of each slot in them, and numbers of tokens, 0 where not asked for."""

    def __call__(
        self,
        x: Tensor,
        expert_idx: Tensor,
        active_num: int,
        expert_capacity: int,
        expert_num: int,
        drop_pad_mode: int,
        expert_tokens_count_or_cumsum_flag: int,
        expert_tokens_before_capacity_flag: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _check_tokens("MoeInitRoutingV2", describe(x), "expert_idx", describe(expert_idx))
        _check_modes(drop_pad_mode, expert_tokens_count_or_cumsum_flag)
        none = ops.zeros((expert_num,), mindspore.int32)
        if drop_pad_mode == 1:
            rows, places, _, counts = moe_permute(x, expert_idx, expert_num, expert_capacity, True, True)
            return rows, ops.reshape(places, (-1,)), none, counts if expert_tokens_before_capacity_flag else none
        if expert_num > 0:
            rows, places, sizes = moe_permute(x, expert_idx, expert_num)
            if expert_tokens_count_or_cumsum_flag == 1:
                sizes = ops.cumsum(sizes, 0, mindspore.int32)
        else:
            order, places = _sort(ops.reshape(expert_idx, (-1,)))
            rows, sizes = _rows(x, order, expert_idx.shape[-1]), none
        if active_num > 0:
            rows = rows[:active_num]
        return rows, ops.reshape(places, (-1,)), sizes if expert_tokens_count_or_cumsum_flag > 0 else none, none


class MoeComputeExpertTokens(Replacement):
    """Returns how many of the experts are at most 0, 1, and so on."""

    def __call__(self, sorted_experts: Tensor, num_expert: int) -> Tensor:
        return searchsorted(
            sorted_experts, ops.arange(num_expert, dtype=sorted_experts.dtype), None, mindspore.int32, True
        )


class MoeFinalizeRouting(Replacement):
    """Adds up each token's rows, each with the bias of its expert and times its scale, and one or two other rows."""

    def __call__(
        self,
        expanded_x: Tensor,
        x1: Tensor,
        x2: Tensor | None = None,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
        expanded_row_idx: Tensor | None = None,
        expanded_expert_idx: Tensor | None = None,
    ) -> Tensor:
        _require("expanded_row_idx", expanded_row_idx is not None)
        _require("expanded_expert_idx", bias is None or expanded_expert_idx is not None)
        places = ops.transpose(ops.reshape(expanded_row_idx, (-1, x1.shape[0])), (1, 0))
        y = x1 + moe_unpermute(expanded_x, places, scales)
        if x2 is not None:
            y = y + x2
        if bias is None:
            return y
        biases = embedding(expanded_expert_idx, bias)  # type: ignore[arg-type]
        sums = (biases if scales is None else biases * ops.expand_dims(scales, -1)).sum(1)
        return y + ops.cast(sums, y.dtype)


class MoeTokenPermute(Replacement):
    """Returns a copy of a token for each of its indices, sorted by these, and the place of each copy."""

    def __call__(
        self, tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        name = "moe_token_permute"
        refuse_given(name, "padded_mode", padded_mode)
        _check_rows(name, num_out_tokens)
        _check_tokens(name, describe(tokens), "indices", describe(indices))
        order, places = _sort(ops.reshape(indices, (-1,)))
        if num_out_tokens is not None:
            order = order[:num_out_tokens]
        return _rows(tokens, order, 1 if indices.ndim == 1 else indices.shape[1]), places


class MoeTokenUnpermute(Replacement):
    """Adds up the rows of each token, times their probabilities. A place after the last row adds nothing."""

    def __call__(
        self,
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        restore_shape: Any = None,
    ) -> Tensor:
        name = "moe_token_unpermute"
        refuse_given(name, "padded_mode", padded_mode)
        refuse_given(name, "restore_shape", restore_shape is not None)
        places = ops.masked_fill(sorted_indices, sorted_indices >= permuted_tokens.shape[0], -1)
        return moe_unpermute(permuted_tokens, ops.reshape(places, (-1, 1) if probs is None else probs.shape), probs)


def _rows(tokens: Tensor, order: Tensor, k: int) -> Tensor:
    """Returns the tokens of slots, of which each token has k."""
    return embedding(ops.floor_divide(order, k), tokens)


def _sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts integers, equal ones in their order: returns which is at each place, and the place of each.

    It takes their digits from the last to the first. MindSpore's own sort does not keep the order of equals.
    """
    slots = keys.shape[0]
    order = ops.cast(ops.arange(slots), mindspore.int32)
    if has_zero(slots):
        return order, order
    bits = 64 if keys.dtype == mindspore.int64 else 32
    for low in range(0, bits, _BITS):
        digits = ops.bitwise_right_shift(ops.stop_gradient(ops.gather(keys, order, 0)), low)
        digits = ops.bitwise_and(digits, _RADIX - 1) if low < bits - _BITS else digits + _RADIX // 2  # it has the sign
        numbers = ops.expand_dims(ops.cast(order, mindspore.float64), 1)
        order = ops.cast(moe_permute(numbers, digits, _RADIX)[0].squeeze(1), mindspore.int32)
    places = ops.cast(ops.arange(slots), mindspore.int32)
    return order, ops.tensor_scatter_elements(ops.zeros_like(places), order, places)


@once
def _require(argument: str, is_given: bool) -> None:
    if not is_given:
        raise TypeError(f"MoeFinalizeRouting: {argument} must be a Tensor, got None")


@once
def _check_tokens(name: str, x: Description, argument: str, indices: Description) -> None:
    (x_shape, _), (shape, _) = x, indices
    if x_shape and shape is not None and (len(shape) not in (1, 2) or not fits(shape[:1], x_shape[:1])):
        raise ValueError(f"{name}: {argument} must have shape ({x_shape[0]}, k) or ({x_shape[0]},), got {shape}")


@once
def _check_active(active_num: int | None) -> None:
    if active_num is not None and active_num < 0:
        raise ValueError(f"MoeInitRouting: active_num must be at least 0, got {active_num}")


@once
def _check_modes(drop_pad_mode: int | None, flag: int | None) -> None:
    if drop_pad_mode not in (0, 1, None):
        raise ValueError(f"MoeInitRoutingV2: drop_pad_mode must be 0 or 1, got {drop_pad_mode}")
    if flag not in (0, 1, 2, None):
        raise ValueError(f"MoeInitRoutingV2: expert_tokens_count_or_cumsum_flag must be 0, 1 or 2, got {flag}")


@once
def _check_kind(name: str, group_list_type: int) -> None:
    if group_list_type not in (0, 1):
        raise ValueError(f"{name}: group_list_type must be 0 (ends) or 1 (counts), got {group_list_type}")


@once
def _check_dtype(name: str, dtype: mindspore.Type, x: Description) -> None:
    if dtype != x[1]:
        raise NotImplementedError(f"{name}: output_dtype must be None or the dtype of x without scale, got {dtype}")


@once
def _check_rows(name: str, num_out_tokens: int | None) -> None:
    if num_out_tokens is not None and num_out_tokens <= 0:
        raise NotImplementedError(f"{name}: num_out_tokens must be at least 1 here, got {num_out_tokens}")


@once
def _check_lists(name: str, lengths: tuple[int | None, ...], lacks_groups: bool, kind: tuple[int, int]) -> None:
    split_item, group_type = kind
    if kind not in ((0, -1), (3, 0)):
        raise NotImplementedError(
            f"{name}: split_item and group_type must be 0 and -1, or 3 and 0, got {split_item} and {group_type}"
        )
    if (group_type == -1) != lacks_groups:
        raise ValueError(f"{name}: group_list must be given with group_type 0, and with that alone")
    wanted = lengths[0] if lacks_groups else 1
    for argument, length in zip(_LISTS, lengths):
        if length not in (wanted, None):
            raise ValueError(f"{name}: {argument} must have {wanted} tensors, got {length}")
    has_scale, has_rows, has_antiquant, has_offset = (length is not None for length in lengths[3:])
    if (has_rows and not has_scale) or (has_offset and not has_antiquant) or (has_scale and has_antiquant):
        raise ValueError(
            f"{name}: pre_token_scale needs scale, antiquant_offset needs antiquant_scale, and these exclude each other"
        )


class GroupedMatmul(Replacement):
    """Calls grouped_matmul with the settings that it was made with."""

    def __init__(
        self, split_item: int = 0, group_type: int = -1, transpose_a: bool = False, transpose_b: bool = False
    ) -> None:
        self.split_item, self.group_type, self.transpose_b = split_item, group_type, transpose_b
        refuse_given("GroupedMatmul", "transpose_a", transpose_a)

    def __call__(
        self,
        x: Tensors,
        weight: Tensors,
        bias: Tensors | None = None,
        scale: Any = None,
        offset: Any = None,
        antiquant_scale: Any = None,
        antiquant_offset: Any = None,
        group_list: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        return grouped_matmul(
            *(x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, group_list),
            *(self.split_item, self.group_type, False, self.transpose_b),
        )
