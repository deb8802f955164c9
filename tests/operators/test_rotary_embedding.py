import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import DTYPES, chain, length, random, zeros
from msops.compat import VERSION
from msops.operators.rotary_embedding import operators
from operator_test import Net, OperatorTest, run, run_gradient, wide_in_graph_mode


def angles_of_places(table, features, position_ids, interleaved):
    """Returns a table as (B or 1, T, d/2)."""
    if table.shape[-1] == features:  # every angle twice
        table = table[..., ::2] if interleaved else table[..., : features // 2]
    if table.ndim != 3:
        table = table[None] if table.ndim == 2 else table[:, 0]
    if position_ids is not None:
        ids = position_ids if position_ids.ndim == 2 else position_ids[None]
        (samples,) = np.broadcast_shapes(table.shape[:1], ids.shape[:1])
        table = np.broadcast_to(table, (samples, *table.shape[1:]))[np.arange(samples)[:, None], ids]
    return table


def rotate(x, cos, sin, position_ids=None, interleaved=False, layout="BHTD"):
    if cos.dtype.itemsize < x.dtype.itemsize:
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    cos, sin = (angles_of_places(table, x.shape[-1], position_ids, interleaved) for table in (cos, sin))
    half = cos.shape[-1]
    # All heads have the same angles.
    cos, sin = (table[:, None] if layout == "BHTD" else table[:, :, None] for table in (cos, sin))
    if layout == "THD":
        cos, sin = cos[0], sin[0]
    out = np.copy(x)
    firsts = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    seconds = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., firsts], x[..., seconds]
    out[..., firsts] = a * cos - b * sin
    out[..., seconds] = b * cos + a * sin
    return (out,)


def rotate_back(dout, cos, sin, position_ids=None, **settings):
    return rotate(dout, cos, -sin, position_ids, **settings)


def turn(x, cos, sin, position_ids=None, interleaved=False, layout="BHTD"):
    return msops.rotary_embedding(x, cos, sin, interleaved, layout, position_ids)


def twice(table, interleaved):
    """Returns a table with every angle twice."""
    return np.repeat(table, 2, -1) if interleaved else np.concatenate((table, table), -1)


def case(batch, heads, length, width, half, of_batch=False, before=None, rows=None, ids=None, **settings):
    """Returns shapes and settings. `before` are a table's axes before its rows, and `ids` those of positions before
    their last one, if there are positions, for which the tables have `rows`."""
    x = {
        "BHTD": (batch, heads, length, width),
        "BTHD": (batch, length, heads, width),
        "THD": (length, heads, width),
    }[settings.get("layout", "BHTD")]
    before = (batch,) * of_batch if before is None else before
    table = (*before, length if rows is None else rows, half)
    return [x, table, table, *([] if ids is None else [(*ids, length)])], settings


PAIRS, STEPS = dict(interleaved=True), dict(layout="BTHD")
BOTH = PAIRS | STEPS
ROWS = dict(layout="THD")
SETTINGS = {"halves": {}, "pairs": PAIRS, "halves, BTHD": STEPS, "pairs, BTHD": BOTH}


class TestRotaryEmbedding(OperatorTest):
    function = msops.rotary_embedding
    formulas = (rotate, rotate_back)
    cases = {
        "small": case(2, 3, 5, 7, 2, of_batch=True, **BOTH),
        "one": case(1, 1, 1, 2, 1),
        "empty": case(2, 3, 0, 4, 2),
        "no angles": case(2, 3, 4, 5, 0),
        "Llama": case(2, 5, 9, 64, 32),
        "large": case(2, 8, 150, 128, 64, **STEPS),
        "twice": case(2, 3, 4, 10, 10),
        "twice, pairs, of each sample": case(2, 3, 4, 6, 6, before=(2, 1), **BOTH),
        "a table of one sample": case(2, 3, 4, 6, 2, before=(1,)),
        "THD": case(1, 3, 4, 6, 3, **ROWS),
        "positions": case(2, 3, 4, 6, 2, rows=7, ids=()),
        "positions of samples": case(2, 3, 4, 6, 6, before=(2,), rows=7, ids=(2,), **BOTH),
        "THD, positions": case(1, 3, 4, 6, 6, before=(1, 1), rows=9, ids=(1,), **ROWS, **PAIRS),
        "no rows": case(2, 3, 0, 4, 4, rows=0, ids=(2,)),
    }
    further = {
        f"{name}, {kind}{' of each sample' * of_batch}": case(*sizes, of_batch, **settings)
        for kind, settings in SETTINGS.items()
        for of_batch in (False, True)
        for name, sizes in {
            "whole rows": (2, 5, 9, 64, 32),
            "part of the rows": (2, 6, 7, 96, 16),
            "odd packs": (2, 1, 7, 40, 8),
            "odd rows": (2, 3, 11, 15, 5),
            "half a pack": (3, 2, 3, 20, 10),
            "a step": (3, 9, 1, 128, 64),
            "nothing passes": (2, 4, 3, 6, 3),
        }.items()
    } | {
        "many rows": case(2, 10, 500, 128, 64),
        "many rows, BTHD": case(2, 10, 500, 128, 48, **STEPS),
        "many pairs": case(2, 9, 600, 128, 64, of_batch=True, **PAIRS),
        "many pairs, BTHD": case(2, 9, 600, 128, 48, **BOTH),
    } | {
        f"{name}, {kind}{', positions' * bool(more)}": case(*sizes, before=before, **more, **settings)
        for kind, settings in SETTINGS.items()
        for before, more in (((), {}), ((2, 1), {}), ((), dict(rows=20, ids=())), ((2,), dict(rows=20, ids=(2,))))
        for name, sizes in {
            "twice": (2, 5, 9, 64, 64),
            "twice, odd rows": (2, 2, 7, 10, 10),
            "once": (2, 2, 7, 64, 16),
        }.items()
    } | {
        "many rows, twice": case(2, 10, 500, 128, 128),
        "many pairs, twice": case(2, 9, 600, 128, 128, rows=601, ids=(), **PAIRS),
        "many odd rows": case(1, 10, 203, 262, 131),
        "many odd rows of samples": case(2, 530, 3, 7, 2, of_batch=True, **PAIRS),
        "many odd rows, BTHD": case(131, 3, 7, 6, 2, **BOTH),
        "many odd rows, heads of a place in parts": case(1, 900, 100, 6, 6, rows=105, ids=(), **STEPS),
    }  # fmt: skip
    small = "small"
    hostile = ("small", "Llama", "twice, pairs, of each sample", "positions of samples", "THD")
    roundings = 4
    second_order = True
    constants = (1, 2, 3)
    wrong = (
        (
            zeros((1, 1, 2, 4), (2, 2), (2, 2), dtype=np.int32),
            {},
            TypeError,
            "rotary_embedding: x must be float16, float32 or float64, got int32",
        ),
        ([*zeros((1, 1, 2, 4), (2, 2)), 1.0], {}, TypeError, "rotary_embedding: sin must be a Tensor, got float"),
        (zeros((1, 1, 2, 4), (3, 2), (3, 2)), {}, ValueError, "cos must have shape"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 1)), {}, ValueError, "sin must have shape"),
        (zeros((3, 1, 2, 4), (2, 2, 2), (2, 2, 2)), {}, ValueError, "or (B, 1, T, d/2), got (2, 2, 2)"),
        (zeros((1, 1, 2, 4), (2, 3), (2, 3)), {}, ValueError, "at most half as many angles as the 4 features of x"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(layout="BSH"), ValueError, "BHTD, BTHD, THD, got 'BSH'"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(layout=1), TypeError, "layout must be a str, got int"),
        (zeros((1, 1, 2, 4), (2, 2), (2, 2)), dict(interleaved=1), TypeError, "interleaved must be a bool, got int"),
    )
    huge = (
        (2**31 // (64 * 48) + 7, 64, 48, {}),
        (2**31 // (64 * 50) + 7, 64, 50, BOTH),
        (2**27 + 3, 2, 8, PAIRS),
        (2**30 + 5, 1, 4, {}),
    )

    def net(self, **settings):
        return Net(turn, **settings)

    def operators(self, shapes=(), interleaved=False, layout="BHTD"):
        return chain(operators(interleaved, layout, len(shapes) == 4))

    def inputs(self, shapes, dtype, seed=1, interleaved=False, **settings):
        x, *tables = random(seed, dtype, *shapes[:3])
        if shapes[1][-1] == shapes[0][-1]:
            tables = [twice(table[..., : table.shape[-1] // 2], interleaved) for table in tables]
        rng = np.random.default_rng(seed)
        return [x, *tables, *(rng.integers(0, shapes[1][-2], shape, np.int32) for shape in shapes[3:])]

    def reference_gradient(self, x, cos, sin, *rest, **settings):
        *ids, dout = rest
        return *rotate_back(dout, cos, sin, *ids, **settings), *map(np.zeros_like, (cos, sin, *ids))

    def random_case(self, random):
        batch, heads, places, width = (length(random) for _ in range(4))
        settings = dict(interleaved=random.random() < 0.5, layout=random.choice(("BHTD", "BTHD", "THD")))
        batch = 1 if settings["layout"] == "THD" else batch
        before = random.choice(((), (1,), (batch,), (1, 1), (batch, 1)))
        columns = random.choice((random.randint(0, width // 2), width - width % 2))
        if columns != width:
            columns = min(columns, width // 2)
        positions = random.choice(({}, dict(rows=1 + length(random), ids=random.choice(((), (1,), (batch,))))))
        return case(batch, heads, places, width, columns, before=before, **positions, **settings)

    def check_huge(self, gpu, places, heads, width, settings):
        (shape, table, _), settings = case(1, heads, places, width, width // 2, **settings)
        operator = self.operators(**settings)[0]
        x, cos, sin = gpu.random(*shape), gpu.random(*table), gpu.random(*table)
        out = gpu.run(operator, x, cos, sin)
        gpu.check_parts(operator, [x, cos, sin], out, places, 3, gpu.assert_equal)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_angles_in_float32(mode, settings, dtype):
    """Tables may be float32 beside float16 and float64; they are not rounded to float16."""
    shapes, settings = case(2, 3, 5, 20, 8, of_batch=True, **settings)
    (x,), tables = random(1, dtype, shapes[0]), random(2, np.float32, *shapes[1:])
    net = Net(msops.rotary_embedding, **settings)
    (want,) = rotate(x.astype(np.float64), *tables, **settings)
    (got,) = run(net, x, *tables)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "float16" else 1e-15, atol=1e-6)
    gradients = run_gradient(net, [x, *tables], [got])
    assert [g.dtype for g in gradients] == [dtype, "float32", "float32"]
    (want,) = rotate_back(got.astype(np.float64), *tables, **settings)
    np.testing.assert_allclose(gradients[0], want, rtol=1e-3 if dtype == "float16" else 1e-15, atol=1e-6)


def test_what_passes_keeps_its_bits(mode):
    """Features beyond the angles are copied, NaN among them, and do not depend on their neighbours."""
    shapes, _ = case(1, 2, 3, 24, 4)
    x, cos, sin = random(1, np.float16, *shapes)
    x[..., 9] = np.nan
    (out,) = run(Net(msops.rotary_embedding), x, cos, sin)
    np.testing.assert_array_equal(out[..., 8:].view(np.uint16), x[..., 8:].view(np.uint16))
    assert np.isfinite(out[..., :8]).all()


def angles_of(dim, places, base):
    return np.array([[t * base ** (-2 * i / dim) for i in range(dim // 2)] for t in places])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 11])
def test_cell(mode, start, dtype):
    """The tables have the places from `start` on. Far places keep their angles, which float32 would lose."""
    net = msops.RotaryEmbedding(6, 5000, base=500.0, interleaved=True, layout="BTHD")
    assert not list(net.get_parameters())
    (x,) = random(1, dtype, (2, 7, 3, 8))
    for first in (start, 4993 - start):
        angles = angles_of(6, range(first, first + 7), 500.0)
        (want,) = rotate(x.astype(np.float64), np.cos(angles), np.sin(angles), **BOTH)
        got = net(Tensor(x), first).asnumpy()
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-6)


@pytest.mark.skipif(VERSION < (2, 7), reason="open sizes need MindSpore 2.7")
def test_cell_of_open_length(mode):
    net, opened = (msops.RotaryEmbedding(4, 16) for _ in range(2))
    opened.set_inputs(Tensor(shape=[1, 2, None, 6], dtype=mindspore.float32))
    for places in (3, 16):
        (x,) = random(places, np.float32, (1, 2, places, 6))
        np.testing.assert_array_equal(opened(Tensor(x)).asnumpy(), net(Tensor(x)).asnumpy())
    with pytest.raises((RuntimeError, ValueError)):
        opened(Tensor(np.zeros((1, 2, 17, 6), np.float32))).asnumpy()


def test_products_depend_on_distances(mode):
    """The product of a query and a key depends on how far apart they are alone."""
    net = msops.RotaryEmbedding(64, 300)
    query, key = random(1, np.float32, (1, 1, 1, 64), (1, 1, 1, 64))
    products = [(net(Tensor(query), 17 + s).asnumpy() * net(Tensor(key), 5 + s).asnumpy()).sum() for s in (0, 100, 250)]
    np.testing.assert_allclose(products, products[0], rtol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((5, 8), ValueError, "RotaryEmbedding: dim must be even, got 5"),
        ((4, 0), ValueError, "RotaryEmbedding: max_length must be at least 1, got 0"),
        ((4, 8, 0), ValueError, "RotaryEmbedding: base must be positive, got 0"),
        ((4, 8, "10"), TypeError, "RotaryEmbedding: base must be a number, got str"),
        ((4, 8, 10.0, 0), TypeError, "rotary_embedding: interleaved must be a bool, got int"),
        (
            (4, 8, 10.0, False, "TBHD"),
            ValueError,
            "rotary_embedding: layout must be one of BHTD, BTHD, THD, got 'TBHD'",
        ),
    ],
)
def test_wrong_settings(arguments, error, words):
    with pytest.raises(error, match=words):
        msops.RotaryEmbedding(*arguments)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ((np.zeros((1, 1, 4, 4)), 5), ValueError, "start \\+ T at most max_length = 8, got 5 and T = 4"),
        ((np.zeros((1, 1, 4, 4)), -1), ValueError, "start must be at least 0"),
        ((np.zeros((1, 1, 4, 4)), 1.0), TypeError, "start must be an int, got float"),
        ((np.zeros((1, 4, 4)), 0), ValueError, "x must have 4 axes"),
        ((np.zeros((1, 1, 4, 2)), 0), ValueError, "x must have at least dim = 4 features"),
    ],
)
def test_wrong_calls(mode, inputs, error, words):
    x, start = inputs
    with pytest.raises(error, match=words):
        msops.RotaryEmbedding(4, 8)(Tensor(x.astype(np.float32)), start).asnumpy()


X, TABLE = np.ones((2, 1, 3, 4), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 1, 2, 5), (2, 5)), "cos must not have every angle twice for an odd number of features, 5"),
        (((1, 1, 2, 4), (2, 3)), "at most half as many angles as the 4 features of x, or each of them twice, got 3"),
        (((2, 1, 2, 4), (2, 2, 2, 4)), r"or \(B, 1, T, d/2\), got \(2, 2, 2, 4\)"),
        (((2, 1, 2, 4), (3, 2, 4)), r"got \(3, 2, 4\)"),
    ],
)
def test_wrong_tables(mode, shapes, words):
    x, table = shapes
    with pytest.raises(ValueError, match=words):
        run(Net(turn), np.zeros(x, np.float32), *zeros(table, table))


@pytest.mark.parametrize("ids", [(1, 3, 3), (3, 3), (4,), ()])
def test_wrong_shapes_of_positions(mode, ids):
    with pytest.raises(ValueError, match="position_ids must have shape"):
        run(Net(turn), X, TABLE, TABLE, np.zeros(ids, np.int32))


def test_positions_are_whole_numbers(mode):
    with pytest.raises(TypeError, match="position_ids must be int32 or int64, got float32"):
        run(Net(turn), X, TABLE, TABLE, np.zeros(3, np.float32))


def test_positions_of_int64(mode):
    ids = np.array([[2, 0, 1], [1, 1, 0]])
    x, table = random(1, np.float32, X.shape, (5, 2))
    (want,) = rotate(x, table, table, ids)
    np.testing.assert_allclose(run(Net(turn), x, table, table, ids)[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@wide_in_graph_mode
def test_copies_that_differ(mode, interleaved, which):
    """The CPU tells it if the row is read, and a GPU gives NaN for the pair alone. NaN is equal to NaN here."""
    tables = random(1, np.float32, (5, 4), (5, 4))
    inputs = [X, *(twice(table[:, :2], interleaved) for table in tables), np.array([0, 3, 1])]
    inputs[1][1] = np.nan
    inputs[which][2, 3] += 1
    net = Net(turn, interleaved=interleaved)
    assert np.isnan(run(net, *inputs)[0][..., 2, :]).all()
    inputs[3][0] = 2
    if mindspore.get_context("device_target") == "GPU":
        pair = [2, 3] if interleaved else [1, 3]
        np.testing.assert_array_equal(np.nonzero(np.isnan(run(net, *inputs)[0][0, 0, 0]))[0], pair)
    else:
        with pytest.raises(RuntimeError, match="rotary_embedding: row 2 of cos or sin has different numbers"):
            run(net, *inputs)


@pytest.mark.parametrize("position", [-1, 5, 2**40])
@wide_in_graph_mode
def test_positions_out_of_range(mode, position):
    (table,) = random(1, np.float32, (5, 2))
    inputs = [X, table, table, np.array([0, position, 1])]
    if mindspore.get_context("device_target") == "GPU":
        np.testing.assert_array_equal(np.isnan(run(Net(turn), *inputs)[0][0, 0]).any(-1), [False, True, False])
    else:
        with pytest.raises(RuntimeError, match=f"rotary_embedding: position_ids has {position}, expected 0 to 4"):
            run(Net(turn), *inputs)


def test_cell_by_positions(mode):
    net = msops.RotaryEmbedding(4, 8, layout="THD")
    (x,) = random(1, np.float32, (3, 2, 6))
    np.testing.assert_array_equal(net(Tensor(x), 2).asnumpy(), net(Tensor(x), 0, Tensor([2, 3, 4])).asnumpy())
    with pytest.raises(ValueError, match="RotaryEmbedding: start must be 0 beside position_ids, got 1"):
        net(Tensor(x), 1, Tensor([2, 3, 4]))
