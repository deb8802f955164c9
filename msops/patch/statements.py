"""Reads the statements and expressions of libraries: what they call, and which variables they read and change."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any

from .formula import NoFormulaError, number, path_of

if TYPE_CHECKING:
    from .formula import Meanings

PREFIX = "_msops_"  # of variables that no library has
SQRT = f"{PREFIX}sqrt"  # a function of numbers
NO_PRODUCT = "no product of weights and values follows its scores"
_AXES = {frozenset((2, 3)): 4, frozenset((-1, -2)): 0, frozenset((1, 2)): 3}  # that are swapped, and how many there are
CASTS = {"to", "astype", "type", "float", "type_as"}
_PURE = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.BinOp, ast.Subscript),
    *(ast.Slice, ast.expr_context, ast.boolop, ast.cmpop, ast.operator, ast.unaryop),
)


class Calls:
    """Reads the calls of a function with the variables `local`, whose first argument is `cell`."""

    def __init__(self, meanings: Meanings, scope: dict[str, Any], local: set[str], cell: str) -> None:
        self.cell = cell
        self._meanings, self._scope, self._local = meanings, scope, local

    def read(self, node: ast.Call) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
        """Returns the name of a function of MindSpore's, or of a Tensor's method, and its arguments, the Tensor first.
        A Cell that the Cell has, and calls, has the name `cell`."""
        named = {each.arg or "": each.value for each in node.keywords}
        path, arguments = path_of(node.func), list(node.args)
        if "" not in named and not any(isinstance(each, ast.Starred) for each in arguments):
            if self.is_of_cell(node) and not named and len(arguments) == 1:
                return self.cell, arguments, named
            if isinstance(node.func, ast.Attribute) and (len(path) < 2 or path[0] in self._local - {self.cell}):
                return node.func.attr, [node.func.value, *arguments], named
            if path and path[0] not in self._local:
                return self.bare_name(node.func), arguments, named
        raise NoFormulaError(f"it has among its scores: {ast.unparse(node)}")

    def is_of(self, node: ast.Call, names: set[str]) -> bool:
        """Tells whether a call is of one of these functions of MindSpore's."""
        return bool(names & set(path_of(node.func)[-1:])) and self.read(node)[0] in names

    def is_of_cell(self, node: ast.Call) -> bool:
        """Tells whether the function's Cell has what is called."""
        return path_of(node.func)[:1] == [self.cell]

    def may_change(self, node: ast.AST) -> bool:
        """Tells whether this calls what may change its arguments in place: a method of the Cell or another function."""
        return isinstance(node, ast.Call) and (self.is_of_cell(node) or isinstance(node.func, ast.Name))

    def is_local(self, node: ast.expr) -> bool:
        return bool(self._local & set(path_of(node)[:1]))

    def bare_name(self, node: Any) -> str:
        """Returns the name of what MindSpore defines."""
        return self._meanings.bare_name(node, self._scope)

    def global_function(self, node: ast.Call) -> Any:
        """Returns the function of the module that is called, or None."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        is_global = name in self._scope and name not in self._local
        return self._meanings.meaning(self._scope, name) if is_global else None

    def number_of(self, node: ast.expr) -> ast.expr:
        """Returns an expression of a number without its way through a tensor."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CASTS:
            kinds = {text.rpartition(".")[2] for text in texts([*node.args, *(each.value for each in node.keywords)])}
            if node.func.attr not in ("type_as", "float") and kinds - {"dtype", "float16", "float32"}:
                raise NoFormulaError(f"it scales by {ast.unparse(node)}")
            return self.number_of(node.func.value)
        if isinstance(node, ast.Call) and self.is_of(node, {"sqrt"}):
            (of,) = node.args
            if isinstance(of, ast.Call) and self.is_of(of, {"tensor", "Tensor"}):
                of = of.args[0]
            return ast.Call(ast.Name(SQRT, ast.Load()), [of], [])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and len(node.args) == 1:
            return node
        if not is_pure(node):
            raise NoFormulaError(f"it scales by {ast.unparse(node)}")
        return node

    def turned(self, node: ast.expr) -> tuple[ast.expr, int]:
        """Returns the keys, and how many axes they have, from their transpose."""
        if isinstance(node, ast.Call):
            name, arguments, named = self.read(node)
            axes = [number(each) for each in arguments[1:]]
            if name in ("transpose", "swapaxes") and not named and frozenset(axes) in _AXES:
                return arguments[0], _AXES[frozenset(axes)]
            if name in ("permute", "transpose") and not named and axes in ([0, 1, 3, 2], [(0, 1, 3, 2)]):
                return arguments[0], 4
        raise NoFormulaError(NO_PRODUCT)


class Replace(ast.NodeTransformer):
    """Puts a variable in place of a node."""

    def __init__(self, node: ast.AST, name: str) -> None:
        self._node, self._name = node, name

    def visit(self, node: ast.AST) -> Any:
        return ast.Name(self._name, ast.Load()) if node is self._node else self.generic_visit(node)


class Rename(ast.NodeTransformer):
    """Gives variables other names."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)


class Told(ast.NodeTransformer):
    """Puts what queries and keys tell in place of the dtype of some variables, and of the shape of some."""

    def __init__(self, of_dtype: set[str], of_shape: set[str], query: str, key: str) -> None:
        self._of_dtype, self._of_shape, self._query, self._key = of_dtype, of_shape, query, key

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr == "dtype" and name in self._of_dtype:
            return parsed(f"{self._query}.dtype")
        if node.attr == "shape" and name in self._of_shape:
            return self._shape()
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        of = [each.id for each in node.args if isinstance(each, ast.Name)]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "expand_as" and set(of) & self._of_shape:
            node = ast.Call(ast.Attribute(node.func.value, "broadcast_to", ast.Load()), [self._shape()], [])
        return self.generic_visit(node)

    def _shape(self) -> ast.expr:
        return parsed(f"({self._query}.shape[:-1] + ({self._key}.shape[-2],))")


class _Sizeless(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return ast.Constant(0) if node.attr in ("shape", "dtype", "ndim") else self.generic_visit(node)


def values_read(node: ast.AST) -> set[str]:
    """Returns the variables of which code reads more than dtypes and shapes."""
    return names_read(_Sizeless().visit(copy.deepcopy(node)))


def names_read(node: ast.AST) -> set[str]:
    """Returns the variables that code reads, also to change them in place."""
    nodes = list(ast.walk(node))
    changed = {base(each) for each in nodes if isinstance(each, ast.AugAssign)}
    return changed | {each.id for each in nodes if isinstance(each, ast.Name) and is_load(each)}


def names_written(node: ast.AST) -> set[str]:
    """Returns the variables that code assigns, or whose objects it changes."""
    nodes = list(ast.walk(node))
    return {base(each) for each in nodes if changes(each)} | {
        each.id for each in nodes if isinstance(each, ast.Name) and not is_load(each)
    }


def is_load(node: Any) -> bool:
    return isinstance(node.ctx, ast.Load)


def changes(node: ast.AST) -> bool:
    """Tells whether code changes an object: it assigns to a part of it, or calls `add_` or `assign_add`."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not is_load(node):
        return True
    if isinstance(node, ast.AugAssign):
        return True
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    name = node.func.attr if is_method else ""  # type: ignore[attr-defined]
    return name.endswith("_") or name.startswith("assign")


def base(node: Any) -> str:
    """Returns the variable whose object code changes."""
    while isinstance(node, (ast.AugAssign, ast.Attribute, ast.Subscript, ast.Call)):
        node = getattr(node, {ast.AugAssign: "target", ast.Call: "func"}.get(type(node), "value"))
    return node.id if isinstance(node, ast.Name) else ""


def is_pure(node: ast.expr) -> bool:
    return all(isinstance(each, _PURE) for each in ast.walk(node))


def only_raises(line: ast.If) -> bool:
    return len(line.body) == 1 and isinstance(line.body[0], ast.Raise) and not line.orelse


def both(conditions: tuple[ast.expr, ...]) -> ast.expr:
    return conditions[0] if len(conditions) == 1 else ast.BoolOp(ast.And(), list(conditions))


def texts(nodes: Any) -> list[str]:
    return [ast.unparse(each) for each in nodes]


def first_line(line: ast.stmt) -> str:
    return ast.unparse(line).splitlines()[0]


def parsed(text: str) -> ast.expr:
    """Returns an expression without a place in a file."""
    node = ast.parse(text, mode="eval").body
    for each in ast.walk(node):
        for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            vars(each).pop(name, None)
    return node
