"""Finds attention, softmax(q kᵀ scale + mask) v, among the statements of a longer function.

The statements from the product of queries and keys to the product with the values are read one after the other. Each
must be a step of the formula, or leave the scores alone. The condition of a step stays a condition. Where a branch is
anything else, its condition becomes a guard: calls in which it is true are the library's.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mindspore import Tensor, float16, float32

from .formula import NoFormulaError, path_of
from .statements import (
    CASTS,
    NO_PRODUCT,
    PREFIX,
    Rename,
    Replace,
    Told,
    both,
    changes,
    first_line,
    is_pure,
    names_read,
    names_written,
    only_raises,
    texts,
    values_read,
)

if TYPE_CHECKING:
    from .statements import Calls

    Conditions = tuple[ast.expr, ...]

OUT = f"{PREFIX}out"  # the variable that has the result
PRODUCTS = {"matmul", "bmm"}
_SIGNS = {ast.Mult: "*", ast.Div: "/", ast.Add: "+"}
_NAMES_OF_SIGNS = {"mul": "*", "div": "/", "add": "+"}
LEAST = {float16: -65504.0, float32: float(np.finfo(np.float32).min)}
_KEPT = (ast.Assign, ast.AugAssign, ast.If, ast.Expr, ast.Raise)  # statements that may run before the scores


class Step(NamedTuple):
    """What is done to the scores if some conditions hold: `*` or `/` a number, `+` a tensor, or the least number takes
    their place where a tensor is true (`hide`) or false (`keep`); and the sizes of the scores' view of four axes."""

    what: str
    value: ast.expr
    conditions: Conditions
    sizes: tuple[ast.expr, ...]


class Inner(NamedTuple):
    """A statement that leaves the scores alone, of a branch that does not. It writes variables of other names."""

    line: ast.stmt
    conditions: Conditions
    names: set[str]  # in the library


class _Value(NamedTuple):
    """What a variable has: scores or weights."""

    is_weights: bool = False
    is_own: bool = True  # its dtype is that of the queries
    is_dropped: bool = False  # by dropout
    sizes: tuple[ast.expr, ...] = ()  # of a view of four axes, where the products have three


class Steps:
    """The steps of attention in a function, whose calls `calls` reads."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.query: Any = None
        self.key: Any = None
        self.value: Any = None
        self.axes = 0  # how many the queries have, or 0 if the product takes any number
        self.steps: list[Step | Inner] = []
        self.dropout: list[ast.expr] = []  # a Cell, or the probability and whether the Cell is in training
        self.dtypes: list[ast.expr] = []  # what must be the dtype of the queries
        self.guards: list[ast.expr] = []
        self.moved: list[ast.stmt] = []  # statements that leave the scores alone, to run before all others
        self.left: list[ast.stmt] = []  # the others, as they are
        # Steps and guards before a moved statement that reads the scores' dtype or shape.
        self.told: tuple[list[Step], list[ast.expr]] | None = None
        self.last: ast.stmt | None = None  # the last of these, with OUT in place of the product
        self.values: dict[str, _Value] = {}
        self._read: set[str] = set()  # by conditions and the products
        self._read_by_steps: set[str] = set()
        self._written: set[str] = set()  # by statements that are left
        self._inside: dict[str, Conditions] = {}  # what inner statements write
        self._least: dict[str, Conditions] = {}  # variables that have the least number of the queries' dtype
        self.count = 0  # of the statements that are read

    def read(self, lines: list[ast.stmt]) -> None:
        """Reads statements, from the product of queries and keys to that of weights and values."""
        for line in lines:
            self.count += 1
            if self._ends(line):
                return
            self._take(line, ())
            if self.query is None:
                break
        raise NoFormulaError(NO_PRODUCT)

    def _ends(self, line: ast.stmt) -> bool:
        """Tells whether a statement multiplies weights by values, and keeps that product."""
        if self.query is None or not isinstance(line, ast.Assign):
            return False
        plain: Any = self._plain(line)
        for node in ast.walk(plain.value):
            if (
                not isinstance(node, ast.Call)
                or not self._holds(node.args[:1])
                or not self._calls.is_of(node, PRODUCTS)
            ):
                continue
            _, (weights, self.value, *more), named = self._calls.read(node)
            value = self._valued(weights, ())
            if more or named or self._holds(self.value) or not (value.is_weights and value.is_own) or value.sizes:
                raise NoFormulaError("its weights have another dtype or shape than the formula's")
            self._note(self.value)
            self.left.append(line)
            self.last = Replace(node, OUT).visit(plain)
            if self._holds(self.last):
                raise NoFormulaError("it uses the weights beside their product with the values")
            return True
        return False

    def _take(self, line: ast.stmt, conditions: Conditions) -> None:
        """Reads a statement. Statements with conditions are parts of one that is left."""
        plain: Any = self._plain(line)
        if isinstance(plain, ast.AugAssign) and isinstance(plain.target, ast.Name) and self._holds(plain.target):
            if len(self.values) > 1:
                raise NoFormulaError("it changes scores in place that have two names")
            plain = ast.Assign([plain.target], ast.BinOp(ast.Name(plain.target.id), plain.op, plain.value))
        if isinstance(plain, ast.Assert):
            plain = ast.If(ast.UnaryOp(ast.Not(), plain.test), [ast.Raise()], [])
        is_chain = self._holds(plain) or (self.query is None and not conditions)
        if not is_chain and not (isinstance(plain, ast.If) and only_raises(plain)):
            if not conditions and ast.unparse(plain) != ast.unparse(line):
                self._tell()
            self._keep(plain, conditions)
            return
        if isinstance(plain, ast.If):  # the parts of a branch tell another shape after a view
            self._branch(plain.test, line if isinstance(line, ast.If) else plain, conditions)
        elif isinstance(plain, ast.Assign) and isinstance(plain.targets[0], ast.Name) and len(plain.targets) == 1:
            value, name = self._valued(plain.value, conditions), plain.targets[0].id
            self._written.add(name)
            self.values[name] = value
        else:
            raise NoFormulaError(f"it has among its scores: {first_line(line)}")
        if not conditions:
            self.left.append(line)

    def _branch(self, test: ast.expr, line: ast.If, conditions: Conditions) -> None:
        other = ast.UnaryOp(ast.Not(), test)
        if not is_pure(test) or self._holds(test) or names_read(test) & self._written:
            raise NoFormulaError(f"it depends on {ast.unparse(test)}")
        self._note(test)
        if only_raises(line):
            self.guards.append(both((*conditions, test)))
            return
        body, orelse = (*conditions, test), (*conditions, other)
        first, second = self._after(line.body, body), self._after(line.orelse, orelse)
        if isinstance(first, Steps) and isinstance(second, Steps) and first.values == second.values:
            first.values = self.values
            for each in line.orelse:
                first._take(each, orelse)
            vars(self).update(vars(first))
        elif isinstance(second, Steps):
            vars(self).update(vars(second))
            self.guards.append(both(body))
        elif isinstance(first, Steps):
            vars(self).update(vars(first))
            self.guards.append(both(orelse))
        else:
            raise first

    def _after(self, lines: list[ast.stmt], conditions: Conditions) -> Steps | NoFormulaError:
        """Returns the steps with those of some more statements, or why there are none."""
        steps = copy.copy(self)
        for name, each in vars(self).items():
            if isinstance(each, (list, dict, set)):
                setattr(steps, name, copy.copy(each))
        try:
            for each in lines:
                steps._take(each, conditions)
        except NoFormulaError as error:
            return error
        return steps

    def _tell(self) -> None:
        """Notes the steps that must leave the scores' dtype and shape alone, which a moved statement reads."""
        steps = [each for each in self.steps if isinstance(each, Step)]
        read = [node for each in steps for node in (each.value, *each.conditions, *each.sizes)]
        moved = {name for line in self.moved for name in names_written(line)}
        if len(steps) < len(self.steps) or moved & set().union(*map(names_read, [*read, *self.guards])):
            raise NoFormulaError("it reads the dtype or the shape of scores that a step may change")
        self.told = steps, list(self.guards)

    def _keep(self, line: ast.stmt, conditions: Conditions) -> None:
        """Takes a statement that leaves the scores alone, and may run before them."""
        nodes = list(ast.walk(line))
        written = names_written(line)
        acts = any(changes(each) or isinstance(each, ast.Expr) for each in nodes)
        given = (names_read(self.query) | names_read(self.key) | self._read_by_steps) - {self._calls.cell}
        may_change = any(values_read(each) & given for each in nodes if self._calls.may_change(each))
        if conditions:  # it runs again where the library's own code runs after it
            calls = any(isinstance(each, ast.Call) and self._calls.is_of_cell(each) for each in nodes)
            is_other = bool(acts or calls or not isinstance(line, ast.Assign) or written & self._read)
        else:
            is_statement = all(isinstance(each, _KEPT) for each in nodes if isinstance(each, ast.stmt))
            is_other = not is_statement or bool(acts and values_read(line) & self._read)  # it may change the queries
            is_other = is_other or bool((names_read(line) | written) & self._written or written & self._read_by_steps)
        if is_other or may_change or written & self._read:
            raise NoFormulaError(f"it has among its scores: {first_line(line)}")
        is_least = isinstance(line, ast.Assign) and self._is_least(line.value, conditions)
        self._least = {name: each for name, each in self._least.items() if name not in written}
        self._least.update(dict.fromkeys(written, conditions) if is_least else {})
        if not conditions:
            self.moved.append(line)
            return
        renamed = self._renamed(line, conditions)
        self._inside.update(dict.fromkeys(written, conditions))
        self._written |= written
        self.steps.append(Inner(Rename({each: PREFIX + each for each in written}).visit(renamed), conditions, written))

    def _renamed(self, node: Any, conditions: Conditions) -> Any:
        """Returns code that reads the variables that inner statements write by their other names."""
        read = names_read(node) & set(self._inside)
        if any(conditions[: len(self._inside[each])] != self._inside[each] for each in read):
            raise NoFormulaError("it reads a variable that other calls do not write")
        return Rename({each: PREFIX + each for each in read}).visit(copy.deepcopy(node)) if read else node

    def _note(self, *nodes: ast.expr) -> None:
        """Notes what is read after all inner statements, or before them."""
        for each in nodes:
            if names_read(each) & set(self._inside):
                raise NoFormulaError("it reads a variable that other calls do not write")
            self._read |= names_read(each)

    def _valued(self, node: ast.expr, conditions: Conditions) -> _Value:
        """Returns what an expression of scores or weights is, and notes its steps."""
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.values[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            return self._combined(_SIGNS[type(node.op)], node.left, node.right, conditions)
        if not isinstance(node, ast.Call):
            raise NoFormulaError(f"it has among its scores: {ast.unparse(node)}")
        name, arguments, named = self._calls.read(node)
        if self.query is None and name in PRODUCTS and not named and len(arguments) == 2:
            self.query, (self.key, self.axes) = arguments[0], self._calls.turned(arguments[1])
            self._note(self.query, self.key)
            return _Value()
        if name in _NAMES_OF_SIGNS and len(arguments) == 2 and not named:
            return self._combined(_NAMES_OF_SIGNS[name], arguments[0], arguments[1], conditions)
        if name == "where" and len(arguments) == 3 and not named:
            return self._hidden("keep", arguments[1], arguments[0], arguments[2], conditions)
        if name == "masked_fill" and len(arguments) == 3 and not named:
            return self._hidden("hide", arguments[0], arguments[1], arguments[2], conditions)
        if not self._holds(arguments[:1]) and self.query is not None:
            raise NoFormulaError(f"it has among its scores: {ast.unparse(node)}")
        value = self._valued(arguments[0], conditions)
        if name == "contiguous":
            return value
        if name in CASTS:
            return value._replace(is_own=self._casts_to_own(name, arguments[1:], named))
        if name in ("view", "reshape") and not named:
            return self._viewed(value, arguments[1:])
        if name == "softmax" and not value.is_weights and not conditions:
            dtype = named.pop("dtype", None)
            if set(named) <= {"dim", "axis"} and texts([*arguments[1:], *named.values()]) == ["-1"]:
                return value._replace(is_weights=True, is_own=self._is_own(dtype) if dtype else value.is_own)
        if name in ("dropout", self._calls.cell) and value.is_weights and not value.is_dropped and not conditions:
            self.dropout = self._dropping(node, arguments[1:], named)
            self._note(*self.dropout)
            return value._replace(is_dropped=True)
        raise NoFormulaError(f"it has among its scores: {ast.unparse(node)}")

    def _combined(self, sign: str, left: ast.expr, right: ast.expr, conditions: Conditions) -> _Value:
        """Returns scores times, divided by or plus something else."""
        is_left = self._holds(left) or (self.query is None and not self._holds(right) and _has_product(left))
        scores, other = (left, right) if is_left or sign == "/" else (right, left)
        value = self._valued(scores, conditions)
        if value.is_weights or self._holds(other):
            raise NoFormulaError("it changes its weights" if value.is_weights else "it combines scores with scores")
        if sign == "+":
            self._add_step(sign, other, conditions, value)
            return value
        for each in [each for each in self.steps if isinstance(each, Step) and each.what not in ("*", "/")]:
            if not each.conditions:
                raise NoFormulaError("it scales the scores after a mask")
            self.guards.append(both(each.conditions))
            self.steps.remove(each)
        self._add_step(sign, self._calls.number_of(other), conditions, value)
        return value

    def _hidden(self, what: str, scores: ast.expr, mask: ast.expr, fill: ast.expr, conditions: Conditions) -> _Value:
        value = self._valued(scores, conditions)
        if value.is_weights or not value.is_own or self._holds(mask) or not self._is_least(fill, conditions):
            raise NoFormulaError("it hides by another number than the least one, or hides weights")
        self._add_step(what, mask, conditions, value)
        return value

    def _add_step(self, what: str, value: ast.expr, conditions: Conditions, of: _Value) -> None:
        calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
        if any(changes(each) for each in ast.walk(value)) or any(self._calls.is_of_cell(each) for each in calls):
            raise NoFormulaError(f"it calls {ast.unparse(value)}")
        self._note(*of.sizes)
        self._read_by_steps |= names_read(value)
        self.steps.append(Step(what, self._renamed(value, conditions), conditions, of.sizes))

    def _is_least(self, node: ast.expr, conditions: Conditions) -> bool:
        """Tells whether this is the least number of the queries' dtype, by what a library's function returns for it."""
        if isinstance(node, ast.Name) and node.id in self._least:
            before = self._least[node.id]
            return conditions[: len(before)] == before
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)) or not node.args:
            return False
        own = f"{ast.unparse(self.query)}.dtype"
        function = self._calls.global_function(node) if "min" in ast.unparse(node.func) else None
        if function is not None:
            is_of_own = texts(node.args) == [own] and not node.keywords
            return is_of_own and all(_least_of(function, dtype) == least for dtype, least in LEAST.items())
        if not self._calls.is_of(node, {"full", "tensor", "Tensor"}) or texts(each.value for each in node.keywords) != [
            own
        ]:
            return False
        is_full = len(node.args) == 2 and ast.unparse(node.args[0]) in ("[]", "()")
        return (is_full or len(node.args) == 1) and self._is_least(node.args[-1], conditions)

    def _casts_to_own(self, name: str, arguments: list[ast.expr], named: dict[str, ast.expr]) -> bool:
        """Tells whether a cast gives the queries' dtype, not float32."""
        if name == "float":
            return False
        (of,) = [*arguments, *named.values()]
        if name == "type_as" and self._holds(of):
            return self._valued(of, ()).is_own
        return self._is_own(ast.Attribute(of, "dtype", ast.Load()) if name == "type_as" else of)

    def _is_own(self, dtype: ast.expr) -> bool:
        """Tells whether a dtype is to be the queries', or else is float32."""
        if self._calls.is_local(dtype) and is_pure(dtype) and not self._holds(dtype):
            self.dtypes.append(dtype)
            self._note(dtype)
            return True
        is_name = isinstance(dtype, (ast.Name, ast.Attribute)) and not self._holds(dtype)
        if not is_name or self._calls.bare_name(dtype) != "float32":
            raise NoFormulaError(f"it casts scores to {ast.unparse(dtype)}")
        return False

    def _viewed(self, value: _Value, sizes: list[ast.expr]) -> _Value:
        if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
            sizes = sizes[0].elts
        are_numbers = all(map(is_pure, sizes)) and not self._holds(sizes)
        if are_numbers and len(sizes) == 4 and not value.sizes and self.axes != 4:
            self.axes = 3
            return value._replace(sizes=tuple(sizes))
        if are_numbers and len(sizes) == 3 and texts(sizes[1:]) == texts(value.sizes[2:]):
            return value._replace(sizes=())
        raise NoFormulaError("it views its scores in another shape")

    def _dropping(self, node: ast.Call, arguments: list[ast.expr], named: dict[str, ast.expr]) -> list[ast.expr]:
        """Returns a Cell that is called, or the probability of dropout and whether the Cell is in training."""
        if self._calls.is_of_cell(node):
            return [node.func]
        given = {**dict(zip(("p", "training"), arguments)), **named}
        if len(arguments) > 2 or not set(given) <= {"p", "training"} or not all(map(is_pure, given.values())):
            raise NoFormulaError(f"it drops by {ast.unparse(node)}")
        return [given.get("p", ast.Constant(0.5)), given.get("training", ast.Constant(value=True))]

    def _holds(self, nodes: Any) -> bool:
        """Tells whether scores or weights are in one of these."""
        nodes = nodes if isinstance(nodes, (list, tuple)) else [nodes]
        return any(isinstance(each, ast.Name) and each.id in self.values for node in nodes for each in ast.walk(node))

    def _plain(self, line: ast.stmt) -> ast.stmt:
        """Returns a statement with what queries and keys tell in place of the dtype and the shape of scores."""
        plain: ast.stmt = copy.deepcopy(line)
        if not isinstance(self.query, ast.Name) or not isinstance(self.key, ast.Name):
            return plain
        if {self.query.id, self.key.id} & set(self.values):
            return plain
        of_dtype = {name for name, value in self.values.items() if value.is_own}
        of_shape = {name for name, value in self.values.items() if not value.sizes}
        return Told(of_dtype, of_shape, self.query.id, self.key.id).visit(plain)


def _has_product(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Call) and PRODUCTS & set(path_of(each.func)[-1:]) for each in ast.walk(node))


def _least_of(function: Any, dtype: Any) -> float:
    try:
        least = function(dtype)
        return float(least.asnumpy() if isinstance(least, Tensor) else least)
    except Exception:  # noqa: BLE001 (whatever it is, it does not return the least number)
        return 0.0
