"""Gives norms of sums, which encoders have after each layer, to add_layer_norm, where nothing asks for gradients.

self.norm(x + y) becomes one call, which looks at the Cell and at the Tensors each time. So do two statements,
x = x + y and x = self.norm(x).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from msops.core.compiled import once, records_gradients
from msops.core.inputs import describe
from msops.operators.add_layer_norm import add_layer_norm

from .formula import path_of
from .gates import is_as_its_class, of_mint
from .rewritten import is_norm_of, joined, may_call
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

OPERATOR = "add_layer_norm"
_NORMED = f"{PREFIX}normed_sum"
_LAYER_NORM = of_mint("LayerNorm")


def may_read(cls: type, value: Any) -> bool:
    """Tells whether a class that makes a LayerNorm has a method that may call it."""
    return may_call(cls, value, "LayerNorm")


def functions(reasons: set[str]) -> dict[str, Function]:
    """Returns the function that the Reader lets a method call."""

    def normed(cell: nn.Cell, norm: Any, x: Any, y: Any) -> Any:
        if type(norm) is not _LAYER_NORM or not is_as_its_class(norm, cell):
            reasons.add("its norm is no LayerNorm")
        elif not isinstance(x, Tensor) or not isinstance(y, Tensor) or not _takes(*map(describe, _all(norm, x, y))):
            reasons.add("a call's dtypes or shapes do not fit layer_norm")
        elif not records_gradients():
            return add_layer_norm(x, y, norm.weight, norm.bias, norm.eps)
        return norm(x + y)

    return {_NORMED: normed}


def _all(norm: Any, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y, norm.weight, norm.bias


@once
def _takes(x: Description, y: Description, weight: Description, bias: Description) -> bool:
    if x != y or not x[0] or None in x[0] or 0 in x[0] or x[1] not in (mindspore.float16, mindspore.float32):
        return False
    none = describe(None)
    if none in (weight, bias):  # without parameters, how many axes the norm has is not told
        return False
    is_last = weight[0] == bias[0] and weight[0] == x[0][len(x[0]) - len(weight[0] or ()) :]
    return bool(is_last and weight[0]) and all(each[1] in (x[1], mindspore.float32) for each in (weight, bias))


class Reader(ast.NodeTransformer):
    """Puts calls in place of norms of sums in statements of a method whose first argument is `cell`."""

    def __init__(self, cell: str) -> None:
        self.count = 0
        self._cell = cell

    def read(self, tree: ast.FunctionDef) -> None:
        joined(tree, self._normalizes, self._join)
        self.visit(tree)

    def _normalizes(self, line: ast.stmt, before: ast.stmt) -> bool:
        """Tells whether a statement normalizes what the one before it assigns to the same variable, a sum."""
        if not isinstance(line, ast.Assign) or not isinstance(before, ast.Assign) or not _is_sum(before.value):
            return False
        if not is_norm_of(line.value, self._cell) or len(line.targets) != 1 or len(before.targets) != 1:
            return False
        (target,), (of,) = before.targets, line.value.args  # type: ignore[attr-defined]
        name = [target.id] if isinstance(target, ast.Name) else []
        return bool(name) and path_of(line.targets[0]) == name == path_of(of)

    @staticmethod
    def _join(line: Any, before: Any) -> None:
        line.value.args = [before.value]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not is_norm_of(node, self._cell) or not _is_sum(node.args[0]):
            return node
        self.count += 1
        terms: Any = node.args[0]
        arguments = [ast.Name(self._cell, ast.Load()), node.func, terms.left, terms.right]
        return ast.copy_location(ast.Call(ast.Name(_NORMED, ast.Load()), arguments, []), node)


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
