"""This operator serves patch_mindspore alone: msops has no public name for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore

from msops.core import settings
from msops.core.factory import Operators, custom_op
from msops.core.library import of_package

if TYPE_CHECKING:
    from mindspore import Tensor

    from msops.core.operator import Operator
    from msops.core.spec import Spec

_NAME = "strided_copy"
_LIBRARY = of_package(_NAME)
_MAX_RANK = 8  # kMostRank in aot_kernels/strided_copy/copy.h
_FAR = 2**40  # kFar there is one less
_DTYPES = (
    *(mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bool_),
    *(mindspore.int8, mindspore.int16, mindspore.int32, mindspore.int64),
    *(mindspore.uint8, mindspore.uint16, mindspore.uint32, mindspore.uint64),
    *(mindspore.complex64, mindspore.complex128),
)


def strided_copy(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    """Copies a strided view of the elements of `x`, in the order in which memory has them, to contiguous memory.

    Element (i, j, ...) of the result is element `offset` + i `stride[0]` + j `stride[1]` + ... of `x`. A stride may be
    0 or negative. So this copies what transposes, broadcasts, slices with steps and `as_strided` make. The gradient has
    zeros where the view has no element; there is none where the view has an element twice.
    """
    return operators.primitive(shape, stride, offset)(x)


def is_distinct(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Returns whether a view has no element twice, as far as that shows by each stride being wider than all that the
    smaller ones reach."""
    reach = 0
    for apart, length in sorted((abs(apart), length) for apart, length in zip(stride, shape) if length != 1):
        if apart <= reach:
            return 0 in shape
        reach += (length - 1) * apart
    return True


@Operators
def operators(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Operator:
    for name, values in (("shape", shape), ("stride", stride)):
        if not isinstance(values, tuple) or len(values) > _MAX_RANK or len(values) != len(shape):
            raise ValueError(f"{_NAME}: {name} must be a tuple of at most {_MAX_RANK} ints for each axis, got {values}")
        for value in values:
            low = -_FAR if name == "stride" else -1
            if not low < settings.integer(_NAME, name, value) < _FAR:
                raise ValueError(f"{_NAME}: {name} must have ints above {low} and below {_FAR}, got {value}")
    if not 0 <= settings.integer(_NAME, "offset", offset) < _FAR:
        raise ValueError(f"{_NAME}: offset must be at least 0 and below {_FAR}, got {offset}")
    if 0 not in shape and offset + sum(min(0, (n - 1) * s) for n, s in zip(shape, stride)) < 0:
        raise ValueError(f"{_NAME}: stride must not lead to elements before the first one, got {stride}")
    attributes: dict[str, Any] = {"rank": len(shape), "offset": offset}
    for axis, (length, apart) in enumerate(zip(shape, stride)):
        attributes |= {f"size_{axis}": length, f"stride_{axis}": apart}
    gradient = None
    if is_distinct(shape, stride):
        gradient = custom_op(
            _LIBRARY.StridedCopyBackward,
            f"dy({', '.join(map(str, shape))}), x -> dx",
            infer=_infer_gradient,
            name=_NAME,
            dtypes=_DTYPES,
            **attributes,
        )
    return custom_op(
        _LIBRARY.StridedCopyForward, "x -> y", infer=_infer, gradient=gradient, dtypes=_DTYPES, **attributes
    )


def _infer(x: Spec, rank: int, offset: int, **attributes: int) -> Spec:
    shape = tuple(attributes[f"size_{axis}"] for axis in range(rank))
    if math.prod(shape):
        last = offset + sum(max(0, (n - 1) * attributes[f"stride_{axis}"]) for axis, n in enumerate(shape))
        if last >= x.size:
            raise ValueError(f"x must have at least {last + 1} elements, got {x.size}")
    return x._replace(shape=shape)


def _infer_gradient(dy: Spec, x: Spec, **attributes: int) -> Spec:
    _infer(x, **attributes)
    return x
