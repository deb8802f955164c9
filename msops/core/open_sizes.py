"""Sizes that a graph leaves open: MindSpore asks the library for them, and the library asks the operator's rule."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from .spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .library import Entry

_STAND_INS = 1, 2**10, 2**20  # for open sizes, in rules

# The operators that are alive, by their numbers.
operators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_open(specs: Sequence[Spec]) -> bool:
    """Whether sizes are open. Of an open rank (-2) nothing can be told."""
    sizes = [size for spec in specs for size in spec.shape]
    return -1 in sizes and min(sizes) == -1


def infer(label: str, rule: Callable[..., list[Spec]], specs: Sequence[Spec]) -> list[Spec]:
    """The outputs' Specs where sizes of inputs are open, -1: those sizes are open that stand-ins make differ."""
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


def offer_rule(entry: Entry) -> bool:
    """Tells the C function whom to ask for sizes, if it is an MSOPS_ENTRY; whether it is."""
    try:
        rule = ctypes.c_void_p.in_dll(entry.library.handle, f"{entry.name}Rule")
    except ValueError:
        return False
    rule.value = ctypes.cast(sizes_of_outputs, ctypes.c_void_p).value
    return True


@ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_char),
)
def sizes_of_outputs(number: int, ranks: Any, shapes: Any, sizes: Any, room: int, message: Any) -> int:
    """The msops::Rule of aot_kernels/common/open_sizes.h."""
    try:
        operator = operators[number]
        specs = [Spec(tuple(shapes[i][: ranks[i]]), dtype) for i, dtype in enumerate(operator.input_dtypes)]
        outputs = infer(operator.label, operator.infer, specs) if is_open(specs) else operator.infer(*specs)
        numbers = [size for out in outputs for size in (len(out.shape), *out.shape)]
        if len(numbers) > room:
            raise ValueError(f"{operator.label}: the outputs have more than {room} sizes")
        for i, size in enumerate(numbers):
            sizes[i] = size
        return len(outputs)
    except Exception as error:  # noqa: BLE001 (C has none)
        text = str(error).encode()[:1000] + b"\0"
        ctypes.memmove(message, text, len(text))
        return 0
