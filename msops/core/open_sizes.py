"""Infers sizes that a graph leaves open: MindSpore asks the library, and the library asks the operator's rule."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .definition import Definition
from .spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .library import Entry

_STAND_INS = 1, 2**10, 2**20  # rules get these in place of open sizes


def is_open(specs: Sequence[Spec]) -> bool:
    """Tells whether sizes are open (-1). The answer is no for an open rank (-2), from which nothing can be inferred."""
    sizes = [size for spec in specs for size in spec.shape]
    return -1 in sizes and min(sizes) == -1


def infer(label: str, rule: Callable[..., list[Spec]], specs: Sequence[Spec]) -> list[Spec]:
    """Infers the outputs' Specs from inputs with open sizes (-1), in whose place the rule gets several stand-ins.

    A size of an output is open (-1) unless at least two stand-ins fit the rule, and all that fit give the same size.
    """
    found = []
    for number in _STAND_INS:
        numbers = [spec._replace(shape=tuple(number if n < 0 else n for n in spec.shape)) for spec in specs]
        try:
            found.append(rule(*numbers, shapes=False))
        except ValueError as caught:
            error = caught
    if not found:
        shapes = ", ".join(str(spec.shape) for spec in specs)
        raise ValueError(f"{label}: more sizes must be known at compile time than {shapes}") from error
    outputs = []
    for same in zip(*found):
        sizes = zip(*(out.shape for out in same))
        shape = tuple(each[0] if len({*each}) == 1 < len(each) else -1 for each in sizes)
        outputs.append(same[0]._replace(shape=shape))
    return outputs


_Rule = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_char),
)


@_Rule  # the C functions of all operators call it
def sizes_of_outputs(number: int, ranks: Any, shapes: Any, sizes: Any, room: int, message: Any) -> int:
    """Writes the rank and sizes of each output of the operator of a number to `sizes`, as msops::Rule of
    aot_kernels/common/open_sizes.h says."""
    try:
        operator = Definition.alive[number]
        specs = [Spec(tuple(shapes[i][: ranks[i]]), dtype) for i, dtype in enumerate(operator.input_dtypes)]
        outputs = infer(operator.label, operator.infer, specs) if is_open(specs) else operator.infer(*specs)
        numbers = [size for out in outputs for size in (len(out.shape), *out.shape)]
        if len(numbers) > room:
            raise ValueError(f"{operator.label}: the outputs have more than {room} sizes")
        for i, size in enumerate(numbers):
            sizes[i] = size
        return len(outputs)
    except Exception as error:  # noqa: BLE001 (C has no exceptions)
        text = str(error).encode()[:1000] + b"\0"
        ctypes.memmove(message, text, len(text))
        return 0


def offer_rule(entry: Entry) -> bool:
    """Gives the C function the address of the rule. Returns False if it is not an MSOPS_ENTRY."""
    try:
        address = ctypes.c_void_p.in_dll(entry.library.handle, f"{entry.name}Rule")
    except ValueError:
        return False
    address.value = ctypes.cast(sizes_of_outputs, ctypes.c_void_p).value
    return True
