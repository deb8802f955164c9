"""Tensors as rules see them, and checks of Cells' arguments. All messages read "who: what must be this, got that"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import Initializer, initializer

if TYPE_CHECKING:
    Init = Tensor | str | Initializer | float

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


def whole(value: object) -> bool:
    """Whether this is an int, of NumPy's or of Python's, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def positive(operator: str, name: str, value: int) -> int:
    """Requires a whole number of at least 1, and returns it."""
    if not whole(value):
        raise TypeError(f"{operator}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{operator}: {name} must be at least 1, got {value}")
    return int(value)


def boolean(operator: str, name: str, value: bool) -> bool:
    """Requires a bool, of NumPy's or of Python's, and returns it."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operator}: {name} must be a bool, got {type(value).__name__}")
    return bool(value)


def parameter(operator: str, name: str, init: Init, shape: tuple[int, ...], dtype: mindspore.Type) -> Parameter:
    """A new Parameter; requires a floating dtype, and an initial Tensor to have it."""
    if dtype not in FLOATS:
        raise TypeError(f"{operator}: dtype must be float16, float32 or float64, got {dtype}")
    if isinstance(init, Tensor) and init.dtype != dtype:
        raise TypeError(
            f"{operator}: {name}_init must be {dtype_name(dtype)} as dtype is, got {dtype_name(init.dtype)}"
        )
    try:
        value = initializer(init, shape, dtype)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        got = f"a Tensor of shape {init.shape}" if isinstance(init, Tensor) else repr(init)
        raise kind(
            f"{operator}: {name}_init must be a number, the name of an initializer, an Initializer or a Tensor of "
            f"shape {shape}, got {got}"
        ) from error
    return Parameter(value, name=name)
