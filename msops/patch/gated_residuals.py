"""Gives x + gate * y, as diffusion transformers add the output of a layer, to addcmul.

So it does where two statements do this, y = gate * y and x = x + y, if nothing reads y after them. Where an `if` ends
with the first, and the second follows it, the second moves into its branches.
"""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.addcmul import addcmul

from .rewritten import push
from .statements import PREFIX, is_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

OPERATOR = "addcmul"
_LATER, _FIRST = f"{PREFIX}add_product", f"{PREFIX}product_and_sum"


def may_read(cls: type, value: Any) -> bool:
    """Tells whether a method has a variable that is called a gate, and no function that reads its variables."""
    is_own = inspect.isfunction(value) and not value.__code__.co_cellvars
    return is_own and any("gate" in each for each in value.__code__.co_varnames)


def add_product(x: Any, one: Any, other: Any) -> Any:
    """Returns x + one * other."""
    return addcmul(x, one, other) if _are_one(x, one, other) else x + one * other


def product_and_sum(one: Any, other: Any, x: Any) -> Any:
    """Returns one * other + x."""
    return addcmul(x, one, other) if _are_one(x, one, other) else one * other + x


def functions(reasons: set[str]) -> dict[str, Function]:
    """Returns the functions that the Reader lets a method call."""
    return {_LATER: add_product, _FIRST: product_and_sum}


def _are_one(*tensors: Any) -> bool:
    return all(isinstance(each, Tensor) for each in tensors) and _takes(*map(describe, tensors))


@once
def _takes(x: Description, one: Description, other: Description) -> bool:
    """Tells whether a product broadcasts to the shape of x, and all have one dtype."""
    if x[0] is None or None in x[0] or x[1] not in (mindspore.float16, mindspore.float32):
        return False
    for shape, dtype in (one, other):
        if dtype != x[1] or shape is None or len(shape) > len(x[0]):
            return False
        if any(n not in (1, m) for n, m in zip(reversed(shape), reversed(x[0]))):
            return False
    return True


class Reader(ast.NodeTransformer):
    """Puts calls in place of sums with products by a gate."""

    def __init__(self, cell: str) -> None:
        self.count = 0
        self._loads: list[ast.Name] = []

    def read(self, tree: ast.FunctionDef) -> None:
        nodes = list(ast.walk(tree))
        changed = {id(each.target) for each in nodes if isinstance(each, ast.AugAssign)}
        names = [each for each in nodes if isinstance(each, ast.Name)]
        self._loads = [each for each in names if is_load(each) or id(each) in changed]
        in_loops = {id(each) for loop in nodes if isinstance(loop, (ast.For, ast.While)) for each in ast.walk(loop)}
        for node in nodes:
            for name in ("body", "orelse", "finalbody"):
                lines = getattr(node, name, None)
                if isinstance(lines, list):
                    setattr(node, name, self._joined(lines, id(node) in in_loops))
        self.visit(tree)

    def _joined(self, lines: list[ast.stmt], is_in_loop: bool) -> list[ast.stmt]:
        """Returns statements in which one computes a product and a sum, in place of two."""
        joined: list[Any] = []
        for line in lines:
            names = self._added(line, is_in_loop)
            if joined and _gated(joined[-1]) in names:
                joined[-1] = _Put(_gated(joined[-1]), joined[-1].value).visit(line)
            elif joined and _ends(joined[-1], names):
                push(joined[-1], line)  # what comes later, its branches, joins them
            else:
                joined.append(line)
        return joined

    def _added(self, line: ast.stmt, is_in_loop: bool) -> set[str]:
        """Returns those of two variables that a statement adds which nothing reads afterwards."""
        if not isinstance(line, ast.Assign) or len(line.targets) != 1 or not isinstance(line.targets[0], ast.Name):
            return set()
        value, target = line.value, line.targets[0].id
        if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
            return set()
        names = [each.id for each in (value.left, value.right) if isinstance(each, ast.Name)]
        if len(set(names)) != 2:
            return set()
        end = line.end_lineno, line.end_col_offset
        later = {each.id for each in self._loads if (each.lineno, each.col_offset) >= end}
        return {each for each in names if each == target or not (is_in_loop or each in later)}

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Add):
            return node
        for name, product, others in ((_LATER, node.right, (node.left,)), (_FIRST, node.left, (node.right,))):
            if _is_gated(product):
                self.count += 1
                factors: list[Any] = [product.left, product.right]  # type: ignore[attr-defined]
                arguments = [*others, *factors] if name == _LATER else [*factors, *others]
                return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), arguments, []), node)
        return node


class _Put(ast.NodeTransformer):
    """Puts an expression in place of a variable that is read."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._value if node.id == self._name and is_load(node) else node


def _gated(line: ast.AST) -> str:
    """Returns the variable that a statement assigns a product by a gate, or ""."""
    if not isinstance(line, ast.Assign) or len(line.targets) != 1 or not _is_gated(line.value):
        return ""
    (target,) = line.targets
    return target.id if isinstance(target, ast.Name) else ""


def _ends(line: ast.AST, names: set[str]) -> bool:
    """Tells whether a branch ends with a product by a gate that is assigned to one of these variables."""
    branches = (line.body, line.orelse) if isinstance(line, ast.If) else ()
    return any(lines and (_gated(lines[-1]) in names or _ends(lines[-1], names)) for lines in branches)


def _is_gated(node: ast.AST) -> bool:
    """Tells whether this is a product, of which a factor is a variable that is called a gate, or a view of one."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return any("gate" in _variable(each) for each in (node.left, node.right))


def _variable(node: ast.AST) -> str:
    """Returns the variable of which this is an attribute, a part or what a method returns, or ""."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
