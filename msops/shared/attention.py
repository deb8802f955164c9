"""Holds the operators of attention: checks of their settings, their shapes, and the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn, ops

from msops.core import settings
from msops.core.compiled import keep_dtypes
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package
from msops.core.spec import Spec, accumulator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from mindspore import Tensor

    from msops.core.operator import Operator

    Window = Sequence[int] | None

_NAME = "flash_attention"
_LIBRARY = of_package(_NAME)
_MOST_FEATURES = 512
_LAYOUTS = ("BHTD", "BTHD")  # in the order of Layout in aot_kernels/flash_attention.cu, where packed tensors follow
_PACKED = 2
_INPUTS = {
    "BHTD": "q(B, Hq, Tq, D), k(B, Hk, Tk, D), v(B, Hk, Tk, Dv)",
    "BTHD": "q(B, Tq, Hq, D), k(B, Tk, Hk, D), v(B, Tk, Hk, Dv)",
}
_MORE = (
    "kv_lengths(B, dtype=int32)?, mask(*M, dtype=bool)?",
    "alibi_slopes(*A, dtype=float32|common)?, seed(dtype=int64)?",
)
_BIAS = "bias(*N, dtype=common|float32)"
_OUT = {"BHTD": "out(B, Hq, Tq, Dv)", "BTHD": "out(B, Tq, Hq, Dv)"}


class _Gradients(nn.Cell):
    """Has the gradient of attention with a bias, of which graph mode leaves out what nobody asks for."""

    def __init__(self, backward: Operator, of_bias: Operator) -> None:
        super().__init__()
        keep_dtypes(self)
        self.backward, self.of_bias = backward, of_bias

    def gradient(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_lengths: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        alibi_slopes: Tensor | None,
        seed: Tensor | None,
        results: tuple[Tensor, Tensor],
        dresults: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, ...]:
        # MindSpore 1.10 cannot unpack tuples inside of a tuple.
        given, of_results = (q, k, v, kv_lengths, mask, bias, alibi_slopes, seed), results + dresults
        dq, dk, dv = self.backward(*given, *of_results)
        dbias = self.of_bias(*given, *of_results)
        return dq, dk, dv, _zeros(kv_lengths), _zeros(mask), dbias, _zeros(alibi_slopes), _zeros(seed)


def _zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else ops.zeros_like(x)


@Operators
def operators(
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float,
    layout: str,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    bias_gradient: bool = False,
) -> Operator:
    """Returns the operator that gives out and, in any case, lse. A bias has a gradient if `bias_gradient`."""
    settings.boolean(_NAME, "return_lse", return_lse)
    axes = settings.one_of(_NAME, "layout", layout, _LAYOUTS)
    attributes = attributes_of(_NAME, causal, scale, window, softcap) | {"dropout_p": probability(dropout_p)}
    backward, of_bias = gradients(axes, attributes)
    inputs = ", ".join((_INPUTS[layout], _MORE[0], f"{_BIAS}?", _MORE[1]))
    return custom_op(
        _LIBRARY.FlashAttentionForward,
        f"{inputs} -> out, lse; partial, mask_bits, padded(..., dtype=common)",
        infer=infer,
        gradient=_Gradients(backward, of_bias).gradient if bias_gradient else backward,
        axes=axes,
        **attributes,
    )


def gradients(axes: int, attributes: dict[str, Any]) -> tuple[Operator, Operator]:
    """Returns the operators of the gradients of q, k and v, and of the bias."""
    layout = _LAYOUTS[axes]
    lse = "lse(B, Hq, Tq, dtype=accumulator)"
    kept = f"{_OUT[layout]}, {lse}, d{_OUT[layout]}, d{lse}"
    maybe_biased, biased = (
        ", ".join((_INPUTS[layout], _MORE[0], bias, _MORE[1], kept)) for bias in (_BIAS + "?", _BIAS)
    )
    backward = custom_op(
        _LIBRARY.FlashAttentionBackward,
        f"{maybe_biased} -> dq, dk, dv; delta, query_sums, mask_bits, padded(..., dtype=common)",
        infer=infer_backward,
        axes=axes,
        **attributes,
    )
    of_bias = custom_op(
        _LIBRARY.FlashAttentionBiasBackward,
        f"{biased} -> dbias(*N, dtype=bias); delta",
        axes=axes,
        **attributes,
    )
    return backward, of_bias


@Operators
def packed_operators(
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float,
    return_lse: bool = False,
) -> Operator:
    """Returns the operator for packed sequences, which gives out and, in any case, lse."""
    name = "flash_attention_varlen"
    settings.boolean(name, "return_lse", return_lse)
    attributes = attributes_of(name, causal, scale, window, softcap)
    for key, argument, value in (
        ("most_queries", "max_seqlen_q", max_seqlen_q),
        ("most_keys", "max_seqlen_k", max_seqlen_k),
    ):
        attributes[key] = settings.integer(name, argument, value)
        if not 0 <= value < 2**31:
            raise ValueError(f"{name}: {argument} must be at least 0 and less than 2^31, got {value}")
    inputs = "q(Nq, Hq, D), k(Nk, Hk, D), v(Nk, Hk, Dv)"
    starts = "cu_seqlens_q(S, dtype=int32), cu_seqlens_k(S, dtype=int32)"
    kept = "out(Nq, Hq, Dv), lse(Hq, Nq, dtype=accumulator), dout(Nq, Hq, Dv), dlse(Hq, Nq, dtype=accumulator)"
    backward = custom_op(
        _LIBRARY.FlashAttentionBackward,
        f"{inputs}, {starts}, {kept} -> dq, dk, dv; delta, query_sums, mask_bits, padded(..., dtype=common)",
        infer=infer_backward,
        name=name,
        axes=_PACKED,
        **attributes,
    )
    return custom_op(
        _LIBRARY.FlashAttentionForward,
        f"{inputs}, {starts} -> out, lse; partial, mask_bits, padded(..., dtype=common)",
        infer=infer_packed,
        gradient=backward,
        name=name,
        axes=_PACKED,
        **attributes,
    )


def attributes_of(name: str, causal: bool, scale: float | None, window: Window, softcap: float) -> dict[str, Any]:
    """Checks the settings of an operator, and returns them as its C entries take them."""
    left, right = -1, -1
    if window is not None:
        left, right = settings.numbers(name, "window", window, (2,), -1)
    return dict(
        left=left,
        right=0 if settings.boolean(name, "causal", causal) else right,
        scale=1.0 if scale is None else settings.number(name, "scale", scale),
        by_width=int(scale is None),
        softcap=settings.number(name, "softcap", softcap, 0),
    )


def probability(dropout_p: float) -> float:
    """Checks dropout_p."""
    if not 0 <= settings.number(_NAME, "dropout_p", dropout_p) < 1:
        raise ValueError(f"{_NAME}: dropout_p must be at least 0 and less than 1, got {dropout_p}")
    return float(dropout_p)


def infer(
    q: Spec,
    k: Spec,
    v: Spec,
    kv_lengths: Spec | None,
    mask: Spec | None,
    bias: Spec | None,
    alibi_slopes: Spec | None,
    seed: Spec | None,
    axes: int,
    **settings: float,
) -> list[Spec]:
    head, row = (1, 2) if axes == 0 else (2, 1)
    heads, queries, keys = q.shape[head], q.shape[row], k.shape[row]
    _check_heads(q, k, v, head)
    full = (q.shape[0], heads, queries, keys)
    for name, x in (("mask", mask), ("bias", bias)):
        if x is None:
            continue
        pairs = zip(reversed(x.shape), reversed(full))
        if len(x.shape) > 4 or any(size not in (1, whole) for size, whole in pairs):
            raise ValueError(f"{name} must broadcast to (B, Hq, Tq, Tk) = {full}, got {x.shape}")
    if alibi_slopes is not None and alibi_slopes.shape not in (full[1:2], full[:2]):
        raise ValueError(f"alibi_slopes must have shape (Hq,) or (B, Hq) = {full[:2]}, got {alibi_slopes.shape}")
    lse = Spec((q.shape[0], heads, queries), accumulator(q.dtype))
    return [q._replace(shape=(*q.shape[:-1], v.shape[-1])), lse]


def infer_packed(q: Spec, k: Spec, v: Spec, starts_q: Spec, starts_k: Spec, **settings: float) -> list[Spec]:
    _check_heads(q, k, v, 1)
    if starts_q.size == 0:
        raise ValueError("cu_seqlens_q must have at least one number, got shape (0,)")
    lse = Spec((q.shape[1], q.shape[0]), accumulator(q.dtype))
    return [q._replace(shape=(*q.shape[:-1], v.shape[-1])), lse]


def infer_backward(q: Spec, k: Spec, v: Spec, *others: Spec | None, **settings: float) -> list[Spec]:
    return [q, k, v]


def _check_heads(q: Spec, k: Spec, v: Spec, head: int) -> None:
    heads, kv_heads = q.shape[head], k.shape[head]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q must have a multiple of the {kv_heads} heads of k and v, got {heads}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > _MOST_FEATURES:
            raise ValueError(f"{name} must have at most {_MOST_FEATURES} features, got {x.shape[-1]}")
