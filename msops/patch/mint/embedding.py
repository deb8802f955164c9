"""Takes rows of a table."""

from __future__ import annotations

import mindspore
from mindspore import Tensor, ops

from msops.core.spec import FLOATS
from msops.operators.embedding import embedding as rows_of

from .reduction import vector_norm


def embedding(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    n = weight.shape[0]
    if padding_idx is not None and not -n <= padding_idx < n:
        raise ValueError(f"mint.nn.functional.embedding: padding_idx must be from {-n} to {n - 1}, got {padding_idx}")
    if max_norm is not None:
        shorter = _shortened(ops.stop_gradient(weight), input.reshape(-1), max_norm, norm_type)
        weight = ops.depend(weight, ops.assign(weight, shorter))
    rows = rows_of(input, weight, padding_idx) if weight.dtype in FLOATS else ops.gather(weight, input, 0)
    if not scale_grad_by_freq:
        return rows
    held = ops.stop_gradient(rows)
    counts = ops.gather(_counts(input.reshape(-1), n), input, 0).expand_dims(-1)
    return held + (rows - held) / ops.cast(counts, rows.dtype)


def _shortened(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Returns a table whose rows that are used are max_norm long at most."""
    norms = vector_norm(weight, norm_type, -1, True)
    is_long = ops.logical_and(norms > max_norm, _counts(ids, weight.shape[0]).expand_dims(-1) > 0)
    return ops.where(is_long, weight * (max_norm / (norms + 1e-7)), weight)


def _counts(ids: Tensor, n: int) -> Tensor:
    """Returns how often each row is used."""
    ones = ops.ones(ids.shape, mindspore.float32)
    return ops.tensor_scatter_elements(ops.zeros((n,), mindspore.float32), ids, ones, 0, "add")
