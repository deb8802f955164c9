"""Tests what stands in the places of the functions that launch MindSpore's kernels, without a GPU: in a plugin of the
tests' own, which calls functions of the same names as MindSpore's plugin for GPUs does."""

import functools
import subprocess
import threading
from pathlib import Path

import mindspore
import numpy as np
import pytest

from fake_plugin import installed
from msops.compat import VERSION
from msops.patch.gpu import kernels

NUMBERS = "float16", "float32", "float64", "int32", "int64"
ALL = "bool", *NUMBERS, "int8", "int16", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128"
NAMES = "rank", "offset", "op", "to", "first", "upper", "diagonal", "row", "inner", "length"
KEYS = (*NAMES, *(f"{name}_{i}" for name in ("size", "stride") for i in range(8)))


@pytest.fixture
def parts(stand_ins):
    stand_ins[0].attributes = [f"msops_{key}" for key in KEYS]
    return stand_ins


@pytest.fixture
def plugin(parts):
    """The plugin whose calls reach entries that note them."""
    plugin, functions = parts
    with installed(plugin, functions, plugin.entries(functions.entries)):
        yield plugin


def array(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def only(plugin, entry, arrays):
    """Returns the shapes and attributes of the only call, which is of this entry with these arrays."""
    (called,) = plugin.called
    plugin.called.clear()
    assert called.entry == entry
    assert called.addresses == [x.ctypes.data for x in arrays]
    assert called.dtypes == [x.dtype.name for x in arrays]
    assert called.stream is None
    return called.shapes, called.attributes


@pytest.mark.parametrize("dtype", NUMBERS)
def test_binary_arguments(plugin, dtype):
    x, y, z, truth = array(2, 3, 5, dtype=dtype), array(3, 1, dtype=dtype), array(2, 3, 5, dtype=dtype), array(30) > 0
    for op in (8, 9, 10, 11, 12, 14, 21, 28):
        assert plugin.binary(op, dtype, 0, 1, (2, 3, 5), (1, 3, 1), (2, 3, 5), x, y, z) == 0
        shapes, attributes = only(plugin, "BinaryForward", [x, y, z])
        assert shapes == [[2, 3, 5], [1, 3, 1], [2, 3, 5]]
        assert attributes == {"op": op}
    for op in range(8):
        assert plugin.binary(op, dtype, 1, 1, (2, 3, 5), (1, 3, 1), (2, 3, 5), x, y, truth) == 0
        assert only(plugin, "CompareForward", [x, y, truth])[1] == {"op": op}


@pytest.mark.parametrize(
    ("x_shape", "y_shape", "expected"),
    [
        ((30,), (30,), [[30], [30], [30]]),
        ((30,), (1,), [[30], [1], [30]]),
        ((1,), (30,), [[1], [30], [30]]),
        ((2, 15), (2, 15), [[30], [30], [30]]),
    ],
)
def test_binary_without_broadcasting(plugin, x_shape, y_shape, expected):
    """MindSpore takes no note of the shapes then, except of a single element."""
    x, y, z, z_shape = array(30), array(30), array(30), (2, 15) if len(x_shape) == 2 else (30,)
    assert plugin.binary(10, "float32", 0, 0, x_shape, y_shape, z_shape, x, y, z) == 0
    assert only(plugin, "BinaryForward", [x, y, z])[0] == expected


def test_binary_ext_arguments(plugin):
    for dtype, alpha in (("float16", "float32"), ("float64", "int64"), ("int32", "int64")):
        x, y, number, z = (array(6, dtype=name) for name in (dtype, dtype, alpha, dtype))
        is_float = alpha == "float32"
        assert plugin.binary_ext(dtype, is_float, 1, (2, 3), (1, 3), (2, 3), x, y, number, z) == 0
        shapes, attributes = only(plugin, "BinaryExtForward", [x, y, number, z])
        assert shapes == [[2, 3], [1, 3], [], [2, 3]]
        assert attributes == {"op": 32 if is_float else 33}


def test_arguments_of_two_dtypes(plugin):
    x, y, z = array(6, dtype="float16"), array(3), array(6)
    assert plugin.mixed((2, 3), (3,), (2, 3), x, y, z) == 0
    assert only(plugin, "BinaryMixedForward", [x, y, z]) == ([[2, 3], [3], [2, 3]], {"op": 12})


def test_cast_arguments(plugin):
    x, y = array(24), array(24, dtype="bool")
    assert plugin.cast(1, 24, x, y) == 0
    assert only(plugin, "CastForward", [x, y]) == ([[24], [24]], {"to": 0})
    assert plugin.cast(0, 24, array(24, dtype="float64"), array(24, dtype="float16")) == 77
    assert not plugin.called


def test_select_arguments(plugin):
    c, x, y, z = array(24, dtype="bool"), array(24), array(24), array(24)
    assert plugin.select("float32", c, x, y, z, 24) == 0
    assert only(plugin, "SelectForward", [c, x, y, z])[0] == [[24]] * 4
    shapes = (2, 3, 1), (1, 1, 4), (2, 1, 4), (2, 3, 4)
    assert plugin.select_broadcast("float32", *shapes, c, x, y, z) == 0
    assert only(plugin, "SelectForward", [c, x, y, z])[0] == list(map(list, shapes))
    assert plugin.masked_fill("float32", 24, 24, x, c, y, z) == 0
    assert only(plugin, "SelectForward", [c, y, x, z])[0] == [[1, 24], [1, 1], [1, 24], [1, 24]]
    assert plugin.masked_fill("float32", 6, 24, x, c, y, z) == 0  # a value for each of four parts, under vmap
    assert only(plugin, "SelectForward", [c, y, x, z])[0] == [[4, 6], [4, 1], [4, 6], [4, 6]]
    assert plugin.broadcast_masked_fill("float32", 24, (2, 3, 4), (1, 3, 1), (2, 3, 4), x, c, y, z) == 0
    assert only(plugin, "SelectForward", [c, y, x, z])[0] == [[1, 3, 1], [1], [2, 3, 4], [2, 3, 4]]


def axes(attributes):
    return [(attributes[f"size_{i}"], attributes[f"stride_{i}"]) for i in range(attributes["rank"])]


@pytest.mark.parametrize("dtype", ALL)
def test_copies_arguments(plugin, dtype):
    x, y = array(1000, dtype=dtype), array(1000, dtype=dtype)

    def copied(offset, reach, *expected):
        shapes, attributes = only(plugin, "StridedCopyForward", [x, y])
        assert axes(attributes) == list(expected)
        assert shapes == [[reach], [length for length, _ in expected]]
        assert attributes["offset"] == offset

    assert plugin.as_strided(dtype, (2, 3, 4), (1, 9, 2), 5, 24, x, y) == 0
    copied(5, 31, (2, 1), (3, 9), (4, 2))
    assert plugin.as_strided(dtype, (2, 3, 4), (12, 4, 1), 5, 24, x, y) == 0
    copied(5, 29, (24, 1))
    assert plugin.as_strided(dtype, (3, 4), (0, -2), 6, 12, x, y) == 0
    copied(6, 7, (3, 0), (4, -2))
    for simplify in (0, 1):
        assert plugin.transpose(dtype, simplify, (2, 3, 4, 5), (0, 3, 1, 2), x, y) == 0
        copied(0, 120, (2, 60), (5, 1), (12, 5))
    assert plugin.broadcast_to(dtype, (1, 3, 1), (2, 3, 4), x, y) == 0
    copied(0, 3, (2, 0), (3, 1), (4, 0))
    assert plugin.tile(dtype, (1, 3), (2, 6), x, y) == 0
    copied(0, 3, (4, 0), (3, 1))
    ones = [1] * 6
    whole, part = [*ones, 6, 10], [*ones, 3, 4]
    assert plugin.strided_slice(dtype, whole, [*[0] * 6, 5, 1], [*ones, -2, 2], part, x, y) == 0
    copied(51, 60, (3, -20), (4, 2))
    assert plugin.slice(dtype, (1, 2, 3), (2, 3, 4), (5, 6, 7), x, y) == 0
    copied(42 + 14 + 3, 210, (2, 42), (3, 7), (4, 1))
    assert plugin.slice(dtype, (7,), (3,), (20,), x, y) == 0
    copied(7, 20, (3, 1))


def test_band_arguments(plugin):
    x, y = array(60), array(60)
    for upper in (0, 1):
        assert plugin.band("float32", upper, 60, -1, 3, 5, x, y) == 0
        shapes, attributes = only(plugin, "BandForward", [x, y])
        assert shapes == [[4, 3, 5]] * 2
        assert attributes == {"upper": upper, "diagonal": -1}


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64"])
def test_reduction_arguments(plugin, dtype):
    accumulator = "float64" if dtype == "float64" else "float32"
    x, y, partial = array(60, dtype=dtype), array(60, dtype=dtype), array(1, dtype=accumulator)
    for first, kept in ((1, [4]), (0, [3, 5])):
        assert plugin.reduce(dtype, (3, 4, 5), first, 2, x, partial, y) == 0
        shapes, attributes = only(plugin, "ReduceForward", [x, y, partial])
        assert shapes == [[3, 4, 5], kept, [1, 1]]
        assert attributes == {"op": 2, "first": first}


def test_joins_arguments(plugin):
    for dtype, used, each in (("int8", "int8", 1), ("complex64", "float64", 1), ("complex128", "float64", 2)):
        pieces, lengths, whole = array(2, dtype="int64"), array(2, dtype="int32"), array(64, dtype=used)
        assert plugin.concat(dtype, 48, 2, 24, 4, lengths, pieces, whole) == 0
        shapes, attributes = only(plugin, "ConcatForward", [pieces, lengths, whole])
        assert shapes == [[2], [2], [48 * each]]
        assert attributes == {"row": 24 * each, "inner": 4 * each}
        assert plugin.stack(dtype, 48, 2, 4, pieces, whole) == 0
        shapes, attributes = only(plugin, "StackForward", [pieces, whole])
        assert shapes == [[2], [48 * each]]
        assert attributes == {"length": 4 * each}
        assert plugin.split(dtype, 48, 3, 24, 4, whole, pieces) == 0
        assert only(plugin, "SplitForward", [whole, pieces]) == ([[48 * each], [2]], {"length": 12 * each})
        assert plugin.unstack(dtype, 48, 2, 4, pieces, whole) == 0
        assert only(plugin, "SplitForward", [whole, pieces]) == ([[48 * each], [2]], {"length": 4 * each})


def test_gradients_of_biases_arguments(plugin):
    dy, db = array(240, dtype="float32"), array(6, dtype="float32")
    assert plugin.bias_grad("float32", 240, 6, 0, 0, dy, db) == 0
    assert only(plugin, "ReduceForward", [dy, db, db])[0] == [[40, 6], [6], [1, 1]]
    assert plugin.bias_grad("float32", 240, 6, 4, 5, dy, db) == 0
    shapes, attributes = only(plugin, "ReduceForward", [dy, db, db])
    assert shapes == [[2, 6, 20], [6], [1, 1]]
    assert attributes == {"op": 0, "first": 1}


def refused():
    """Yields a name and a call that only MindSpore's own function can do."""
    x, y = array(64), array(64)
    yield "another dtype", lambda p: p.binary(10, "int8", 0, 0, (3,), (3,), (3,), x, y, y)
    yield "a complex dtype", lambda p: p.binary(10, "complex64", 0, 0, (3,), (3,), (3,), x, y, y)
    yield "another operation", lambda p: p.binary(19, "float32", 0, 0, (3,), (3,), (3,), x, y, y)
    yield "no elements", lambda p: p.binary(10, "float32", 0, 1, (0, 3), (1, 3), (0, 3), x, y, y)
    yield "more axes than entries take", lambda p: p.transpose("float32", 1, [2] * 10, tuple(range(9, -1, -1)), x, y)
    yield "parts of complex numbers", lambda p: p.as_strided("float32", (3, 2), (1, 3), 0, 12, x, y)
    yield "values of uneven parts", lambda p: p.masked_fill("float32", 5, 24, x, y, x, y)
    yield "several values", lambda p: p.broadcast_masked_fill("float32", 3, (6,), (6,), (6,), x, y, x, y)
    yield "a mean of integers", lambda p: p.reduce("int32", (3, 4), 1, 4, x, x, y)
    yield "any of numbers", lambda p: p.reduce("float32", (3, 4), 1, 5, x, x, y)
    yield "more axes than are reduced", lambda p: p.reduce("float32", (2, 3, 2, 3), 1, 0, x, x, y)
    yield "a triangle of no matrix", lambda p: p.band("float32", 1, 60, 0, 7, 5, x, y)
    yield "uneven pieces", lambda p: p.split("float32", 60, 7, 20, 1, x, y)
    yield "too many elements", lambda p: p.stack("float32", 2**31, 2, 4, x, y)
    yield "a slice beyond the tensor", lambda p: p.slice("float32", (7,), (3,), (9,), x, y)


@pytest.mark.parametrize("case", refused(), ids=lambda case: case[0])
def test_left_to_mindspore(plugin, case):
    before = plugin.originals
    assert case[1](plugin) == 77
    assert plugin.originals == before + 1
    assert plugin.called == []


def test_fails_over_to_mindspore(plugin):
    x, before = array(8), plugin.originals
    for status in (5, 9):
        plugin.status = status
        assert plugin.select("float32", x, x, x, x, 8) == 77
    assert len(plugin.called) == 2
    assert plugin.originals == before + 2
    plugin.status = 0
    assert plugin.select("float32", x, x, x, x, 8) == 0


@pytest.mark.parametrize("status", [7, 8])
def test_not_called_again_without_a_kernel(plugin, status):
    """Where the library has no code for the GPU, each call would fail and print a line."""
    x, before = array(8), plugin.originals
    plugin.status = status
    for _ in range(3):
        assert plugin.select("float32", x, x, x, x, 8) == 77
    assert len(plugin.called) == 1
    assert plugin.originals == before + 3
    assert plugin.transpose("float32", 1, (2, 3), (1, 0), x, x) == 77  # another entry still runs
    assert len(plugin.called) == 2


def test_undo(parts):
    plugin, functions = parts
    x = array(8)
    for _ in range(3):
        with installed(plugin, functions, plugin.entries(functions.entries)):
            assert plugin.select("float32", x, x, x, x, 8) == 0
        assert functions.installed() == []
        assert plugin.select("float32", x, x, x, x, 8) == 77
        assert plugin.called == []


def test_null_stream_of_a_gpu(parts):
    """It is a stream of the GPU, but means the CPU to entries."""
    plugin, functions = parts
    x = array(8)
    with installed(plugin, functions, plugin.entries(functions.entries), on_cpu=False):
        assert plugin.select("float32", x, x, x, x, 8) == 77
        assert plugin.select("float32", x, x, x, x, 8, stream=0x1234) == 0
        assert [each.stream for each in plugin.called] == [0x1234]


def test_missing_entries(parts):
    plugin, functions = parts
    x = array(8)
    entries = plugin.entries(["SelectForward"])
    assert functions.install({}, plugin.NAME) == 0
    assert functions.install(entries, "no such plugin") == 0
    assert functions.install(entries, plugin.NAME) == 4 * 12
    with installed(plugin, functions, entries):
        assert plugin.select("float32", x, x, x, x, 8) == 0
        assert plugin.binary(10, "float32", 0, 0, (3,), (3,), (3,), x, x, x) == 77


def test_listed(plugin, parts):
    listed = parts[1].installed()
    assert kernels.Kernel("BinaryOpWithBroadcastCudaFunc", "add", ("float16",) * 3) in listed
    assert kernels.Kernel("BinaryOpWithBroadcastCudaFunc", "less", ("int64", "int64", "bool")) in listed
    assert kernels.Kernel("BinaryExtOpWithBroadcastCudaFunc", "sub_ext", (*["int32"] * 2, "int64", "int32")) in listed
    assert kernels.Kernel("CalTranspose", "", ("complex128",)) in listed
    assert len(set(listed)) == len(listed)
    assert not any("int8" in each.dtypes for each in listed if each.operation)


def test_calls(plugin, parts):
    x = array(8)
    for status in (0, 0, 5):
        plugin.status = status
        plugin.select("float32", x, x, x, x, 8)
    plugin.transpose("float32", 0, (2, 3), (1, 0), x, x)
    plugin.transpose("float32", 1, (2, 3), (1, 0), x, x)
    calls = {kernel: each for kernel, each in parts[1].calls().items() if any(each)}
    names = kernels.Kernel("CalSelect", "", ("float32",)), kernels.Kernel("CalTranspose", "", ("float32",))
    assert calls == dict(zip(names, [(2, 1), (0, 2)]))


def test_threads(plugin):
    """MindSpore launches from several threads."""
    plugin.attributes, kept = [], plugin.attributes
    x, failed = array(8), []

    def work():
        failed.extend(plugin.select("float32", x, x, x, x, 8) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    plugin.attributes = kept
    assert failed == [0] * 200
    assert len(plugin.called) == 200


@functools.cache
def imports_of_plugin():
    """Returns the mangled names of the functions that MindSpore's plugin for GPUs imports."""
    path = Path(mindspore.__file__).parent / "lib" / "plugin" / "libmindspore_gpu.so.11.6"
    if not path.exists():
        pytest.skip("this wheel of MindSpore has no plugin for GPUs")
    said = subprocess.run(["nm", "--dynamic", "--undefined-only", path], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in said.stdout.splitlines()]


# We replace this many instances of each function in MindSpore 2.10. The functions that are not here have 14, one for
# each dtype.
INSTANCES = {
    "BinaryOpWithBroadcastCudaFunc": 104,
    "BinaryExtOpWithBroadcastCudaFunc": 16,
    "Cast": 28,
    "CalSelect": 12,
    "CalSelectBroadcast": 12,
    "ElewiseMaskedFill": 12,
    "BroadcastMaskedFill": 12,
    "CalTranspose": 28,
    "CalTriu": 13,
    "CalTril": 12,
    "ArrayReduce": 6,
    "CalBiasAddGradNHWC": 2,
    "CalBiasAddGradNCHW": 2,
}


@pytest.mark.skipif(VERSION != (2, 10), reason="the functions are those of MindSpore 2.10")
def test_names_of_mindspore(parts):
    _, functions = parts
    for name in functions.templates:
        symbols = [each for each in imports_of_plugin() if each.startswith(f"_Z{len(name)}{name}I")]
        assert sum(map(functions.accepts, symbols)) == INSTANCES.get(name, 14), name
