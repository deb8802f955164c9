"""What an operator takes and gives: "feats(N, 8, F), points(N, 3) -> out(N, F)"."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore.common import dtype as mstype

from .check import FLOATS, Spec, accumulator, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

_FUNCTIONS = {"min": min, "max": max}
_NODES = (
    *(ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Starred, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub),
)


class _Tensor(NamedTuple):
    """A tensor of a signature. Without sizes it has any shape, without dtype that of the first one without."""

    name: str
    sizes: tuple[ast.expr, ...] | None
    dtype: str | None

    def words(self) -> str:
        sizes = self.sizes or ()
        return f"({', '.join(map(ast.unparse, sizes))}{',' * (len(sizes) == 1)})"

    def shape(self, operator: str, values: dict[str, Any]) -> tuple[int, ...]:
        sizes = ast.Tuple(list(self.sizes or ()), ast.Load(), lineno=1, col_offset=0)
        code = compile(ast.Expression(sizes), "", "eval")
        try:
            return eval(code, {"__builtins__": {}, **_FUNCTIONS, **values})  # noqa: S307 (of _NODES alone)
        except ZeroDivisionError:
            raise ValueError(f"{operator}: {self.name} cannot have shape {self.words()}: division by zero") from None


class Signature:
    """The tensors of an operator, with their shapes and dtypes, in one line.

    A signature lists inputs, an arrow, outputs and, after a semicolon, scratch: `x(N, C) -> y(C); partial(8, C)`.
    Scratch is memory that the C function needs for its work; callers never see it. Each tensor is a `name`, if it may
    have any shape, or a `name(size, ...)` with a size for each axis:

    - a number;
    - a name: the same number wherever it stands;
    - `*name`: any number of axes;
    - an expression of names, such as `3 * H`, with `+`, `-`, `*`, `//`, `%`, `min` and `max`.

    The tensors have one dtype, which may be any of `dtypes`, except those that name theirs as a last argument:
    `index(N, dtype=int32)`, `total(N, dtype=accumulator)`. The dtype `accumulator` is float64 beside float64 and
    float32 otherwise; scratch has it unless it names another. An output without sizes has the shape of the first input;
    the sizes of scratch without any come from the `infer` of :func:`msops.custom_op`.

    Args:
        text (str): The signature.
        dtypes (tuple[mindspore.dtype]): Default: float16, float32 and float64.
        **values (int, float): What sizes may name besides the inputs' sizes.

    Raises:
        TypeError: If the text is no str.
        ValueError: If the text does not say all that.

    Examples:
        >>> import mindspore, msops
        >>> signature = msops.Signature("x(*S, K), weight(K) -> out(*S)")
        >>> x, weight = (msops.Spec(shape, mindspore.float32) for shape in ((2, 3, 5), (5,)))
        >>> print(signature.infer("weighted_sum", x, weight)[0].shape)
        (2, 3)
        >>> signature.infer("weighted_sum", x, x)
        Traceback (most recent call last):
        ValueError: weighted_sum: weight must have shape (K,), got (2, 3, 5)
    """

    def __init__(self, text: str, dtypes: Sequence[mindspore.Type] = FLOATS, **values: float) -> None:
        if not isinstance(text, str):
            raise TypeError(f"signature must be a str, got {type(text).__name__}")
        self.text, self.dtypes, self.values = text, tuple(dtypes), values
        try:
            if text.count("->") != 1:
                raise ValueError("there must be one ->")
            takes, gives = text.split("->")
            gives, *scratch = gives.split(";")
            if len(scratch) > 1 or ";" in takes:
                raise ValueError("there must be at most one ;, after the outputs")
            self.inputs, self.outputs = _tensors(takes), _tensors(gives)
            self.scratch = tuple(
                tensor._replace(dtype=tensor.dtype or "accumulator") for tensor in _tensors("".join(scratch))
            )
            for side, tensors in (("input", self.inputs), ("output", self.outputs)):
                if not tensors:
                    raise ValueError(f"there is no {side}")
            self._find_mistakes()
        except (SyntaxError, ValueError) as error:
            message = error.msg if isinstance(error, SyntaxError) else error
            raise ValueError(f"signature {text!r}: {message}; it must read like 'x(N, C), y(C) -> out(N)'") from None

    def check(self, operator: str, *specs: Spec | str, shapes: bool = True) -> dict[str, Any]:
        """Requires inputs to fit, in their shapes, too, or in their ranks alone. Returns the values of all names of
        sizes. A str stands for what is no Tensor, and is the name of its type."""
        if len(specs) != len(self.inputs):
            names = ", ".join(tensor.name for tensor in self.inputs)
            raise TypeError(f"{operator}: takes {len(self.inputs)} inputs ({names}), got {len(specs)}")
        given = []
        for tensor, spec in zip(self.inputs, specs):
            if isinstance(spec, str):
                raise TypeError(f"{operator}: {tensor.name} must be a Tensor, got {spec}")
            given.append((tensor, spec))
        first = None
        for tensor, spec in given:
            first = self._check_dtype(operator, tensor, spec, first) or first
        values = dict(self.values)
        sized = [(tensor, spec) for tensor, spec in given if tensor.sizes is not None]
        for tensor, spec in sized:
            _bind(operator, tensor, spec, values)
        for tensor, spec in sized:
            if shapes and spec.shape != (expected := tensor.shape(operator, values)):
                shown = "" if tensor.words() == str(expected) else f" = {expected}"
                raise ValueError(f"{operator}: {tensor.name} must have shape {tensor.words()}{shown}, got {spec.shape}")
        return values

    def infer(self, operator: str, *specs: Spec | str, shapes: bool = True) -> list[Spec]:
        """The Specs of the outputs, then those of scratch, for inputs of these, which must fit."""
        values = self.check(operator, *specs, shapes=shapes)
        return self.evaluate(operator, (*self.outputs, *self.scratch), values, *specs)

    def evaluate(
        self, operator: str, tensors: Sequence[_Tensor], values: dict[str, Any], *specs: Spec | str
    ) -> list[Spec]:
        """The Specs of some of the outputs and scratch, for inputs of these and the values that `check` returned."""
        given = [spec for spec in specs if isinstance(spec, Spec)]  # all are
        common = next((spec.dtype for tensor, spec in zip(self.inputs, given) if tensor.dtype is None), None)
        found = []
        for out in tensors:
            shape = given[0].shape if out.sizes is None else out.shape(operator, values)
            if any(size < 0 for size in shape):
                raise ValueError(f"{operator}: {out.name} cannot have shape {out.words()} = {shape}")
            if out.dtype is None and common is None:
                raise ValueError(f"{operator}: {out.name} must name its dtype in the signature, since all inputs do")
            found.append(Spec(shape, _dtype(out.dtype, common)))
        return found

    def _check_dtype(
        self, operator: str, tensor: _Tensor, spec: Spec, first: tuple[str, mindspore.Type] | None
    ) -> tuple[str, mindspore.Type] | None:
        """Returns (name, dtype) of a tensor that has the common dtype."""
        if any(length is None or length < 0 for length in spec.shape):
            what = "rank" if spec.shape == (-2,) else "shape"
            raise ValueError(f"{operator}: {tensor.name} must have a {what} known at compile time, got {spec.shape}")
        own = tensor.dtype is not None
        allowed = (_dtype(tensor.dtype, first and first[1]),) if own else self.dtypes
        if spec.dtype not in allowed:
            *others, last = map(dtype_name, allowed)
            words = f"{', '.join(others)} or {last}" if others else last
            raise TypeError(f"{operator}: {tensor.name} must be {words}, got {dtype_name(spec.dtype)}")
        if own:
            return None
        if first and spec.dtype != first[1]:
            raise TypeError(
                f"{operator}: {tensor.name} must be {dtype_name(first[1])} as {first[0]} is, "
                f"got {dtype_name(spec.dtype)}"
            )
        return tensor.name, spec.dtype

    def _find_mistakes(self) -> None:
        names = [tensor.name for tensor in self.inputs + self.outputs + self.scratch]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are two tensors {name}")
        of_inputs, of_outputs = (
            [size for tensor in side for size in tensor.sizes or ()]
            for side in (self.inputs, self.outputs + self.scratch)
        )
        known = {*self.values, *(size.id for size in of_inputs if isinstance(size, ast.Name))}
        many = {name for size in of_inputs if isinstance(size, ast.Starred) for name in _names(size)}
        for size in of_inputs + of_outputs:
            starred = isinstance(size, ast.Starred)
            for name in _names(size):
                if name not in known | many:
                    raise ValueError(f"no input has an axis of the size {name}")
                if name in (known if starred else many):
                    raise ValueError(f"{name} cannot be both the size of an axis and, as *{name}, those of many")
                if not isinstance(self.values.get(name, 0), int):
                    raise ValueError(f"the size {name} must be a whole number, got {self.values[name]}")


def _names(size: ast.expr) -> list[str]:
    """Those of sizes in an expression."""
    nodes = list(ast.walk(size))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and node not in called]


def _tensors(text: str) -> tuple[_Tensor, ...]:
    node = ast.parse(f"({text.strip()},)" if text.strip() else "()", mode="eval").body
    if not isinstance(node, ast.Tuple):
        raise ValueError(f"{text.strip()} is no list of tensors")
    return tuple(map(_tensor, node.elts))


def _tensor(node: ast.expr) -> _Tensor:
    if isinstance(node, ast.Name):
        return _Tensor(node.id, None, None)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{ast.unparse(node)} is no tensor")
    dtype = None
    for keyword in node.keywords:
        dtype = ast.unparse(keyword.value)
        known = dtype == "accumulator" or isinstance(getattr(mindspore, dtype, None), mstype.typing.Number)
        if keyword.arg != "dtype" or not known:
            raise ValueError(f"{ast.unparse(keyword)} is no dtype")
    if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value is ...:
        return _Tensor(node.func.id, None, dtype)  # name(..., dtype=int32)
    for size in node.args:
        for part in ast.walk(size):
            calls = isinstance(part, ast.Call) and ast.unparse(part.func) in _FUNCTIONS and len(part.args) > 1
            whole = not isinstance(part, ast.Constant) or type(part.value) is int
            starred = not isinstance(part, ast.Starred) or (part is size and isinstance(part.value, ast.Name))
            if not (calls or isinstance(part, _NODES)) or not whole or not starred:
                raise ValueError(f"{ast.unparse(size)} is no size")
    if sum(isinstance(size, ast.Starred) for size in node.args) > 1:
        raise ValueError(f"{node.func.id} has two sizes with *")
    return _Tensor(node.func.id, tuple(node.args), dtype)


def _bind(operator: str, tensor: _Tensor, spec: Spec, values: dict[str, Any]) -> None:
    """Gives the names among the sizes of a tensor their values."""
    sizes = tensor.sizes or ()
    star = next((i for i, size in enumerate(sizes) if isinstance(size, ast.Starred)), None)
    many = len(spec.shape) - len(sizes) + 1  # axes of the star
    if many < 0 or (star is None and many != 1):
        raise ValueError(f"{operator}: {tensor.name} must have shape {tensor.words()}, got {spec.shape}")
    for i, size in enumerate(sizes):
        if isinstance(size, ast.Starred):
            (name,) = _names(size)
            values.setdefault(name, spec.shape[i : i + many])
        elif isinstance(size, ast.Name):
            values.setdefault(size.id, spec.shape[i if star is None or i < star else i + many - 1])


def _dtype(name: str | None, common: mindspore.Type) -> mindspore.Type:
    if name is None:
        return common
    if name == "accumulator":
        return accumulator(common)
    return getattr(mindspore, name)
