"""From a C function to a MindSpore operator."""

from __future__ import annotations

import ctypes
import functools
import itertools
import numbers
import threading
import weakref
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import PrimitiveWithInfer

from . import open_sizes
from .check import FLOATS, Spec
from .library import Entry
from .primitive import Primitive, as_attribute
from .signature import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias, TypeVar

    Infer = Callable[..., Spec | Sequence[Spec]]
    Gradient: TypeAlias = "Operator | Callable[..., tuple[Tensor, ...]]"
    Function = TypeVar("Function", bound=Callable[..., Any])


class _Compiling(PrimitiveWithInfer):
    """Whether it is called in what MindSpore compiles."""

    def __init__(self) -> None:
        super().__init__("Compiling")

    def __infer__(self) -> dict[str, Any]:
        return {"shape": (), "dtype": mindspore.bool_, "value": True}

    def __call__(self) -> bool:
        return False


_compiling = _Compiling()


def custom_op(
    entry: Entry,
    signature: str,
    *,
    infer: Infer | None = None,
    gradient: Gradient | None = None,
    name: str | None = None,
    dtypes: Sequence[mindspore.Type] = FLOATS,
    **attributes: float,
) -> Operator:
    """A C function as an operator, for tensors of both devices and in both modes.

    Equal arguments give the same operator. Whatever its rules depend on tells it from all others, in the caches that
    MindSpore keeps by a primitive's attributes, too.

    Args:
        entry (Entry): The C function, of a :class:`msops.Library`.
        signature (str): What it takes and gives, as in :class:`msops.Signature`. Sizes may name attributes. The C
            function's parameters are the inputs, then the outputs, then scratch.
        infer (callable): `infer(*inputs, **attributes)` takes the :class:`msops.Spec` of each input and the attributes,
            raises TypeError or ValueError if they do not fit, with words that follow the operator's name, and returns
            the Spec of each output, then of each scratch tensor that has no sizes in the signature; or the only one.
            An absent input is None; an output that is left out has a Spec all the same. The signature's outputs then
            have no sizes. Default: what the signature says.
        gradient (Operator, callable): An operator whose signature names what it needs: inputs and outputs of this one,
            and `dy`, the gradient of an output `y`. Its outputs are the gradients, `dx` of an input `x`; an input
            without one gets zeros. Else a function of a module, or a method of a Cell without Parameters, of all
            inputs, the output and its gradient (a tuple each of several), which returns a tuple of gradients. What is
            absent is None, in all of these. An operator as gradient of one with an optional input `bias` has an
            optional output `dbias`. Default: none, which is an error where one is needed, unless all outputs are of
            whole numbers.
        name (str): For messages. Default: the library's.
        dtypes (tuple[mindspore.dtype]): As in :class:`msops.Signature`.
        **attributes (int, float, bool): What the C function reads by `call.attribute(name, low, high)`, which takes no
            float, or by `call.number(name)`; the numbers of an `MSOPS_FORMULA_WITH`.

    Returns:
        Operator. Called with tensors, it returns a tensor or, if there are several outputs, a tuple. An optional input
        may be None or, at the end, left out. Except where MindSpore compiles the call, inputs may be handed over by
        their names.

    Raises:
        TypeError: If an argument has a wrong type; of a call, if an input is not a Tensor of one of the dtypes.
        RuntimeError: If MindSpore compiles the call of `custom_op` itself; see :func:`msops.once`.
        ValueError: If the signature is none, or does not match the gradient's; of a call, if a shape does not fit.

    Examples:
        >>> import mindspore, msops
        >>> library = msops.load("cube", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(CubeForward, (x), (y), y = x * x * x)
        ... MSOPS_FORMULA(CubeBackward, (x, dy), (dx), dx = dy * 3 * x * x)
        ... ''')
        >>> cube = msops.custom_op(
        ...     library.CubeForward, "x -> y", gradient=msops.custom_op(library.CubeBackward, "x, dy -> dx")
        ... )
        >>> x = mindspore.Tensor([1.0, 2.0])
        >>> print(cube(x), mindspore.grad(lambda x: cube(x))(x))
        [1. 8.] [ 3. 12.]
    """
    # MindSpore compiles this function if it meets it.
    if _compiling():
        raise RuntimeError(
            "custom_op: an operator must be made before its call is compiled, or in a function decorated with "
            "msops.once"
        )
    return make_operator(entry, signature, infer, gradient, name, dtypes, attributes)


def make_operator(
    entry: Entry,
    signature: str,
    infer: Infer | None,
    gradient: Gradient | None,
    name: str | None,
    dtypes: Sequence[mindspore.Type],
    attributes: dict[str, float],
    absent: frozenset[str] = frozenset(),
) -> Operator:
    """The operator of these arguments, without the optional tensors that are absent."""
    if not isinstance(entry, Entry):
        raise TypeError(f"custom_op: entry must be a function of a Library, got {type(entry).__name__}")
    name = entry.library.name if name is None else name
    if not isinstance(signature, str):
        raise TypeError(f"{name}: signature must be a str, got {type(signature).__name__}")
    if not isinstance(dtypes, (list, tuple)):
        raise TypeError(f"{name}: dtypes must be a tuple, got {dtypes}")
    for what, rule in (("infer", infer), ("gradient", gradient)):
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}: {what} must be callable, got {type(rule).__name__}")
    for what, value in attributes.items():
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name}: attribute {what} must be an int, a float or a bool, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: attribute {what} must fit into 64 bits, got {value}")
    key = (
        *(str(entry.library.path), entry.library.variable, entry.name, signature, name, *map(str, dtypes), absent),
        *(_number(rule) for rule in (infer, gradient)),
        *(item for what, value in sorted(attributes.items()) for item in (what, *as_attribute(what, value))),
    )
    with _lock:
        if key not in _number_of_key:
            _number_of_key[key] = next(_numbers)
            for rule in _functions(infer, gradient):  # when one is gone, no key can be equal to this one
                weakref.finalize(rule, _number_of_key.pop, key, None).atexit = False
        number = _number_of_key[key]
        operator = open_sizes.operators.get(number)
        if operator is None:
            open_sizes.operators[number] = operator = Operator(
                number, entry, Signature(signature, dtypes, **attributes), infer, gradient, name, attributes, absent
            )
        return operator


class Operator:
    """What takes and returns tensors. See :func:`msops.custom_op`, which makes them.

    Attributes:
        entry (Entry): The C function.
        signature (Signature): What it takes and gives, without optional tensors that are absent.
        attributes (dict): What the C function reads: those given, and 0 or 1 as `has_bias` for an optional `bias`.
        gradient (Operator, callable): As it was given, without the gradients of absent inputs.
    """

    __ms_class__ = True  # MindSpore compiles __call__ from its source, as the function of an ms_class (jit_class)

    def __init__(
        self,
        number: int,
        entry: Entry,
        signature: Signature,
        infer: Infer | None,
        gradient: Gradient | None,
        name: str,
        attributes: dict[str, float],
        absent: frozenset[str],
    ) -> None:
        self.number, self.entry, self.settings, self.absent = number, entry, dict(attributes), absent
        self.full, self.signature = signature, signature.without(absent)
        self.attributes = attributes | {f"has_{name}": int(name not in absent) for name in signature.optional}
        if isinstance(gradient, Operator):  # without the gradients of what is absent
            of_absent = absent.union(f"d{each}" for each in absent)
            gradient = gradient.without(*of_absent.intersection(gradient.full.optional))
        self.rule, self.gradient, self.label = infer, gradient, name
        if infer and any(out.sizes is not None for out in signature.outputs):
            raise ValueError(f"{name}: the sizes of outputs must come from infer or the signature, not both")
        if not infer and (unsized := [tensor.name for tensor in signature.scratch if tensor.sizes is None]):
            raise ValueError(f"{name}: the sizes of {unsized[0]} must come from infer or the signature")
        self.input_dtypes: list[mindspore.Type] = []  # at the last inference
        self._check_numbers()
        self.primitive = Primitive(self)
        self.several, self.results = len(self.signature.outputs) > 1, len(self.signature.outputs)
        self.has_scratch = bool(signature.scratch)
        self.has_optional_inputs = any(tensor.optional for tensor in self.signature.inputs)
        self.choose = ops.constexpr(self._choose)
        self.kept: dict[frozenset[str], Operator] = {}  # without more of the optional tensors
        names = ", ".join(self.names()[0])
        self.without_names = f"{name}: takes its inputs without names where it is compiled, as ({names})"

    def __call__(self, *inputs: Tensor | None, **named: Tensor) -> Any:
        if named:
            if _compiling():
                raise TypeError(self.without_names)
            inputs = self.in_order(inputs, named)
        if not self.has_optional_inputs:
            return self.run(*inputs)
        given = ()  # type: tuple[Tensor, ...]  # in a comment for MindSpore before 2.7
        present = ()  # type: tuple[bool, ...]
        for x in inputs:
            present += (x is not None,)
            if x is not None:
                given += (x,)
        return self.choose(present).run(*given)

    def run(self, *inputs: Tensor | None) -> Any:
        """The outputs for all inputs, none of which is absent."""
        outputs = self.primitive(*inputs)
        if self.has_scratch:
            return outputs[: self.results] if self.several else outputs[0]
        return outputs

    def in_order(self, inputs: tuple[Tensor | None, ...], named: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """The inputs, some of which were handed over by their names."""
        names = self.names()[0]
        rest = names[len(inputs) :]
        needed = {tensor.name for tensor in self.signature.inputs if not tensor.optional}
        if not set(rest) & needed <= set(named) <= set(rest):
            raise TypeError(
                f"{self.label}: takes the inputs {', '.join(names)}, got {len(inputs)} without and {', '.join(named)} "
                "by name"
            )
        return (*inputs, *(named.get(name) for name in rest))

    def without(self, *absent: str) -> Operator:
        """The operator without these optional tensors."""
        all_absent = self.absent.union(absent)
        if all_absent == self.absent:
            return self
        if unknown := all_absent.difference(self.full.optional):
            raise ValueError(
                f"{self.label}: {', '.join(sorted(unknown))} must be optional, as in bias(K)?, to be absent"
            )
        arguments = self.entry, self.full.text, self.rule, self.gradient, self.label, self.full.dtypes, self.settings
        if all_absent not in self.kept:
            self.kept[all_absent] = make_operator(*arguments, all_absent)
        return self.kept[all_absent]

    def _choose(self, present: tuple[bool, ...]) -> Operator:
        """The operator for inputs of which some are None, or left out at the end."""
        tensors = self.signature.inputs
        flags = [*present, *[False] * (len(tensors) - len(present))]
        absent = [tensor for tensor, flag in zip(tensors, flags) if not flag]
        if len(present) > len(tensors) or not all(tensor.optional for tensor in absent):
            names = ", ".join(tensor.name + "?" * tensor.optional for tensor in tensors)
            raise TypeError(f"{self.label}: takes the inputs {names}, got {sum(present)}")
        return self.without(*(tensor.name for tensor in absent))

    def infer(self, *inputs: Spec | str, shapes: bool = True) -> list[Spec]:
        """The :class:`Spec` of each output, then of each scratch tensor, for inputs of these, whose shapes need not fit
        if `shapes` is False."""
        signature = self.signature
        if self.rule is None:
            return signature.infer(self.label, *inputs, shapes=shapes)
        values = signature.check(self.label, *inputs, shapes=shapes)
        try:
            given = iter(inputs)
            all_inputs = (None if tensor.name in self.absent else next(given) for tensor in self.full.inputs)
            found = self.rule(*all_inputs, **self.settings)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.label}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{self.label}: infer raised {type(error).__name__}: {error}") from error
        found = [found] if isinstance(found, Spec) else found
        unsized = [tensor for tensor in (*self.full.outputs, *signature.scratch) if tensor.sizes is None]
        self._check_inferred([tensor.name for tensor in unsized], found)
        sized = [tensor for tensor in signature.scratch if tensor.sizes is not None]
        specs = dict(zip(unsized, found)) | dict(zip(sized, signature.evaluate(self.label, sized, values, *inputs)))
        return [specs[tensor] for tensor in (*signature.outputs, *signature.scratch)]

    def _check_inferred(self, names: list[str], found: Any) -> None:
        if not isinstance(found, (list, tuple)) or not all(isinstance(out, Spec) for out in found):
            raise TypeError(f"{self.label}: infer must return a Spec for each output, got {found!r}")
        if len(found) != len(names):
            raise ValueError(
                f"{self.label}: infer must return {len(names)} outputs ({', '.join(names)}), got {len(found)}"
            )
        for out, output in zip(names, found):
            sizes = output.shape if isinstance(output.shape, (list, tuple)) else [None]
            if not all(isinstance(size, numbers.Integral) and int(size) >= 0 for size in sizes):
                raise ValueError(f"{self.label}: infer must return sizes of at least 0 for {out}, got {output.shape}")
            if not isinstance(output.dtype, mstype.typing.Number):
                raise TypeError(f"{self.label}: infer must return a dtype of MindSpore for {out}, got {output.dtype}")

    def names(self) -> tuple[list[str], list[str]]:
        """Input names and output names."""
        return [tensor.name for tensor in self.signature.inputs], [tensor.name for tensor in self.signature.outputs]

    def _check_numbers(self) -> None:
        """Requires the numbers that an MSOPS_FORMULA_WITH names to be attributes, or inputs of rank 0."""
        try:
            text = ctypes.c_char.in_dll(self.entry.library.handle, f"{self.entry.name}Numbers")
        except ValueError:
            return
        inputs = {tensor.name for tensor in self.signature.inputs if tensor.sizes == ()}
        for name in ctypes.string_at(ctypes.addressof(text)).decode().split(", "):
            if name not in inputs and name not in self.attributes:
                raise ValueError(
                    f"{self.label}: the formula's number {name} must be an attribute or an input {name}() after the "
                    f"others, got the attributes {list(self.attributes)} and the signature {self.signature.text!r}"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator:
        return self  # nothing in it changes

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # MindSpore asks functions for it
            raise AttributeError(
                f"{self.label}: mindspore.grad and its like take functions and Cells, not operators: hand over a "
                "function that calls the operator"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def once(make: Function) -> Function:
    """Decorates a function of constants that makes something, such as an operator, so that it may also be called in
    what MindSpore compiles, and makes it once for equal arguments.

    Examples:
        >>> import msops
        >>> @msops.once
        ... def label(n):
        ...     print("made")
        ...     return f"n = {n}"
        >>> print(label(3), label(3))
        made
        n = 3 n = 3
    """
    return ops.constexpr(functools.lru_cache(maxsize=None, typed=True)(make))


_lock = threading.RLock()  # of what follows; an operator may make that of its gradient
_numbers = itertools.count()
# Of an operator; it stays when the operator goes, since what MindSpore keeps for it stays, too.
_number_of_key: dict[tuple[Any, ...], int] = {}
_number_of_rule: weakref.WeakKeyDictionary[Callable[..., Any], int] = weakref.WeakKeyDictionary()


def _number(rule: Operator | Callable[..., Any] | None) -> int:
    """A number that no other function or operator ever had or gets."""
    if rule is None:
        return -1
    if isinstance(rule, Operator):
        return rule.number
    return _number_of_rule.setdefault(rule, next(_numbers))


def _functions(*rules: Operator | Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """The functions among rules, and among those of operators."""
    for rule in rules:
        if isinstance(rule, Operator):
            yield from _functions(rule.rule, rule.gradient)
        elif rule is not None:
            yield rule
