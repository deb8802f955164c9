"""Gives loops over experts, as mindone's language models write them, to grouped_matmul.

Three statements, zeros for the result, a mask of the experts that each token chose and a loop over all experts, become
one call. The loop asks the device which tokens an expert has, so that no CUDA graph can record it. Each expert must be
a gated layer of three linear ones.
"""

from __future__ import annotations

import ast
import copy
import inspect
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, nn, ops

from msops.core.compiled import once, records_gradients, wants_gradient
from msops.core.inputs import describe
from msops.core.spec import FLOATS
from msops.operators.grouped_matmul import grouped_matmul
from msops.operators.moe_permute import moe_permute
from msops.operators.moe_unpermute import moe_unpermute
from msops.operators.swiglu import swiglu

from .formula import Found, NoFormulaError
from .gates import layers_of
from .rewritten import compiled, tree_of
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msops.core.inputs import Description

    Function = Callable[..., Any]

_ROUTED = f"{PREFIX}routed"
_STATEMENTS = """
final_hidden_states = mint.zeros((batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype)
expert_mask = mint.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
for expert_idx in range(self.num_experts):
    expert_layer = self.experts[expert_idx]
    idx, top_x = mint.where(expert_mask[expert_idx])
    if top_x.shape[0] == 0:
        continue
    current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
    current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
    final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
"""
_CALL = f"""
final_hidden_states = {_ROUTED}(
    self, hidden_states, selected_experts, routing_weights, (batch_size * sequence_length, hidden_dim)
)
if final_hidden_states is None:
    pass
"""
_SKIPS = 2  # the place in the loop of the statement that some libraries leave out
_INSIDE = {"expert_mask", "expert_idx", "expert_layer", "idx", "top_x", "current_state", "current_hidden_states"}


def may_route(value: Any) -> bool:
    """Tells whether a function may have such a loop."""
    names = {"index_add_", "experts", "num_experts", "one_hot", "where"}
    return inspect.isfunction(value) and names <= set(value.__code__.co_names)


def routing(own: Function) -> Found:
    """Returns what stands for a method that loops over experts."""
    try:
        tree = tree_of(own)
    except (NoFormulaError, OSError, SyntaxError, TypeError, ValueError):
        raise NoFormulaError("") from None
    count, lines = 3, [_plain(line) for line in tree.body]
    places = [i for i in range(len(lines)) if lines[i : i + count] in _FORMS]
    cell, *others = own.__code__.co_varnames
    meanings = {"mint": getattr(mindspore, "mint", None), "mindspore": mindspore, "range": range}

    def stand() -> bool:
        return all(own.__globals__.get(name, each) is each for name, each in meanings.items())

    if len(places) != 1 or cell != "self" or not stand() or meanings.keys() & set(others):
        raise NoFormulaError("its loop over experts is another one")
    first = places[0]
    loop, after = tree.body[first : first + count], tree.body[first + count :]
    if any(isinstance(node, ast.Name) and node.id in _INSIDE for line in after for node in ast.walk(line)):
        raise NoFormulaError("what the loop over experts leaves is read after it")
    call: list[Any] = ast.parse(_CALL).body
    call[1].body = loop
    tree.body[first : first + count] = [ast.fix_missing_locations(ast.copy_location(line, loop[0])) for line in call]
    reasons = set[str]()

    def routed(cell: Any, x: Any, experts: Any, weights: Any, result: tuple[int, ...]) -> Any:
        layers = _layers_of(cell) if stand() else []
        if not layers or not all(isinstance(each, Tensor) for each in (x, experts, weights)):
            reasons.add("its experts are others than gated layers of silu without biases")
        elif not _takes(describe(x), describe(experts), describe(weights), result, _kinds_of(layers)):
            reasons.add("a call's dtypes or shapes do not fit grouped_matmul")
        else:
            matrices = [layer.weight for each in layers for layer in each]
            if not records_gradients():
                return _computed(x, experts, weights, *matrices)
            # MindSpore gives a Parameter's gradient of a bprop the dtype that the Parameter was made with, but leaves
            # that of a view as it is.
            again = _again if any(map(wants_gradient, matrices)) else _again_frozen
            return again(x, experts, weights, *(each.reshape(each.shape) for each in matrices))
        return None

    return Found(compiled(own, tree, {_ROUTED: routed}), "msops.grouped_matmul", None, reasons)


def _plain(line: ast.stmt) -> str:
    """Writes a statement out, with mint for mindspore.mint."""
    return ast.dump(_OfMint().visit(copy.deepcopy(line)))


class _OfMint(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        is_mint = node.attr == "mint" and isinstance(node.value, ast.Name) and node.value.id == "mindspore"
        return ast.Name("mint", ast.Load()) if is_mint else self.generic_visit(node)  # type: ignore[return-value]


def _forms() -> list[list[str]]:
    """Returns the three statements, with all that the loop may have and without what it may lack."""
    whole, shorter = (ast.parse(_STATEMENTS).body for _ in range(2))
    del shorter[2].body[_SKIPS]  # type: ignore[attr-defined]
    return [[_plain(line) for line in lines] for lines in (whole, shorter)]


_FORMS = _forms()
_LIST: Any = nn.CellList  # type: ignore[attr-defined]
_WHOLE = mindspore.int32, mindspore.int64


def _layers_of(cell: Any) -> list[tuple[nn.Cell, ...]]:
    """Returns the layers of each expert, or nothing if one of them computes something else."""
    experts: Any = getattr(cell, "experts", None)
    if type(experts) is not _LIST or len(experts) != cell.num_experts:
        return []
    found = [layers_of(expert, cell) for expert in experts]
    return [] if None in found else found  # type: ignore[return-value]


def _kinds_of(layers: Sequence[tuple[Any, ...]]) -> tuple[tuple[Description, ...], ...]:
    """Returns what the weights of an expert are, once for all experts that have the same."""
    return tuple({tuple([describe(layer.weight) for layer in each]) for each in layers})


@once
def _takes(
    x: Description,
    experts: Description,
    weights: Description,
    result: tuple[int, ...],
    kinds: tuple[tuple[Description, ...], ...],
) -> bool:
    """Tells whether all experts have weights of the same sizes, and all dtypes are that of the tokens."""
    if len(kinds) != 1 or x[0] is None or None in x[0] or x[0] != result:
        return False
    gate, up, down = kinds[0]
    is_layer = gate == up and gate[0] is not None and gate[0][1] == x[0][1] and down[0] == gate[0][::-1]
    chosen: Any = experts[0] or ()
    is_chosen = chosen == weights[0] and len(chosen) == 2 and chosen[0] == x[0][0] and experts[1] in _WHOLE
    return is_layer and is_chosen and x[1] in FLOATS and {each[1] for each in (weights, gate, down)} == {x[1]}


def _computed(x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
    """Multiplies the tokens of all experts at once. Each expert has three matrices: its gate, the other factor and the
    last one. Those of all experts are copied together."""
    count, (inner, width) = len(matrices) // 3, matrices[0].shape
    gate_up = ops.concat([each for i, each in enumerate(matrices) if i % 3 < 2]).reshape(count, 2 * inner, width)
    down = ops.concat(list(matrices[2::3])).reshape(count, width, inner)
    rows, positions, sizes = moe_permute(x, experts, count)
    hidden = swiglu(grouped_matmul(rows, gate_up, sizes, None, True))
    return moe_unpermute(grouped_matmul(hidden, down, sizes, None, True), positions, weights)


class _Again(nn.Cell):
    """Computes experts, and does so again for their gradients, so that nothing keeps the copies of their matrices.
    These have no gradient if they are frozen."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.is_frozen = is_frozen

    def construct(self, x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        return _computed(x, experts, weights, *matrices)

    def bprop(self, x: Tensor, experts: Tensor, weights: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *matrices, _, dout = rest
        # Otherwise MindSpore goes on from these into the graph of the pass before, which is no longer there.
        x, weights, dout = (ops.stop_gradient(each) for each in (x, weights, dout))
        if self.is_frozen:
            matrices = [ops.stop_gradient(each) for each in matrices]

        def total(x: Tensor, weights: Tensor, *trained: Tensor) -> Tensor:
            return (_computed(x, experts, weights, *(trained or matrices)) * dout).sum()

        trained = () if self.is_frozen else tuple(matrices)
        dx, dweights, *others = mindspore.grad(total, tuple(range(2 + len(trained))))(x, weights, *trained)
        return dx, ops.zeros_like(experts), dweights, *(others or map(ops.zeros_like, matrices))


_again, _again_frozen = _Again(False), _Again(True)
