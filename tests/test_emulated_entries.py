"""Compares C entries in an emulator of a GPU with the same entries on the CPU, for the cases of the cards."""

import ctypes

import numpy as np
import pytest

import emulator
from card import DTYPES, cards, names_of
from msops.testing.abi import DEFAULT_STREAM, Param, prepare_call
from msops.testing.entry import attributes_in_mindspore

GUARD = 16  # elements around each array
SHIFTS = {"float16": 0, "float32": 1, "float64": 0}  # elements, off the alignment of packs


def library_of(stem):
    return ctypes.CDLL(str(emulator.library(stem)))


class Guarded:
    """Holds an array between guard elements."""

    def __init__(self, shape, dtype, shift, values=None):
        size = int(np.prod(shape, dtype=np.int64))
        self.memory = np.full(size + 2 * GUARD, 7, dtype)
        self.array = self.memory[GUARD + shift : GUARD + shift + size].reshape(shape)
        self.array[...] = (np.nan if self.memory.dtype.kind == "f" else -1) if values is None else values
        self.others = np.r_[0 : GUARD + shift, GUARD + shift + size : self.memory.size]

    def untouched(self):
        return (self.memory[self.others] == self.memory.dtype.type(7)).all()


def check_call(library, call, dtype, shift):
    what = f"{call.operator.entry.name}, shifted by {shift}"
    inputs = [Guarded(x.shape, x.dtype, shift, x) for x in call.inputs]
    outputs = [Guarded(x.shape, x.dtype, shift) for x in [*call.results, *call.scratch]]
    params = [Param.of(g.array) for g in [*inputs, *outputs]]
    function = getattr(library, call.operator.entry.name)
    run = prepare_call(function, params, attributes_in_mindspore(call.operator.attributes), DEFAULT_STREAM)
    assert run() == 0, what
    for x, g in zip(call.inputs, inputs):
        np.testing.assert_array_equal(g.array, x, f"{what}: an input was changed")
    assert all(g.untouched() for g in [*inputs, *outputs]), what
    for name, want, g in zip(names_of(call.operator).results, call.results, outputs):
        terms = max(x.size for x in call.inputs) / max(1, want.size)
        scale = max(np.abs(want).max(initial=0), terms**0.5)
        tolerance = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(g.array, want, rtol=tolerance, atol=tolerance * scale, err_msg=f"{what}: {name}")


CASES = [
    pytest.param(card, *case, id=f"{card.name()} {name}")
    for card in cards()
    for name, case in card.entry_cases().items()
    if card.operators(case[0], **case[1])
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("card", "shapes", "settings"), CASES)
def test_emulated_equals_cpu(card, shapes, settings, dtype):
    for call in card.entry_calls(shapes, settings, dtype):
        check_call(library_of(call.operator.entry.library.path.stem), call, dtype, SHIFTS[dtype])
