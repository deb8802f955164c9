"""Tells whether a caller drops a part of what it gets, as layers do with the weights of attention."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from mindspore import nn

if TYPE_CHECKING:
    from types import CodeType, FrameType

READ_NAMES = {"locals", "vars", "eval", "exec", "dir"}  # functions that may read a variable without naming it
_CALLERS = {"map", "starmap", "reduce", "accumulate"}  # functions without frames, which return something else
_LOADS, _STORES = "LOAD_", "STORE_FAST"
# What a Cell's call returns is what its `construct` returns, unless it has hooks: then other functions call that.
_CALLS = {getattr(getattr(nn.Cell, name, None), "__code__", None) for name in ("__call__", "_complex_call")}


class Use(NamedTuple):
    """How a function uses a part of a call's result: it returns it at a place of its tuple, or the names of arguments
    that must be false if it is to be dropped."""

    place: int | None
    guards: frozenset[str]


def is_dropped(place: int, depth: int = 1) -> bool:
    """Tells whether nobody uses the element at this place of the tuple that the calling function is about to return, or
    with a greater depth its caller.

    It looks at the callers' code, from one to the next as long as they return it, and is False where it is in doubt."""
    frame: FrameType | None = sys._getframe(1 + depth)
    while frame is not None:
        if frame.f_code not in _CALLS:
            use = _use(frame.f_code, frame.f_lasti, place)
            values = frame.f_locals if use and use.guards else {}
            if use is None or not all(_is_false(values.get(each, True)) for each in use.guards):
                return False
            if use.place is None:
                return True
            place = use.place
        frame = frame.f_back
    return False


@functools.lru_cache(4096)
def _use(code: CodeType, called: int, place: int) -> Use | None:
    """Returns how code uses an element of the tuple that the instruction at offset `called` gets, or None in doubt."""
    lines = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOP", "EXTENDED_ARG")]
    after = [each for each in lines if each.offset > called][:2]
    if not after or (READ_NAMES | _CALLERS) & set(code.co_names):
        return None
    first, second = after[0], after[-1]
    if first.opname == "RETURN_VALUE":
        return Use(place, frozenset())
    if first.opname == "LOAD_CONST" and (second.opname == "BINARY_SUBSCR" or second.argrepr == "[]"):
        is_other = type(first.argval) is int and first.argval >= 0 and first.argval != place
        return Use(None, frozenset()) if is_other else None
    if first.opname != "UNPACK_SEQUENCE" or first.argval <= place:
        return None
    names: list[str] = []
    for each in lines[lines.index(first) + 1 :]:
        if not each.opname.startswith(_STORES) or "LOAD" in each.opname or len(names) >= first.argval:
            break
        names += each.argval if isinstance(each.argval, tuple) else [each.argval]
    if len(names) < first.argval or names[place] in names[place + 1 :]:
        return None
    name = names[place]
    loads = [each for each in lines if _LOADS in each.opname and name in _as_tuple(each.argval)]
    return _use_of_name_in(code, name) if loads else Use(None, frozenset())


def _is_false(value: object) -> bool:
    return value is None or value is False  # a Tensor is not asked


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _use_of_name_in(code: CodeType, name: str) -> Use | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != code.co_name:
        return None
    return use_of_name(tree, name)


def use_of_name(tree: ast.FunctionDef, name: str) -> Use | None:
    """Returns how a function's code uses a variable after it is assigned, or None in doubt."""
    uses = _Uses(name, tree)
    if uses.is_unknown or len(uses.places) > 1:
        return None
    return Use(next(iter(uses.places), None), frozenset(uses.guards))


class _Uses(ast.NodeVisitor):
    """Collects where a function returns a variable, and which arguments guard its other uses."""

    def __init__(self, name: str, tree: ast.FunctionDef) -> None:
        self.name, self.places, self.guards, self.is_unknown = name, set[int](), set[str](), False
        arguments = (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)
        stored = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and not _is_load(each)}
        self._constants = {each.arg for each in arguments} - stored
        self._guard: str | None = None
        for line in tree.body:
            self.visit(line)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == self.name and _is_load(node):
            if self._guard:
                self.guards.add(self._guard)
            else:
                self.is_unknown = True

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.visit_Name(ast.Name(node.target.id, ast.Load()))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        elements = node.value.elts if isinstance(node.value, ast.Tuple) else []
        if self._guard or not elements or any(isinstance(each, ast.Starred) for each in elements):
            self.generic_visit(node)
            return
        for place, each in enumerate(elements):
            if isinstance(each, ast.Name) and each.id == self.name:
                self.places.add(place)
            else:
                self.visit(each)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        before = self._guard
        if isinstance(node.test, ast.Name) and node.test.id in self._constants:
            self._guard = before or node.test.id
        for each in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(each)
        self._guard = before
        for each in node.orelse if isinstance(node.orelse, list) else [node.orelse]:
            self.visit(each)


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)
