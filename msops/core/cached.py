"""Keeps the results of functions, by arguments that also have equal types."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mindspore

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


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
