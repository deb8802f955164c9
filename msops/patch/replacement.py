"""Holds what stands in place of MindSpore's primitives: those that msops has, and those that it refuses."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NoReturn

import mindspore
from mindspore import ops

from msops.core.compiled import once

if TYPE_CHECKING:
    from collections.abc import Callable

    from mindspore import Tensor


def put_method(owner: Any, name: str, method: Any) -> None:
    """Puts a method into a class, or a function into a module. MindSpore finds what it has compiled of a Cell again by
    the name that its `construct` has."""
    if name == "construct":
        method.__name__ = name
    setattr(owner, name, method)


class Replacement:
    """A primitive as MindSpore compiles it, from the source of `__call__`."""

    __ms_class__ = True

    def shard(self, in_strategy: object = None, out_strategy: object = None) -> Replacement:
        """Does nothing, as for MindSpore's primitives, unless MindSpore distributes operators, which is refused."""
        if mindspore.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel"):
            raise NotImplementedError(f"{type(self).__name__}: msops' operators cannot be sharded")
        return self

    def add_prim_attr(self, name: str, value: object) -> Replacement:
        """Does nothing: the attributes tell Ascend's compiler where and how to run a kernel."""
        return self

    def recompute(self, mode: bool = True) -> Replacement:
        """Does nothing: gradients of msops' operators keep inputs, of which there is nothing to compute again."""
        return self


class Maker:
    """Makes primitives for MindSpore's cache of them, which calls `Primitive.__new__(cls)`, also for a Replacement."""

    def __new__(cls, *settings: Any, **named: Any) -> Any:
        if issubclass(cls, Replacement):
            return object.__new__(cls)
        return ops.Primitive.__new__(cls, *settings, **named)


def is_third_party(own: Any) -> Callable[[Any], bool] | None:
    """Lets level O1 of amp call what msops puts in place of functions and primitives as it is. MindSpore takes a
    function that is not in site-packages, or is below the current folder, for the user's own, and writes its source
    into a module that lacks the names of its own module."""

    def is_of_msops_or_third_party(function: Any) -> bool:
        return str(getattr(function, "__module__", "")).partition(".")[0] == "msops" or own(function)

    return own and is_of_msops_or_third_party


class Choice(Replacement):
    """A primitive that calls MindSpore's own, `own`, unless something else computes what it is called with."""

    own: Any

    def shard(self, in_strategy: object = None, out_strategy: object = None) -> Choice:
        """Tells MindSpore, which has this operator, how to distribute it."""
        self.own.shard(in_strategy, out_strategy)
        return self

    def add_prim_attr(self, name: str, value: object) -> Choice:
        """Sets an attribute of MindSpore's operator, such as `recompute`."""
        self.own.add_prim_attr(name, value)
        return self

    def recompute(self, mode: bool = True) -> Choice:
        """Tells MindSpore to compute the results again for the gradient."""
        self.own.recompute(mode)
        return self


class Called(Replacement):
    """A primitive that a function computes. It takes the primitive's inputs, then what the primitive was made with."""

    function: Any
    made_with: inspect.Signature

    def __init__(self, *settings: Any, **named: Any) -> None:
        bound = self.made_with.bind(self, *settings, **named)
        bound.apply_defaults()
        self.settings = bound.args[1:]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.function(*inputs, *self.settings, **named)


@functools.cache  # several modules of MindSpore hold a class
def called(own: type, function: Callable[..., Any]) -> type[Called]:
    """Returns the class of a primitive that stands for MindSpore's class `own`."""
    signature = inspect.signature(own.__init__)  # type: ignore[misc]
    return type(own.__name__, (Called,), {"function": staticmethod(function), "made_with": signature})


class Refused(Replacement):
    """A primitive that msops does not have. Programs may make one, but not call it."""

    words = ""

    def __init__(self, *settings: Any, **named: Any) -> None:
        pass

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return refuse(self.words)


@once
def refuse(words: str) -> NoReturn:
    raise NotImplementedError(words)


@once
def refuse_given(name: str, argument: str, is_given: bool) -> None:
    """Requires that an argument, which msops does not have, is not given."""
    if is_given:
        raise NotImplementedError(f"{name}: msops has no {argument}")


def refused(name: str, instead: str) -> type[Refused]:
    """Returns the class of a refused primitive."""
    return type(name, (Refused,), {"words": f"{name}: it has kernels on Ascend alone, and msops has none; {instead}"})
