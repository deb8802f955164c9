"""Checks and converts the inputs of operators' functions, also in code that MindSpore compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.compiled import once
from msops.core.spec import Spec

if TYPE_CHECKING:
    from typing import Any

    from msops.core.signature import Signature

    Description = tuple[Any, Any]
    Sizes = tuple[int | None, ...]  # None is an open size


def cast_as(tensor: Tensor, x: Tensor) -> Tensor:
    """Casts a tensor to the dtype of x. What is not a Tensor is returned as it is, and reported by a later check."""
    if not isinstance(tensor, Tensor) or not isinstance(x, Tensor) or tensor.dtype == x.dtype:
        return tensor
    return ops.cast(tensor, x.dtype)


def widened(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """Casts a tensor of float16 to float32 beside an x of float32. What else it is, a later check says."""
    if not isinstance(tensor, Tensor) or not isinstance(x, Tensor) or tensor.dtype != mindspore.float16:
        return tensor
    return ops.cast(tensor, x.dtype) if x.dtype == mindspore.float32 else tensor


def as_int32(lengths: Tensor | None) -> Tensor | None:
    """Casts lengths or offsets of int64 to int32. Numbers that are too large or negative stay so."""
    if not isinstance(lengths, Tensor):
        return lengths
    if lengths.dtype != mindspore.int64:  # apart: for level O1, MindSpore computes both sides of an `or`
        return lengths
    return ops.cast(ops.minimum(ops.maximum(lengths, -1), 2**31 - 1), mindspore.int32)


def present(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Returns the inputs that are not None."""
    given = ()  # type: tuple[Tensor, ...]  # MindSpore before 2.7 needs the type in a comment
    for x in inputs:
        if x is not None:
            given += (x,)
    return given


def describe(x: object) -> "Description":  # noqa: UP037, since for level O1 MindSpore copies this to a module without it
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return None, type(x)


def describe_pair(state: object) -> tuple[Description | None, int]:
    """Describes a state for `check_pair`. An exported graph may not ask for the type of a tuple of Tensors."""
    if isinstance(state, (tuple, list)):
        return None, len(state)
    return describe(state), -1


def spec_of(description: Description) -> Spec | str:
    shape, kind = description
    if shape is not None:
        return Spec(shape, kind)
    if isinstance(kind, mindspore.common.dtype.typing.Number):
        return Spec((-2,), kind)  # a Tensor of an open rank
    if isinstance(kind, Tensor):
        return "something else"  # the type is known only when the graph runs, and its stand-in cannot be printed
    return getattr(kind, "__name__", str(kind))


def check_inputs(signature: Signature, who: str, specs: list[Spec | str]) -> None:
    """Requires inputs to fit a signature. Open sizes are not checked here: the operators check them at run time."""
    is_open = any(size is None for spec in specs if isinstance(spec, Spec) for size in spec.shape)
    if is_open:
        specs = [
            spec if isinstance(spec, str) else spec._replace(shape=tuple(size or 1 for size in spec.shape))
            for spec in specs
        ]
    signature.check(who, *specs, shapes=not is_open)


@once
def check_pair(who: str, names: str, pair: tuple[Description | None, int]) -> None:
    """Requires a state to have two elements."""
    state, length = pair
    if length != 2:
        kind = "" if state is None else spec_of(state)
        got = f"{length} elements" if state is None else kind if isinstance(kind, str) else "a Tensor"
        raise TypeError(f"{who}: state must be a tuple {names}, got {got}")


@once
def has_zero(*sizes: int | None) -> bool | None:
    """Tells whether one of the sizes is 0; returns None where that is open.

    None is a constant, whereas MindSpore 2.7 cannot compile the gradient of an `if` whose condition is open.
    """
    return True if 0 in sizes else None if None in sizes else False


@once
def lacks_rank(shape: Sizes | None) -> bool:
    """Tells whether a shape is not known at all, in code that MindSpore compiles for inputs of an open rank."""
    return shape is None


def fits(shape: Sizes, wanted: Sizes) -> bool:
    """Tells whether two shapes have the same rank, and all sizes that are known in both are equal."""
    return len(shape) == len(wanted) and all(a == b or a is None or b is None for a, b in zip(shape, wanted))


def unless_zero(tensor: Tensor, terms: Any) -> Tensor:
    """Replaces a tensor, and its gradient, by zeros if `terms` is an open size that turns out to be 0.

    MindSpore's MatMul does not write sums that have no terms.
    """
    if has_zero(terms) is None:
        return ops.masked_fill(tensor, ops.full((1, 1), terms, dtype=mindspore.int32) == 0, 0.0)
    return tensor


@ops.constexpr
def is_pynative() -> bool:
    return mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
