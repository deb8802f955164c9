"""Defines operators, which take and return tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import ops

from .compiled import compiling
from .definition import Definition
from .inputs import present
from .primitive import Primitive

if TYPE_CHECKING:
    from collections.abc import Callable

    from mindspore import Tensor


class Operator(Definition):
    """A C function as a function of tensors. See :func:`msops.custom_op`, which makes operators.

    Attributes:
        entry (Entry): The C function.
        signature (Signature): The inputs, outputs and scratch, without optional tensors that are absent.
        attributes (dict): What the C function can read: the given attributes and, for an optional `bias`, `has_bias`,
            which is 0 or 1.
        gradient (Operator, callable): The given gradient, without the gradients of absent inputs.
    """

    primitive: Primitive

    if TYPE_CHECKING:  # subclasses have it, each in the form that MindSpore needs

        def __call__(self, *inputs: Tensor | None, **named: Tensor) -> Any: ...

    def __init__(self, make: Callable[[frozenset[str]], Operator], *definition: Any) -> None:
        super().__init__(*definition)
        self.make = make
        self.kept: dict[frozenset[str], Operator] = {}  # absent tensors -> the operator that `make` made without them

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
