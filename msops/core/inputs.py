"""What functions of operators ask of their arguments, in what MindSpore compiles, too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import mindspore
from mindspore import Tensor, ops

from msops.core.spec import Spec

if TYPE_CHECKING:
    from typing import Any

    from msops.core.compiled import Function
    from msops.core.signature import Signature

    Description = tuple[Any, Any]
    Sizes = tuple[int | None, ...]  # None: an open one


def cast_as(tensor: Tensor, x: Tensor) -> Tensor:
    """In the dtype of x. Of what is no Tensor a check tells."""
    if not isinstance(tensor, Tensor) or not isinstance(x, Tensor) or tensor.dtype == x.dtype:
        return tensor
    return ops.cast(tensor, x.dtype)


def describe(x: object) -> Description:
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return None, type(x)


def describe_pair(state: object) -> tuple[Description | None, int]:
    """What `check_pair` asks. An exported graph may not ask for the type of a tuple of Tensors."""
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
        return "something else"  # a stand-in for the type of what only the running graph knows; it cannot be printed
    return getattr(kind, "__name__", str(kind))


def open_once(make: Function) -> Function:
    """`once`, where sizes may be open: None."""
    return ops.constexpr(functools.lru_cache(maxsize=None, typed=True)(make), check=False)


def check_inputs(signature: Signature, who: str, specs: list[Spec | str]) -> None:
    """Where sizes are open, the operators check them when the graph runs."""
    is_open = any(size is None for spec in specs if isinstance(spec, Spec) for size in spec.shape)
    if is_open:
        specs = [
            spec if isinstance(spec, str) else spec._replace(shape=tuple(size or 1 for size in spec.shape))
            for spec in specs
        ]
    signature.check(who, *specs, shapes=not is_open)


@open_once
def check_pair(who: str, names: str, pair: tuple[Description | None, int]) -> None:
    """Requires a state of two elements."""
    state, length = pair
    if length != 2:
        kind = "" if state is None else spec_of(state)
        got = f"{length} elements" if state is None else kind if isinstance(kind, str) else "a Tensor"
        raise TypeError(f"{who}: state must be a tuple {names}, got {got}")


@open_once
def has_zero(*sizes: int | None) -> bool | None:
    """Whether one is 0; None where that is open, since MindSpore 2.7 cannot compile the gradient of an `if` of it."""
    return True if 0 in sizes else None if None in sizes else False


def fits(shape: Sizes, wanted: Sizes) -> bool:
    """Whether all sizes that are known are equal."""
    return len(shape) == len(wanted) and all(a == b or a is None or b is None for a, b in zip(shape, wanted))


def unless_zero(tensor: Tensor, terms: Any) -> Tensor:
    """Zeros if an open size is 0, and a gradient of zeros: sums of no terms are not written by MindSpore's MatMul."""
    if has_zero(terms) is None:
        return ops.masked_fill(tensor, ops.full((1, 1), terms, dtype=mindspore.int32) == 0, 0.0)
    return tensor


@ops.constexpr
def is_pynative() -> bool:
    return mindspore.get_context("mode") == mindspore.PYNATIVE_MODE
