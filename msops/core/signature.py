"""Reads signatures, which say what an operator takes and gives: "feats(N, 8, F), points(N, 3) -> out(N, F)"."""

from __future__ import annotations

import ast
import copy
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
from mindspore.common import dtype as mstype

from .spec import FLOATS, Spec, accumulator, dtype_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import CodeType

_OPTIONAL = "@optional"  # it replaces a question mark, so that Python can parse the text
_INDEX = "int32", "int64"  # dtype=index stands for these
_FUNCTIONS = {"min": min, "max": max}
_NODES = (
    *(ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Starred, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub),
)


class _Tensor(NamedTuple):
    """A tensor of a signature. Without sizes it may have any shape; without a dtype it has the common dtype."""

    name: str
    sizes: tuple[ast.expr, ...] | None
    dtype: str | None
    optional: bool = False

    def words(self) -> str:
        sizes = self.sizes or ()
        return f"({', '.join(map(ast.unparse, sizes))}{',' * (len(sizes) == 1)})"

    def shape(self, operator: str, values: dict[str, Any]) -> tuple[int, ...]:
        names = {"__builtins__": {}, **_FUNCTIONS, **values}
        try:
            return eval(_compiled(self.sizes or ()), names)  # noqa: S307 (it contains _NODES only)
        except ZeroDivisionError:
            raise ValueError(f"{operator}: {self.name} cannot have shape {self.words()}: division by zero") from None


@functools.lru_cache(256)
def _compiled(sizes: tuple[ast.expr, ...]) -> CodeType:
    return compile(ast.Expression(ast.Tuple([*sizes], ast.Load(), lineno=1, col_offset=0)), "", "eval")


class Signature:
    """Describes the tensors of an operator, with their shapes and dtypes, in one line.

    A signature lists inputs, an arrow, outputs and, after a semicolon, scratch: `x(N, C) -> y(C); partial(8, C)`.
    Scratch is memory that the C function needs for its work; callers never see it. Each tensor is a `name`, if it may
    have any shape, or a `name(size, ...)` with a size for each axis. A size is one of these:

    - a number;
    - a name, which stands for the same number throughout the signature;
    - `*name`, which stands for any number of axes;
    - an expression of names, such as `3 * H`, with `+`, `-`, `*`, `//`, `%`, `min` and `max`.

    An output without sizes has the shape of the first input. Scratch without sizes gets them from the library, which
    has an `MSOPS_SCRATCH` for the entry. A question mark after a tensor, as in `bias(K)?`, means that an input may be
    absent, or an output left out.

    All tensors have one common dtype, which may be any of `dtypes`, except tensors that name their own dtype as a last
    argument, as in `idx(N, dtype=int32)` or `weight(C, dtype=float32|common)`. That dtype is one of these:

    - a dtype of MindSpore: `int32`, `bool`, `float32`;
    - `index`: int32 or int64;
    - `accumulator`: float64 if the common dtype is float64, float32 otherwise; scratch has it by default;
    - `common`: the common dtype;
    - the name of an input: that input's dtype, as in `weight(C, dtype=float32|common) -> dweight(C, dtype=weight)`;
    - several of these, separated by `|`. Only inputs may have several: an output or scratch names one dtype.

    Args:
        text (str): The signature.
        dtypes (tuple[mindspore.dtype]): What the common dtype may be. Default: float16, float32 and float64.
        **values (int, float): Numbers that sizes may name in addition to the inputs' sizes.

    Raises:
        TypeError: If the text is not a str.
        ValueError: If the text is not a signature as described.

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
            self.optional = tuple(tensor.name for tensor in self.inputs + self.outputs if tensor.optional)
            self.scratch = tuple(
                tensor._replace(dtype=tensor.dtype or "accumulator") for tensor in _tensors("".join(scratch))
            )
            for side, tensors in (("input", self.inputs), ("output", self.outputs)):
                if not tensors:
                    raise ValueError(f"there is no {side}")
            self._find_mistakes()
            self.without(self.optional)._find_mistakes()
        except (SyntaxError, ValueError) as error:
            message = error.msg if isinstance(error, SyntaxError) else str(error).replace(" @ optional", "?")
            raise ValueError(f"signature {text!r}: {message}; it must read like 'x(N, C), y(C) -> out(N)'") from None

    def without(self, absent: Collection[str]) -> Signature:
        """Returns the signature of a call without these optional tensors."""
        other = copy.copy(self)
        other.inputs, other.outputs = (
            tuple(tensor for tensor in tensors if tensor.name not in absent) for tensors in (self.inputs, self.outputs)
        )
        other.optional = tuple(name for name in self.optional if name not in absent)
        return other

    def allowed(
        self, tensor: _Tensor, common: mindspore.Type | None, dtypes: Mapping[str, mindspore.Type]
    ) -> tuple[mindspore.Type, ...]:
        """Returns the dtypes that a tensor may have, given the common dtype and the dtypes of the inputs."""
        if tensor.dtype is None:
            return self.dtypes if common is None else (common,)
        found: list[mindspore.Type] = []
        for word in tensor.dtype.split("|"):
            if word == "index":
                found += (getattr(mindspore, name) for name in _INDEX)
            elif word in ("accumulator", "common"):
                found.append(common if word == "common" else accumulator(common))
            else:
                found.append(_known_dtype(word) or dtypes[word])
        return tuple(dict.fromkeys(found))

    def check(self, operator: str, *specs: Spec | str, shapes: bool = True) -> dict[str, Any]:
        """Requires inputs to fit the signature, and returns the values of all names of sizes.

        If `shapes` is False, only dtypes and ranks must fit. A str stands for an input that is not a Tensor, and is the
        name of its type.
        """
        if len(specs) != len(self.inputs):
            names = ", ".join(tensor.name for tensor in self.inputs)
            raise TypeError(f"{operator}: takes {len(self.inputs)} inputs ({names}), got {len(specs)}")
        given = []
        for tensor, spec in zip(self.inputs, specs):
            if isinstance(spec, str):
                raise TypeError(f"{operator}: {tensor.name} must be a Tensor, got {spec}")
            given.append((tensor, spec))
        self._check_dtypes(operator, given)
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
        """Infers the Specs of the outputs, then of scratch, from the inputs' Specs, which must fit."""
        values = self.check(operator, *specs, shapes=shapes)
        given = [spec for spec in specs if isinstance(spec, Spec)]  # all are Specs, since `check` refuses a str
        return self.evaluate(operator, (*self.outputs, *self.scratch), values, given)

    def evaluate(
        self,
        operator: str,
        tensors: Sequence[_Tensor],
        values: dict[str, Any],
        given: Sequence[Spec],
        known: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> list[Spec]:
        """Infers the Specs of some outputs and scratch from the inputs' Specs and the values that `check` returned.
        `known` has the shapes of some of these tensors."""
        common = next((spec.dtype for tensor, spec in zip(self.inputs, given) if tensor.dtype is None), None)
        dtypes = {tensor.name: spec.dtype for tensor, spec in zip(self.inputs, given)}
        found = []
        for out in tensors:
            shape = known.get(out.name)
            if shape is None:
                shape = given[0].shape if out.sizes is None else out.shape(operator, values)
                if any(size < 0 for size in shape):
                    raise ValueError(f"{operator}: {out.name} cannot have shape {out.words()} = {shape}")
            if out.dtype is None and common is None:
                raise ValueError(f"{operator}: {out.name} must name its dtype in the signature, since all inputs do")
            found.append(Spec(shape, self.allowed(out, common, dtypes)[0]))
        return found

    def _check_dtypes(self, operator: str, given: list[tuple[_Tensor, Spec]]) -> None:
        """Requires known shapes, and dtypes that fit. The first input that names no dtype sets the common dtype."""
        common: mindspore.Type | None = None
        first = ""
        dtypes: dict[str, mindspore.Type] = {}
        for tensor, spec in sorted(given, key=lambda each: each[0].dtype is not None):
            if any(length is None or length < 0 for length in spec.shape):
                what = "rank" if spec.shape == (-2,) else "shape"
                raise ValueError(
                    f"{operator}: {tensor.name} must have a {what} known at compile time, got {spec.shape}"
                )
            allowed = self.allowed(tensor, common, dtypes)
            if spec.dtype not in allowed:
                *others, last = map(dtype_name, allowed)
                words = f"{', '.join(others)} or {last}" if others else last
                words += f" as {first} is" if tensor.dtype is None and common is not None else ""
                raise TypeError(f"{operator}: {tensor.name} must be {words}, got {dtype_name(spec.dtype)}")
            dtypes[tensor.name] = spec.dtype
            if tensor.dtype is None and common is None:
                common, first = spec.dtype, tensor.name

    def _find_mistakes(self) -> None:
        names = [tensor.name for tensor in self.inputs + self.outputs + self.scratch]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are two tensors {name}")
        self._find_mistakes_of_dtypes()
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

    def _find_mistakes_of_dtypes(self) -> None:
        has_common = any(tensor.dtype is None for tensor in self.inputs)
        before: set[str] = set()
        for tensor in (*self.inputs, *self.outputs, *self.scratch):
            words = tensor.dtype.split("|") if tensor.dtype else []
            for word in words:
                if word not in ("index", "accumulator", "common") and not _known_dtype(word) and word not in before:
                    raise ValueError(f"dtype={word} is no dtype")
                if word == "common" and not has_common:
                    raise ValueError("no input has the common dtype")
            if tensor in self.inputs:
                before.add(tensor.name)
            elif len(words) > 1 or "index" in words:
                raise ValueError(f"{tensor.name} must have one dtype, not dtype={tensor.dtype}")
            if tensor.optional and tensor in self.scratch:
                raise ValueError(f"{tensor.name} cannot be optional, since it is scratch")


def _known_dtype(word: str) -> mindspore.Type | None:
    """Returns MindSpore's dtype of this name, or None if there is none."""
    found = getattr(mindspore, "bool_" if word == "bool" else word, None)
    return found if isinstance(found, mstype.typing.Number) else None


def _names(size: ast.expr) -> list[str]:
    """Returns the names of sizes in an expression."""
    nodes = list(ast.walk(size))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return [node.id for node in nodes if isinstance(node, ast.Name) and node not in called]


def _tensors(text: str) -> tuple[_Tensor, ...]:
    text = text.replace("?", _OPTIONAL).strip()
    node = ast.parse(f"({text},)" if text else "()", mode="eval").body
    if not isinstance(node, ast.Tuple):
        raise ValueError(f"{text} is no list of tensors")
    return tuple(map(_tensor, node.elts))


def _tensor(node: ast.expr) -> _Tensor:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return _tensor(node.left)._replace(optional=True)
    if isinstance(node, ast.Name):
        return _Tensor(node.id, None, None)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{ast.unparse(node)} is no tensor")
    dtype = None
    for keyword in node.keywords:
        dtype = ast.unparse(keyword.value).replace(" ", "")
        if keyword.arg != "dtype" or not all(word.isidentifier() for word in dtype.split("|")):
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
    """Adds the values of names that a tensor's sizes contain to `values`, unless they are there."""
    sizes = tensor.sizes or ()
    star = next((i for i, size in enumerate(sizes) if isinstance(size, ast.Starred)), None)
    many = len(spec.shape) - len(sizes) + 1  # number of axes that a star stands for
    if many < 0 or (star is None and many != 1):
        raise ValueError(f"{operator}: {tensor.name} must have shape {tensor.words()}, got {spec.shape}")
    for i, size in enumerate(sizes):
        if isinstance(size, ast.Starred):
            (name,) = _names(size)
            values.setdefault(name, spec.shape[i : i + many])
        elif isinstance(size, ast.Name):
            values.setdefault(size.id, spec.shape[i if star is None or i < star else i + many - 1])
