"""Writes into tensors."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Parameter, Tensor, ops
from mindspore.ops import operations

from msops.core.compiled import compiling, records_gradients

assign = operations.Assign()


def copy_into(to: Tensor, source: Tensor) -> Tensor:
    """Writes a tensor into another by MindSpore's copy, which has a gradient, and which graph mode has on all devices.
    PyNative mode has no kernel of it for GPUs."""
    if compiling() or mindspore.get_context("device_target") != "GPU":
        return ops.auto_generate.inplace_copy_op(to, source, False)
    return become(to, source) if records_gradients() else assign(to, source)


def become(to: Tensor, source: Tensor) -> Tensor:
    """Gives a tensor the memory and the gradient of another. As after a copy, MindSpore raises an error if a gradient
    needs what was there: it compares the tensor's version with the one that it saved."""
    set_versions: Any = getattr(mindspore._c_expression, "_unsafe_set_version_counter", None)
    if set_versions is None:
        raise NotImplementedError(
            "mint: writing into a tensor has no gradient on a GPU in PyNative mode of this MindSpore: use the function "
            "or the method without _"
        )
    is_part = getattr(to, "parent_tensor_", None) is not None  # it was made as tensor[index]
    if is_part or (isinstance(to, Parameter) and to.requires_grad):
        what = "a part of another tensor" if is_part else "a Parameter that requires a gradient"
        raise NotImplementedError(f"mint: writing into {what} has no gradient on a GPU in PyNative mode")
    version = to._version
    # The source's own function may have saved its result, whose version must stay.
    to.assign_value(ops.deepcopy(source))
    set_versions([to], [version + 1])
    return to


def store(to: Tensor, source: Tensor) -> Tensor:
    """Writes a tensor that needs no gradient into another."""
    source = ops.stop_gradient(source)
    return ops.auto_generate.inplace_copy_op(to, source, False) if compiling() else assign(to, source)
