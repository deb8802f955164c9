"""Defines what describes an operator: its C function, its tensors, and the rules for their shapes and dtypes."""

from __future__ import annotations

import ctypes
import numbers
import weakref
from itertools import starmap
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore
from mindspore.common import dtype as mstype

from .abi import Param, as_attribute, ask_shapes
from .spec import LARGEST, SMALLEST, Rounded, Spec, accumulator, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from mindspore import Tensor

    from .library import Entry
    from .signature import Signature

    Infer = Callable[..., Spec | Sequence[Spec]]
    Gradient: TypeAlias = "Definition | Callable[..., tuple[Tensor | None, ...]]"


class Definition:
    """The part of an operator that describes it. What compiles operators, and what calls them, takes it from here.

    Attributes:
        full (Signature): The inputs, outputs and scratch, with all optional tensors.
        absent (frozenset): The names of the optional tensors that `signature` lacks.
        settings (dict): The given attributes.
        rule (callable): The given `infer`.
        input_dtypes (list): The inputs' dtypes at the last inference.

    The others are as in :class:`msops.Operator`.
    """

    primitive: Callable[..., Any]  # what MindSpore runs; operators have it
    alive: ClassVar[weakref.WeakValueDictionary[int, Definition]] = weakref.WeakValueDictionary()  # by number

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
        self.label, self.full, self.signature = name, signature, signature.without(absent)
        self.number, self.entry, self.settings, self.absent = number, entry, dict(attributes), absent
        self.attributes = attributes | {f"has_{name}": int(name not in absent) for name in signature.optional}
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
        names = ", ".join(self.names()[0])
        self.without_names = f"{name}: takes its inputs without names where it is compiled, as ({names})"

    def names(self) -> tuple[list[str], list[str]]:
        """Returns input names and output names."""
        return [tensor.name for tensor in self.signature.inputs], [tensor.name for tensor in self.signature.outputs]

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
