"""Leaves out the cast of logits to float32, which a library's loss function makes before it calls cross_entropy.

The kernels compute in float32 whatever the logits are. The library's function is compiled again without the cast; where
the kernels do not take a call, it is made later.
"""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor

from msops.core.compiled import once
from msops.core.inputs import describe
from msops.operators.cross_entropy import cross_entropy

from .formula import Formula, Found, NoFormulaError, path_of, written
from .rewritten import compiled, tree_of
from .statements import PREFIX, is_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from msops.core.inputs import Description

    Function = Callable[..., Any]

LOSS = "loss_function"  # the property of models that returns such a function
_OF_ROWS = f"{PREFIX}loss_of_rows"
_FORMULAS = {  # of what a loss function calls: whether it gets a count, and what it returns
    True: "lambda x0, x1, x2, x3: CrossEntropyLoss(ignore_index=x3, reduction='sum')(x0, x1) / x2",
    False: "lambda x0, x1, x2, x3: CrossEntropyLoss(ignore_index=x3, reduction='mean')(x0, x1)",
}
_ARGUMENTS = [inspect.Parameter.empty, inspect.Parameter.empty, None, -100]  # their defaults
_VIEWS = {"view", "reshape"}


def giving(own: property, loss_of: Function) -> property:
    """Returns a property that gives what `loss_of` makes of a model's loss function."""
    return property(lambda self: loss_of(own.fget(self)), own.fset, own.fdel, own.__doc__)  # type: ignore[misc]


def losing(own: Function) -> Found:
    """Returns what stands for a loss function."""
    tree = tree_of(own)
    reader = _Reader(own.__code__.co_varnames[0])
    reader.read(tree)
    called = own.__globals__.get(reader.called)
    if not inspect.isfunction(called):
        raise NoFormulaError("it calls no function of its module with the logits")
    formulas = _formulas_of(called)
    reasons = set[str]()

    def loss_of_rows(
        function: Function, logits: Any, labels: Any, count: Any = None, ignored: Any = -100, **named: Any
    ) -> Any:
        are_own = function is called and all(each.stands() for each in formulas)
        is_known = are_own and isinstance(logits, Tensor) and isinstance(labels, Tensor) and type(ignored) is int
        if is_known and _takes(describe(logits), describe(labels)):
            if count is None:
                return cross_entropy(logits, labels, None, ignored)
            return cross_entropy(logits, labels, None, ignored, "sum") / count
        reasons.add("a call's dtypes or shapes are not those of rows of float16")
        return function(logits.float(), labels, count, ignored, **named)

    now = compiled(own, tree, {_OF_ROWS: loss_of_rows})
    return Found(now, "msops.cross_entropy", None, reasons)


def _formulas_of(called: Function) -> list[Formula]:
    parameters = list(inspect.signature(called).parameters.values())
    if [each.default for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD] != _ARGUMENTS:
        raise NoFormulaError(f"{called.__name__} has other arguments than the formula")
    formulas = []
    for has_count, text in _FORMULAS.items():
        is_sum = f"'{'sum' if has_count else 'mean'}' == 'sum'"
        formula = Formula(called, None, {"x2 is not None": has_count, is_sum: has_count})
        if formula.text != written(text):
            raise formula.why
        formulas.append(formula)
    return formulas


@once
def _takes(logits: Description, labels: Description) -> bool:
    is_matrix = logits[0] is not None and len(logits[0]) == 2 and None not in logits[0] and 0 not in logits[0]
    is_half = logits[1] == mindspore.float16 and labels[1] in (mindspore.int32, mindspore.int64)
    return is_matrix and is_half and labels[0] == logits[0][:1]


class _Reader(ast.NodeTransformer):
    """Takes the cast of a variable out of a function, and finds the one function that it is given to."""

    def __init__(self, logits: str) -> None:
        self.called = ""
        self._logits = logits

    def read(self, tree: ast.FunctionDef) -> None:
        lines = [line for line in tree.body if not self._casts(line)]
        if len(lines) != len(tree.body) - 1:
            raise NoFormulaError("it does not cast its first argument to float32, or does so twice")
        tree.body = lines
        self.visit(tree)
        if not self.called or any(map(self._reads, ast.walk(tree))):
            raise NoFormulaError("it computes more than one function of its first argument")

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        """Passes by a view of the logits that takes their name."""
        of = self._method_of_logits(node)
        if of is not None and of.func.attr in _VIEWS:  # type: ignore[attr-defined]
            of.func.value = _Checked(self._logits, ast.Load())  # type: ignore[attr-defined]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.args and path_of(node.args[0]) == [self._logits]:
            if self.called or isinstance(node.args[0], _Checked):
                raise NoFormulaError("it gives its first argument to several functions")
            self.called = node.func.id
            arguments = [node.func, _Checked(self._logits, ast.Load()), *node.args[1:]]
            return ast.copy_location(ast.Call(ast.Name(_OF_ROWS, ast.Load()), arguments, node.keywords), node)
        return node

    def _casts(self, line: ast.stmt) -> bool:
        of = self._method_of_logits(line)
        return of is not None and of.func.attr == "float" and not of.args  # type: ignore[attr-defined]

    def _method_of_logits(self, line: ast.stmt) -> ast.Call | None:
        """Returns the call in a statement that assigns to the logits what a method of theirs returns."""
        if not isinstance(line, ast.Assign) or len(line.targets) != 1 or path_of(line.targets[0]) != [self._logits]:
            return None
        call = line.value
        is_method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and not call.keywords
        return call if is_method and path_of(call.func.value) == [self._logits] else None  # type: ignore[attr-defined, return-value]

    def _reads(self, node: ast.AST) -> bool:
        is_name = isinstance(node, ast.Name) and node.id == self._logits
        return is_name and is_load(node) and not isinstance(node, _Checked)


class _Checked(ast.Name):
    """A variable that is read where its dtype does not matter."""
