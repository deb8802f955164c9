"""Compares what msops' entries compute in the places of MindSpore's functions with NumPy, on the CPU: see
test_kernels.py."""

import itertools

import numpy as np
import pytest

from fake_plugin import installed
from msops.patch.gpu import kernels

NUMBERS = "float16", "float32", "float64", "int32", "int64"
ALL = "bool", *NUMBERS, "int8", "int16", "uint8", "uint16", "uint32", "uint64", "complex64", "complex128"


@pytest.fixture
def plugin(stand_ins):
    """The plugin whose calls reach msops' own entries. MindSpore's own functions compute nothing."""
    plugin, functions = stand_ins
    with installed(plugin, functions, kernels.addresses(functions.entries, on_cpu=True)):
        yield plugin


def values(rng, shape, dtype, low=-5, high=6):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    return (rng.integers(max(low, 0) if dtype.startswith("u") else low, high, shape)).astype(dtype)


COMPARISONS = (
    np.greater,
    np.less,
    np.equal,
    np.greater_equal,
    np.less_equal,
    np.not_equal,
    np.logical_and,
    np.logical_or,
)
BINARY = {
    8: np.maximum,
    9: np.minimum,
    10: np.add,
    11: np.subtract,
    12: np.multiply,
    14: np.power,
    21: lambda x, y: (x - y) * (x - y),
}
DIVISIONS = {
    13: np.divide,
    15: np.divide,
    27: lambda x, y: np.where(y == 0, x * 0, x / np.where(y == 0, 1, y)),
    28: lambda x, y: np.where(y == 0, x * 0, x * y),
}
SHAPES = (
    (0, (120,), (120,)),
    (0, (120,), (1,)),
    (0, (1,), (120,)),
    (1, (2, 3, 4, 5), (2, 1, 4, 1)),
    (1, (1, 7), (5, 1)),
    (1, (3, 1, 65), (3, 8, 1)),
    (1, (2,) * 8, (1, 2) * 4),
)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_binary(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    is_float = dtype.startswith("float")
    for op, (is_broadcast, x_shape, y_shape) in itertools.product([*BINARY, *(DIVISIONS if is_float else ())], SHAPES):
        x, y = values(rng, x_shape, dtype), values(rng, y_shape, dtype, low=0 if op == 14 else -5)
        if op == 14:
            x = np.abs(x)
        want = {**BINARY, **DIVISIONS}[op](x, y).astype(dtype)
        z = np.full(want.shape, 111, dtype)
        assert plugin.binary(op, dtype, 0, is_broadcast, x_shape, y_shape, z.shape, x, y, z) == 0
        np.testing.assert_allclose(z, want, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_comparisons(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    for (op, compare), (is_broadcast, x_shape, y_shape) in itertools.product(enumerate(COMPARISONS), SHAPES):
        x, y = values(rng, x_shape, dtype), values(rng, y_shape, dtype)
        want = compare(x, y)
        z = np.full(want.shape, 7, np.uint8)
        assert plugin.binary(op, dtype, 1, is_broadcast, x_shape, y_shape, z.shape, x, y, z) == 0
        np.testing.assert_array_equal(z, want)
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", NUMBERS)
def test_binary_ext(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    for is_float, (is_broadcast, x_shape, y_shape) in itertools.product((0, 1), SHAPES):
        if is_float and dtype.startswith("int"):
            continue
        x, y = values(rng, x_shape, dtype), values(rng, y_shape, dtype)
        alpha = np.array([2.5], np.float32) if is_float else np.array([3], np.int64)
        number = alpha[0].astype(dtype)
        want = x + number * y if is_float else x - number * y
        z = np.zeros_like(want)
        arguments = is_float, is_broadcast, x_shape, y_shape, z.shape, x, y, alpha, z
        assert plugin.binary_ext(dtype, *arguments) == 0
        np.testing.assert_array_equal(z, want)
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", [each for each in ALL if not each.startswith("complex")])
def test_select(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    c, x, y = values(rng, 24, "bool"), values(rng, 24, dtype), values(rng, 24, dtype)
    z = np.zeros_like(x)
    assert plugin.select(dtype, c, x, y, z, 24) == 0
    np.testing.assert_array_equal(z, np.where(c, x, y))
    for shapes in (
        ((2, 3, 1), (1, 1, 4), (2, 1, 4)),
        ((1, 1, 1), (2, 3, 4), (1, 3, 1)),
        ((2, 3, 4), (1,) * 3, (1,) * 3),
    ):
        used = [v[: np.prod(shape)].reshape(shape) for v, shape in zip((c, x, y), shapes)]
        z = np.zeros((2, 3, 4), dtype)
        assert plugin.select_broadcast(dtype, *shapes, z.shape, *map(np.ascontiguousarray, used), z) == 0
        np.testing.assert_array_equal(z, np.where(*used))
    z = np.zeros_like(x)
    for inner in (24, 6):
        assert plugin.masked_fill(dtype, inner, 24, x, c, y, z) == 0
        np.testing.assert_array_equal(z, np.where(c, np.repeat(y[: 24 // inner], inner), x))
    assert plugin.broadcast_masked_fill(dtype, 24, (2, 3, 4), (1, 3, 1), (2, 3, 4), x, c, y, z) == 0
    np.testing.assert_array_equal(z.reshape(2, 3, 4), np.where(c[:3].reshape(3, 1), y[0], x.reshape(2, 3, 4)))
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", ALL)
def test_copies(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    x = values(rng, 2000, dtype)

    def copies(operator, want, *arguments):
        y = np.full(want.shape, 1, dtype)
        assert getattr(plugin, operator)(dtype, *arguments, x, y) == 0
        np.testing.assert_array_equal(y, want)

    def view(shape):
        return x[: np.prod(shape)].reshape(shape)

    def strided(shape, strides, offset):
        return np.lib.stride_tricks.as_strided(x[offset:], shape, [each * x.itemsize for each in strides])

    for shape, strides, offset in (((5, 7, 9), (2, 70, 3), 11), ((64, 33), (1, 40), 0), ((3, 5), (0, -2), 20)):
        want = strided(shape, strides, offset).copy()
        y = np.full(shape, 1, dtype)
        assert plugin.as_strided(dtype, shape, strides, offset, want.size, x, y) == 0
        np.testing.assert_array_equal(y, want)
    for shape, order in (((20, 30), (1, 0)), ((2, 3, 4, 5), (0, 2, 1, 3)), ((2, 3, 4, 5, 6), (4, 1, 3, 0, 2))):
        copies("transpose", view(shape).transpose(order), len(shape) % 2, shape, order)
    for shape, to in (((1, 3, 1), (2, 3, 4)), ((7, 1), (7, 65)), ((1, 65), (7, 65))):
        copies("broadcast_to", np.broadcast_to(view(shape), to), shape, to)
    for shape, times in (((2, 3), (2, 2)), ((1, 5, 4), (3, 1, 2))):
        want = np.tile(view(shape), times)
        copies("tile", want, shape, want.shape)
    whole = (1, 1, 1, 1, 1, 6, 10, 9)
    want = view(whole)[..., 4::-2, 1:8:3, :]
    copies("strided_slice", want, whole, [0] * 5 + [4, 1, 0], [1] * 5 + [-2, 3, 1], want.shape)
    copies("slice", view((5, 6, 7))[1:3, 2:5, 3:], (1, 2, 3), (2, 3, 4), (5, 6, 7))
    copies("slice", x[7:40], (7,), (33,), (50,))
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", ALL)
def test_gradients_of_slices(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    whole = (1, 1, 1, 1, 2, 6, 10, 9)
    for part in (np.s_[..., 4::-2, 1:8:3, :], np.s_[..., 1:, :, :, :], np.s_[..., ::3]):
        want = np.zeros(whole, dtype)
        dy = values(rng, want[part].shape, dtype)
        want[part] = dy
        places = np.arange(want.size).reshape(whole)[part]
        strides = np.array(np.empty(whole, np.int8).strides)
        begin = np.unravel_index(places.flat[0], whole)
        # The steps, from the distances of the elements where an axis has more than one.
        steps = [
            int(np.diff(places, axis=i).flat[0]) // int(strides[i]) if dy.shape[i] > 1 else 1 for i in range(dy.ndim)
        ]
        dx = np.full(whole, 1, dtype)
        assert plugin.strided_slice_grad(dtype, dy.shape, list(map(int, begin)), steps, whole, dy, dx) == 0
        np.testing.assert_array_equal(dx, want)
    assert plugin.originals == before


REDUCTIONS = np.sum, np.prod, np.max, np.min, np.mean


@pytest.mark.parametrize("dtype", NUMBERS)
def test_reductions(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    for shape in ((1000,), (33, 65), (300, 7, 50), (100, 300), (20000, 3), (3, 20000)):
        x = values(rng, shape, dtype)
        for first, (reduction, reduce) in itertools.product((0, 1), enumerate(REDUCTIONS)):
            if (reduction == 4 and dtype.startswith("int")) or (len(shape) == 1 and not first):
                continue
            y = x.astype("float64") if reduction != 1 else np.sign(x)
            y[y == 0] += reduction == 1  # products of 1 and -1
            used, axes = y.astype(dtype), tuple(range(1 - first, len(shape), 2))
            want = reduce(used.astype("float64"), axes)
            found = np.zeros(want.shape, dtype)
            scratch = np.zeros(x.shape, dtype)
            assert plugin.reduce(dtype, shape, first, reduction, used, scratch, found) == 0
            np.testing.assert_allclose(found, want.astype(dtype), rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-5)
    assert plugin.originals == before


def test_reductions_of_bools(plugin):
    rng, before = np.random.default_rng(0), plugin.originals
    x = rng.random((30, 40, 50)) < 0.98
    for first, (reduction, reduce) in itertools.product((0, 1), ((5, np.any), (6, np.all))):
        want = reduce(x, tuple(range(1 - first, 3, 2)))
        found = np.zeros(want.shape, bool)
        assert plugin.reduce("bool", x.shape, first, reduction, x, np.zeros_like(x), found) == 0
        np.testing.assert_array_equal(found, want)
    assert plugin.originals == before


def test_gradients_of_biases(plugin):
    rng, before = np.random.default_rng(0), plugin.originals
    dy, db = values(rng, (2, 6, 4, 5), "float32"), np.zeros(6, np.float32)
    assert plugin.bias_grad("float32", dy.size, 6, 4, 5, dy, db) == 0
    np.testing.assert_array_equal(db, dy.sum((0, 2, 3)))
    assert plugin.bias_grad("float32", dy.size, 6, 0, 0, dy, db) == 0
    np.testing.assert_array_equal(db, dy.reshape(-1, 6).sum(0))
    assert plugin.originals == before


def addresses(arrays):
    return np.array([each.ctypes.data for each in arrays], np.int64)


@pytest.mark.parametrize("dtype", ALL)
def test_joins(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    for rows, lengths, inner in ((3, (2, 5, 1), 4), (1, (700, 33), 1), (5, (1, 1, 1, 1), 9)):
        pieces = [values(rng, (rows, length, inner), dtype) for length in lengths]
        want = np.concatenate(pieces, 1)
        y = np.full(want.shape, 1, dtype)
        sizes = np.array(lengths, np.int32)
        row = sum(lengths) * inner
        assert plugin.concat(dtype, y.size, len(pieces), row, inner, sizes, addresses(pieces), y) == 0
        np.testing.assert_array_equal(y, want)
    for rows, count, inner in ((3, 4, 5), (7, 2, 64), (1, 3, 1)):
        pieces = [values(rng, (rows, inner), dtype) for _ in range(count)]
        want = np.stack(pieces, 1)
        y = np.full(want.shape, 1, dtype)
        assert plugin.stack(dtype, y.size, count, inner, addresses(pieces), y) == 0
        np.testing.assert_array_equal(y, want)
        cut = [np.full((rows, inner), 1, dtype) for _ in range(count)]
        assert plugin.unstack(dtype, y.size, count, inner, addresses(cut), y) == 0
        np.testing.assert_array_equal(cut, pieces)
        cut = [np.full((rows, inner), 1, dtype) for _ in range(count)]
        assert plugin.split(dtype, y.size, inner, count * inner, 1, y, addresses(cut)) == 0
        np.testing.assert_array_equal(cut, pieces)
    assert plugin.originals == before


@pytest.mark.parametrize("dtype", [each for each in ALL if each != "complex128"])
def test_bands(plugin, dtype):
    rng, before = np.random.default_rng(0), plugin.originals
    for shape, diagonal, upper in itertools.product(((2, 5, 7), (1, 33, 20)), (-40, -2, 0, 3, 50), (0, 1)):
        x = values(rng, shape, dtype)
        y = np.full(shape, 1, dtype)
        assert plugin.band(dtype, upper, x.size, diagonal, *shape[1:], x, y) == 0
        np.testing.assert_array_equal(y, (np.triu if upper else np.tril)(x, diagonal))
    assert plugin.originals == before
