"""Defines operators, which take and return tensors."""

from __future__ import annotations

import ctypes
import numbers
import weakref
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore
from mindspore import ops
from mindspore.common import dtype as mstype

from ..compat import VERSION
from . import gradients, open_sizes
from .abi import Param, ask_shapes
from .compiled import compiling
from .inputs import present
from .primitive import Primitive, as_attribute
from .spec import LARGEST, SMALLEST, Rounded, Spec, accumulator, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from mindspore import Tensor

    from .library import Entry
    from .signature import Signature

    Infer = Callable[..., Spec | Sequence[Spec]]
    Gradient: TypeAlias = "Operator | Callable[..., tuple[Tensor | None, ...]]"


class Operator:
    """A C function as a function of tensors. See :func:`msops.custom_op`, which makes operators.

    Attributes:
        entry (Entry): The C function.
        signature (Signature): The inputs, outputs and scratch, without optional tensors that are absent.
        attributes (dict): What the C function can read: the given attributes and, for an optional `bias`, `has_bias`,
            which is 0 or 1.
        gradient (Operator, callable): The given gradient, without the gradients of absent inputs.
    """

    primitive: Primitive  # what MindSpore runs
    alive: ClassVar[weakref.WeakValueDictionary[int, Operator]] = weakref.WeakValueDictionary()  # by number
    sizes_of_outputs = open_sizes.make_rule(alive)  # the C functions of all operators ask it

    if TYPE_CHECKING:  # subclasses have it, each in the form that MindSpore needs

        def __call__(self, *inputs: Tensor | None, **named: Tensor) -> Any: ...

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
        make: Callable[[frozenset[str]], Operator],
    ) -> None:
        self.label, self.full, self.signature = name, signature, signature.without(absent)
        self.number, self.entry, self.settings, self.absent = number, entry, dict(attributes), absent
        self.attributes = attributes | {f"has_{name}": int(name not in absent) for name in signature.optional}
        if isinstance(gradient, Operator):
            of_absent = absent.union(f"d{each}" for each in absent)
            gradient = gradient.without(*of_absent.intersection(gradient.full.optional))
        self.rule, self.gradient = infer, gradient
        self.no_float32 = [what for what, x in attributes.items() if isinstance(x, Rounded) and not x.is_float32()]
        if infer and (sized := [out for out in signature.outputs if out.sizes is not None]):
            out = sized[0].name if sized[0].dtype is None else f"{sized[0].name}(..., dtype={sized[0].dtype})"
            raise ValueError(
                f"{name}: the sizes of outputs must come from infer or the signature, not both: with infer, write "
                f"{out} in place of {sized[0].name}{sized[0].words()}"
            )
        self.asked = [tensor.name for tensor in signature.scratch if tensor.sizes is None]  # of the library
        self.shapes_of_scratch = getattr(entry.library.handle, f"{entry.name}Scratch", None)
        if self.asked and not self.shapes_of_scratch:
            raise ValueError(
                f"{name}: {self.asked[0]} must have sizes in the signature, as in {self.asked[0]}(8, C), or the "
                f"library must have MSOPS_SCRATCH({entry.name})"
            )
        self.input_dtypes: list[mindspore.Type] = []  # the last inference sets them
        self._check_numbers()
        self.make = make
        self.kept: dict[frozenset[str], Operator] = {}  # absent tensors -> the operator that `make` made without them
        names = ", ".join(self.names()[0])
        self.without_names = f"{name}: takes its inputs without names where it is compiled, as ({names})"

    def in_order(self, inputs: tuple[Tensor | None, ...], named: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """Returns the inputs in the signature's order; those in `named` were passed by name."""
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
        """Returns the operator without these optional tensors."""
        all_absent = self.absent.union(absent)
        if all_absent == self.absent:
            return self
        if unknown := all_absent.difference(self.full.optional):
            raise ValueError(
                f"{self.label}: {', '.join(sorted(unknown))} must be optional, as in bias(K)?, to be absent"
            )
        if all_absent not in self.kept:
            self.kept[all_absent] = self.make(all_absent)
        return self.kept[all_absent]

    def infer(self, *inputs: Spec | str, shapes: bool = True) -> list[Spec]:
        """Infers the :class:`Spec` of each output, then of each scratch tensor, from the inputs' Specs.

        If `shapes` is False, the inputs' ranks must fit the signature, but their sizes need not.
        """
        signature = self.signature
        if self.no_float32:
            self._check_float32(*inputs, shapes=shapes)
        values = signature.check(self.label, *inputs, shapes=shapes)
        specs = [each for each in inputs if isinstance(each, Spec)]  # all are, as `check` requires
        of_infer = self._ask_infer(self.rule, specs) if self.rule else {}
        of_library = self._ask_library(specs, shapes) if self.asked else {}
        rest = [tensor for tensor in (*signature.outputs, *signature.scratch) if tensor.name not in of_infer]
        outputs = [of_infer[out.name] for out in signature.outputs if out.name in of_infer]
        return outputs + signature.evaluate(self.label, rest, values, specs, of_library)

    def _ask_infer(self, infer: Infer, inputs: Sequence[Spec]) -> dict[str, Spec]:
        """Returns the Specs that `infer` infers, by name."""
        try:
            given = iter(inputs)
            all_inputs = (None if tensor.name in self.absent else next(given) for tensor in self.full.inputs)
            found: Any = infer(*all_inputs, **self.settings)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.label}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"{self.label}: infer raised {type(error).__name__}: {error}") from error
        found = [found] if isinstance(found, Spec) else found
        names = [tensor.name for tensor in self.full.outputs]
        self._check_inferred(names, found)
        return dict(zip(names, found))

    def _ask_library(self, inputs: Sequence[Spec], shapes: bool) -> dict[str, tuple[int, ...]]:
        """Returns the shapes that MSOPS_SCRATCH computes, by name. Without `shapes`, their sizes are open (-1), as some
        of the inputs' are."""
        sized = inputs if shapes else [x._replace(shape=(1,) * len(x.shape)) for x in inputs]
        rule = f"MSOPS_SCRATCH({self.entry.name})"
        try:
            params = [Param(None, x.shape, dtype_name(x.dtype)) for x in sized]
            found = ask_shapes(self.shapes_of_scratch, params, dict(starmap(as_attribute, self.attributes.items())))
        except ValueError as error:
            raise ValueError(f"{self.label}: {error} ({rule})") from None
        if len(found) != len(self.asked):
            names = ", ".join(self.asked)
            raise ValueError(f"{self.label}: {rule} must return {len(self.asked)} shapes ({names}), got {len(found)}")
        for name, shape in zip(self.asked, found):
            if any(size < 0 for size in shape):
                raise ValueError(f"{self.label}: {rule} must return sizes of at least 0 for {name}, got {shape}")
        return dict(zip(self.asked, found if shapes else [(-1,) * len(shape) for shape in found]))

    def _check_float32(self, *inputs: Spec | str, shapes: bool) -> None:
        """Requires settings that float32 holds, unless the kernels compute in float64."""
        self.signature.check(self.label, *inputs, shapes=shapes)
        pairs = zip(self.signature.inputs, inputs)
        common = next(x.dtype for tensor, x in pairs if tensor.dtype is None and isinstance(x, Spec))
        if accumulator(common) == mindspore.float32:
            name = self.no_float32[0]
            raise ValueError(
                f"{self.label}: {name} must be 0 or have a magnitude from {SMALLEST:.2g} to {LARGEST:.2g}, as float32 "
                f"holds it, for inputs of {dtype_name(common)}, got {self.settings[name]}"
            )

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

    def make_bprop(self) -> Callable[..., Any] | None:
        """Makes the gradient that MindSpore wants: a function of all inputs, the output and the output's gradient."""
        if self.gradient is None:
            whole = all((out.dtype or "").startswith(("int", "uint", "bool")) for out in self.signature.outputs)
            if VERSION < (2, 0) and not whole:
                return None  # 1.10 asks in PyNative mode for gradients that it does not need
            return gradients.missing(self, is_zero=whole)
        if isinstance(self.gradient, Operator):
            return gradients.of_operator(self, self.gradient)
        return gradients.of_function(self, self.gradient)

    def names(self) -> tuple[list[str], list[str]]:
        """Returns input names and output names."""
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

    def __repr__(self) -> str:
        return f"Operator({self.label}: {self.full.text})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator:
        return self  # an operator does not change, so no copy is needed

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # MindSpore asks functions for it
            raise AttributeError(
                f"{self.label}: mindspore.grad and its like take functions and Cells, not operators: hand over a "
                "function that calls the operator"
            )
        inherited = getattr(super(), "__getattr__", None)  # a primitive has one
        if inherited is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return inherited(name)


class PlainOperator(Operator, Primitive):
    """An operator without scratch and optional inputs, which is its own primitive.

    MindSpore casts Parameters for primitives in mixed precision, but not for what it compiles from source.
    """

    def __init__(self, *arguments: Any) -> None:
        Operator.__init__(self, *arguments)
        Primitive.__init__(self, self)

    # These are properties, since an operator that referred to itself would live until the garbage collector runs.
    @property
    def operator(self) -> Operator:  # type: ignore[override]
        return self

    @property
    def primitive(self) -> Primitive:  # type: ignore[override]
        return self

    def __call__(self, *inputs: Tensor | None, **named: Tensor) -> Any:
        return Primitive.__call__(self, *(self.in_order(inputs, named) if named else inputs))


class ScratchOperator(Operator):
    """An operator with scratch: a call drops what its primitive returns after the outputs.

    The Cells of msops call the primitive: for level O1, MindSpore rewrites what a Cell calls, and finds no source of an
    operator.
    """

    __ms_class__ = True  # MindSpore compiles __call__ from its source, as it does for an ms_class (jit_class)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.primitive = Primitive(self)
        self.several, self.results = len(self.signature.outputs) > 1, len(self.signature.outputs)
        self.has_scratch = bool(self.signature.scratch)

    def __call__(self, *inputs: Tensor | None, **named: Tensor) -> Any:
        if named:
            if compiling():
                raise TypeError(self.without_names)
            inputs = self.in_order(inputs, named)
        outputs = self.run(inputs)
        if self.has_scratch:
            return outputs[: self.results] if self.several else outputs[0]
        return outputs

    def run(self, inputs: tuple[Tensor | None, ...]) -> Any:
        """Returns what the primitive returns."""
        return self.primitive(*inputs)


class OptionalOperator(ScratchOperator):
    """An operator with optional inputs, and perhaps scratch: each call runs the primitive without the absent ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # MindSpore 1.10 takes functions of one name for one.
        self.choose = ops.constexpr(self._choose, name=f"choose_{self.number}")

    # MindSpore 1.10 cannot compile a loop in a method of an ms_class, so the loops are in functions below.
    def run(self, inputs: tuple[Tensor | None, ...]) -> Any:
        return self.choose(_presence(inputs))(*present(inputs))

    def _choose(self, presence: tuple[bool, ...]) -> Primitive:
        """Returns the primitive for inputs of which some are None, or left out at the end."""
        tensors = self.signature.inputs
        flags = [*presence, *[False] * (len(tensors) - len(presence))]
        absent = [tensor for tensor, flag in zip(tensors, flags) if not flag]
        if len(presence) > len(tensors) or not all(tensor.optional for tensor in absent):
            names = ", ".join(tensor.name + "?" * tensor.optional for tensor in tensors)
            raise TypeError(f"{self.label}: takes the inputs {names}, got {sum(presence)}")
        return self.without(*(tensor.name for tensor in absent)).primitive


def _presence(inputs: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    flags = ()  # type: tuple[bool, ...]  # MindSpore before 2.7 needs the type in a comment
    for x in inputs:
        flags += (x is not None,)
    return flags
