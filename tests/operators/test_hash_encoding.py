import itertools
import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import msops
from card import random, zeros
from msops.operators.hash_encoding import operators
from msops.testing.checks import Net, assert_equal
from operator_test import OperatorTest, check_training, run, run_gradient

PRIMES = (1, 2654435761, 805459861, 3674653429)


def levels_of(dim, levels, base_resolution, growth, log2_size):
    """Yields (scale, first entry, size, resolution of a dense level or 0) of each level."""
    first = 0
    for level in range(levels):
        scale = 2.0 ** (level * math.log2(growth)) * base_resolution - 1
        corners = (math.ceil(scale) + 1) ** dim
        size = min(-(-corners // 8) * 8, 2**log2_size)
        yield scale, first, size, math.ceil(scale) + 1 if corners <= size else 0
        first += size


def entries_of(dim, **settings):
    settings.pop("interpolation", None)
    return sum(size for _, _, size, _ in levels_of(dim, **settings))


def corners(points, interpolation="linear", **grids):
    """Yields for each level and corner: the level, the corner's entries, and, as functions of the axes to derive by,
    its shares."""
    dim = points.shape[1]
    inside = (points >= 0) & (points <= 1)
    for level, (scale, first, size, resolution) in enumerate(levels_of(dim, **grids)):
        step = np.asarray(scale, points.dtype)
        wide = np.promote_types(points.dtype, np.float64)  # the kernels round once, by fma
        at = np.clip(points, 0, 1).astype(wide) * step + 0.5
        cell = np.floor(at)
        t, steps = (at - cell).astype(points.dtype), step * inside
        cell = cell.astype(np.int64)
        if interpolation == "linear":
            far = t, steps, 0 * t
        else:
            far = t * t * (3 - 2 * t), 6 * t * (1 - t) * steps, (6 - 12 * t) * steps**2
        sides = (1 - far[0], -far[1], -far[2]), far
        for corner in itertools.product((0, 1), repeat=dim):
            place = cell + np.array(corner)
            if resolution:
                entry = (place * resolution ** np.arange(dim)).sum(1)
            else:
                entry = np.bitwise_xor.reduce(place * np.array(PRIMES[:dim]) % 2**32, axis=1)

            def share(*axes, corner=corner, sides=sides):
                return np.prod([sides[corner[d]][axes.count(d)][:, d] for d in range(dim)], 0)

            yield level, first + entry % size, share


def forward(points, table, **settings):
    out = np.zeros((len(points), settings["levels"], table.shape[1]), np.result_type(points, table))
    for level, entry, share in corners(points, **settings):
        out[:, level] += share()[:, None] * table[entry]
    return (out.reshape(len(points), out.shape[1] * out.shape[2]).astype(table.dtype),)


def backward_points(points, table, dout, **settings):
    dout = dout.reshape(len(points), settings["levels"], dout.shape[1] // settings["levels"])
    dpoints = np.zeros_like(points)
    for level, entry, share in corners(points, **settings):
        product = (dout[:, level] * table[entry]).sum(1)
        for axis in range(points.shape[1]):
            dpoints[:, axis] += share(axis) * product
    return (dpoints,)


def backward_table(points, dout, **settings):
    dout = dout.reshape(len(points), settings["levels"], dout.shape[1] // settings["levels"])
    dtable = np.zeros((entries_of(points.shape[1], **settings), dout.shape[2]), dout.dtype)
    for level, entry, share in corners(points, **settings):
        np.add.at(dtable, entry, share()[:, None] * dout[:, level])
    return (dtable,)


def along_share(share, ddpoints, *axes):
    return sum(ddpoints[:, d] * share(d, *axes) for d in range(ddpoints.shape[1]))


def along_points(points, table, dout, ddpoints, **settings):
    dout = dout.reshape(len(points), settings["levels"], dout.shape[1] // settings["levels"])
    dpoints = np.zeros_like(points)
    for level, entry, share in corners(points, **settings):
        product = (dout[:, level] * table[entry]).sum(1)
        for axis in range(points.shape[1]):
            dpoints[:, axis] += along_share(share, ddpoints, axis) * product
    return (dpoints,)


def along_table(points, dout, ddpoints, **settings):
    dout = dout.reshape(len(points), settings["levels"], dout.shape[1] // settings["levels"])
    dtable = np.zeros((entries_of(points.shape[1], **settings), dout.shape[2]), dout.dtype)
    for level, entry, share in corners(points, **settings):
        np.add.at(dtable, entry, along_share(share, ddpoints)[:, None] * dout[:, level])
    return (dtable,)


def along_forward(points, table, ddpoints, **settings):
    out = np.zeros((len(points), settings["levels"], table.shape[1]), table.dtype)
    for level, entry, share in corners(points, **settings):
        out[:, level] += along_share(share, ddpoints)[:, None] * table[entry]
    return (out.reshape(len(points), out.shape[1] * out.shape[2]),)


def case(n, dim=3, features=2, levels=3, base=3, growth=1.6, log2_size=6, interpolation="linear"):
    settings = dict(levels=levels, base_resolution=base, growth=growth, log2_size=log2_size)
    table = (entries_of(dim, **settings), features)
    return [(n, dim), table], dict(settings, interpolation=interpolation)


def call(points=(5, 3), table=(160, 2), dtype=np.float32, **changed):
    return zeros(points, table, dtype=dtype), {**case(5)[1], **changed}


class TestHashEncoding(OperatorTest):
    function = msops.hash_encoding
    formulas = forward, backward_table, backward_points, along_forward, along_table, along_points
    cases = {
        "small": case(5, 2, 2, levels=2, log2_size=4),
        "smoothstep": case(7, 3, 2, interpolation="smoothstep"),
        "one": case(1, 2, 1, levels=1, base=1, log2_size=3),
        "no points": case(0),
        "no features": case(5, features=0),
        "four axes": case(33, 4, 3, levels=2, base=2, log2_size=5),
        "four features": case(65, 3, 4, levels=4, base=2),
        "eight features": case(70, 2, 8, levels=5, growth=1.3, log2_size=8),
        "large": case(1000, 3, 2, levels=4, base=4, growth=1.5, log2_size=8),
    }
    further = {
        f"{n} points of {dim} axes, {features} features, {levels} levels, {interpolation}": case(
            n, dim, features, levels, 2, growth, log2_size, interpolation
        )
        for n, dim, features, levels, growth, log2_size, interpolation in (
            (130, 2, 1, 16, 1.2, 7, "smoothstep"), (300, 3, 2, 16, 1.2, 9, "linear"),
            (70, 4, 5, 3, 2.0, 7, "smoothstep"),
            (257, 3, 8, 1, 1.0, 3, "linear"), (2100, 3, 2, 8, 1.4, 8, "linear"), (4100, 2, 2, 2, 20.0, 14, "linear"),
            (64, 3, 12, 2, 1.5, 5, "linear"), (33, 2, 2, 32, 1.1, 6, "linear"), (2100, 2, 2, 4, 7.0, 18, "linear"),
            (300, 3, 3, 2, 60.0, 20, "linear"),
        )
    }  # fmt: skip
    small = "small"
    hostile = ("small",)
    second_order = True
    half_gradient_in_float32 = False
    roundings = 128  # a place in a grid of tens of cells is tens of roundings from its exact one
    units_of_largest = 32
    test_wrong_inputs = None  # points of another number of axes have another operator
    wrong = (
        (*call(dtype=np.int32), TypeError, "table must be float16, float32 or float64"),
        ([np.zeros((5, 3), np.float16), np.zeros((160, 2), np.float32)], call()[1], TypeError, "points must be"),
        ([0.5, np.zeros((160, 2), np.float32)], call()[1], TypeError, "points must be a Tensor, got float"),
        (*call((5, 5)), ValueError, "hash_encoding: points must have shape (N, D) with D from 2 to 4, got (5, 5)"),
        (*call((5,)), ValueError, "hash_encoding: points must have shape (N, D) with D from 2 to 4, got (5,)"),
        (*call(table=(168, 2)), ValueError, "hash_encoding: table must have shape"),
        (*call(table=(160,)), ValueError, "hash_encoding: table must have shape"),
        (*call(levels=0), ValueError, "hash_encoding: levels must be from 1 to 32, got 0"),
        (*call(levels=2.0), TypeError, "hash_encoding: levels must be an int, got float"),
        (*call(log2_size=32), ValueError, "hash_encoding: log2_size must be from 3 to 31, got 32"),
        (*call(base_resolution=0), ValueError, "hash_encoding: base_resolution must be from 1 to 1073741824, got 0"),
        (*call(growth=0.5), ValueError, "hash_encoding: growth must be finite and at least 1, got 0.5"),
        (*call(growth="2"), TypeError, "hash_encoding: growth must be a number, got str"),
        (*call(growth=2.0**40), ValueError, "growth must keep levels to 2^30 cells along an axis, got 1099511627776.0"),
        (*call(interpolation="cubic"), ValueError, "interpolation must be one of linear, smoothstep, got 'cubic'"),
    )

    def operators(self, shapes=(), **settings):
        """Returns the operators of all orders, each of which names what it takes."""
        axes = shapes[0][1] if shapes else 2
        first = operators(axes, **(settings or case(1, axes)[1]))
        found = {}

        def visit(operator):
            if operator.entry.name in found:
                return
            found[operator.entry.name] = operator
            if operator.gradient is not None:
                for cell in operator.gradient.__closure__:
                    visit(cell.cell_contents)

        visit(first)
        names = "Forward", "BackwardTable", "BackwardPoints", "AlongForward", "AlongTable", "AlongPoints"
        return [found[f"HashEncoding{name}"] for name in names]

    def inputs(self, shapes, dtype, seed=1, levels=2, base_resolution=3, growth=1.6, log2_size=4, **_):
        """Keeps points off the lines between cells, where there are kinks."""
        rng = np.random.default_rng(seed)
        of_points, of_table = shapes
        points = rng.uniform(-0.1, 1.1, of_points)
        for _ in range(200):
            near = np.minimum(np.abs(points), np.abs(points - 1)) < 0.004
            for scale, *_ in levels_of(of_points[1], levels, base_resolution, growth, log2_size):
                near |= np.abs((points * scale + 0.5 + 0.5) % 1 - 0.5) < 0.004
            points = np.where(near, rng.uniform(-0.1, 1.1, of_points), points)
        return [np.asarray(points, dtype), *random(seed, dtype, of_table)]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        return super().entry_calls(shapes, settings, dtype, seed)  # points are not scaled

    def reference_gradient(self, points, table, dout, **settings):
        return *backward_points(points, table, dout, **settings), *backward_table(points, dout, **settings)

    def random_case(self, random):
        return case(
            random.randrange(random.choice((2, 9, 200))), random.randrange(2, 5), random.randrange(5),
            random.randrange(1, 5), random.randrange(1, 6), 1 + random.random(), random.randrange(3, 10),
            random.choice(("linear", "smoothstep")),
        )  # fmt: skip


SETTINGS = dict(levels=2, base_resolution=4, growth=2.0, log2_size=19)


def encode(points, table, **changed):
    return run(Net(msops.hash_encoding, **{**SETTINGS, **changed}), points, table)[0]


def test_points_at_lines_ends_and_outside(mode):
    """At a corner only its features count. What is outside counts as the nearest end, and has no gradient there."""
    table = random(1, np.float64, (entries_of(2, **SETTINGS), 3))[0]
    for level, (scale, first, _, resolution) in enumerate(levels_of(2, **SETTINGS)):
        cell = np.arange(1, resolution)
        points = np.stack([(cell - 0.5) / scale, np.full(len(cell), 0.5 / scale)], 1)
        want = table[first + cell + resolution]
        np.testing.assert_allclose(encode(points, table)[:, 3 * level : 3 * level + 3], want, atol=1e-12)
    ends = np.array([[0.0, 1.0], [1.0, 0.3], [1.0, 1.0], [0.0, 0.0]])
    outside = np.array([[-2.0, 1e30], [1.5, 0.3], [np.inf, 3.0], [-np.inf, -1e-9]])
    np.testing.assert_array_equal(encode(outside, table), encode(ends, table))
    dout = random(2, np.float64, (4, 6))[0]
    net = Net(msops.hash_encoding, **SETTINGS)
    at_ends, beyond = (run_gradient(net, [points, table], [dout]) for points in (ends, outside))
    np.testing.assert_array_equal(at_ends[1], beyond[1])
    want = np.where((outside >= 0) & (outside <= 1), at_ends[0], 0)
    np.testing.assert_array_equal(beyond[0], want)
    assert (at_ends[0] != 0).all()


def test_last_corner_wraps(mode):
    """At 1 the far corner is one beyond the grid: the first of the next row and, after the last one, of the table."""
    table = np.arange(16, dtype=np.float64)[:, None]
    points = np.array([[1.0, 0.0], [1.0, 1.0]])
    out = encode(points, table, levels=1, log2_size=4)
    # Corners (3 or 4, 0 or 1) of 4 x 4, then (3 or 4, 3 or 4): 12 + 3, then 16, 19 and 20, which are 0, 3 and 4.
    np.testing.assert_allclose(out[:, 0], [(3 + 4 + 7 + 8) / 4, (15 + 0 + 3 + 4) / 4])


def test_not_a_number_stays_in_its_row(mode):
    points, table = np.random.default_rng(1).random((6, 3)), random(2, np.float64, (entries_of(3, **SETTINGS), 2))[0]
    clean = encode(points, table)
    points[2, 1] = np.nan
    out = encode(points, table)
    assert np.isnan(out[2]).all()
    out[2] = clean[2]
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_gradient_that_is_not_finite(mode, value):
    """It stays in the entries around its point, where scaling of losses looks for it."""
    points, table = np.random.default_rng(1).random((40, 2)), random(2, np.float32, (entries_of(2, **SETTINGS), 2))[0]
    dout = random(3, np.float32, (40, 4))[0]
    points = points.astype(np.float32)
    net = Net(msops.hash_encoding, **SETTINGS)
    clean = run_gradient(net, [points, table], [dout])[1]
    dout[7, 1] = value
    got = run_gradient(net, [points, table], [dout])[1]
    wrong = ~np.isfinite(got)
    assert 1 <= wrong[:, 1].sum() <= 4
    assert not wrong[:, 0].any()
    np.testing.assert_allclose(got[~wrong], clean[~wrong], atol=1e-5)


@pytest.mark.parametrize(("table_dtype", "points_dtype"), [("float16", "float32"), ("float16", "float64"),
                                                          ("float32", "float64"), ("float64", "float32")])  # fmt: skip
def test_points_of_another_dtype(mode, table_dtype, points_dtype):
    card, (shapes, settings) = TestHashEncoding(), case(50, levels=4, log2_size=9)
    points, table = card.inputs(shapes, np.float64, **settings)
    inputs = [points.astype(points_dtype), table.astype(table_dtype)]
    dout = random(3, table_dtype, (50, 8))[0]
    net = Net(msops.hash_encoding, **settings)
    exact = [x.astype(np.float64) for x in inputs]
    (out,) = run(net, *inputs)
    assert out.dtype == table_dtype
    tolerance = 2e-3 if table_dtype == "float16" else 2e-5
    np.testing.assert_allclose(out, forward(*exact, **settings)[0], rtol=tolerance, atol=tolerance)
    got = run_gradient(net, inputs, [dout])
    want = card.reference_gradient(*exact, dout.astype(np.float64), **settings)
    for result, expected, x in zip(got, want, inputs):
        assert result.dtype == x.dtype
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


class Field(nn.Cell):
    """A signed distance field of an encoding and a linear layer."""

    def __init__(self, interpolation):
        super().__init__()
        self.encoding = msops.HashEncoding(3, 4, 2, 10, 4, 1.5, interpolation)
        self.encoding.table.set_data(Tensor(random(5, np.float32, self.encoding.table.shape)[0]))
        self.head = nn.Dense(8, 1)

    def construct(self, points):
        return self.head(self.encoding(points))


class Eikonal(nn.Cell):
    """Takes the gradient of a field with respect to space, which should have length 1."""

    def __init__(self, field):
        super().__init__(auto_prefix=False)
        self.field, self.gradient = field, ops.GradOperation()

    def construct(self, points):
        slope = self.gradient(self.field)(points)
        return ((ops.sqrt((slope * slope).sum(1) + 1e-12) - 1) ** 2).mean()


@pytest.mark.parametrize("interpolation", ["linear", "smoothstep"])
def test_eikonal_loss(interpolation):
    """The gradient of a loss of the gradient reaches the table: it agrees with differences of the loss."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    field = Field(interpolation)
    loss = Eikonal(field)
    points = Tensor(np.random.default_rng(0).random((64, 3)).astype(np.float32))
    table = field.encoding.table
    (gradient,) = ops.value_and_grad(loss, None, [table])(points)[1]
    direction = random(6, np.float32, table.shape)[0]
    value = table.asnumpy().copy()
    losses = []
    for step in (-1e-2, 1e-2):
        table.set_data(Tensor(value + np.float32(step) * direction))
        losses.append(loss(points).asnumpy())
    difference = (losses[1] - losses[0]) / 2e-2
    np.testing.assert_allclose(difference, (gradient.asnumpy() * direction).sum(), rtol=2e-2)


@pytest.mark.wide
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto", "to_float"])
def test_gradients_in_mixed_precision(level):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    points = Tensor(np.random.default_rng(0).random((40, 2)), mindspore.float32)
    encoding = msops.HashEncoding(2, 3, 2, 8, 4, interpolation="smoothstep")  # rounded points may cross kinks
    encoding.table.set_data(Tensor(random(5, np.float32, encoding.table.shape)[0]))

    def gradients(net):
        of_points, (of_table,) = ops.value_and_grad(lambda x: (net(x) ** 2).mean(), 0, [encoding.table])(points)[1]
        return of_points.asnumpy(), of_table.asnumpy()

    want = gradients(encoding)
    cast = encoding.to_float(mindspore.float16) if level == "to_float" else amp.auto_mixed_precision(encoding, level)
    for got, expected in zip(gradients(cast), want):
        np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * np.abs(expected).max())


def test_cell(mode):
    """It has the function's settings, and its table learns."""
    points = np.random.default_rng(0).random((50, 2)).astype(np.float32)
    _, settings = case(50, levels=4, base=5, growth=1.5, interpolation="smoothstep")  # a float32, as graphs make of it
    cell = msops.HashEncoding(2, **settings)
    assert_equal(run(cell, points), run(Net(msops.hash_encoding, **settings), points, cell.table.asnumpy()))
    check_training(cell, points)


def test_sizes_near_whole_numbers():
    """Where the finest level has 2^k cells but for rounding, Python and the entry must round alike."""
    point = Tensor(np.full((1, 2), 0.3, np.float32))
    for levels, base, finest in itertools.product((2, 3, 5, 8, 9, 12, 16), (4, 6, 16), (32, 96, 256)):
        for growth in {2 ** (math.log2(finest / base) / (levels - 1)), (finest / base) ** (1 / (levels - 1))}:
            encoding = msops.HashEncoding(2, levels, 1, 17, base, growth)
            assert encoding(point).shape == (1, levels)
