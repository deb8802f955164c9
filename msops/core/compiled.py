"""Tells whether MindSpore is compiling the code that runs, and makes constants once in such code."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.primitive import PrimitiveWithInfer

from .spec import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .operator import Operator
    from .primitive import Primitive

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
def is_on_gpu() -> bool:
    """Tells whether MindSpore's device is a GPU, also in code that MindSpore compiles."""
    return bool(mindspore.get_context("device_target") == "GPU")


@ops.constexpr
def records_gradients() -> bool:
    """Tells whether PyNative mode records what runs, to differentiate it. True where MindSpore does not say."""
    executor = mindspore.common.api._pynative_executor
    asked = getattr(executor, "requires_grad", None) or getattr(executor, "grad_flag", None)
    return asked is None or bool(asked())


def cached(make: Function) -> Function:
    """Decorates a function so that it runs once for equal arguments, of which it keeps the last 256.

    Equal arguments also have equal types: 1, 1.0 and True differ. The function gets what has no hash, such as a dict,
    at each call, and can say what the argument must be.
    """

    @functools.lru_cache(256, typed=True)  # a full cache frees an operator unless a Cell or a graph still has it
    def kept(*arguments: Any, **named: Any) -> Any:
        return make(*map(_value, arguments), **{name: _value(each) for name, each in named.items()})

    @functools.wraps(make)
    def call(*arguments: Any, **named: Any) -> Any:
        if named or not _PLAIN.issuperset(map(type, arguments)):
            arguments = tuple([_key(each) if type(each) in _SEQUENCES else each for each in arguments])
            named = {name: _key(each) if type(each) in _SEQUENCES else each for name, each in named.items()}
        try:
            return kept(*arguments, **named)
        except TypeError:
            if _has_hash((arguments, *named.values())):
                raise
        return kept.__wrapped__(*arguments, **named)

    return call  # type: ignore[return-value]


_SEQUENCES = frozenset((tuple, list))
_PLAIN = frozenset((bool, float, int, str, type(None)))
# A value of one of these types equals no value of another of them.
_UNLIKE = frozenset((int, str, type(None), *map(type, (mindspore.float16, mindspore.int32, mindspore.bool_))))


class _Key(tuple):  # type: ignore[type-arg]
    """Holds the type of a value, and the value or the keys of its elements. It has a hash where these have one."""

    __slots__ = ()


def _key(value: Any) -> Any:
    """Returns what equals the same of another value only if the types are equal, too, also those of elements."""
    if _is_own_key(value):
        return value
    kind = type(value)
    return _Key((kind, *map(_key, value))) if kind in _SEQUENCES else _Key((kind, value))


def _is_own_key(value: Any) -> bool:
    kind = type(value)
    if kind is not tuple:
        return kind in _UNLIKE
    return _UNLIKE.issuperset(map(type, value)) or all(map(_is_own_key, value))


def _value(key: Any) -> Any:
    """Returns the value of a key."""
    if not isinstance(key, _Key):
        return key
    kind, *values = key
    return kind(map(_value, values)) if kind in _SEQUENCES else values[0]


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


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


@ops.constexpr
def raise_errors() -> None:
    """Waits in PyNative mode on the CPU, so that an error of an operator that runs meanwhile is raised here.

    MindSpore gives the outputs of what fails no memory, and still runs some of what was called after it, such as a
    matmul, which ends the process.
    """
    if mindspore.get_context("device_target") == "CPU":
        mindspore.common.api._pynative_executor.sync()


def keep_dtypes(cell: nn.Cell) -> None:
    """Makes PyNative mode run the operators of a Cell in the dtypes that they get, also inside of a Cell with
    `to_float`, for which MindSpore would cast every floating tensor to float16."""
    kinds = getattr(nn.cell, "MixedPrecisionType", None)
    if kinds is not None:
        cell.mixed_precision_type = kinds.NOTSET


def once(make: Function) -> Function:
    """Decorates a function of constants that makes something, such as an operator.

    The function may then also be called in code that MindSpore compiles, and it runs once for equal arguments, unless
    256 others came since. Arguments are equal if their types are, too. What is not a constant in compiled code, such as
    an open size, arrives as None.

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
    return ops.constexpr(cached(make), check=False)


@once
def constant(value: float, dtype: mindspore.Type, shape: tuple[int, ...] = ()) -> Tensor:
    """Returns a Tensor of one number. MindSpore would make float32 of Python's numbers."""
    return Tensor(np.full(shape, value, dtype_name(dtype)))


class Operators:
    """The operators that a function of settings makes, which is decorated with this class: one for equal settings.

    As with :func:`msops.once`, the function runs once for equal arguments, also in code that MindSpore compiles.

    Args:
        make (callable): Checks the settings, and returns an :class:`msops.Operator`.

    Attributes:
        primitive (callable): `primitive(*settings, *given)` returns what MindSpore runs for these settings, where
            `given` tells of each optional input, in the signature's order, whether it is given. Unlike the operator, it
            takes no None, and also returns scratch, after the outputs. Functions and Cells call it: in mixed precision
            MindSpore casts Parameters for primitives, but not for an operator with optional inputs.

    Examples:
        >>> import mindspore, msops
        >>> library = msops.load("power", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA_WITH(Power, (x), (y), (exponent), y = pow(x, exponent))
        ... ''')
        >>> @msops.Operators
        ... def powers(exponent):
        ...     return msops.custom_op(library.Power, "x -> y", exponent=exponent)
        >>> powers.primitive(3.0) is powers(3.0)
        True
        >>> print(powers.primitive(3.0)(mindspore.Tensor([1.0, 2.0])))
        [1. 8.]
    """

    __ms_class__ = True  # MindSpore then knows the attributes of this object in what it compiles

    def __init__(self, make: Callable[..., Operator]) -> None:
        self.make, self.signature = cached(make), inspect.signature(make)
        self.primitive = once(self._primitive)

    def __call__(self, *settings: Any, **named: Any) -> Operator:
        """Returns the operator for these settings."""
        bound = self.signature.bind(*settings, **named)
        bound.apply_defaults()
        return self.make(*bound.args, **bound.kwargs)

    def _primitive(self, *arguments: Any) -> Primitive:
        settings = len(self.signature.parameters)
        operator = self.make(*arguments[:settings])
        inputs = zip(operator.signature.optional, arguments[settings:])
        return operator.without(*(name for name, is_given in inputs if not is_given)).primitive
