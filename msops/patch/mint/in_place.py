"""Writes into tensors."""

from __future__ import annotations

import mindspore
from mindspore import Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import compiling, records_gradients

assign = operations.Assign()


def copy_into(to: Tensor, source: Tensor) -> Tensor:
    """Writes a tensor into another by MindSpore's copy, which has a gradient, and which graph mode has on all devices.
    PyNative mode has no kernel of it for GPUs."""
    if compiling() or mindspore.get_context("device_target") != "GPU":
        return ops.auto_generate.inplace_copy_op(to, source, False)
    if records_gradients():
        raise NotImplementedError(
            "mint: writing into a tensor has no gradient on a GPU in PyNative mode: use the function or the method "
            "without _"
        )
    return assign(to, source)


def store(to: Tensor, source: Tensor) -> Tensor:
    """Writes a tensor that needs no gradient into another."""
    source = ops.stop_gradient(source)
    return ops.auto_generate.inplace_copy_op(to, source, False) if compiling() else assign(to, source)
