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
    PyNative mode has no kernel of it for GPUs, and writes nothing where the target is a part of a tensor's memory."""
    if compiling():
        return ops.auto_generate.inplace_copy_op(to, source, False)
    records = records_gradients()
    if records:
        require_gradient(to)
    elif is_part(to):
        return write_part(to, source)
    if mindspore.get_context("device_target") == "GPU":
        return become(to, source) if records else assign(to, source)
    if not fills_memory(to):
        raise NotImplementedError(
            "mint: MindSpore cannot write into a view of a part of a tensor, or of its axes in another order: write "
            "into tensor[index]"
        )
    return ops.auto_generate.inplace_copy_op(to, source, False)


def is_part(to: Tensor) -> bool:
    """Tells whether a tensor was made as tensor[index]."""
    return getattr(to, "parent_tensor_", None) is not None


def write_part(to: Tensor, source: Tensor) -> Tensor:
    """Writes into tensor[index] without a gradient. MindSpore then writes into that tensor, too."""
    to[...] = source
    return to


def fills_memory(to: Tensor) -> bool:
    """Tells whether a tensor's elements are all that its memory holds, in their order, as a view by reshape's are."""
    if not hasattr(to, "untyped_storage"):  # old versions of MindSpore lack it
        return not is_part(to)
    return bool(to.is_contiguous() and to.storage_offset() == 0 and to.untyped_storage().size() == to.nbytes)


def require_gradient(to: Tensor, function: str = "mint", other: str = "function that is not in place") -> None:
    """Requires that a tensor, which is written into where gradients are taken, has one. A copy into a part does not
    write into the whole tensor, and a Parameter keeps its own gradient."""
    if isinstance(to, Parameter) and to.requires_grad:
        what = "a Parameter that requires a gradient"
    elif is_part(to) and not isinstance(to, Parameter):
        what = "a part of another tensor"
    else:
        return
    raise NotImplementedError(
        f"{function}: {what} has no gradient on GPU and CPU: where gradients are taken, use the {other}"
    )


def become(to: Tensor, source: Tensor) -> Tensor:
    """Gives a tensor the memory and the gradient of another. As after a copy, MindSpore raises an error if a gradient
    needs what was there: it compares the tensor's version with the one that it saved."""
    set_versions: Any = getattr(mindspore._c_expression, "_unsafe_set_version_counter", None)
    if set_versions is None:
        raise NotImplementedError(
            "mint: writing into a tensor has no gradient on a GPU in PyNative mode of this MindSpore: use the function "
            "or the method without _"
        )
    version = to._version
    # The source's own function may have saved its result, whose version must stay.
    to.assign_value(ops.deepcopy(source))
    set_versions([to], [version + 1])
    return to


def store(to: Tensor, source: Tensor) -> Tensor:
    """Writes a tensor that needs no gradient into another."""
    source = ops.stop_gradient(source)
    if compiling():
        return ops.auto_generate.inplace_copy_op(to, source, False)
    return write_part(to, source) if is_part(to) else assign(to, source)
