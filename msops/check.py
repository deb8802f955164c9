"""Tensors as rules see them, and checks of Cells' arguments. All messages read "who: what must be this, got that"."""

import math
from typing import NamedTuple

import mindspore
from mindspore import Parameter, Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

FLOATS = (mindspore.float16, mindspore.float32, mindspore.float64)


class Spec(NamedTuple):
    """Shape and dtype of a tensor, in the rules of :func:`msops.custom_op`.

    Attributes:
        shape (tuple): None of what is no Tensor.
        dtype (mindspore.dtype): The type's name of what is no Tensor.
        size (int): The number of elements.

    Examples:
        >>> import mindspore, msops
        >>> print(msops.Spec((2, 3), mindspore.float32).size)
        6
    """

    shape: tuple
    dtype: object

    @property
    def size(self):
        return math.prod(self.shape)


def from_inference(argument):
    """The Spec of what MindSpore hands to a primitive's inference."""
    dtype = argument["dtype"]
    if isinstance(dtype, mstype.typing.TensorType):
        return Spec(tuple(argument["shape"]), dtype.element_type())
    value = argument.get("value")
    return Spec(None, str(dtype) if value is None else type(value).__name__)


def accumulator(dtype):
    """What elements of `dtype` are summed in."""
    return mindspore.float64 if dtype == mindspore.float64 else mindspore.float32


def dtype_name(dtype):
    """As NumPy calls it."""
    return str(dtype).lower()


def positive(operator, name, value):
    """Requires a whole number of at least 1, and returns it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{operator}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{operator}: {name} must be at least 1, got {value}")
    return value


def boolean(operator, name, value):
    """Requires a bool, and returns it."""
    if not isinstance(value, bool):
        raise TypeError(f"{operator}: {name} must be a bool, got {type(value).__name__}")
    return value


def parameter(operator, name, init, shape, dtype):
    """A new Parameter; requires a floating dtype, and an initial Tensor to have it."""
    if dtype not in FLOATS:
        raise TypeError(f"{operator}: dtype must be float16, float32 or float64, got {dtype}")
    if isinstance(init, Tensor) and init.dtype != dtype:
        raise TypeError(
            f"{operator}: {name}_init must be {dtype_name(dtype)} as dtype is, got {dtype_name(init.dtype)}"
        )
    return Parameter(initializer(init, shape, dtype), name=name)
