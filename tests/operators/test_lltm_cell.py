import mindspore
import numpy as np
import pytest
from mindspore import COOTensor, Tensor, amp, nn, ops

import msops
from card import random, zeros
from features import check_open_sizes
from msops.compat import VERSION
from msops.operators.lltm_cell import backward, forward
from operator_test import Net, OperatorTest, check_training, run, run_gradient
from test_sigmoid import sigmoid


def pointwise(gates, c):
    """Returns the activations that both directions need."""
    i, o, g = np.split(gates, 3, 1)
    elu = np.where(g > 0, g, np.expm1(np.minimum(g, 0)))
    new_c = c + sigmoid(i) * elu
    return sigmoid(i), sigmoid(o), g, elu, new_c


def pointwise_gradient(gates, c, dh, dc):
    i, o, g, elu, new_c = pointwise(gates, c)
    tanh = np.tanh(new_c)
    dc = dc + dh * o * (1 - tanh**2)
    dgates = np.concatenate([dc * elu * i * (1 - i), dh * tanh * o * (1 - o), dc * i * np.where(g > 0, 1, elu + 1)], 1)
    return dgates.astype(gates.dtype), dc


def lltm_cell(product, bias, c):
    _, o, _, _, new_c = pointwise(product + bias, c)
    return np.tanh(new_c) * o, new_c


def lltm_cell_backward(product, bias, c, dh, dc):
    dgates, dc = pointwise_gradient(product + bias, c, dh, dc)
    return dgates, dgates.sum(0), dc


def sizes(b, h):
    return [(b, 3 * h), (3 * h,), (b, h)], {}


class TestPointwise(OperatorTest):
    """Tests the kernels by themselves, which compute what follows the product."""

    test_wrong_arguments = None  # the function checks its arguments instead
    operator = forward
    formulas = (lltm_cell, lltm_cell_backward)
    cases = {
        "small": sizes(3, 4),
        "one": sizes(1, 1),
        "empty batch": sizes(0, 4),
        "odd": sizes(67, 13),
        "wide": sizes(2, 3000),
        "tall": sizes(20_011, 2),
        "large": sizes(1031, 256),
    }
    further = {
        f"{b} x {h}": sizes(b, h)
        for b, h in ((3, 5), (16, 8), (70, 33), (257, 2), (300, 1024), (4099, 67), (16_400, 257), (61, 513))
    }
    small = "small"
    huge = ((2**22 + 5, 256),)

    def net(self):
        return Net(forward)

    def check_huge(self, gpu, b, h):
        inputs = product, bias, c = [gpu.random(*shape) for shape in sizes(b, h)[0]]
        outputs = new_h, _ = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, outputs, b, 1000, gpu.assert_equal)
        inputs = [product, bias, c, c, new_h]
        outputs = dproduct, dbias, _, _ = gpu.run(backward, *inputs)
        gpu.check_parts(backward, inputs, outputs, b, 1000, gpu.assert_equal)
        gpu.assert_sums(dbias, gpu.sum(dproduct))


STATE = ((2, 2), (2, 2), (6, 7), 6)  # shapes of h, c, weight and bias for an x of shape (2, 5)


class TestLLTMCell(OperatorTest):
    function = msops.lltm_cell
    cases = {
        "small": ([(3, 5), (3, 4), (3, 4), (12, 9), (12,)], {}),
        "one": ([(1, 1), (1, 1), (1, 1), (3, 2), (3,)], {}),
        "odd": ([(7, 11), (7, 13), (7, 13), (39, 24), (39,)], {}),
        "large": ([(65, 33), (65, 128), (65, 128), (384, 161), (384,)], {}),
    }
    small = "small"
    half_in_float32 = half_gradient_in_float32 = False  # MindSpore's matmul rounds the gates to float16
    wrong = (
        (zeros((2, 5), *STATE, dtype=np.int32), {}, TypeError, "x must be float16, float32 or float64, got int32"),
        (
            [*zeros((2, 5)), np.zeros((2, 2)), *zeros(*STATE[1:])],
            {},
            TypeError,
            "h must be float32 as x is, got float64",
        ),
        ([*zeros((2, 5)), None, *zeros(*STATE[1:])], {}, TypeError, "lltm_cell: h must be a Tensor, got None"),
        (zeros((2, 5, 1), *STATE), {}, ValueError, "lltm_cell: x must have shape (B, I), got (2, 5, 1)"),
        (zeros((2, 5), (3, 2), *STATE[1:]), {}, ValueError, "lltm_cell: h must have shape (B, H) = (2, 2), got (3, 2)"),
        (zeros((2, 5), (2, 2), (2, 3), *STATE[2:]), {}, ValueError, "c must have shape (B, H) = (2, 2), got (2, 3)"),
        (
            zeros((2, 5), *STATE[:2], (7, 6), 6),
            {},
            ValueError,
            "(3 * H, H + I) = (6, 7), got (7, 6)",
        ),
        (zeros((2, 5), *STATE[:3], 4), {}, ValueError, "lltm_cell: bias must have shape (3 * H,) = (6,), got (4,)"),
    )

    @staticmethod
    def reference(x, h, c, weight, bias):
        return lltm_cell(np.concatenate([h, x], 1) @ weight.T, bias, c)

    @staticmethod
    def reference_gradient(x, h, c, weight, bias, dh, dc):
        hx = np.concatenate([h, x], 1)
        dgates, dc = pointwise_gradient(hx @ weight.T + bias, c, dh, dc)
        dhx = dgates @ weight
        return dhx[:, h.shape[1] :], dhx[:, : h.shape[1]], dc, dgates.T @ hx, dgates.sum(0)


def test_special_values(mode):
    """Gates are accurate for large |x|, and NaN or infinity stay in their unit."""
    product = np.array([[-1e4, 1e4, 1e4, -np.inf, 0, 1e4, np.nan, 1, -np.inf]], np.float32)  # i, o, g, three units each
    c = np.array([[0.5, 2, 3]], np.float32)
    new_h, new_c = run(forward, product, np.zeros(9, np.float32), c)
    np.testing.assert_array_equal(new_c, np.array([[np.nan, 3, 2]], np.float32))
    np.testing.assert_allclose(new_h, [[np.nan, np.tanh(3) / 2, np.tanh(2)]], rtol=1e-6)


def test_small_gates_keep_their_digits(mode):
    """e^g - 1 keeps the digits of a small g, which subtracting 1 from e^g in float32 would lose."""
    product = np.array([[100, 0, -1e-6]], np.float32)
    new_c = run(forward, product, *zeros(3, (1, 1)))[1]
    np.testing.assert_allclose(new_c, [[np.expm1(-1e-6)]], rtol=1e-6)


@pytest.mark.parametrize(
    ("n", "got"), [(None, "NoneType"), (0, "0 elements"), (1, "1 elements"), (3, "3 elements")], ids=str
)
def test_state_must_be_a_pair(mode, n, got):
    x, h = (Tensor(a) for a in zeros((1, 2), (1, 3)))
    state = None if n is None else (h,) * n
    with pytest.raises(TypeError, match=rf"LLTMCell: state must be a tuple \(h, c\), got {got}"):
        msops.LLTMCell(2, 3)(x, state)
    if n is not None:
        with pytest.raises(TypeError, match=rf"LLTM: state must be a tuple \(h_0, c_0\), got {got}"):
            msops.LLTM(2, 3)(Tensor(np.zeros((4, 1, 2), np.float32)), state)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty(mode, sizes):
    """There may be no samples, no features or no units."""
    b, i, h = sizes
    inputs = random(9, np.float32, (b, i), (b, h), (b, h), (3 * h, h + i), (3 * h,))
    douts = random(10, np.float32, (b, h), (b, h))
    pairs = [*zip(run(Net(msops.lltm_cell), *inputs), TestLLTMCell.reference(*inputs))]
    pairs += zip(run_gradient(Net(msops.lltm_cell), inputs, douts), TestLLTMCell.reference_gradient(*inputs, *douts))
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def not_tensors():
    coo = COOTensor(Tensor([[0, 1]], mindspore.int32), Tensor([1.0], mindspore.float32), (2, 3))
    return {"COOTensor": coo, "mutable list": mindspore.mutable([Tensor([1.0]), Tensor([2.0])])}


@pytest.mark.skipif(VERSION < (2, 7), reason="older versions have other errors, or no such objects")
@pytest.mark.parametrize("kind", ["COOTensor", "mutable list"])
def test_what_is_not_a_tensor(mode, kind):
    value = not_tensors()[kind]
    with pytest.raises(TypeError, match="lltm_cell: h must be a Tensor, got"):
        Net(msops.lltm_cell)(Tensor(zeros((2, 5))[0]), value, *map(Tensor, zeros(*STATE[1:])))
    with pytest.raises(TypeError, match="lltm: x must be a Tensor, got"):
        Net(msops.lltm)(value, *map(Tensor, zeros((2, 3), (2, 3), (9, 5), (9, 3), (9,))))


def test_numpy_numbers():
    """Sizes may be NumPy numbers."""
    three = np.int64(3)
    assert msops.LLTMCell(three, np.uint8(200)).weight.shape == (600, 203)
    net = msops.LLTM(three, np.uint8(200), np.int32(2), bidirectional=np.bool_(True))
    assert net.weight_ih_l1.shape == (600, 400)


def test_training(mode):
    x, h, c = random(5, np.float32, (9, 6), (9, 7), (9, 7))
    check_training(msops.LLTMCell(6, 7), x, (Tensor(h), Tensor(c)))


def test_cell(mode):
    """The Cell has the function's parameters, which start uniformly distributed within 1 / sqrt(H)."""
    mindspore.set_seed(1)
    cell = msops.LLTMCell(30, 40, mindspore.float64)
    x, h, c = random(6, np.float64, (5, 30), (5, 40), (5, 40))
    weight, bias = cell.weight.asnumpy(), cell.bias.asnumpy()
    assert weight.shape == (120, 70)
    assert bias.shape == (120,)
    for values in (weight, bias):
        assert 0.9 / 40**0.5 < np.abs(values).max() <= 1 / 40**0.5
        assert abs(values.mean()) < 0.03
    state = cell(Tensor(x), (Tensor(h), Tensor(c)))
    for got, want in zip(state, TestLLTMCell.reference(x, h, c, weight, bias)):
        np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-12, atol=1e-14)


class Flat(nn.Cell):
    """Calls a Cell that has a state, but takes and returns only tensors."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x, h, c):
        output, state = self.net(x, (h, c))
        if isinstance(state, tuple):
            return output, state[0], state[1]
        return output, state


class Weighted(nn.Cell):
    """Computes the sum of a Cell's outputs, each multiplied by a tensor, in float32."""

    def __init__(self, net, weights):
        super().__init__(auto_prefix=False)
        self.net, self.weights = net, [Tensor(each) for each in weights]

    def construct(self, *inputs):
        total = 0
        for out, weight in zip(self.net(*inputs), self.weights):
            total += (ops.cast(out, mindspore.float32) * weight).sum()
        return total


HALF, SINGLE = mindspore.float16, mindspore.float32
MIXED = {  # name -> (change of the Cell, dtype of x, dtype of the state, dtype of the results)
    "to_float": (lambda net: net.to_float(HALF), SINGLE, SINGLE, HALF),
    "O1": (lambda net: amp.auto_mixed_precision(net, "O1"), SINGLE, SINGLE, SINGLE),
    "O2": (lambda net: amp.auto_mixed_precision(net, "O2"), SINGLE, SINGLE, SINGLE),
    "O3": (lambda net: amp.auto_mixed_precision(net, "O3"), SINGLE, SINGLE, SINGLE),
    "auto": (lambda net: amp.auto_mixed_precision(net, "auto"), SINGLE, SINGLE, SINGLE),
    "x": (lambda net: net, HALF, SINGLE, HALF),
    "state": (lambda net: net, SINGLE, HALF, SINGLE),
}


def check_mixed_precision(way, net, inputs, douts, reference, reference_gradient):
    """Requires that results and gradients, also of the float32 Parameters, equal float64's to float16's precision.

    They must do so to float32's precision in level O1, and where only the state is float16, which then holds the same
    numbers.
    """
    if way in ("O1", "auto") and VERSION < (2, 1):
        pytest.skip("MindSpore has no such level")
    precise = way in ("O1", "state")
    make, of_x, of_state, of_results = MIXED[way]
    x, *state = (np.asarray(each, np.float16).astype(np.float32) for each in inputs)
    parameters = net.trainable_params()
    exact = [np.float64(each) for each in (x, *state, *(p.asnumpy() for p in parameters))]
    tensors = [Tensor(x, of_x), *(Tensor(each, of_state) for each in state)]
    mixed = make(Flat(net))
    results = mixed(*tensors)
    assert {out.dtype for out in results} == {of_results}
    _, (of_inputs, of_parameters) = ops.value_and_grad(Weighted(mixed, douts), (0, 1, 2), parameters)(*tensors)
    assert [g.dtype for g in of_inputs + of_parameters] == [of_x, of_state, of_state] + [SINGLE] * len(parameters)
    got = [*results, *of_inputs, *of_parameters]
    want = [*reference(*exact), *reference_gradient(*exact, *douts)]
    allowed = [1e-6 if precise else 2**-8] * len(want)
    if way == "state":
        allowed[len(results) + 1 : len(results) + 3] = [2**-11] * 2  # these gradients are float16
    errors = [np.abs(a.asnumpy() - b).max() / np.abs(b).max() for a, b in zip(got, want)]
    assert all(error < most for error, most in zip(errors, allowed)), errors
    assert precise or max(errors) > 1e-5


@pytest.mark.parametrize("way", MIXED)
def test_mixed_precision(mode, way, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MindSpore writes the networks of level O1 into a folder
    mindspore.set_seed(1)
    inputs, douts = random(7, np.float32, (9, 6), (9, 7), (9, 7)), random(8, np.float32, (9, 7), (9, 7))
    cell, references = msops.LLTMCell(6, 7), (TestLLTMCell.reference, TestLLTMCell.reference_gradient)
    check_mixed_precision(way, cell, inputs, douts, *references)


needs_open_sizes = pytest.mark.skipif(VERSION < (2, 7), reason="graph mode has no open sizes")


def open_tensors(*shapes):
    return [Tensor(shape=shape, dtype=mindspore.float32) for shape in shapes]


@needs_open_sizes
def test_open_sizes(mode):
    """All sizes of lltm_cell may be open. features.py tests the Cell."""
    calls = [[(2, 5), *STATE], [(3, 2), (3, 1), (3, 1), (3, 3), (3,)]]
    check_open_sizes(Net(msops.lltm_cell), [[None, None]] * 4 + [[None]], calls)


@needs_open_sizes
@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        pytest.param(
            [(2, 5), (2, 2), (3, 2), (6, 7), (6,)],
            RuntimeError,
            "lltm_cell: c must have shape (B, H) = (2, 2), got (3, 2)",
            marks=pytest.mark.wide,
        ),
        (
            [(2, 5), (2, 2), (2, 2), (6, 7), (4,)],
            RuntimeError,
            "lltm_cell: bias must have shape (3 * H,) = (6,), got (4,)",
        ),
        ([(2, 5), (2, 2), (2,), (6, 7), (6,)], ValueError, "lltm_cell: c must have shape (B, H), got (1,)"),
    ],
    ids=["c", "bias", "rank"],
)
def test_open_sizes_that_do_not_fit(shapes, error, words):
    """Wrong ranks are errors when the graph compiles, and wrong sizes when it runs."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Net(msops.lltm_cell)
    net.set_inputs(*open_tensors(*([None] * len(shape) for shape in shapes)))
    with pytest.raises(error) as caught:
        run(net, *zeros(*shapes))
    assert words in str(caught.value)


@needs_open_sizes
def test_open_rank():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Flat(msops.LLTMCell(5, 2))
    net.set_inputs(Tensor(shape=None, dtype=mindspore.float32), *open_tensors((None, 2), (None, 2)))
    with pytest.raises(ValueError, match="lltm_cell: x must have a rank known at compile time, got"):
        run(net, *zeros((2, 5), (2, 2), (2, 2)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 4), ValueError, "LLTMCell: input_size must be at least 1, got 0"),
        ((4, -1), ValueError, "LLTMCell: hidden_size must be at least 1, got -1"),
        ((4.0, 4), TypeError, "LLTMCell: input_size must be an int, got float"),
        ((4, True), TypeError, "LLTMCell: hidden_size must be an int, got bool"),
        ((4, 4, mindspore.int32), TypeError, "LLTMCell: dtype must be float16, float32 or float64, got Int32"),
    ],
    ids=str,
)
def test_wrong_settings(arguments, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        msops.LLTMCell(*arguments)
