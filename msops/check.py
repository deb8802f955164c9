"""Argument checks. All messages read "operator: argument must be this, got that"."""

import math
from typing import NamedTuple

import mindspore
from mindspore import Parameter, Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

FLOATS = (mindspore.float16, mindspore.float32, mindspore.float64)


class Spec(NamedTuple):
    """Shape and dtype of a tensor. What is no Tensor has the shape None, and its type's name as dtype."""

    shape: tuple
    dtype: object

    @property
    def size(self):
        return math.prod(self.shape)


def from_inference(argument):
    """The Spec of what MindSpore hands to a primitive's inference."""
    dtype = argument["dtype"]
    if isinstance(dtype, mstype.TensorType):
        return Spec(tuple(argument["shape"]), dtype.element_type())
    value = argument.get("value")
    return Spec(None, str(dtype) if value is None else type(value).__name__)


def tensors(operator, **arguments):
    """Requires Tensors of one floating dtype and known shapes."""
    first, expected = next(iter(arguments.items()))
    for name, spec in arguments.items():
        if spec.shape is None:
            raise TypeError(f"{operator}: {name} must be a Tensor, got {spec.dtype}")
        if any(length is None or length < 0 for length in spec.shape):
            raise ValueError(f"{operator}: {name} must have a shape known at compile time, got {spec.shape}")
        if spec.dtype not in FLOATS:
            raise TypeError(f"{operator}: {name} must be float16, float32 or float64, got {_name(spec.dtype)}")
        if spec.dtype != expected.dtype:
            raise TypeError(
                f"{operator}: {name} must be {_name(expected.dtype)} as {first} is, got {_name(spec.dtype)}"
            )


def shape(operator, name, spec, *expected):
    """Requires a shape. An expected length is a number, or a word for any."""
    if len(spec.shape) != len(expected) or any(
        isinstance(want, int) and got != want for got, want in zip(spec.shape, expected)
    ):
        words = ", ".join(map(str, expected)) + ("," if len(expected) == 1 else "")
        raise ValueError(f"{operator}: {name} must have shape ({words}), got {spec.shape}")


def _name(dtype):
    return str(dtype).lower()


def positive(operator, name, value):
    """Requires a whole number of at least 1, and returns it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{operator}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{operator}: {name} must be at least 1, got {value}")
    return value


def parameter(operator, name, init, shape, dtype):
    """A new Parameter; requires a floating dtype, and an initial Tensor to have it."""
    if dtype not in FLOATS:
        raise TypeError(f"{operator}: dtype must be float16, float32 or float64, got {dtype}")
    if isinstance(init, Tensor) and init.dtype != dtype:
        raise TypeError(f"{operator}: {name}_init must be {_name(dtype)} as dtype is, got {_name(init.dtype)}")
    return Parameter(initializer(init, shape, dtype), name=name)
