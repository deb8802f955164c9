"""Gives norms with a scale and a shift for each sample, as diffusion transformers write them, to layer_norm's kernels,
and to addcmul what gated_residuals.py finds in the same methods.

self.norm(x) * scale + shift becomes one call, which looks at the Cell and at the Tensors each time. So do two
statements, y = self.norm(x) and y = y * scale + shift. The scale is mostly 1 + another Tensor.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.layer_norm_of_samples import layer_norm_of_samples

from . import gated_residuals
from .formula import Found, NoFormulaError, path_of
from .gates import is_as_its_class, of_mint
from .rewritten import compiled, may_call, tree_of_method
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

_MODULATED = f"{PREFIX}modulated"
_LAYER_NORM = of_mint("LayerNorm")
_VIEWS = {"unsqueeze", "expand_dims"}  # methods that scales and shifts may call
_MOST_SAMPLES = 32  # each has launches of its own


def may_modulate(cls: type, value: Any) -> bool:
    """Tells whether a class that makes a LayerNorm has a method that may call it."""
    return may_call(cls, value, "LayerNorm")


def modulating(own: Function, owner: type) -> Found:
    """Returns what stands for a method in which a norm is scaled and shifted, or a sum has a gate."""
    tree = tree_of_method(own)
    norms, gates = _Reader(own.__code__.co_varnames[0]), gated_residuals.Reader()
    if gated_residuals.may_gate(own):  # it looks at the places of names, which calls of norms do not have
        gates.read(tree)
    if may_modulate(owner, own):
        norms.read(tree)
    operators = [name for name, reader in (("msops.layer_norm", norms), ("addcmul", gates)) if reader.count]
    if not operators:
        raise NoFormulaError("")  # it has nothing that could be recognized
    reasons = set[str]()

    def modulated(cell: nn.Cell, norm: Any, x: Any, scale: Any, shift: Any) -> Any:
        are_tensors = all(isinstance(each, Tensor) for each in (x, scale, shift))
        if type(norm) is not _LAYER_NORM or not is_as_its_class(norm, cell) or not are_tensors:
            reasons.add("its norm is no LayerNorm")
        elif not _takes(tuple(map(describe, (x, scale, shift, norm.weight, norm.bias))), tuple(norm.normalized_shape)):
            reasons.add("a call's dtypes or shapes do not fit layer_norm")
        else:
            parameters = (x.shape[0], x.shape[-1])
            shift = shift if norm.bias is None else norm.bias * scale + shift
            scale = scale if norm.weight is None else norm.weight * scale
            return layer_norm_of_samples(x, scale.reshape(parameters), shift.reshape(parameters), norm.eps)
        return norm(x) * scale + shift

    functions = {_MODULATED: modulated, **gated_residuals.FUNCTIONS}
    return Found(compiled(own, tree, functions), " and ".join(operators), None, reasons)


@once
def _takes(tensors: tuple[Description, ...], normalized: tuple[int, ...]) -> bool:
    x, scale, shift, weight, bias = tensors
    if x[0] is None or len(x[0]) != 3 or None in x[0] or 0 in x[0] or x[0][0] > _MOST_SAMPLES:
        return False
    of_sample, own = ((x[0][0], 1, x[0][2]), x[1]), (x[0][2:], x[1])
    have_own = all(each in (own, describe(None)) for each in (weight, bias))
    is_known = normalized == own[0] and x[1] in (mindspore.float16, mindspore.float32)
    return is_known and have_own and scale == shift == of_sample


class _Reader(ast.NodeTransformer):
    """Puts calls in place of norms, scales and shifts in statements of a method whose first argument is `cell`."""

    def __init__(self, cell: str) -> None:
        self.count = 0
        self._cell = cell

    def read(self, tree: ast.FunctionDef) -> None:
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                lines = getattr(node, name, None)
                if isinstance(lines, list):
                    setattr(node, name, self._joined(lines))
        self.visit(tree)

    def _joined(self, lines: list[ast.stmt]) -> list[ast.stmt]:
        """Returns statements in which one scales and shifts a norm, in place of two."""
        joined: list[Any] = []
        for line in lines:
            if joined and self._shifts(line, joined[-1]):
                line.value.left.left = joined.pop().value  # type: ignore[attr-defined]
            joined.append(line)
        return joined

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        scaled = _scaled(node)
        if scaled is None or not self._is_norm(scaled.left) or not all(map(_is_plain, (scaled.right, node.right))):
            return node
        self.count += 1
        norm: Any = scaled.left
        arguments = [ast.Name(self._cell, ast.Load()), norm.func, norm.args[0], scaled.right, node.right]
        return ast.copy_location(ast.Call(ast.Name(_MODULATED, ast.Load()), arguments, []), node)

    def _shifts(self, line: ast.stmt, before: ast.stmt) -> bool:
        """Tells whether a statement scales and shifts what the one before it assigns to the same variable, a norm."""
        if not isinstance(line, ast.Assign) or not isinstance(before, ast.Assign) or not self._is_norm(before.value):
            return False
        (target, *more), scaled = before.targets, _scaled(line.value)
        if more or not isinstance(target, ast.Name) or scaled is None or [target.id] != path_of(scaled.left):
            return False
        scale, shift = scaled.right, line.value.right  # type: ignore[attr-defined]
        read = {each.id for part in (scale, shift) for each in ast.walk(part) if isinstance(each, ast.Name)}
        return len(line.targets) == 1 and path_of(line.targets[0]) == [target.id] and target.id not in read

    def _is_norm(self, node: ast.AST) -> bool:
        """Tells whether this is a call of a norm of the Cell, with one argument."""
        if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
            return False
        path, is_one = path_of(node.func), not isinstance(node.args[0], ast.Starred)
        return is_one and len(path) == 2 and path[0] == self._cell and "norm" in path[1]


def _scaled(node: ast.AST) -> ast.BinOp | None:
    """Returns y * scale of y * scale + shift."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    scaled = node.left if is_sum else None  # type: ignore[attr-defined]
    return scaled if isinstance(scaled, ast.BinOp) and isinstance(scaled.op, ast.Mult) else None


def _is_plain(node: ast.AST) -> bool:
    """Tells whether an expression calls nothing but views of Tensors, so that a norm may be computed after it."""
    kinds = ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr
    found = [each for each in ast.walk(node) if isinstance(each, kinds)]
    return all(isinstance(each, ast.Call) and _VIEWS.issuperset(path_of(each.func)[-1:] or [""]) for each in found)
