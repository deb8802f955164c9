"""Shapes and dtypes of tensors, as rules see them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mindspore
from mindspore.common import dtype as mstype

FLOATS = (mindspore.float16, mindspore.float32, mindspore.float64)


class Spec(NamedTuple):
    """Shape and dtype of a tensor, in the rules of :func:`msops.custom_op`.

    Attributes:
        shape (tuple[int]): The number of elements along each axis.
        dtype (mindspore.dtype): That of the elements.
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
    """The Spec of what MindSpore hands to a primitive's inference; of what is no Tensor, the type's name."""
    dtype = argument["dtype"]
    if isinstance(dtype, mstype.typing.TensorType):
        return Spec(tuple(argument["shape"]), dtype.element_type())
    value = argument.get("value")
    return str(dtype) if value is None else type(value).__name__


def accumulator(dtype: mindspore.Type) -> mindspore.Type:
    """What elements of `dtype` are summed in."""
    return mindspore.float64 if dtype == mindspore.float64 else mindspore.float32


def dtype_name(dtype: mindspore.Type) -> str:
    """As NumPy calls it."""
    return str(dtype).lower()


def dtype_called(name: str) -> mindspore.Type:
    """MindSpore's dtype of a name of NumPy's."""
    return getattr(mindspore, "bool_" if name == "bool" else name)
