"""Gives norms with a scale and a shift for each sample, as diffusion transformers write them, to layer_norm's kernels.

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

from .formula import path_of
from .gates import is_as_its_class, of_mint
from .rewritten import is_norm_of, joined, may_call
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

OPERATOR = "msops.layer_norm"
_MODULATED = f"{PREFIX}modulated"
_LAYER_NORM = of_mint("LayerNorm")
_VIEWS = {"unsqueeze", "expand_dims"}  # methods that scales and shifts may call
_MOST_SAMPLES = 32  # each has launches of its own


def may_read(cls: type, value: Any) -> bool:
    """Tells whether a class that makes a LayerNorm has a method that may call it."""
    return may_call(cls, value, "LayerNorm")


def functions(reasons: set[str]) -> dict[str, Function]:
    """Returns the function that the Reader lets a method call."""

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

    return {_MODULATED: modulated}


@once
def _takes(tensors: tuple[Description, ...], normalized: tuple[int, ...]) -> bool:
    x, scale, shift, weight, bias = tensors
    if x[0] is None or len(x[0]) != 3 or None in x[0] or 0 in x[0] or x[0][0] > _MOST_SAMPLES:
        return False
    of_sample, own = ((x[0][0], 1, x[0][2]), x[1]), (x[0][2:], x[1])
    have_own = all(each in (own, describe(None)) for each in (weight, bias))
    is_known = normalized == own[0] and x[1] in (mindspore.float16, mindspore.float32)
    return is_known and have_own and scale == shift == of_sample


class Reader(ast.NodeTransformer):
    """Puts calls in place of norms, scales and shifts in statements of a method whose first argument is `cell`."""

    def __init__(self, cell: str) -> None:
        self.count = 0
        self._cell = cell

    def read(self, tree: ast.FunctionDef) -> None:
        joined(tree, self._shifts, self._join)
        self.visit(tree)

    @staticmethod
    def _join(line: Any, before: Any) -> None:
        line.value.left.left = before.value

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        scaled = _scaled(node)
        if (
            scaled is None
            or not is_norm_of(scaled.left, self._cell)
            or not all(map(_is_plain, (scaled.right, node.right)))
        ):
            return node
        self.count += 1
        norm: Any = scaled.left
        arguments = [ast.Name(self._cell, ast.Load()), norm.func, norm.args[0], scaled.right, node.right]
        return ast.copy_location(ast.Call(ast.Name(_MODULATED, ast.Load()), arguments, []), node)

    def _shifts(self, line: ast.stmt, before: ast.stmt) -> bool:
        """Tells whether a statement scales and shifts what the one before it assigns to the same variable, a norm."""
        if (
            not isinstance(line, ast.Assign)
            or not isinstance(before, ast.Assign)
            or not is_norm_of(before.value, self._cell)
        ):
            return False
        (target, *more), scaled = before.targets, _scaled(line.value)
        if more or not isinstance(target, ast.Name) or scaled is None or [target.id] != path_of(scaled.left):
            return False
        scale, shift = scaled.right, line.value.right  # type: ignore[attr-defined]
        read = {each.id for part in (scale, shift) for each in ast.walk(part) if isinstance(each, ast.Name)}
        return len(line.targets) == 1 and path_of(line.targets[0]) == [target.id] and target.id not in read


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
