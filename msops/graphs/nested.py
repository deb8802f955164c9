"""Takes nested tuples, lists and dicts apart, and puts them together with other tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Slot(NamedTuple):
    """A place for a tensor."""

    number: int


def _is_leaf(value: Any) -> bool:
    """Parameters are no leaves: the recorded work uses their own memory."""
    return isinstance(value, Slot) or (isinstance(value, Tensor) and not isinstance(value, Parameter))


def key_of(value: Any, tensors: list[Tensor], path: str) -> Any:
    """Appends the tensors of a value, and returns a hashable description of the value without their content."""
    kind = type(value)
    if _is_leaf(value):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return kind, tuple([key_of(each, tensors, f"{path}[{i}]") for i, each in enumerate(value)])
    if isinstance(value, dict):
        return kind, tuple([(name, key_of(each, tensors, f"{path}[{name!r}]")) for name, each in value.items()])
    if isinstance(value, Parameter):
        return kind, id(value)
    if isinstance(value, (float, complex, np.inexact)):
        return kind, repr(value)  # NaN does not equal itself, and 0.0 equals -0.0
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"cuda_graph: {path} must be a Tensor, a number, a str, None or a tuple, list or dict of these, got "
            f"{kind.__name__}"
        ) from None
    return kind, value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value in the order of `key_of`."""
    if _is_leaf(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)


def others_of(value: Any) -> Iterator[Any]:
    """Yields what a value has beside the tensors."""
    if isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from others_of(each)
    elif not _is_leaf(value):
        yield value


def with_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """Returns the value with others in place of its tensors or slots, in the order of `key_of`."""
    if _is_leaf(value):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        parts = [with_tensors(each, tensors) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        made = copy.copy(value)  # a class of its own, such as the outputs of a library's models, keeps its state
        for name, each in value.items():
            made[name] = with_tensors(each, tensors)
        return made
    return value
