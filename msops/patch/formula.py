"""Tells what a function of a library computes, as one expression of its arguments: its formula."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Function = Callable[..., Any]

_MOST_LINES = 24  # of a function: with many more, the expression could be too long
_CASTS: dict[str, Any] = {  # methods that are x.to(dtype): its argument, of theirs
    "astype": lambda dtype: [dtype],
    "float": lambda: [ast.Name("float32")],
    "type_as": lambda like: [ast.Attribute(like, "dtype")],
}
_ORDERS = {"softmax": ("dim", "dtype"), "dropout": ("p", "training")}  # names of the arguments after the first
_NAMES = {"axis": "dim", "keep_dims": "keepdim"}
_OF_SIZES = {"broadcast_to": "expand", "expand": "expand", "reshape": "reshape"}  # methods that take sizes or a tuple
_SWAPPED = {frozenset((2, 3)): (2, 3), frozenset((-1, -2)): (2, 3), frozenset((1, 2)): (1, 2)}  # axes of four


class NoFormulaError(Exception):
    """A function computes more than one expression, or what its names mean cannot be told, perhaps not yet."""

    def __init__(self, words: str, *, is_final: bool = True) -> None:
        super().__init__(words)
        self.is_final = is_final


class Found(NamedTuple):
    """What stands for a function, the operator that it calls, the formula that must stand if the function is a
    method, a set for the reasons why calls stay with the library's own code, and what tells a Cell whether it stands,
    if it is more than the formula."""

    now: Function
    operator: str
    formula: Formula | None
    reasons: set[str]
    stands: Function | None = None


class Meanings:
    """What the names of libraries' modules mean to functions that msops recognizes."""

    def __init__(self) -> None:
        self.names: list[tuple[dict[str, Any], str, Any]] = []  # a namespace, a name in it, and what it means

    def stand(self) -> bool:
        """Tells whether all names mean what they did."""
        return all(scope.get(name) is meaning for scope, name, meaning in self.names)

    def meaning(self, scope: dict[str, Any], name: str) -> Any:
        """Returns what a name means in a module."""
        if name not in scope:
            raise NoFormulaError(f"{name} is not MindSpore's", is_final=hasattr(builtins, name))
        self.names.append((scope, name, scope[name]))
        return scope[name]

    def bare_name(self, node: ast.Name | ast.Attribute, scope: dict[str, Any]) -> str:
        """Returns the name, without modules before it, of what MindSpore or Python's math defines."""
        *path, name = path_of(node)
        if not path:
            is_known = is_mindspores(name, self.meaning(scope, name))
        else:
            module = self.meaning(scope, path[0])
            for each in path[1:]:
                module = getattr(module, each, None)
            is_known = inspect.ismodule(module) and module.__name__.partition(".")[0] in ("mindspore", "math")
        if not is_known:
            raise NoFormulaError(f"{ast.unparse(node)} is not MindSpore's")
        return name


class Formula(Meanings):
    """What a function computes, as one expression of its arguments x0, x1, ... , or "" if that cannot be told.

    Methods of the class `owner` are inlined, and so are functions of the function's module: the formula stands as long
    as their names mean the same. `decisions` says which of the function's conditions are true; with any other one, the
    function is no formula. `names` are the arguments' in place of x0, x1, ... ."""

    def __init__(
        self,
        function: Function,
        owner: Any = None,
        decisions: dict[str, bool] | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.text, self.why = "", NoFormulaError("its formula is none that msops knows")
        self.methods: dict[str, Function] = {}
        self.owner = owner if isinstance(owner, type) else None
        self.decisions = decisions or {}
        self.flag = f"_msops_{id(self)}_stands"  # the property of a class that tells whether the formula does
        arguments: list[Any] = [ast.Name(each) for each in names or map("x{}".format, range(_count(function)))]
        try:
            self.text = ast.unparse(self.result(function, arguments, may_inline=True))
        except NoFormulaError as error:
            self.why = error
        except Exception:  # noqa: BLE001 (whatever is wrong with other people's source, it is no formula)
            self.why = NoFormulaError("its source cannot be read")

    def stands(self, cell: Any = None) -> bool:
        """Tells whether all names mean what they did, to a Cell also those of its methods."""
        return self.stand() and all(
            getattr(getattr(cell, name, None), "__func__", None) is method for name, method in self.methods.items()
        )

    def result(self, function: Function, arguments: list[Any], *, may_inline: bool) -> ast.expr:
        """Returns the expression that a function returns."""
        if inspect.unwrap(function) is not function:  # its source is that of another function
            raise NoFormulaError(f"{function.__name__} is wrapped")
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
            raise NoFormulaError(f"{function.__name__} is decorated, or no function with a name")
        return _result(tree, _Substitute(arguments, tree, function.__globals__, self, may_inline=may_inline))

    def method(self, name: str) -> Function | None:
        """Returns the method of the class that has a name, if the class defines one."""
        method = vars(self.owner).get(name) if self.owner else None
        if not inspect.isfunction(method):
            return None
        self.methods[name] = method
        return method


def _count(function: Function) -> int:
    return function.__code__.co_argcount


def is_mindspores(name: str, meaning: Any) -> bool:
    """Tells whether this is what MindSpore, or the patch, calls so."""
    own = getattr(meaning, "__name__", None)
    root = (getattr(meaning, "__module__", None) or "").partition(".")[0]
    return root in ("mindspore", "msops") and (own == name if own else meaning == getattr(mindspore, name, None))


def _result(tree: Any, substitute: _Substitute) -> ast.expr:
    """Returns the expression that a function's syntax tree returns after a few assignments."""
    lines: list[ast.stmt] = tree.body if isinstance(tree, ast.FunctionDef) else [ast.Return(tree.body)]
    for line in _taken(lines[:_MOST_LINES], substitute):
        if isinstance(line, ast.Return) and line.value:
            result: ast.expr = substitute.visit(line.value)
            return result
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            _assign(line.targets[0], substitute.visit(line.value), substitute.values)
        elif not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)):  # a docstring
            raise NoFormulaError(f"it does more than to assign: {ast.unparse(line).splitlines()[0]}")
    raise NoFormulaError("it returns nothing, or is long")


def _taken(lines: list[ast.stmt], substitute: _Substitute) -> Iterator[ast.stmt]:
    """Yields the lines that run, where all conditions are decided."""
    for line in lines:
        if isinstance(line, ast.If):
            yield from _taken(line.body if substitute.decided(line.test) else line.orelse, substitute)
        else:
            yield line


def _assign(target: ast.expr, value: ast.expr, values: dict[str, Any]) -> None:
    """Lets a name, or those of a shape's sizes, stand for a value."""
    if isinstance(target, ast.Name):
        values[target.id] = value
    elif isinstance(target, ast.Tuple) and _is_tuple(value, len(target.elts)):
        for i, each in enumerate(target.elts):
            _assign(each, ast.Subscript(value, ast.Constant(i)), values)
    else:
        raise NoFormulaError(f"it assigns to {ast.unparse(target)}")


def _is_tuple(value: ast.expr, length: int) -> bool:
    """Tells whether a value is a shape, or is cut into as many parts."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "chunk":
        return bool(value.args) and number(value.args[0]) == length
    return isinstance(value, ast.Attribute) and value.attr == "shape"


class _Substitute(ast.NodeTransformer):
    """Replaces variables by their values, what MindSpore defines by its bare name, and calls of functions and methods
    by what these return. Without a formula, as in those of this module, names stand for themselves."""

    def __init__(
        self, arguments: list[Any], tree: Any, scope: dict[str, Any], found: Formula | None, *, may_inline: bool
    ) -> None:
        self.values: dict[str, Any] = dict(zip((each.arg for each in tree.args.args), arguments))
        self.scope, self.found, self.may_inline = scope, found, may_inline

    def decided(self, test: ast.expr) -> bool:
        """Tells whether a condition is true."""
        text = ast.unparse(self.visit(test))
        if self.found is None or text not in self.found.decisions:
            raise NoFormulaError(f"it depends on {text}")
        return self.found.decisions[text]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.values:
            value: ast.expr = self.values[node.id]
            return value
        if self.found:
            self.found.bare_name(node, self.scope)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        path = path_of(node)
        if self.found and len(path) > 1 and path[0] not in self.values:
            return ast.Name(self.found.bare_name(node, self.scope))
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        result: ast.expr = self.visit(node.body if self.decided(node.test) else node.orelse)
        return result

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called, of_self = self._inlined(node.func)
        if self.found and called and not node.keywords:
            arguments = [*of_self, *map(self.visit, node.args)]
            return self.found.result(called, arguments, may_inline=False)
        self.generic_visit(node)
        return _plain(node)

    def _inlined(self, function: ast.expr) -> tuple[Function | None, list[ast.expr]]:
        """Returns what is called, if its result takes the call's place, and the arguments that it gets first."""
        if self.found is None or not self.may_inline:  # what an inlined function calls stays a call
            return None, []
        if isinstance(function, ast.Name) and function.id not in self.values:
            called = self.found.meaning(self.scope, function.id)
            return (called if inspect.isfunction(called) and not is_mindspores(function.id, called) else None), []
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            of_self = self.values.get(function.value.id)
            if isinstance(of_self, ast.Name) and of_self.id == "x0":
                return self.found.method(function.attr), [of_self]
        return None, []


def path_of(node: ast.expr) -> list[str]:
    """Returns the names of a chain such as mint.nn.functional, or nothing for other expressions before the dot."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else names[-1:]


def _plain(call: ast.Call) -> ast.expr:
    """Returns one form of calls that are written in several."""
    function, arguments = call.func, call.args
    keywords = [ast.keyword(_NAMES.get(each.arg or "", each.arg), each.value) for each in call.keywords]
    if isinstance(function, ast.Name) and function.id in _ORDERS:
        named = {each.arg: each.value for each in keywords}
        named.update(zip(_ORDERS[function.id], arguments[1:]))
        return ast.Call(function, arguments[:1], [ast.keyword(name, named[name]) for name in sorted(named, key=str)])
    if isinstance(function, ast.Name) and function.id in ("transpose", "broadcast_to") and not call.keywords:
        function, arguments = ast.Attribute(arguments[0], function.id), arguments[1:]
    if isinstance(function, ast.Attribute) and function.attr == "mean":
        return ast.Call(function, arguments, keywords)
    if not isinstance(function, ast.Attribute) or call.keywords:
        return call
    x, name = function.value, function.attr
    if name in _CASTS:
        return ast.Call(ast.Attribute(x, "to"), _CASTS[name](*arguments), [])
    if name == "contiguous" and not arguments:
        return x
    if name in _OF_SIZES:
        sizes = arguments[0].elts if isinstance(arguments[0], (ast.Tuple, ast.List)) else arguments
        return ast.Call(ast.Attribute(x, _OF_SIZES[name]), sizes, [])
    if name in ("swapaxes", "transpose") and len(arguments) == 2:
        axes = _SWAPPED.get(frozenset(map(number, arguments)), ())
        if axes:
            return ast.Call(ast.Attribute(x, "swapaxes"), [ast.Constant(axis) for axis in axes], [])
    return call


def number(node: ast.expr) -> Any:
    """Returns the number, or another constant, that code writes out, or None for other code."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def written(text: str) -> str:
    """Returns a formula of msops in the form of those that are found."""
    function: Any = ast.parse(text, mode="eval").body
    arguments = [ast.Name(f"x{i}") for i in range(len(function.args.args))]
    return ast.unparse(_result(function, _Substitute(arguments, function, {}, None, may_inline=False)))
