"""Compares C entries in an emulator of a GPU with the same entries on the CPU, for the cases of the cards."""

import ctypes
import functools
import itertools

import numpy as np
import pytest

import emulator
from card import DTYPES, cards
from gpu import check_call
from msops.core.abi import DEFAULT_STREAM, Param, prepare_call
from msops.testing.entry import Status, attributes_in_mindspore

pytestmark = pytest.mark.wide

SHIFTS = {"float16": 0, "float32": 1, "float64": 0}  # elements, off the alignment of packs


@functools.cache
def library_of(stem):
    return ctypes.CDLL(str(emulator.library(emulator.SOURCES / f"{stem}.cu")))


class Emulator:
    """Has NumPy's arrays, and calls entries of emulated libraries."""

    array = numpy = staticmethod(np.asarray)

    def full(self, size, value, dtype):
        return np.full(size, value, dtype)

    def status(self, operator, arrays):
        function = getattr(library_of(operator.entry.library.path.stem), operator.entry.name)
        attributes = attributes_in_mindspore(operator.attributes)
        status = prepare_call(function, [Param.of(x) for x in arrays], attributes, DEFAULT_STREAM)()
        if status == Status.LAUNCH_FAILED:  # no launch fails in the emulator
            pytest.skip("the entry needs cuBLAS")
        return status


CASES = [
    (f"{card.name()} {name}", card, *case)
    for card in cards()
    for name, case in card.entry_cases().items()
    if card.operators(case[0], **case[1])
]


# Each case takes one dtype, since the emulator is slow; neighbouring cases take different ones.
@pytest.mark.parametrize(
    ("card", "shapes", "settings", "dtype"),
    [pytest.param(*case, dtype, id=f"{name}-{dtype}") for (name, *case), dtype in zip(CASES, itertools.cycle(DTYPES))],
)
def test_emulated_equals_cpu(card, shapes, settings, dtype):
    for call in card.entry_calls(shapes, settings, dtype):
        check_call(Emulator(), call, dtype, SHIFTS[dtype])
