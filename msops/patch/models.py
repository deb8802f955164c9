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
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore import Tensor, float64, nn, ops

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.core.spec import FLOATS, Rounded
from msops.operators.rms_norm import rms_norm
from msops.operators.rotary_position_embedding import rotary_position_embedding as turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

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


def _replace_name(owner: Any, name: str) -> None:
    own = vars(owner).get(name) if owner else None
    if inspect.isfunction(own) and (own.__module__ or "").partition(".")[0] not in ("mindspore", "msops"):
        found = Formula(own, owner)
        make = _FORMULAS.get(found.text)
        replacement = make and make(own, found)
        if replacement:
            if isinstance(owner, type):
                _put(owner, found.flag, None, property(found.stands))
            _put(owner, name, own, replacement)


def _put(owner: Any, name: str, own: Function | None, now: Any) -> None:
    _replaced.append(_Replaced(owner, name, own, now))
    setattr(owner, name, now)


class Formula:
    """What a function computes, as one expression of its arguments x0, x1, ... , or "" if that cannot be told.

    Methods of the class `owner` are inlined, and so are functions of the function's module: the formula stands as long
    as their names mean the same."""

    def __init__(self, function: Function, owner: Any = None) -> None:
        self.text = ""
        self.names: list[tuple[dict[str, Any], str, Any]] = []  # a namespace, a name in it, and what it means
        self.methods: dict[str, Function] = {}
        self.owner = owner if isinstance(owner, type) else None
        self.flag = f"_msops_{id(self)}_stands"  # the property of a class that tells whether the formula does
        arguments: list[Any] = [ast.Name(f"x{i}") for i in range(function.__code__.co_argcount)]
        try:
            self.text = ast.unparse(self.result(function, arguments, may_inline=True))
        except Exception:  # noqa: BLE001 (whatever is wrong with other people's source, it is no formula)
            return

    def stands(self, cell: Any = None) -> bool:
        """Tells whether all names mean what they did, to a Cell also those of its methods."""
        return all(scope.get(name) is meaning for scope, name, meaning in self.names) and all(
            getattr(getattr(cell, name, None), "__func__", None) is method for name, method in self.methods.items()
        )

    def result(self, function: Function, arguments: list[Any], *, may_inline: bool) -> ast.expr:
        """Returns the expression that a function returns."""
        if inspect.unwrap(function) is not function:  # its source is that of another function
            raise _NoFormulaError
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
            raise _NoFormulaError
        return _result(tree, _Substitute(arguments, tree, function.__globals__, self, may_inline=may_inline))

    def meaning(self, scope: dict[str, Any], name: str) -> Any:
        """Returns what a name means in a module."""
        self.names.append((scope, name, scope[name]))
        return scope[name]

    def method(self, name: str) -> Function | None:
        """Returns the method of the class that has a name, if the class defines one."""
        method = vars(self.owner).get(name) if self.owner else None
        if not inspect.isfunction(method):
            return None
        self.methods[name] = method
        return method


class _NoFormulaError(Exception):
    """A function computes more than one expression, or what its names mean cannot be told."""


def _is_mindspores(name: str, meaning: Any) -> bool:
    """Tells whether this is what MindSpore, or the patch, calls so."""
    own = getattr(meaning, "__name__", None)
    root = (getattr(meaning, "__module__", None) or "").partition(".")[0]
    return root in ("mindspore", "msops") and (own == name if own else meaning == getattr(mindspore, name, None))


def _result(tree: Any, substitute: _Substitute) -> ast.expr:
    """Returns the expression that a function's syntax tree returns after a few assignments."""
    for line in tree.body[:_MOST_LINES] if isinstance(tree, ast.FunctionDef) else [ast.Return(tree.body)]:
        if isinstance(line, ast.Return) and line.value:
            result: ast.expr = substitute.visit(line.value)
            return result
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and len(line.targets) == 1:
            substitute.values[line.targets[0].id] = substitute.visit(line.value)
        elif not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):  # a docstring
            break
    raise _NoFormulaError


class _Substitute(ast.NodeTransformer):
    """Replaces variables by their values, what MindSpore defines by its bare name, and calls of functions and methods
    by what these return. Without a formula, as in those of this module, names stand for themselves."""

    def __init__(
        self, arguments: list[Any], tree: Any, scope: dict[str, Any], found: Formula | None, *, may_inline: bool
    ) -> None:
        self.values: dict[str, Any] = dict(zip((each.arg for each in tree.args.args), arguments))
        self.scope, self.found, self.may_inline = scope, found, may_inline

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.values:
            value: ast.expr = self.values[node.id]
            return value
        if self.found and not _is_mindspores(node.id, self.found.meaning(self.scope, node.id)):
            raise _NoFormulaError
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if self.found and isinstance(node.value, ast.Name) and node.value.id not in self.values:
            module = self.found.meaning(self.scope, node.value.id)
            if not inspect.ismodule(module) or module.__name__.partition(".")[0] != "mindspore":
                raise _NoFormulaError
            return ast.Name(node.attr)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called, of_self = self._inlined(node.func)
        if self.found and called and not node.keywords:
            arguments = [*of_self, *map(self.visit, node.args)]
            return self.found.result(called, arguments, may_inline=False)
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CASTS and not node.keywords:
            return ast.Call(ast.Attribute(node.func.value, "to"), _CASTS[node.func.attr](*node.args), [])
        return node

    def _inlined(self, function: ast.expr) -> tuple[Function | None, list[ast.expr]]:
        """Returns what is called, if its result takes the call's place, and the arguments that it gets first."""
        if self.found is None or not self.may_inline:  # what an inlined function calls stays a call
            return None, []
        if isinstance(function, ast.Name) and function.id not in self.values:
            called = self.found.meaning(self.scope, function.id)
            return (called if inspect.isfunction(called) and not _is_mindspores(function.id, called) else None), []
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            of_self = self.values.get(function.value.id)
            if isinstance(of_self, ast.Name) and of_self.id == "x0":
                return self.found.method(function.attr), [of_self]
        return None, []


@once
def _normalizes(x: Description, weight: Description, eps: Any) -> bool:
    """Tells whether rms_norm takes these, and returns the dtype that the formula does."""
    is_row = bool(x[0]) and weight[0] == x[0][-1:] and None not in weight[0]
    takes_eps = type(eps) in (int, float) and 0 <= eps < inf and (x[1] == float64 or Rounded(eps).is_float32())
    return is_row and x[1] == weight[1] and x[1] in FLOATS and takes_eps


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


def _normalizing(eps: str, offset: float, casting: str) -> Callable[[Function, Formula], Function | None]:
    """Makes the `construct` of RMSNorms whose attribute `eps` is added to the mean."""

    def make(own: Function, found: Formula) -> Function | None:
        parameters = [(each.kind, each.default) for each in inspect.signature(own).parameters.values()]
        if parameters != [(inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)] * 2:
            return None
        name, flag = list(inspect.signature(own).parameters)[1], found.flag  # calls may use the name
        if name == "hidden_states":

            def construct(self: Any, hidden_states: Tensor) -> Any:
                if getattr(self, flag) and _normalizes(
                    describe(hidden_states), describe(self.weight), getattr(self, eps)
                ):
                    return rms_norm(hidden_states, self.weight, getattr(self, eps), offset, casting)
                return own(self, hidden_states)

        else:

            def construct(self: Any, x: Tensor) -> Any:  # type: ignore[misc]
                if getattr(self, flag) and _normalizes(describe(x), describe(self.weight), getattr(self, eps)):
                    return rms_norm(x, self.weight, getattr(self, eps), offset, casting)
                return own(self, x)

        return construct if name in ("x", "hidden_states") else None

    return make


def _turning(own: Function, found: Formula) -> Function | None:
    @ops.constexpr(check=False, reuse_result=False)
    def stands(_: int) -> bool:
        return found.stands()

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if stands(0) and _turns(describe(q), describe(k), describe(cos), describe(sin), unsqueeze_dim):
            cos, sin = cos.expand_dims(unsqueeze_dim), sin.expand_dims(unsqueeze_dim)
            return turn(q, cos, sin, False), turn(k, cos, sin, False)
        return own(q, k, cos, sin, position_ids, unsqueeze_dim)

    def parameters(function: Function) -> list[tuple[Any, ...]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    return apply_rotary_pos_emb if parameters(own) == parameters(apply_rotary_pos_emb) else None


def _written(text: str) -> str:
    """Returns a formula of this module in the form of `formula`."""
    function = ast.parse(text, mode="eval").body
    arguments = [ast.Name(f"x{i}") for i in range(len(function.args.args))]  # type: ignore[attr-defined]
    return ast.unparse(_result(function, _Substitute(arguments, function, {}, None, may_inline=False)))


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
_FORMULAS: dict[str, Callable[[Function, Formula], Function | None]] = {
    _written(f"lambda q, k, cos, sin, places, axis: ({_BOTH})"): _turning,
    **{
        _written("lambda self, x: " + text.format(y=f"x.to(float32) * {_ROOT.format(eps)}")): _normalizing(eps, *how)
        for text, how in _NORMS.items()
        for eps in ("eps", "variance_epsilon")
    },
}
