"""Tells whether MindSpore is compiling the code that runs, and makes constants once in such code."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import nn, ops
from mindspore.ops.primitive import PrimitiveWithInfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


class Compiling(PrimitiveWithInfer):
    """Tells whether it is called in code that MindSpore compiles."""

    def __init__(self) -> None:
        super().__init__("Compiling")

    def __infer__(self) -> dict[str, Any]:
        return {"shape": (), "dtype": mindspore.bool_, "value": True}

    def __call__(self) -> bool:
        return False


compiling = Compiling()


@ops.constexpr
def records_gradients() -> bool:
    """Tells whether PyNative mode records what runs, to differentiate it. True where MindSpore does not say."""
    executor = mindspore.common.api._pynative_executor
    asked = getattr(executor, "requires_grad", None) or getattr(executor, "grad_flag", None)
    return asked is None or bool(asked())


def cached(make: Function) -> Function:
    """Decorates a function so that it runs once for equal arguments, if these have hashes.

    A list has none. The function gets it at each call, and can say what the argument must be.
    """
    kept = functools.lru_cache(maxsize=None, typed=True)(make)

    @functools.wraps(make)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            hash((arguments, *named.values()))
            run: Callable[..., Any] = kept
        except TypeError:
            run = make
        return run(*arguments, **named)

    return call  # type: ignore[return-value]


def forget_recording() -> None:
    """Ends the recording of PyNative mode in graph mode.

    If a function raises while PyNative mode records it, MindSpore does not end the recording. The next graph would then
    be compiled together with its gradient, which fails for a graph that has gradients of first order in it.
    """
    executor = mindspore.common.api._pynative_executor
    try:
        # get_context takes too long for each call of an operator.
        if executor.grad_flag() and mindspore.context._context().get_mode() == mindspore.GRAPH_MODE:
            executor.set_grad_flag(False)
    except AttributeError:
        pass  # an older version lacks one of these names


def keep_dtypes(cell: nn.Cell) -> None:
    """Makes PyNative mode run the operators of a Cell in the dtypes that they get, also inside of a Cell with
    `to_float`, for which MindSpore would cast every floating tensor to float16."""
    kinds = getattr(nn.cell, "MixedPrecisionType", None)
    if kinds is not None:
        cell.mixed_precision_type = kinds.NOTSET


def once(make: Function) -> Function:
    """Decorates a function of constants that makes something, such as an operator.

    The function may then also be called in code that MindSpore compiles, and it runs once for equal arguments. It runs
    each time if an argument, such as a list, has no hash.

    Examples:
        >>> import msops
        >>> @msops.once
        ... def label(n):
        ...     print("made")
        ...     return f"n = {n}"
        >>> print(label(3), label(3))
        made
        n = 3 n = 3
    """
    return ops.constexpr(cached(make))
