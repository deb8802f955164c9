"""Gives silu after a GroupNorm, as convolutional blocks write it, to group_norm.

Two statements, x = self.norm(x) and x = self.nonlinearity(x), become one call, which looks at the two Cells each time.
Where an `if` ends with the first, and the second follows it, the second moves into its branches.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.group_norm import group_norm

from .formula import Found, NoFormulaError, path_of
from .gates import is_as_its_class, kind_of, of_mint
from .rewritten import compiled, may_call, push, tree_of_method
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

_NORMED = f"{PREFIX}normed"
_ACTIVATIONS = {"nonlinearity", "conv_act", "act", "activation"}
_GROUP_NORM = of_mint("GroupNorm")


def may_norm(cls: type, value: Any) -> bool:
    """Tells whether a class that makes a GroupNorm has a method that may call it and an activation."""
    return may_call(cls, value, "GroupNorm") and bool(_ACTIVATIONS & set(value.__code__.co_names))


def norming(own: Function) -> Found:
    """Returns what stands for a method in which an activation follows a norm."""
    tree = tree_of_method(own)
    reader = _Reader(own.__code__.co_varnames[0])
    tree.body = reader.read(tree.body)
    if not reader.count:
        raise NoFormulaError("")  # it has nothing that could be recognized
    reasons = set[str]()

    def normed(cell: nn.Cell, norm: Any, activation: Any, x: Any) -> Any:
        is_group = type(norm) is _GROUP_NORM and is_as_its_class(norm, cell) and isinstance(x, Tensor)
        if not is_group or kind_of(activation, cell) != "silu":
            reasons.add("its norm is no GroupNorm, or its activation is another one than silu")
        elif not _takes(describe(x), describe(norm.weight), describe(norm.bias)):
            reasons.add("a call's dtypes or shapes do not fit group_norm")
        else:
            return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, "silu")
        return activation(norm(x))

    return Found(compiled(own, tree, {_NORMED: normed}), "msops.group_norm", None, reasons)


@once
def _takes(x: Description, weight: Description, bias: Description) -> bool:
    if x[0] is None or len(x[0]) < 2 or None in x[0] or 0 in x[0]:
        return False
    is_own = all(each[1] in (x[1], mindspore.float32) and each[0] == x[0][1:2] for each in (weight, bias))
    return is_own and x[1] in (mindspore.float16, mindspore.float32)


class _Reader:
    """Puts calls in place of norms and activations in statements of a method whose first argument is `cell`."""

    def __init__(self, cell: str) -> None:
        self.count = 0
        self._cell = cell

    def read(self, lines: list[ast.stmt]) -> list[ast.stmt]:
        """Returns statements with these calls."""
        read: list[ast.stmt] = []
        rest = list(lines)
        while rest:
            line, follows = rest.pop(0), rest[0] if rest else None
            name = self._activated(follows)
            if name and isinstance(line, ast.If) and self._ends(line, name):
                push(line, rest.pop(0))
            elif name and self._normed(line) == name:
                self.count += 1
                line = self._joined(line, rest.pop(0))
            if isinstance(line, ast.If):
                line.body, line.orelse = self.read(line.body), self.read(line.orelse)
            read.append(line)
        return read

    def _joined(self, norm: Any, activation: Any) -> ast.stmt:
        first, second = norm.value, activation.value
        arguments = [ast.Name(self._cell, ast.Load()), first.func, second.func, first.args[0]]
        call = ast.Call(ast.Name(_NORMED, ast.Load()), arguments, [])
        return ast.copy_location(ast.Assign(activation.targets, call), norm)

    def _ends(self, line: ast.If, name: str) -> bool:
        """Tells whether a branch ends with a norm whose result has this name."""
        return any(
            self._ends(lines[-1], name) if isinstance(lines[-1], ast.If) else self._normed(lines[-1]) == name
            for lines in (line.body, line.orelse)
            if lines
        )

    def _normed(self, line: ast.stmt) -> str:
        """Returns the variable that gets what a norm of the Cell makes from a variable, or ""."""
        name, called, _ = self._called(line)
        return name if "norm" in called else ""

    def _activated(self, line: ast.stmt | None) -> str:
        """Returns the variable that gets an activation of itself, or ""."""
        name, called, argument = self._called(line)
        return name if called in _ACTIVATIONS and name == argument else ""

    def _called(self, line: ast.stmt | None) -> tuple[str, str, str]:
        """Returns the names of the variable that is assigned, of the Cell that is called, and of its argument."""
        if not isinstance(line, ast.Assign) or len(line.targets) != 1 or not isinstance(line.value, ast.Call):
            return "", "", ""
        target, function, arguments = line.targets[0], line.value.func, line.value.args
        if path_of(function)[:1] != [self._cell] or len(path_of(function)) != 2:
            return "", "", ""
        if line.value.keywords or len(arguments) != 1 or not isinstance(arguments[0], ast.Name):
            return "", "", ""
        return target.id if isinstance(target, ast.Name) else "", path_of(function)[1], arguments[0].id
