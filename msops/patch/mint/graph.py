"""Lets graph mode call functions for methods of Tensors.

MindSpore's compiler chooses a primitive for `x.chunk(2, dim=1)` in C++, where no Python can replace it. But it reads
programs by a parser in Python. So what this parser returns is changed: the call of a method that has no kernel becomes
the call of a function, `__msops_chunk__(x, 2, dim=1)`, which calls the method after all if x is not a Tensor.
"""

from __future__ import annotations

import ast
import contextlib
import re
from typing import TYPE_CHECKING, Any

from mindspore import Tensor

from msops.patch.replacement import refuse

from .methods import ALWAYS, NAMED, NEW_NAMES, OF_DIM, WITHOUT_GRAPH, begins_with_dim

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., Any]

_OWN = ("mindspore", "msops")  # what these packages call is replaced elsewhere
_CALLS = re.compile(rf"\.\s*({'|'.join([*ALWAYS, *OF_DIM, *NAMED, *WITHOUT_GRAPH])})\s*\(")


def rewriting(parse: Function) -> Function:
    """Makes the method `parse` of MindSpore's parser, which returns the tokens and the syntax tree of a function."""

    def parse_and_rewrite(self: Any) -> tuple[Any, Any]:
        tokens, tree = parse(self)
        if tokens is None or self.fn.__module__.partition(".")[0] in _OWN or not _CALLS.search(tokens.text):
            return tokens, tree
        self.global_namespace.dicts = (*self.global_namespace.dicts, _FUNCTIONS)
        own = type(tokens)(tokens.text, parse=True)  # the parser keeps the other tree
        return own, _Rewriter(self.fn, own.tree).visit(own.tree)

    return parse_and_rewrite


class _Rewriter(ast.NodeTransformer):
    """Replaces the calls of methods in the syntax tree of a function."""

    def __init__(self, function: Any, tree: ast.AST) -> None:
        stores = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        self.local = {*stores, *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))}
        self.outer = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it has no value yet
                self.outer[name] = cell.cell_contents

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        method = node.func
        if not (isinstance(method, ast.Attribute) and self.is_replaced(method.attr, node.keywords)):
            return node
        if self.may_be_tensor(method.value):
            function: Any = ast.copy_location(ast.Name(_function_name(method.attr), ast.Load()), method)
            for place in ("first_token", "last_token"):  # MindSpore shows the lines of an error by these
                setattr(function, place, getattr(method, place))
            node.func, node.args = function, [method.value, *node.args]
        return node

    def is_replaced(self, name: str, keywords: list[ast.keyword]) -> bool:
        if name in NAMED:
            return any(each.arg is None or each.arg in NEW_NAMES for each in keywords)
        return name in ALWAYS or name in OF_DIM or name in WITHOUT_GRAPH

    def may_be_tensor(self, receiver: ast.expr) -> bool:
        """Tells whether an expression may stand for a Tensor. A module's name does not, which no function takes."""
        root = receiver
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.local and root.id in self.outer:
            return root is receiver and isinstance(self.outer[root.id], Tensor)
        if isinstance(root, ast.Call) and isinstance(root.func, ast.Name) and root.func.id == "super":
            return False
        return not isinstance(root, ast.Constant)


def _function_name(method: str) -> str:
    return f"__msops_{method}__"


def _of_tensors(name: str, function: Function) -> Function:
    def method(receiver: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(receiver, Tensor):
            return function(receiver, *arguments, **named)
        return getattr(receiver, name)(*arguments, **named)

    return method


def _of_dim(name: str, function: Function) -> Function:
    def method(receiver: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(receiver, Tensor) and begins_with_dim(*arguments, **named):
            return function(receiver, *arguments, **named)
        return getattr(receiver, name)(*arguments, **named)

    return method


def _refusing(name: str) -> Function:
    words = (
        f"mint.Tensor.{name}: graph mode cannot write into a Tensor by this method on GPU and CPU: use a method that "
        "returns a new one, or copy_"
    )

    def function(*arguments: Any, **named: Any) -> Any:
        return refuse(words)

    return function


_MADE = {
    **{name: _of_tensors(name, function) for name, function in {**ALWAYS, **NAMED}.items()},
    **{name: _of_tensors(name, _refusing(name)) for name in WITHOUT_GRAPH},
    **{name: _of_dim(name, function) for name, function in OF_DIM.items()},
}
_FUNCTIONS = {_function_name(name): function for name, function in _MADE.items()}
METHODS = {"graph._parse.parser.Parser.parse": rewriting, "_extends.parse.parser.Parser.parse": rewriting}
