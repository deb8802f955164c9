"""Gives gates and activations that model libraries write out to swiglu, geglu and gelu."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import nn, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.spec import FLOATS
from msops.operators.geglu import geglu
from msops.operators.gelu import gelu
from msops.operators.swiglu import swiglu

from .formula import Formula, Found, NoFormulaError, is_mindspores, written
from .mint.linear import Dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]


def of_mint(name: str) -> Any:
    """Returns a class of mindspore.mint.nn, or None where MindSpore does not have it."""
    return getattr(getattr(getattr(mindspore, "mint", None), "nn", None), name, None)


_WRITTEN = {  # gelu, as it is written out, and how it is approximated
    written("lambda x0, x1: " + text): approximate
    for text, approximate in {
        "(0.5 * x1 * (1.0 + tanh(sqrt(Tensor(2.0 / pi)) * (x1 + 0.044715 * pow(x1, 3.0))))).to(x1.dtype)": "tanh",
        "0.5 * x1 * (1.0 + tanh(x1 * 0.7978845608 * (1.0 + 0.044715 * x1 * x1)))": "tanh",
        "x1 * sigmoid(1.702 * x1)": "sigmoid",
    }.items()
}
_KINDS = {  # what an activation returns, and the name by which the functions below know it
    "silu(x1)": "silu",
    "x1 * sigmoid(x1)": "silu",
    "gelu(x1)": "none",
    "gelu(x1, approximate='tanh')": "tanh",
    **_WRITTEN,
}
_OF_GATES = "silu", "none", "tanh"  # those that swiglu and geglu have
_OF_ATTRIBUTE = "x0.act(x1)"  # the Cell calls a function that it holds
_LINEAR = of_mint("Linear")
_DENSE = getattr(ops, "Dense", None), Dense
_OF_MINDSPORE = {getattr(nn, "SiLU", None), of_mint("SiLU")}
_HOOKS = "_forward_pre_hook", "_forward_hook", "_backward_pre_hook", "_backward_hook"
_HALVES = "x0.proj(x1).chunk(2, dim=-1)"
_GATED = "lambda x0, x1: x0.{2}(x0.act_fn(x0.{0}(x1)) * x0.{1}(x1))"
_LAYERS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_FORMULAS = {  # what `construct` returns, the attribute that holds its activation, and layers, unless halves are gated
    **{written(_GATED.format(*names)): ("act_fn", names) for names in _LAYERS},
    written(f"lambda x0, x1: {_HALVES}[0] * x0.activation({_HALVES}[1])"): ("activation", ()),
    written(f"lambda x0, x1: {_HALVES}[0] * gelu({_HALVES}[1]).to({_HALVES}[1].dtype)"): ("", ()),
}
_gated: dict[Function, tuple[str, tuple[str, ...]]] = {}  # what `construct` is now -> the flag, and names of layers
_formulas: dict[tuple[type, Function], Formula] = {}  # of activations and what their `construct` is now


def gating(own: Function, owner: type) -> Found:
    """Returns what stands for the `construct` of a gated layer."""
    formula = Formula(own, owner)
    if formula.text not in _FORMULAS:
        raise formula.why
    activation, layers = _FORMULAS[formula.text]
    first, second, last = layers or ("", "", "")
    flag = formula.flag

    def kind(self: Any) -> str:
        if not formula.stands(self):
            return ""
        found = kind_of(getattr(self, activation), self) if activation else "none"
        return found if found in _OF_GATES else ""

    def gated(self: Any, x: Any) -> Any:
        if layers:
            gate, up = getattr(self, first)(x), getattr(self, second)(x)
        else:
            up, gate = self.proj(x).chunk(2, dim=-1)
        if not _takes(describe(gate), describe(up)):
            product = (getattr(self, activation) if activation else self.gelu)(gate) * up
        elif getattr(self, flag) == "silu":
            product = swiglu(gate, up)
        else:
            product = geglu(gate, up, getattr(self, flag))
        return getattr(self, last)(product) if layers else product

    now = _construct(own, flag, gated)
    _gated[now] = flag, layers
    return Found(now, "msops.swiglu or msops.geglu", formula, set(), kind)


def layers_of(cell: Any, of: nn.Cell) -> tuple[nn.Cell, ...] | None:
    """Returns the gate, the other factor and the last layer of a Cell that another one calls, if it gates by silu, and
    these are linear, without biases."""
    if not is_as_its_class(cell, of) or type(cell).construct not in _gated:
        return None
    flag, names = _gated[type(cell).construct]
    layers = tuple([getattr(cell, name) for name in names])
    is_linear = all(_is_linear(each) and is_as_its_class(each, cell) for each in layers)
    return layers if layers and is_linear and getattr(cell, flag) == "silu" else None


def _is_linear(layer: Any) -> bool:
    """Tells whether a Cell multiplies by its weight alone, as MindSpore wrote it."""
    if type(layer) is not _LINEAR or layer.bias is not None or type(layer.dense) not in _DENSE:
        return False
    return bool(_LINEAR.construct.__module__ == _LINEAR.__module__)


def activating(own: Function, owner: type) -> Found:
    """Returns what stands for the `construct` of an activation that is written out as several operators."""
    formula = _formulas[owner, own] = Formula(own, owner)
    if formula.text in _KINDS and formula.text not in _WRITTEN:
        raise NoFormulaError("it is one operator already")
    if formula.text not in _WRITTEN:
        raise formula.why
    approximate = _WRITTEN[formula.text]

    def activated(self: Any, x: Any) -> Any:
        return gelu(x, approximate) if _takes(describe(x), describe(x)) else own(self, x)

    now = _construct(own, formula.flag, activated)
    _formulas[owner, now] = formula
    return Found(now, "msops.gelu", formula, set())


def forget() -> None:
    """Forgets activations and gated layers, at the end of the patch."""
    _formulas.clear()
    _gated.clear()


def is_as_its_class(cell: Any, of: nn.Cell) -> bool:
    """Tells whether a call of a Cell by another one computes the `construct` of its class and its gradient, and that
    alone."""
    if not isinstance(cell, nn.Cell) or "construct" in vars(cell) or type(cell).__call__ is not nn.Cell.__call__:
        return False
    if any(getattr(cell, each, None) for each in _HOOKS) or "bprop" in vars(cell) or hasattr(type(cell), "bprop"):
        return False
    return bool(getattr(cell, "mixed_precision_type", None) == getattr(of, "mixed_precision_type", None))


def kind_of(cell: Any, of: nn.Cell) -> str:
    """Returns the name of what a Cell computes when another one calls it, or "" if that cannot be told."""
    if not is_as_its_class(cell, of):
        return ""
    cls = type(cell)
    if cls in _OF_MINDSPORE:
        return "silu"
    key = cls, cls.construct
    if key not in _formulas:
        _formulas[key] = Formula(cls.construct, cls)
    formula = _formulas[key]
    if not formula.stands(cell):
        return ""
    return _kind_of_function(vars(cell).get("act")) if formula.text == _OF_ATTRIBUTE else _KINDS.get(formula.text, "")


def _kind_of_function(function: Any) -> str:
    named: dict[str, Any] = {"approximate": "none"}
    if isinstance(function, functools.partial) and not function.args:
        named, function = function.keywords, function.func
    is_gelu = getattr(function, "__name__", "") == "gelu" and is_mindspores("gelu", function)
    return named["approximate"] if is_gelu and named in ({"approximate": "none"}, {"approximate": "tanh"}) else ""


@once
def _takes(gate: Description, up: Description) -> bool:
    return gate == up and gate[0] is not None and None not in gate[0] and 0 not in gate[0] and gate[1] in FLOATS


def _construct(own: Function, flag: str, replacement: Function) -> Function:
    """Returns a `construct` that has the argument's name, since calls may use it."""
    parameters = [(each.kind, each.default) for each in inspect.signature(own).parameters.values()]
    if parameters != [(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)] * 2:
        raise NoFormulaError("its arguments are others than the formula's")
    name = list(inspect.signature(own).parameters)[1]

    def of_x(self: Any, x: Any) -> Any:
        return replacement(self, x) if getattr(self, flag) else own(self, x)

    def of_state(self: Any, hidden_state: Any) -> Any:
        return replacement(self, hidden_state) if getattr(self, flag) else own(self, hidden_state)

    def of_states(self: Any, hidden_states: Any) -> Any:
        return replacement(self, hidden_states) if getattr(self, flag) else own(self, hidden_states)

    def of_input(self: Any, input: Any) -> Any:  # noqa: A002 (the library calls it so)
        return replacement(self, input) if getattr(self, flag) else own(self, input)

    made = {"x": of_x, "hidden_state": of_state, "hidden_states": of_states, "input": of_input}
    if name not in made:
        raise NoFormulaError(f"its argument is called {name}")
    return made[name]
