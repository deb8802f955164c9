"""Says which line an entry or a signature lacks, for findings of :func:`msops.testing.opcheck`."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.operator import Operator


def of_one_shape(operator: Operator) -> str:
    """Says how a signature states that tensors have one shape, if none of it has sizes."""
    signature = operator.signature
    if any(tensor.sizes is not None for tensor in (*signature.inputs, *signature.outputs)):
        return ""
    inputs, outputs = (", ".join(f"{t.name}(*S)" for t in tensors) for tensors in (signature.inputs, signature.outputs))
    return f"; if all have one shape, the signature is {inputs} -> {outputs}"


def of_dtype(operator: Operator, said: str) -> str:
    """Says how an entry takes a tensor that has a dtype of its own in the signature, if the entry refused its dtype."""
    for tensor in (*operator.signature.inputs, *operator.signature.outputs):
        if tensor.dtype and f" {tensor.name} is " in said:
            return f'; by the signature, it is taken by call.tensor_of("{tensor.dtype}", "{tensor.name}")'
    return ""


def of_shape(operator: Operator, i: int, right: tuple[int, ...], wrong: tuple[int, ...]) -> tuple[str | None, str]:
    """Returns the name of a tensor that tensor number `i` does not fit with the wrong shape, and the check that an
    entry lacks which takes that."""
    signature = operator.signature
    tensors = [*signature.inputs, *signature.outputs]
    tensor, others = tensors[i], [*tensors[:i], *tensors[i + 1 :]]
    sizes: dict[str, list[ast.expr]] = {t.name: list(t.sizes or ()) for t in tensors}
    for output in signature.outputs:
        if output.sizes is None and not operator.rule:
            sizes[output.name] = sizes[tensors[0].name] or [ast.Name(tensors[0].name)]  # the shape of the first input
    if not sizes[tensors[0].name]:
        sizes[tensors[0].name] = [ast.Name(tensors[0].name)]
    written = {name: list(map(ast.unparse, each)) for name, each in sizes.items()}

    def ordered(name: str) -> list[str]:
        """Returns the names of the later and of the earlier of two tensors."""
        return sorted((tensor.name, name), key=[t.name for t in tensors].index, reverse=True)

    for other in others:
        if written[tensor.name] and written[other.name] == written[tensor.name]:
            return other.name, "call.require_same_shape({}, {})".format(*ordered(other.name))
    if len(right) != len(wrong):
        return None, f'the rank in call.tensor("{tensor.name}", {len(right)})'
    axis = next(k for k, (a, b) in enumerate(zip(right, wrong)) if a != b)
    changed = sizes[tensor.name][axis : axis + 1] if len(sizes[tensor.name]) == len(right) else sizes[tensor.name]
    names = {name for size in changed for name in _names(size)}
    beside = next((t.name for t in others if names & {name for size in sizes[t.name] for name in _names(size)}), None)
    later, earlier = ordered(beside) if beside else (tensor.name, None)
    if earlier and written[later] == written[earlier][:-1]:
        return beside, f"call.require_shape_of_rows({later}, {earlier})"
    if not sizes[later] or any(isinstance(size, ast.Starred) for size in sizes[later]):
        return beside, f"a check of {later}'s shape"
    known = {
        size.id: f"{name}.dim({k})"
        for name in (later, *(t.name for t in reversed(signature.inputs) if t.name != later))
        for k, size in enumerate(sizes[name])
        if isinstance(size, ast.Name) and size.id not in signature.values
    }
    axes = [ast.unparse(_Renamed(known).visit(ast.parse(each, mode="eval"))) for each in written[later]]
    return beside, f"call.require_shape({later}, {{{', '.join(axes).replace('//', '/')}}})"


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id))


def _names(size: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(size) if isinstance(node, ast.Name)}
