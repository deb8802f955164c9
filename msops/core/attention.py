"""Checks the settings of attention, and infers the shapes of its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import settings
from .spec import Spec, accumulator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Window = Sequence[int] | None

_MOST_FEATURES = 512


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
