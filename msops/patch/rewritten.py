"""Compiles a library's function again from its own source, in which some statements are others.

Its `__wrapped__` is the library's function, which graph mode compiles. Tracebacks name the library's lines.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from .callers import READ_NAMES
from .formula import NoFormulaError, path_of
from .statements import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

_MAKE = f"{PREFIX}make"


def tree_of(own: Function) -> ast.FunctionDef:
    """Returns the syntax tree of a function that may be compiled again."""
    code = own.__code__
    if inspect.unwrap(own) is not own or code.co_freevars or READ_NAMES & set(code.co_names) or not code.co_argcount:
        raise NoFormulaError("it is wrapped, or reads variables of other functions")
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(own))).body
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or any(map(_is_mangled, ast.walk(tree))):
        raise NoFormulaError("it is decorated, or has private names")
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    return tree


def tree_of_method(own: Function) -> ast.FunctionDef:
    """Returns what `tree_of` does, or raises an error without words: most methods are not formulas."""
    try:
        return tree_of(own)
    except (NoFormulaError, OSError, SyntaxError, TypeError, ValueError):
        raise NoFormulaError("") from None


def may_call(cls: type, method: Any, made: str) -> bool:
    """Tells whether a method may call a norm of the class `made`, which the `__init__` of its own class names."""
    making = vars(cls).get("__init__")
    if not inspect.isfunction(making) or not inspect.isfunction(method) or method is making:
        return False
    return made in making.__code__.co_names and any("norm" in each.lower() for each in method.__code__.co_names)


def is_norm_of(node: ast.AST, cell: str) -> bool:
    """Tells whether this is a call of a norm of the Cell, with one argument."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1:
        return False
    path, is_one = path_of(node.func), not isinstance(node.args[0], ast.Starred)
    return is_one and len(path) == 2 and path[0] == cell and "norm" in path[1].lower()


def joined(tree: ast.FunctionDef, are_one: Function, join: Function) -> None:
    """Joins two neighbouring statements wherever `are_one(second, first)`: `join(second, first)` changes the second
    one, which takes the place of both."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            own = getattr(node, name, None)
            if not isinstance(own, list):  # an expression has no statements
                continue
            lines: list[ast.stmt] = []
            for line in own:
                if lines and are_one(line, lines[-1]):
                    join(line, lines.pop())
                lines.append(line)
            setattr(node, name, lines)


def push(line: ast.If, follows: ast.stmt) -> None:
    """Moves the statement that follows an `if` to the ends of its branches."""
    for lines in (line.body, line.orelse):
        if lines and isinstance(lines[-1], ast.If):
            push(lines[-1], follows)
        else:
            lines.append(copy.deepcopy(follows))


def _is_mangled(node: ast.AST) -> bool:
    """Tells whether Python gives a name of a class another meaning outside of it."""
    name = str(getattr(node, "id", getattr(node, "attr", getattr(node, "arg", ""))))
    return name.startswith("__") and not name.endswith("__")


def compiled(own: Function, tree: ast.FunctionDef, functions: dict[str, Any]) -> Any:
    """Returns a function of this code that has the rest of a library's, and that may call these functions."""
    for each in ast.walk(tree):
        if isinstance(each, ast.arg):
            each.annotation = None
    tree.returns, tree.args.defaults, tree.args.kw_defaults = None, [], [None] * len(tree.args.kwonlyargs)
    names = ast.arguments([], [ast.arg(each) for each in functions], None, [], [], None, [])
    make = ast.FunctionDef(_MAKE, names, [tree, ast.Return(ast.Name(tree.name, ast.Load()))], [])
    module = ast.fix_missing_locations(ast.Module([make], []))
    made: dict[str, Any] = {}
    exec(compile(module, own.__code__.co_filename, "exec", dont_inherit=True), own.__globals__, made)  # noqa: S102
    now = made[_MAKE](*functions.values())
    for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__qualname__"):
        setattr(now, name, getattr(own, name))
    now.__module__, now.__wrapped__ = __name__, own
    return now
