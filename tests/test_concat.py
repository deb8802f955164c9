"""Tests the entries of `concat`, which serve patch_mindspore. They take addresses, which they cannot check. So no
operator of custom_op calls them, there is no card, and the fuzzer leaves them out: a wrong address ends the process."""

import ctypes
import math

import numpy as np
import pytest

import emulator
from msops.core.abi import DEFAULT_STREAM, Param, prepare_call
from msops.core.library import of_package
from msops.testing.entry import Status, attributes_in_mindspore

GUARD = 32  # elements around what an entry may write
DTYPES = ("bool", "int8", "float16", "int32", "float32", "int64", "float64")

# rows, the pieces' lengths along the axis, the inner size, whether all begin at aligned addresses
CASES = {
    "two": (3, (2, 4), 3, True),
    "one": (1, (1,), 1, True),
    "packs": (5, (2, 3, 1), 16, True),
    "packs off their addresses": (5, (2, 3, 1), 16, False),
    "odd": (7, (3, 5, 2), 7, True),
    "odd addresses": (7, (3, 5, 2), 7, False),
    "empty pieces": (4, (0, 3, 0, 0, 5, 0), 3, True),
    "no rows": (0, (2, 3), 4, True),
    "columns": (65, (1, 1, 1), 1, True),
    "long": (2, (1501, 40), 9, True),
    "many": (3, tuple(range(1, 70)), 2, False),
    "one row": (1, (33, 70), 5, False),
    "equal": (9, (4, 4, 4), 8, True),
    "equal, odd": (9, (5, 5), 3, False),
    "equal, short": (70, (1, 1), 3, True),
    "equal, long": (3, (2000,) * 3, 3, True),
}


class OnCpu:
    """Calls the package's entries on the CPU."""

    stream = None

    def function(self, name):
        return getattr(of_package("concat").handle, name)


class Emulated:
    """Calls the entries of the emulated library."""

    stream = DEFAULT_STREAM

    def function(self, name):
        return getattr(ctypes.CDLL(str(emulator.library(emulator.SOURCES / "concat.cu"))), name)


def status(device, name, arrays, **attributes):
    values = attributes_in_mindspore(attributes)
    return prepare_call(device.function(name), [Param.of(x) for x in arrays], values, device.stream)()


def arrays_of(rng, shapes, dtype, aligned, fill=None):
    """Returns arrays within guards, and a function that requires the guards to be as they were. Pieces that are not
    aligned begin one, two, ... elements after an address of 16 bytes."""
    arrays, guards = [], []
    for i, shape in enumerate(shapes):
        size, shift = math.prod(shape), GUARD + (0 if aligned else i + 1)
        memory = np.zeros(size + 2 * GUARD + len(shapes) + 16, dtype)
        start = -(memory.ctypes.data // memory.itemsize) % max(1, 16 // memory.itemsize) + shift
        memory[:] = 1
        array = memory[start : start + size].reshape(shape)
        array[...] = rng.integers(0, 2 if dtype == "bool" else 100, shape) if fill is None else fill
        arrays.append(array)
        guards += [memory[:start], memory[start + size :]]

    def check():
        assert all((guard == 1).all() for guard in guards)

    return arrays, check


def addresses_of(pieces):
    return np.array([piece.ctypes.data for piece in pieces], np.int64)


def check_concat(device, case, dtype):
    rows, lengths, inner, aligned = CASES[case]
    rng, row = np.random.default_rng(0), sum(lengths) * inner
    pieces, _ = arrays_of(rng, [(rows, n * inner) for n in lengths], dtype, aligned)
    [whole], check = arrays_of(rng, [(rows, row)], dtype, aligned, fill=0)
    arrays = [addresses_of(pieces), np.array(lengths, np.int32), whole]
    assert status(device, "ConcatForward", arrays, row=row, inner=inner) == 0
    np.testing.assert_array_equal(whole, np.concatenate(pieces, 1))
    check()


def check_stack_and_split(device, case, dtype):
    rows, lengths, inner, aligned = CASES[case]
    rng, length = np.random.default_rng(0), lengths[0] * inner
    pieces, check_pieces = arrays_of(rng, [(rows, length)] * len(lengths), dtype, aligned)
    [whole], check_whole = arrays_of(rng, [(rows, length * len(lengths))], dtype, aligned, fill=0)
    assert status(device, "StackForward", [addresses_of(pieces), whole], length=length) == 0
    want = [piece.copy() for piece in pieces]
    np.testing.assert_array_equal(whole, np.concatenate(want, 1))
    for piece in pieces:
        piece[...] = 0
    assert status(device, "SplitForward", [whole, addresses_of(pieces)], length=length) == 0
    for got, expected in zip(pieces, want):
        np.testing.assert_array_equal(got, expected)
    check_pieces(), check_whole()


EQUAL = [case for case, (_, lengths, *_) in CASES.items() if len(set(lengths)) == 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_concat(case, dtype):
    check_concat(OnCpu(), case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EQUAL)
def test_stack_and_split(case, dtype):
    check_stack_and_split(OnCpu(), case, dtype)


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids="concat {}".format)
def test_emulated_concat(case):
    for dtype in DTYPES:
        check_concat(Emulated(), case, dtype)


@pytest.mark.wide
@pytest.mark.parametrize("case", EQUAL, ids="concat {}".format)
def test_emulated_stack_and_split(case):
    for dtype in DTYPES:
        check_stack_and_split(Emulated(), case, dtype)


@pytest.mark.parametrize("device", [OnCpu(), pytest.param(Emulated(), marks=pytest.mark.wide)], ids=["cpu", "emulator"])
def test_wrong_calls(device, capfd):
    """What an entry can check, it refuses."""
    piece, whole = np.zeros((2, 3), np.float32), np.zeros((2, 6), np.float32)
    pieces, lengths = addresses_of([piece, piece]), np.array([1, 1], np.int32)

    def refused(expected, name, arrays, **attributes):
        assert status(device, name, arrays, **attributes) == expected
        assert capfd.readouterr().err.startswith(f"msops: {name}: ")

    right = dict(row=6, inner=3)
    refused(Status.BAD_SHAPE, "ConcatForward", [pieces, lengths[:1], whole], **right)
    refused(Status.BAD_SHAPE, "ConcatForward", [pieces, lengths, whole], row=5, inner=3)
    refused(Status.BAD_SHAPE, "ConcatForward", [pieces[:0], lengths[:0], whole], **right)
    refused(Status.BAD_DTYPE, "ConcatForward", [pieces, lengths.astype(np.int64), whole], **right)
    refused(Status.BAD_DTYPE, "ConcatForward", [pieces.astype(np.int32), lengths, whole], **right)
    refused(Status.BAD_RANK, "ConcatForward", [pieces[None], lengths, whole], **right)
    refused(Status.BAD_ATTRIBUTE, "ConcatForward", [pieces, lengths, whole], row=-1, inner=3)
    refused(Status.BAD_ATTRIBUTE, "ConcatForward", [pieces, lengths, whole], row=6)
    refused(Status.BAD_PARAMETER_COUNT, "ConcatForward", [pieces, lengths], **right)
    refused(Status.BAD_SHAPE, "StackForward", [pieces, whole], length=4)
    refused(Status.BAD_ATTRIBUTE, "StackForward", [pieces, whole])
    refused(Status.BAD_SHAPE, "SplitForward", [whole, pieces[:0]], length=3)
    refused(Status.BAD_DTYPE, "SplitForward", [whole.astype(np.complex64), pieces], length=3)
    assert not whole.any()
