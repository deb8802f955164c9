"""Describes the shapes and dtypes of tensors, as rules see them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mindspore
from mindspore.common import dtype as mstype

FLOATS = (mindspore.float16, mindspore.float32, mindspore.float64)
# These bound float32's normal numbers. MindSpore's threads take smaller ones for 0.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Rounded(float):
    """A setting that kernels round to the dtype of their sums, so that float32 must hold it unless that is float64."""

    def is_float32(self) -> bool:
        return self == 0.0 or SMALLEST <= abs(self) <= LARGEST


class Spec(NamedTuple):
    """Shape and dtype of a tensor, in the rules of :func:`msops.custom_op`.

    Attributes:
        shape (tuple[int]): The number of elements along each axis.
        dtype (mindspore.dtype): The dtype of the elements.
        size (int): The number of elements.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.Spec((2, 3), mindspore.float32).size)
        6
    """

    shape: tuple[int, ...]
    dtype: mindspore.Type

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def from_inference(argument: dict[str, Any]) -> Spec | str:
    """Returns the Spec of an argument of a primitive's inference, or the type's name if it is not a Tensor."""
    dtype = argument["dtype"]
    if isinstance(dtype, mstype.typing.TensorType):
        return Spec(tuple(argument["shape"]), dtype.element_type())
    value = argument.get("value")
    return str(dtype) if value is None else type(value).__name__


def accumulator(dtype: mindspore.Type) -> mindspore.Type:
    """Returns the dtype in which elements of `dtype` are summed."""
    return mindspore.float64 if dtype == mindspore.float64 else mindspore.float32


def dtype_name(dtype: mindspore.Type) -> str:
    """Returns NumPy's name of a dtype."""
    return str(dtype).lower()


def dtype_called(name: str) -> mindspore.Type:
    """Returns MindSpore's dtype for NumPy's name of it."""
    return getattr(mindspore, "bool_" if name == "bool" else name)
