import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import chain, length, random, zeros
from gpu import BIG
from guarded_call import GuardedCall
from msops.operators.grouped_matmul import operators
from msops.testing.checks import Net, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, check_training, wide_in_graph_mode


def groups_of(sizes):
    """Yields (group, slice of its rows) for the groups that have rows. On a GPU, negative sizes are 0."""
    ends = np.cumsum(np.maximum(sizes, 0))
    for group, (end, size) in enumerate(zip(ends, sizes)):
        if size > 0:
            yield group, slice(end - size, end)


def grouped_matmul(x, weight, group_sizes, bias=None, transpose_weight=False, **_):
    matrices = weight.swapaxes(1, 2) if transpose_weight else weight
    out = np.zeros((len(x), matrices.shape[2]), x.dtype)
    for group, rows in groups_of(group_sizes):
        out[rows] = x[rows] @ matrices[group]
        if bias is not None:
            out[rows] += bias[group].astype(x.dtype)
    return (out,)


def grouped_matmul_backward(x, weight, group_sizes, *rest, transpose_weight=False, **_):
    *bias, dout = rest
    dx, dweight, *dbias = (np.zeros_like(a) for a in (x, weight, *bias))
    for group, rows in groups_of(group_sizes):
        matrix = weight[group] if transpose_weight else weight[group].T
        dx[rows] = dout[rows] @ matrix
        dweight[group] = dout[rows].T @ x[rows] if transpose_weight else x[rows].T @ dout[rows]
        for sums in dbias:
            sums[group] = dout[rows].sum(0)
    return dx, dweight, *dbias


def case(sizes, deep, columns, more=0, transpose_weight=False, bias=False):
    """Returns a case with some more rows than the groups have."""
    groups, rows = len(sizes), sum(sizes) + more
    matrix = (columns, deep) if transpose_weight else (deep, columns)
    shapes = [(rows, deep), (groups, *matrix), (groups,), *[(groups, columns)] * bias]
    return shapes, dict(sizes=sizes, transpose_weight=transpose_weight, has_bias=bias)


class TestGroupedMatmul(OperatorTest):
    function = msops.grouped_matmul
    formulas = grouped_matmul, grouped_matmul_backward
    cases = {
        "small": case((2, 0, 3), 4, 5, 2, bias=True),
        "transposed": case((1, 4, 2, 0), 5, 3, 1, True, True),
        "one": case((1,), 1, 1),
        "no groups": case((), 3, 4, 2, bias=True),
        "only empty groups": case((0, 0), 3, 4, 3, True),
        "no rows": case((0, 0), 3, 4, bias=True),
        "no terms": case((2, 1), 0, 4, 1, bias=True),
        "no terms, no bias": case((2, 1), 0, 4, 1, True),
        "no columns": case((2, 1), 3, 0, 1, bias=True),
        "odd": case((7, 1, 0, 13), 37, 29, 5, bias=True),
        "packs": case((8, 3, 0, 21), 40, 24, transpose_weight=True),
        "large": case((70, 0, 131, 1), 264, 200, 6, bias=True),
    }
    further = {
        "more than a tile": case((100, 33), 72, 200),
        "more than a tile, transposed": case((130, 70), 136, 104, 3, True, True),
        "more terms": case((3, 9), 520, 30, transpose_weight=True),
        "more terms, unaligned": case((5, 2), 519, 9, 1, bias=True),
        "many groups": case((1, 0, 2) * 15, 16, 24, 4, bias=True),
        "words": case((9, 40, 3), 70, 26, 1, bias=True),
        "words, transposed": case((9, 40, 3), 70, 26, 1, True),
        "wide": case((3, 2), 8, 2200, 1, bias=True),
        "deep": case((3, 2), 2200, 8, 1, True),
        "many rows of one group": case((300,), 33, 17, 1),
        "unused": case((3, 0, 21, 0), 40, 24, 9, bias=True),
        "unused, transposed": case((3, 0, 70, 0), 40, 24, 9, True, True),
        "aligned": case((64, 0, 128), 128, 128, 64, True),
    }
    small = "small"
    hostile = ("small", "transposed")
    constants = (2,)
    huge = ((2, 40, 32768, BIG // 65536 + 8, False), (2, BIG // 64, 64, 8, True))
    wrong = (
        ([*zeros((2, 3, 1), (1, 3, 4)), np.array([2])], {}, ValueError,
         "grouped_matmul: x must have shape (N, K), got (2, 3, 1)"),
        ([*zeros((8, 4), (3, 5, 6)), np.zeros(3, np.int32)], {}, ValueError,
         "grouped_matmul: weight must have shape (E, K, M) = (3, 4, 6), got (3, 5, 6)"),
        ([*zeros((8, 4), (3, 4, 6)), np.zeros(3, np.int32)], dict(transpose_weight=True), ValueError,
         "grouped_matmul: weight must have shape (E, M, K) = (3, 4, 4), got (3, 4, 6)"),
        ([*zeros((8, 4), (3, 4, 6)), np.zeros(2, np.int32)], {}, ValueError,
         "grouped_matmul: group_sizes must have shape (E,) = (3,), got (2,)"),
        ([*zeros((8, 4), (3, 4, 6)), np.zeros(3, np.int32), *zeros((3, 4))], {}, ValueError,
         "grouped_matmul: bias must have shape (E, M) = (3, 6), got (3, 4)"),
        ([*zeros((8, 4), (3, 4, 6)), np.zeros(3, np.float32)], {}, TypeError,
         "grouped_matmul: group_sizes must be int32 or int64, got float32"),
        ([np.zeros((8, 4), np.int32), np.zeros((3, 4, 6), np.int32), np.zeros(3, np.int32)], {}, TypeError,
         "grouped_matmul: x must be float16, float32 or float64, got int32"),
        ([*zeros((8, 4)), np.zeros((3, 4, 6), np.float16), np.zeros(3, np.int32)], {}, TypeError,
         "grouped_matmul: weight must be float32"),
        ([*zeros((8, 4), (3, 4, 6)), np.zeros(3, np.int32)], dict(transpose_weight=1), TypeError,
         "grouped_matmul: transpose_weight must be a bool, got int"),
        ([*zeros((8, 4), (3, 4, 6)), [1, 2, 3]], {}, TypeError, "grouped_matmul: group_sizes must be a Tensor, got"),
    )  # fmt: skip

    def net(self, transpose_weight=False, **_):
        return Net(msops.grouped_matmul, transpose_weight=transpose_weight)

    def operators(self, shapes=(), transpose_weight=False, has_bias=True, **_):
        return chain(operators(transpose_weight).without(*["bias"] * (not has_bias)))

    def inputs(self, shapes, dtype, seed=1, sizes=(), has_bias=False, **_):
        x, weight, *bias = random(seed, dtype, *shapes[:2], *shapes[3:])
        return [x, weight, np.array(sizes, np.int64 if len(sizes) % 2 else np.int32), *bias]

    def reference_gradient(self, x, weight, group_sizes, *rest, **settings):
        dx, dweight, *dbias = grouped_matmul_backward(x, weight, group_sizes, *rest, **settings)
        return dx, dweight, np.zeros_like(group_sizes), *dbias

    def unused(self, name, dtype):
        """Returns a case's inputs, gradients of the results, and settings, with NaN in all that no row uses."""
        shapes, settings = self.entry_cases()[name]
        x, weight, sizes, *bias = self.inputs(shapes, dtype, **settings)
        [dout] = random(2, dtype, self.reference(x, weight, sizes, **settings)[0].shape)
        for tail in (x, dout):
            tail[sum(sizes) :] = np.nan
        for each in (weight, *bias):
            each[sizes == 0] = np.nan
        return [x, weight, sizes, *bias], [dout], settings

    def random_case(self, random):
        sizes = tuple(random.choice((0, length(random))) for _ in range(random.randrange(5)))
        bits = (random.random() < 0.5 for _ in range(2))
        return case(sizes, length(random), length(random), random.choice((0, length(random))), *bits)

    def check_huge(self, gpu, groups, rows, deep, columns, transpose_weight):
        """Compares the last rows of the last group with a product in float64."""
        shapes, settings = case((rows // groups,) * groups, deep, columns, 0, transpose_weight)
        forward, backward = self.operators(shapes, **settings)
        x, weight = gpu.random(*shapes[0]), gpu.random(*shapes[1])
        sizes = gpu.torch.full((groups,), rows // groups, dtype=gpu.torch.int32, device="cuda")
        (out, _), last = gpu.run(forward, x, weight, sizes), slice(rows - rows % groups - 10, rows - rows % groups)
        matrix = weight[-1].double().T if transpose_weight else weight[-1].double()
        gpu.assert_sums(out[last], x[last].double() @ matrix)
        dx, dweight, _ = gpu.run(backward, x, weight, sizes, out)
        gpu.assert_sums(dx[last], out[last].double() @ matrix.T)
        assert gpu.torch.isfinite(dweight).all() or rows > 2**16


def reshuffled(dtype, transpose_weight):
    """Returns inputs with 200 rows and 6 groups, and the same with other sizes of groups, of which groups 1 to 3 have
    the rows at other places."""
    x, weight, bias = random(4, dtype, (200, 300), (6, 50, 300) if transpose_weight else (6, 300, 50), (6, 50))
    sizes = np.array([20, 30, 1, 99, 0, 40], np.int32)
    begins = np.cumsum(sizes) - sizes
    of = {e: x[begins[e] : begins[e] + sizes[e]] for e in (1, 2, 3)}
    other = random(5, dtype, (7, 300))[0]
    moved = np.concatenate([other, of[1][:1], of[2], of[3][:50], other])
    return (x, weight, sizes, bias), (moved, weight, np.array([7, 1, 1, 50, 3, 0], np.int32), bias), begins


@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_do_not_depend_on_others(dtype, transpose_weight):
    """Rows have the same bits wherever they are, and whatever the sizes of groups are."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    inputs, moved, begins = reshuffled(dtype, transpose_weight)
    net = Net(msops.grouped_matmul, transpose_weight=transpose_weight)
    out, other = run(net, *inputs)[0], run(net, *moved)[0]
    np.testing.assert_array_equal(other[7:8], out[begins[1] : begins[1] + 1])
    np.testing.assert_array_equal(other[8:9], out[begins[2] : begins[2] + 1])
    np.testing.assert_array_equal(other[9:59], out[begins[3] : begins[3] + 50])


@wide_in_graph_mode
@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_no_row_uses_may_be_anything(mode, dtype, transpose_weight):
    """NaN in rows after the last group, in their gradients, and in weights of empty groups changes nothing."""
    card, name = TestGroupedMatmul(), "unused, transposed" if transpose_weight else "unused"
    inputs, douts, settings = card.unused(name, dtype)
    cleared, cleared_douts = ([np.nan_to_num(each) for each in arrays] for arrays in (inputs, douts))
    net = card.net(**settings)
    got = [*run(net, *inputs), *run_gradient(net, inputs, douts)]
    want = [*run(net, *cleared), *run_gradient(net, cleared, cleared_douts)]
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    out, dx, dweight, _, dbias = got
    rows = sum(settings["sizes"])
    for zero in (out[rows:], dx[rows:], dweight[[1, 3]], dbias[[1, 3]]):
        assert (zero == 0).all()


def test_bias_of_float32(mode):
    """A bias may be float32 beside float16, and is added before the sum is rounded."""
    x, weight, bias = np.full((1, 1), 1, np.float16), np.full((1, 1, 2), 2048, np.float16), np.float32([[0.5, 1.25]])
    net = Net(msops.grouped_matmul)
    inputs = [x, weight, np.array([1]), bias]
    np.testing.assert_array_equal(run(net, *inputs)[0], [[2048, 2050]])
    gradient = run_gradient(net, inputs, [np.full((1, 2), 3, np.float16)])[3]
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [[3, 3]])


@pytest.mark.parametrize("transpose_weight", [False, True])
def test_long_sums_of_float16(transpose_weight):
    """Sums are in float32, over the terms and over the rows."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, weight = np.full((2, 40_000), 1, np.float16), np.full((1, 40_000, 1), 0.25, np.float16)
    net = Net(msops.grouped_matmul, transpose_weight=transpose_weight)
    weight = weight.swapaxes(1, 2) if transpose_weight else weight
    np.testing.assert_array_equal(run(net, x, weight, np.array([2]))[0], [[10_000], [10_000]])
    x, weight, dout = np.full((40_000, 2), 1, np.float16), np.full((1, 2, 2), 1, np.float16), np.full((40_000, 2), 0.25)
    inputs = [x, weight, np.array([40_000]), np.zeros((1, 2), np.float16)]
    _, dweight, _, dbias = run_gradient(net, inputs, [dout.astype(np.float16)])
    np.testing.assert_array_equal(dweight, np.full((1, 2, 2), 10_000))
    np.testing.assert_array_equal(dbias, [[10_000, 10_000]])


@wide_in_graph_mode
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2, -1, 3], "group_sizes[1] is -1, expected at least 0"),
        ([2, 3, 2], "group_sizes[2] is 2, but x has only 1 rows left of 6"),
        ([2**62, 2**62, 2**62], f"group_sizes[0] is {2**62}, but x has only 6 rows left of 6"),
    ],
)
def test_wrong_sizes(mode, sizes, words, device_target):
    """On the CPU they are the entry's error; on a GPU, a negative size is 0, and groups end at row N."""
    x, weight = random(0, np.float32, (6, 4), (3, 4, 5))
    net, inputs = Net(msops.grouped_matmul), [x, weight, np.array(sizes)]
    if device_target == "GPU":
        begins = np.minimum(np.cumsum([0, *(min(max(size, 0), 6) for size in sizes)]), 6)
        np.testing.assert_allclose(
            run(net, *inputs)[0], *grouped_matmul(x, weight, np.diff(begins)), rtol=1e-5, atol=1e-5
        )
        return
    with pytest.raises(RuntimeError, match=re.escape(f"grouped_matmul: {words}")):
        run(net, *inputs)
    with pytest.raises(RuntimeError, match=re.escape(f"grouped_matmul: {words}")):
        run_gradient(net, inputs, [np.ones((6, 5), np.float32)])


def test_wrong_sizes_change_no_memory(capfd):
    card = TestGroupedMatmul()
    for call in card.entry_calls(*card.cases["small"], "float32"):
        for change in (3, -4):
            call.inputs[2][-1] += change
            GuardedCall(call, capfd).refused(Status.BAD_VALUE)
            call.inputs[2][-1] -= change


@pytest.mark.parametrize(("has_bias", "transpose_weight"), [(True, True), (False, False)])
def test_cell(mode, has_bias, transpose_weight):
    net = msops.GroupedMatmul(3, 4, 5, has_bias, transpose_weight)
    [x], sizes = random(0, np.float32, (7, 4)), np.array([2, 1, 3], np.int32)
    assert net.weight.shape == ((3, 5, 4) if transpose_weight else (3, 4, 5))
    parameters = [p.asnumpy() for p in net.trainable_params()]
    assert all(0 < np.abs(p).max() <= 0.5 for p in parameters)
    weight, *bias = parameters
    want = grouped_matmul(x, weight, sizes, *bias, transpose_weight=transpose_weight)
    np.testing.assert_allclose(run(net, x, sizes)[0], *want, rtol=1e-5, atol=1e-6)
    assert f"num_groups=3, in_channels=4, out_channels=5, has_bias={has_bias}" in str(net)
    check_training(net, x, sizes)


def test_cell_with_other_dtypes(mode):
    """The weight is cast to the dtype of x, and a bias stays float32 beside float16."""
    net = msops.GroupedMatmul(1, 1, 1, True, weight_init=Tensor([[[2048.0]]]), bias_init=Tensor([[1.25]]))
    out = run(net, np.ones((1, 1), np.float16), np.array([1]))[0]
    assert (out.dtype, out.tolist()) == (np.float16, [[2050]])


def test_wrong_settings_of_cell():
    for settings, error, words in (
        (dict(num_groups=0), ValueError, "GroupedMatmul: num_groups must be at least 1"),
        (dict(in_channels=2.0), TypeError, "GroupedMatmul: in_channels must be an int"),
        (dict(out_channels=-1), ValueError, "GroupedMatmul: out_channels must be at least 1"),
        (dict(has_bias=1), TypeError, "GroupedMatmul: has_bias must be a bool"),
        (dict(transpose_weight=None), TypeError, "GroupedMatmul: transpose_weight must be a bool"),
    ):
        with pytest.raises(error, match=words):
            msops.GroupedMatmul(**{**dict(num_groups=2, in_channels=3, out_channels=4), **settings})


@wide_in_graph_mode
def test_views_and_open_sizes(mode):
    """Inputs may be views; in graph mode, the number of rows may be open."""
    x, weight = random(3, np.float32, (9, 8), (2, 6, 4))

    class Views(mindspore.nn.Cell):
        def construct(self, x, weight, sizes):
            return msops.grouped_matmul(x[1::2, 2:], weight, sizes)

    net, sizes = Views(), np.array([1, 2], np.int32)
    if mode == "graph":
        net.set_inputs(Tensor(shape=[None, 8], dtype=mindspore.float32), Tensor(weight), Tensor(sizes))
    for rows in (9, 8):
        want = grouped_matmul(x[1:rows:2, 2:], weight, sizes)
        np.testing.assert_allclose(run(net, x[:rows], weight, sizes)[0], *want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transpose_weight", [False, True])
def test_gradient_beside_a_frozen_weight(mode, transpose_weight, monkeypatch):
    """In PyNative mode nothing computes the gradient of a weight that has none."""
    x, weight, dout = (random(seed, "float32", shape)[0] for seed, shape in enumerate(((9, 3), (3, 3, 3), (9, 3))))
    sizes = np.array([2, 0, 5], np.int32)
    x[7:], weight[1] = np.nan, np.nan
    frozen = mindspore.Parameter(Tensor(weight), requires_grad=False)
    made, make = [], operators.primitive

    def multiply(x):
        return (msops.grouped_matmul(x, frozen, Tensor(sizes), None, transpose_weight) * Tensor(dout)).sum()

    if mode == "pynative":
        monkeypatch.setattr(operators, "primitive", lambda *settings: made.append(settings) or make(*settings))
    dx = mindspore.grad(multiply)(Tensor(x)).asnumpy()
    want = grouped_matmul_backward(x, weight, sizes, dout, transpose_weight=transpose_weight)[0]
    np.testing.assert_allclose(dx, want, 1e-5, 1e-5)
    assert made == [(transpose_weight, True, False)] * (mode == "pynative")
    gradient = operators(transpose_weight, True).gradient
    assert (gradient.entry.name, [each.name for each in gradient.signature.outputs]) == ("GroupedMatmulForward", ["dx"])
