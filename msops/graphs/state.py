"""Finds the tensors and Cells that a function uses beside its arguments, and notices when their state changes."""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mindspore import Parameter, Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Kind = TypeVar("Kind")
_CONTAINER = "__setitem__", "__delitem__", "insert", "_insert", "append", "extend", "clear"  # of containers of Cells
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType)


class _State:
    changes = 0  # how often the process may have given new memory to a tensor, or changed a Cell
    parts: ClassVar[weakref.WeakKeyDictionary[nn.Cell, int]] = weakref.WeakKeyDictionary()  # when a Cell got others


def reachable(kind: type[Kind], *roots: Any) -> list[Kind]:
    """Returns what functions and Cells reach of a type: by closures, defaults, attributes, globals and what of modules
    and classes they name, also in functions within them, and what tuples, lists, sets and dicts among these hold."""
    found, seen, waiting = [], set(), list(roots)
    while waiting:
        each = waiting.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            found.append(each)
        if not isinstance(each, Tensor):
            waiting.extend(_parts(each))
    return found


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, nn.Cell):
        yield from value.get_parameters(expand=False)
        yield from vars(value).values()
        yield from _methods(type(value), "construct")
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        if not _is_library(value):
            yield from _named(value.__globals__, set(_names(value.__code__)))
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, (types.MethodType, functools.partial)):
        if isinstance(value, types.MethodType):
            yield from _methods(type(value.__self__), value.__name__)
        yield from (getattr(value, name, None) for name in ("__self__", "__func__", "func", "args", "keywords"))
    elif hasattr(value, "__wrapped__"):  # a decorator's object, such as what `cuda_graph` returns, with its recordings
        yield value.__wrapped__
    else:
        yield from getattr(value, "__dict__", {}).values()
        if callable(value):
            yield from _methods(type(value), "__call__")


def _methods(cls: type, name: str) -> Iterator[types.FunctionType]:
    """Yields a method of a class, and the methods of the class that it names, as they do in turn."""
    waiting, seen = [name], set()
    while waiting:
        method = getattr(cls, waiting.pop(), None)
        if isinstance(method, types.FunctionType) and id(method) not in seen and not _is_library(method):
            seen.add(id(method))
            yield method
            waiting.extend(_names(method.__code__))


def _is_library(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").split(".")[0] in ("mindspore", "msops", "numpy", "builtins")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names in a function's code, and in that of functions, lambdas and comprehensions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _named(space: Mapping[str, Any], names: set[str]) -> Iterator[Any]:
    """Yields what has one of the names in a function's globals, and in the modules and classes that are named there."""
    waiting, seen = [space], set()
    while waiting:
        space = waiting.pop()
        for value in [space[name] for name in names if name in space]:
            if not isinstance(value, (types.ModuleType, type)):
                yield value
            elif id(value) not in seen and not _is_library(value):
                seen.add(id(value))
                waiting.extend(vars(each) for each in getattr(value, "__mro__", (value,)))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (it raises)
    except ValueError:
        return False
    return True


class Memory:
    """Where tensors lie when it is made, and which Cells are set to train.

    Args:
        roots (tuple): Functions and others that reach the tensors and Cells.
    """

    def __init__(self, *roots: Any) -> None:
        self.tensors = reachable(Tensor, *roots)
        self._cells = [(weakref.ref(cell), cell.training) for cell in reachable(nn.Cell, *roots)]
        self._changes = self._begun = _State.changes
        self._places = self._find()
        self._aliases = [Tensor(x) if isinstance(x, Parameter) and x.size else None for x in self.tensors]

    def _find(self) -> list[Any]:
        return [(x.dtype, x._data_ptr()) for x in self.tensors]

    def _cells_changed(self) -> bool:
        alive = [(cell, training) for each, training in self._cells if (cell := each()) is not None]
        return any(cell.training != training or _State.parts.get(cell, 0) > self._begun for cell, training in alive)

    def changed(self) -> bool:
        """Tells whether a tensor lies elsewhere now, since its data was replaced, or a Cell has changed, by `set_train`
        or as it got other Parameters or Cells."""
        if self._changes == _State.changes:
            return False
        self._changes = _State.changes
        return self._find() != self._places or self._cells_changed()

    def keep(self, copy: Callable[[int, Tensor], None]) -> None:
        """Moves Parameters back that a function gave new data, as `self.p = x` of a Cell does in PyNative mode.

        Args:
            copy (callable): Copies a tensor's data to an address.
        """
        self._begun = _State.changes  # Cells that the function itself changes are as it left them
        for x, (dtype, place), alias in zip(self.tensors, self._places, self._aliases):
            if (x.dtype, x._data_ptr()) == (dtype, place):
                continue
            if _lies_at(alias, place) and x.dtype == dtype:
                copy(place, x)
                x.assign_value(alias)
            if x._data_ptr() != place:
                name = f"the Parameter {x.name}" if isinstance(x, Parameter) else "a Tensor"
                raise RuntimeError(f"the function gives {name} other memory; write into it by ops.assign")

    def put_back(self) -> None:
        """Gives Parameters the data that they had, since work that would have computed others is not done."""
        for x, (dtype, place), alias in zip(self.tensors, self._places, self._aliases):
            if _lies_at(alias, place) and x.dtype == dtype and x._data_ptr() != place:
                x.assign_value(alias)


def _lies_at(x: Tensor | None, place: int) -> bool:
    return x is not None and x._data_ptr() == place


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counting(*args: Any, **kwargs: Any) -> Any:
        _State.changes += 1
        return method(*args, **kwargs)

    return counting


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        _State.changes += 1
        _State.parts[self] = _State.changes
        return method(self, *args, **kwargs)

    return noting


@functools.cache
def watch() -> None:
    """Counts calls that change Cells from now on, and those that may give new memory to a tensor, as
    `load_param_into_net` makes them."""
    for owner, names in (
        (Parameter, ("set_data", "set_dtype", "init_data", "_load", "_offload")),
        (Tensor, ("assign_value", "assign_value_cpp", "set_dtype", "set_", "_update_data", "__setstate__")),
        (nn.Cell, ("set_train",)),
    ):
        for name in names:
            setattr(owner, name, _counted(getattr(owner, name)))
    for cls in (getattr(nn, name) for name in ("Cell", "SequentialCell", "CellList", "CellDict")):
        for name in ("insert_param_to_cell", "insert_child_to_cell", *_CONTAINER):
            if name in vars(cls):
                setattr(cls, name, _noted(getattr(cls, name)))
    data: Any = Tensor.data  # type: ignore[misc]
    Tensor.data = property(data.__get__, _counted(data.__set__), doc=data.__doc__)
