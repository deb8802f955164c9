"""Gives msops' kernels to the formulas that model libraries write out in each of their models: RMSNorm and rotation.

A library such as mindone has a class of RMSNorm and a function `apply_rotary_pos_emb` in each module of a language
model. They are recognized by what they compute: a function's local variables are replaced by what they stand for, so
that one expression is left, and this must be one of the formulas below. All other functions stay as they are.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspore import Tensor, nn

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.spec import FLOATS
from msops.operators.rms_norm import rms_norm
from msops.operators.rotary_position_embedding import rotary_position_embedding as turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

_MODULES = frozenset(("ms", "mindspore", "mint", "ops"))  # formulas are written without these names
_CASTS: dict[str, Any] = {  # methods that are x.to(dtype): its argument, of theirs
    "astype": lambda dtype: [dtype],
    "float": lambda: [ast.Name("float32")],
    "type_as": lambda like: [ast.Attribute(like, "dtype")],
}
_MOST_LINES = 8  # of a function: with many more, the expression could be too long
_HOOK = "__init_subclass__"  # Python calls it for each new class of Cells
_ROTATION = "apply_rotary_pos_emb"
_CONSTRUCT = "construct"


class _Replaced(NamedTuple):
    """A name of a class or a module, what stood there, or None for what a class inherits, and what stands there now."""

    owner: Any
    name: str
    own: Function | None
    now: Function


_replaced: list[_Replaced] = []


def watch() -> None:
    """Replaces the formulas of all Cells' classes and of their modules, also of those that are defined later."""
    setattr(nn.Cell, _HOOK, classmethod(_init_subclass))
    classes = [nn.Cell]
    for cls in classes:
        classes += cls.__subclasses__()
        _replace(cls)


def restore() -> None:
    """Ends what `watch` began. What a program has put in place of a replacement stays."""
    if _HOOK in vars(nn.Cell):
        delattr(nn.Cell, _HOOK)
    for owner, name, own, now in _replaced:
        if vars(owner).get(name) is now:
            delattr(owner, name) if own is None else setattr(owner, name, own)
    _replaced.clear()


def _init_subclass(cls: Any, /, **named: Any) -> None:
    super(nn.Cell, cls).__init_subclass__(**named)
    _replace(cls)


def _replace(cls: Any) -> None:
    if cls.__name__.endswith("Norm"):
        _replace_name(cls, _CONSTRUCT)
    # A module defines what its Cells call before it defines the last of them.
    _replace_name(sys.modules.get(cls.__module__), _ROTATION)
    # A class may inherit a replacement, but define the methods that were a part of its formula.
    inherited = getattr(cls, _CONSTRUCT, None)
    own = next((each.own for each in _replaced if each.now is inherited), None)
    defines = any(inspect.isfunction(value) for name, value in vars(cls).items() if not name.startswith("__"))
    if own and defines and _CONSTRUCT not in vars(cls):
        _put(cls, _CONSTRUCT, None, own)


def _replace_name(owner: Any, name: str) -> None:
    own = vars(owner).get(name) if owner else None
    if inspect.isfunction(own) and (own.__module__ or "").partition(".")[0] not in ("mindspore", "msops"):
        make = _FORMULAS.get(formula(own, owner))
        replacement = make and make(own)
        if replacement:
            _put(owner, name, own, replacement)


def _put(owner: Any, name: str, own: Function | None, now: Function) -> None:
    _replaced.append(_Replaced(owner, name, own, now))
    setattr(owner, name, now)


def formula(function: Function, owner: Any = None) -> str:
    """Returns what a function computes as one expression of its arguments x0, x1, ... , or "" if that cannot be told.

    Methods of a class `owner` are inlined, and so are functions of the function's module."""
    known = {**function.__globals__, **_methods(owner)}
    arguments = [ast.Name(f"x{i}") for i in range(function.__code__.co_argcount)]
    try:
        result = _result(_tree(function), arguments, known)
    except Exception:  # noqa: BLE001 (whatever is wrong with other people's source, it is no formula)
        return ""
    return ast.unparse(result) if result else ""


def _methods(owner: Any) -> dict[str, Function]:
    return {f"x0.{name}": value for name, value in vars(owner).items()} if isinstance(owner, type) else {}


def _tree(function: Function) -> ast.FunctionDef | None:
    """Returns the syntax tree of a function that nothing decorates."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree if isinstance(tree, ast.FunctionDef) and not tree.decorator_list else None


def _result(function: Any, arguments: list[Any], known: dict[str, Any]) -> ast.expr | None:
    """Returns the expression that a function's syntax tree returns, or None if it has more than a few assignments."""
    if function is None:
        return None
    values = dict(zip((each.arg for each in function.args.args), arguments))
    substitute = _Substitute(values, known).visit
    lines = function.body if isinstance(function, ast.FunctionDef) else [ast.Return(function.body)]
    for line in lines[:_MOST_LINES]:
        if isinstance(line, ast.Return) and line.value:
            result: ast.expr = substitute(line.value)
            return result
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and len(line.targets) == 1:
            values[line.targets[0].id] = substitute(line.value)
        elif not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):  # a docstring
            return None
    return None


class _Substitute(ast.NodeTransformer):
    """Replaces variables by their values, and calls of known functions by what these return."""

    def __init__(self, values: dict[str, Any], known: dict[str, Any]) -> None:
        self.values, self.known = values, known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in _MODULES:
            return ast.Name(node.attr)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_of_module = isinstance(node.func, ast.Attribute) and ast.unparse(node.func).partition(".")[0] in _MODULES
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CASTS and not node.keywords:
            return ast.Call(ast.Attribute(node.func.value, "to"), _CASTS[node.func.attr](*node.args), [])
        name = ast.unparse(node.func)
        called = None if is_of_module or node.keywords else self.known.get(name)
        if not inspect.isfunction(called):
            return node
        of_self = [ast.Name("x0")] if name.startswith("x0.") else []
        return _result(_tree(called), [*of_self, *node.args], {}) or node  # what it calls itself stays a call


@once
def _normalizes(x: Description, weight: Description, eps: Any) -> bool:
    """Tells whether rms_norm takes these, and returns the dtype that the formula does."""
    is_row = bool(x[0]) and weight[0] == x[0][-1:] and None not in weight[0]
    return is_row and x[1] == weight[1] and x[1] in FLOATS and type(eps) in (int, float)


@once
def _turns(q: Description, k: Description, cos: Description, sin: Description, axis: int) -> bool:
    """Tells whether the tables (B, T, D), which get this axis, fit queries and keys, and all have one dtype."""
    if cos[0] != sin[0] or len(cos[0] or ()) != 3 or axis not in (1, 2) or {q[1], k[1], cos[1], sin[1]} - {q[1]}:
        return False
    table = (*cos[0][:axis], 1, *cos[0][axis:])
    for shape in (q[0], k[0]):
        if len(shape) != 4 or None in (*shape, *table) or not all(n in (1, m) for n, m in zip(table, shape)):
            return False
    return q[1] in FLOATS and table[3] == q[0][3] == k[0][3] and table[3] % 2 == 0


def _normalizing(eps: str, offset: float, casting: str) -> Callable[[Function], Function | None]:
    """Makes the `construct` of RMSNorms whose attribute `eps` is added to the mean."""

    def make(own: Function) -> Function | None:
        name = list(inspect.signature(own).parameters)[1]  # which calls may use
        if name == "hidden_states":

            def construct(self: Any, hidden_states: Tensor) -> Any:
                if _normalizes(describe(hidden_states), describe(self.weight), getattr(self, eps)):
                    return rms_norm(hidden_states, self.weight, getattr(self, eps), offset, casting)
                return own(self, hidden_states)

        else:

            def construct(self: Any, x: Tensor) -> Any:  # type: ignore[misc]
                if _normalizes(describe(x), describe(self.weight), getattr(self, eps)):
                    return rms_norm(x, self.weight, getattr(self, eps), offset, casting)
                return own(self, x)

        return construct if name in ("x", "hidden_states") else None

    return make


def _turning(own: Function) -> Function | None:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if _turns(describe(q), describe(k), describe(cos), describe(sin), unsqueeze_dim):
            cos, sin = cos.expand_dims(unsqueeze_dim), sin.expand_dims(unsqueeze_dim)
            return turn(q, cos, sin, False), turn(k, cos, sin, False)
        return own(q, k, cos, sin, position_ids, unsqueeze_dim)

    parameters = [(each.name, each.default) for each in inspect.signature(own).parameters.values()]
    wanted = [(each.name, each.default) for each in inspect.signature(apply_rotary_pos_emb).parameters.values()]
    return apply_rotary_pos_emb if parameters == wanted else None


def _written(text: str) -> str:
    """Returns a formula of this module in the form of `formula`."""
    function = ast.parse(text, mode="eval").body
    arguments = [ast.Name(f"x{i}") for i in range(len(function.args.args))]  # type: ignore[attr-defined]
    return ast.unparse(_result(function, arguments, {}))  # type: ignore[arg-type]


_ROOT = "rsqrt(x.to(float32).pow(2).mean(-1, keepdim=True) + self.{})"
_NORMS = {  # what `construct` returns, where y is x in float32 times the root: offset and casting of rms_norm
    "self.weight * ({y}).to(x.dtype)": (0.0, "llama"),
    "(self.weight * ({y})).to(x.dtype)": (0.0, "gemma"),
    "({y} * self.weight.to(float32)).to(x.dtype)": (0.0, "gemma"),
    "({y} * self.weight).to(x.dtype)": (0.0, "gemma"),
    "({y} * (1.0 + self.weight.to(float32))).to(x.dtype)": (1.0, "gemma"),
}
_TURNED = "{0} * cos.unsqueeze(axis) + cat((-{0}[..., {0}.shape[-1] // 2:], {0}[..., :{0}.shape[-1] // 2]), dim=-1)"
_BOTH = ", ".join(f"{_TURNED.format(x)} * sin.unsqueeze(axis)" for x in ("q", "k"))
_FORMULAS: dict[str, Callable[[Function], Function | None]] = {
    _written(f"lambda q, k, cos, sin, places, axis: ({_BOTH})"): _turning,
    **{
        _written("lambda self, x: " + text.format(y=f"x.to(float32) * {_ROOT.format(eps)}")): _normalizing(eps, *how)
        for text, how in _NORMS.items()
        for eps in ("eps", "variance_epsilon")
    },
}
