import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from card import Card, random, zeros
from features import check_open_sizes
from gpu import BIG
from msops.compat import VERSION
from msops.core.library import of_package
from msops.core.spec import Spec, dtype_name
from msops.shared.lltm import backward_operators, operators
from msops.testing import opcheck
from msops.testing.entry import Param, Status, call
from operator_test import OperatorTest, Training, check_training, run, run_gradient, wide_in_graph_mode
from test_lltm_cell import (
    MIXED,
    Flat,
    check_mixed_precision,
    needs_open_sizes,
    open_tensors,
    pointwise,
    pointwise_gradient,
)  # fmt: skip


def steps_of(steps, reverse):
    return range(steps - 1, -1, -1) if reverse else range(steps)


def active(t, lengths, batch):
    return np.ones((batch, 1), bool) if lengths is None else (t < np.asarray(lengths))[:, None]


def recur(product, weight, bias, h, c, lengths=None, reverse=False):
    """Returns the outputs, the last state, and for each step its gates, with h and c before it."""
    output, kept = np.zeros((*product.shape[:2], h.shape[1]), h.dtype), {}
    for t in steps_of(len(product), reverse):
        gates, on = product[t] + h @ weight.T + bias, active(t, lengths, len(h))
        kept[t] = gates, h, c
        _, o, _, _, new_c = pointwise(gates, c)
        new_h = np.tanh(new_c) * o
        output[t] = np.where(on, new_h, 0)
        h, c = np.where(on, new_h, h), np.where(on, new_c, c)
    return output, h, c, kept


def recur_gradient(product, weight, bias, h, c, doutput, dh, dc, lengths=None, reverse=False):
    kept, dproduct, dweight = recur(product, weight, bias, h, c, lengths, reverse)[-1], np.zeros_like(product), 0
    for t in reversed(steps_of(len(product), reverse)):
        (gates, h, c), on = kept[t], active(t, lengths, len(dh))
        dgates, dc_before = pointwise_gradient(gates, c, dh + doutput[t], dc)
        dproduct[t] = np.where(on, dgates, 0)
        dh, dc = np.where(on, dproduct[t] @ weight, dh), np.where(on, dc_before, dc)
        dweight = dweight + dproduct[t].T @ h
    return dproduct, np.zeros_like(weight) + dweight, dproduct.sum((0, 1)), dh, dc


def recurrence(t, b, h, **settings):
    state = b, h
    return [(t, b, 3 * h), (3 * h, h), (3 * h,), state, state, (b,)], settings


class Recurrence(Card):
    """Tests the kernels by themselves, which compute the time loop."""

    cases = {
        "small": recurrence(4, 3, 5),
        "reverse": recurrence(4, 3, 5, reverse=True, allow_tf32=True),
        "no steps": recurrence(0, 3, 5, reverse=True),
    }
    further = {
        f"{t} x {b} x {h}{' reverse' * reverse}": recurrence(t, b, h, reverse=reverse)
        for t, b, h in (
            *((0, 3, 5), (4, 0, 5), (4, 3, 0), (1, 2, 3), (9, 1, 128), (6, 3, 67), (5, 16, 128), (4, 300, 96)),
            *((6, 1, 129), (4, 100, 192), (5, 16, 256), (4, 20, 330), (3, 9, 500), (3, 64, 1024), (3, 64, 1025)),
            *((4, 130, 333), (3, 4, 1500), (1, 200, 1032), (3, 200, 1032), (2, 420, 520), (2, 700, 520)),
            *((9, 61, 103), (9, 3, 513)),  # threads share the units where there are few samples
        )
        for reverse in (False, True)
    }
    small = "small"
    hostile = ("reverse",)
    huge = tuple(  # the loop runs in blocks, in clusters, in the grid, and with cuBLAS
        (BIG // (batch * 3 * hidden) + 1, batch, hidden)
        for batch, hidden in ((4096, 64), (64, 256), (256, 1024), (64, 2200))
    )

    def operators(self, shapes=(), reverse=False, allow_tf32=False):
        return [operators(reverse, allow_tf32), backward_operators(reverse, allow_tf32)]

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Chooses lengths from below 0 to above the number of steps, and weights as large as in training, so that
        rounding errors do not grow from step to step."""
        product, weight, *rest = random(seed, dtype, *shapes[:5])
        (steps, *_), (_, hidden) = shapes[:2]
        lengths = np.random.default_rng(seed).integers(-1, steps + 2, shapes[5]).astype(np.int32)
        return [product, weight / np.asarray(max(1, hidden) ** 0.5, dtype), *rest, lengths]

    def check_huge(self, gpu, steps, batch, hidden):
        def close(big, alone):
            scale = alone.abs().max()
            gpu.assert_close(big / scale, alone / scale)

        forward, backward = self.operators()
        product, weight, bias, h, c = (gpu.random(*shape) for shape in recurrence(steps, batch, hidden)[0][:5])
        weight /= 8 * hidden**0.5
        lengths = gpu.torch.full((batch,), steps, dtype=gpu.torch.int32, device="cuda")
        inputs = [product, weight, bias, h, c, lengths]
        output, last_h, last_c, gates, cells, _ = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, [output, None, None, gates, cells], batch, 3, gpu.assert_close)
        inputs = [weight, gates, cells, output, h, lengths, output, last_h, c]
        dgates, _, dh, dc, _ = gpu.run(backward, *inputs)
        gpu.check_parts(backward, inputs, [dgates, None, dh, dc], batch, 3, close)
        assert not last_c.isnan().any()
        assert not dgates.isnan().any()

    def random_case(self, random):
        shapes, _ = super().random_case(random)
        return shapes, dict(reverse=random.random() < 0.5, allow_tf32=random.random() < 0.5)


class Sequence(nn.Cell):
    """Calls the function with its settings. `seq_length` is a list."""

    def __init__(self, seq_length=None, reverse=False, **settings):
        super().__init__()
        self.seq_length = Tensor(np.array(seq_length, np.int32)) if isinstance(seq_length, list) else seq_length
        self.reverse, self.settings = reverse, settings

    def construct(self, *inputs):
        return msops.lltm(*inputs, self.seq_length, self.reverse, **self.settings)


def shapes(t, b, i, h):
    return [(t, b, i), (b, h), (b, h), (3 * h, i), (3 * h, h), (3 * h,)]


SHAPES = shapes(4, 2, 5, 3)
SMALL = zeros(*SHAPES)


def wrong(at, array):
    return [*SMALL[:at], array, *SMALL[at + 1 :]]


class TestLLTM(OperatorTest):
    function = msops.lltm
    cases = {
        "small": (shapes(4, 2, 3, 3), {}),
        "one step": (shapes(1, 3, 2, 5), {}),
        "one": (shapes(3, 1, 1, 1), {}),
        "no steps": (shapes(0, 2, 3, 4), {}),
        "no samples": (shapes(2, 0, 3, 4), {}),
        "no inputs": (shapes(2, 3, 0, 4), {}),
        "no units": (shapes(2, 3, 4, 0), {}),
        "reverse": (shapes(5, 3, 4, 7), {"reverse": True}),
        "lengths": (shapes(5, 7, 3, 9), {"seq_length": [5, 0, 1, 4, 9, -2, 3]}),
        "reverse lengths": (shapes(5, 7, 3, 9), {"seq_length": [5, 0, 1, 4, 9, -2, 3], "reverse": True}),
        "odd": (shapes(7, 13, 11, 67), {}),
        "one sample": (shapes(9, 1, 5, 259), {}),
        "large": (shapes(6, 37, 33, 130), {"reverse": True}),
    }
    small = "lengths"
    half_in_float32 = half_gradient_in_float32 = False  # MindSpore's matmul rounds the products to float16
    wrong = (
        (
            wrong(0, np.zeros((4, 2, 5), np.int32)),
            {},
            TypeError,
            "lltm: x must be float16, float32 or float64, got int",
        ),
        (wrong(1, np.zeros((2, 3))), {}, TypeError, "lltm: h must be float32 as x is, got float64"),
        (wrong(2, None), {}, TypeError, "lltm: c must be a Tensor, got None"),
        (wrong(0, np.zeros((4, 5), np.float32)), {}, ValueError, "lltm: x must have shape (T, B, I), got (4, 5)"),
        (wrong(2, np.zeros((3, 3), np.float32)), {}, ValueError, "c must have shape (B, H) = (2, 3), got (3, 3)"),
        (wrong(3, np.zeros((9, 4), np.float32)), {}, ValueError, "weight_ih must have shape (3 * H, I) = (9, 5)"),
        (wrong(4, np.zeros((9, 5), np.float32)), {}, ValueError, "weight_hh must have shape (3 * H, H) = (9, 3)"),
        (wrong(5, np.zeros(8, np.float32)), {}, ValueError, "lltm: bias must have shape (3 * H,) = (9,), got (8,)"),
        (SMALL, {"seq_length": [1, 2, 3]}, ValueError, "seq_length must have shape (B,) = (2,), got (3,)"),
        (SMALL, {"seq_length": (4, 4)}, TypeError, "lltm: seq_length must be an int32 or int64 Tensor, got tuple"),
        (SMALL, {"reverse": 1}, TypeError, "lltm: reverse must be a bool, got int"),
        (SMALL, {"reverse": []}, TypeError, "lltm: reverse must be a bool, got list"),
        (SMALL, {"allow_tf32": None}, TypeError, "lltm: allow_tf32 must be a bool, got NoneType"),
    )

    def net(self, **settings):
        return Sequence(**settings)

    def inputs(self, shapes, dtype, seed=1, **settings):
        x, h, c, weight_ih, weight_hh, bias = super().inputs(shapes, dtype, seed)
        # Weights are as large as is usual in training, so that rounding errors do not grow from step to step.
        return [x, h, c, *(a / np.asarray(h.shape[1] ** 0.5, dtype) for a in (weight_ih, weight_hh)), bias]

    @staticmethod
    def reference(x, h, c, weight_ih, weight_hh, bias, seq_length=None, reverse=False):
        return recur(x @ weight_ih.T, weight_hh, bias, h, c, seq_length, reverse)[:3]

    @staticmethod
    def reference_gradient(x, h, c, weight_ih, weight_hh, bias, *douts, seq_length=None, reverse=False):
        product = x @ weight_ih.T
        gradients = recur_gradient(product, weight_hh, bias, h, c, *douts, seq_length, reverse)
        dproduct, dweight_hh, dbias, dh, dc = gradients
        return dproduct @ weight_ih, dh, dc, np.einsum("tbg,tbi->gi", dproduct, x), dweight_hh, dbias


@pytest.mark.wide
@pytest.mark.skipif(VERSION == (2, 0), reason="MindSpore 2.0 leaves sizes open in the gradient of a third dtype")
def test_operator():
    """Gradients of the recurrence by itself equal finite differences, in both modes and all dtypes."""
    t, b, n = 4, 5, 3
    product, weight, bias, h, c = random(7, np.float64, (t, b, 3 * n), (3 * n, n), (3 * n,), (b, n), (b, n))
    lengths = np.array([4, 0, 7, 1, -1], np.int32)

    def reference(product, weight, bias, h, c, lengths):
        return recur(product, weight, bias, h, c, lengths, reverse=True)[:3]

    def other(*inputs):
        return recur(*inputs, reverse=False)[:3]

    opcheck(
        operators(reverse=True, allow_tf32=False),
        [product, weight, bias, h, c, lengths],
        reference,
        other=(operators(reverse=False, allow_tf32=False), other),
        half_in_float32=False,
    )


def test_scratch_whose_size_overflows(capfd):
    """A size of 2^66 + 1024 elements is refused, though it is 1024 in 64 bits."""
    forward = operators(False, False)
    t, b, h, f32, i32 = 0, 2**58, 1, mindspore.float32, mindspore.int32
    inputs = [*((shape, f32) for shape in ((t, b, 3 * h), (3 * h, h), (3 * h,), (b, h), (b, h))), ((b,), i32)]
    with pytest.raises(ValueError, match=r"^lltm: h has a shape that no memory can hold \(MSOPS_SCRATCH"):
        forward.infer(*(Spec(*each) for each in inputs))
    outputs = [(shape, f32) for shape in ((t, b, h), (b, h), (b, h), (t, b, 3 * h), (t, b, h), (1024,))]
    arrays = [Param(16, shape, dtype_name(dtype)) for shape, dtype in inputs + outputs]
    assert call(forward.entry, arrays, forward.attributes) == Status.BAD_SHAPE
    assert "no memory can hold" in capfd.readouterr().err


WAYS = {"across the grid": (64, 1024), "in small tiles": (64, 1544), "in tiles": (300, 1544), "by cuBLAS": (4, 1500)}


@pytest.fixture
def tf32_gpu(gpu):
    if gpu.torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 came with sm_80")
    return gpu


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("i", [0, 1])
def test_gpu_allows_tf32(tf32_gpu, way, i):
    """Where TF32 is allowed, recurrent products have factors of 11 bits."""
    results = []
    shapes, _ = recurrence(3, *WAYS[way])
    inputs = Recurrence().entry_calls(shapes, {}, "float32")[i].inputs
    for allow_tf32 in (False, True):
        operator = Recurrence().operators(allow_tf32=allow_tf32)[i]
        results.append(tf32_gpu.run(operator, *(tf32_gpu.torch.from_numpy(x).cuda() for x in inputs))[0].cpu().numpy())
    exact, rounded = results
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-6 < error < 2e-3


@pytest.mark.skipif(
    re.search(rb"msops: nvcc 11", of_package("lltm").path.read_bytes()) is not None,
    reason="tiles came with nvcc 12; cuBLAS, which is there instead, does not round to nearest",
)
@pytest.mark.parametrize("way", ["across the grid", "in small tiles", "in tiles"])
def test_gpu_rounds_factors_to_nearest(tf32_gpu, way):
    torch, run = tf32_gpu.torch, tf32_gpu.run

    def to_tf32(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    batch, hidden = WAYS[way]
    sample = torch.arange(batch, device="cuda")
    unit = sample * 5 % hidden
    forward, backward = Recurrence().operators(allow_tf32=True)
    shapes, _ = recurrence(1, batch, hidden)
    product, _, bias, zeros, c = (torch.zeros(shape, device="cuda") for shape in shapes[:5])
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    weight, h = torch.randn(shapes[1], device="cuda"), torch.randn(batch, hidden, device="cuda")
    ones = zeros.clone()
    ones[sample, unit] = 1
    gates = run(forward, product, weight, bias, ones, c, lengths)[3][0]
    assert torch.equal(gates, to_tf32(weight)[:, unit].T)
    diagonal = torch.eye(hidden, device="cuda").repeat(3, 1)
    output, _, _, gates, cells, _ = run(forward, product, diagonal, bias, h, c, lengths)
    assert torch.equal(gates[0], to_tf32(h).repeat(1, 3))
    diagonal[hidden:] = 0
    dgates, _, dh, _, _ = run(backward, diagonal, gates, cells, output, h, lengths, output, h, c)
    assert torch.equal(dh, to_tf32(dgates[0, :, :hidden]))
    weight[hidden:] = 0
    dgates, _, dh, _, _ = run(backward, weight, gates, cells, output, h, lengths, zeros[None], ones, c)
    assert torch.equal(dh, to_tf32(dgates[0, sample, unit])[:, None] * to_tf32(weight)[unit])


class Slope(nn.Cell):
    """Computes the sum of the squares of the function's gradient, for inputs that are results of operators."""

    def __init__(self, i):
        super().__init__()
        self.i, self.gradient = i, ops.GradOperation(get_all=True)

    def loss(self, *inputs):
        output, _, _ = msops.lltm(*[ops.tanh(each) for each in inputs])
        return (output * output).sum()

    def construct(self, *inputs):
        dx = self.gradient(self.loss)(*inputs)[self.i]
        return (dx * dx).sum()


@wide_in_graph_mode
@pytest.mark.parametrize("i", range(6))
def test_second_order_is_an_error(mode, i):
    """A gradient of second order is an error, while MindSpore's PyNative mode would give zeros for what goes through a
    reshape."""
    if mode == "pynative" and VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 has no gradient of a custom operator's gradient in PyNative mode")
    inputs = [Tensor(array) for array in random(24, np.float32, *SHAPES)]
    error, words = ValueError, "no gradients of their own|has no gradient"
    if VERSION < (2, 0):  # MindSpore before 2.0 has its own message
        error, words = RuntimeError, "bprop not defined"
    with pytest.raises(error, match=words):
        ops.GradOperation(get_all=True)(Slope(i))(*inputs)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_seq_length(mode, dtype):
    """Lengths are clamped to 0 and T. A length may be an input of the compiled graph."""
    net = Sequence(reverse=True)
    inputs = [Tensor(a) for a in random(8, np.float32, *shapes(3, 5, 2, 4))]
    large = 2**40 + 1 if dtype == np.int64 else 2**31 - 1

    class Taking(nn.Cell):
        def construct(self, x, h, c, weight_ih, weight_hh, bias, seq_length):
            return msops.lltm(x, h, c, weight_ih, weight_hh, bias, seq_length, True)

    lengths = Tensor(np.array([large, 2 - large, 0, 2, 3], dtype))
    for got, want in zip(Taking()(*inputs, lengths), Sequence([3, 0, 0, 2, 3], reverse=True)(*inputs)):
        np.testing.assert_array_equal(got.asnumpy(), want.asnumpy())
    whole, all_steps = net(*inputs), Sequence([3] * 5, reverse=True)(*inputs)
    np.testing.assert_array_equal(whole[0].asnumpy(), all_steps[0].asnumpy())


@wide_in_graph_mode
def test_samples_end_by_themselves(mode):
    """Each sample gives the same results as alone and cut to its length, whatever its padding holds."""
    x, h, c, *parameters = random(9, np.float32, *shapes(6, 4, 3, 5))
    lengths = [6, 1, 0, 4]
    x[1:, 1], x[:, 2], x[4:, 3] = np.nan, np.nan, np.inf
    for reverse in (False, True):
        output, h_n, c_n = run(Sequence(lengths, reverse=reverse), x, h, c, *parameters)
        for b, length in enumerate(lengths):
            assert not output[length:, b].any()
            if length == 0:
                np.testing.assert_array_equal(h_n[b], h[b])
                np.testing.assert_array_equal(c_n[b], c[b])
                continue
            alone = run(Sequence(reverse=reverse), x[:length, b : b + 1], h[b : b + 1], c[b : b + 1], *parameters)
            for got, want in zip((output[:length, b], h_n[b], c_n[b]), alone):
                np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-5, atol=1e-6)


@wide_in_graph_mode
def test_padding_has_no_gradient(mode):
    """Finite numbers after a sample's end change neither results nor other gradients by a single bit."""
    x, *rest = random(10, np.float32, *shapes(5, 3, 2, 4))
    lengths, douts = [2, 5, 0], random(11, np.float32, (5, 3, 4), (3, 4), (3, 4))
    other = x.copy()
    other[2:, 0], other[:, 2] = 3, -7
    net = Sequence(lengths)
    for got, want in zip(run(net, other, *rest), run(net, x, *rest)):
        np.testing.assert_array_equal(got, want)
    gradients = [run_gradient(net, [a, *rest], douts) for a in (x, other)]
    for got, want in zip(*gradients):
        np.testing.assert_array_equal(got, want)
    assert not gradients[0][0][2:, 0].any()
    assert not gradients[0][0][:, 2].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_long_sequence(mode, dtype):
    """Without a forget gate c grows, and errors stay: T independent errors add up to sqrt(T) times their size. A step
    rounds c, which stays in float32, and the gates, whose product MindSpore rounds to the dtype. The result is rounded
    to the dtype, too. If c were kept in float16, its errors would be 2^13 times as large."""
    t, n = 4096, 16
    x, h, c, *parameters = random(12, np.float64, *shapes(t, 3, 4, n))
    inputs = [a.astype(dtype) for a in (x, h, c, *(0.1 * a for a in parameters))]
    output, h_n, c_n = run(Sequence(), *inputs)
    exact_output, exact_h, exact_c = TestLLTM.reference(*(a.astype(np.float64) for a in inputs))
    size, eps = np.abs(exact_c).max(), np.finfo(dtype).eps
    assert size > 1000
    allowed = 4 * t**0.5 * (np.finfo(np.float32).eps * size + eps)  # gates are about 1
    assert np.abs(c_n - exact_c).max() < allowed + eps * size
    for got, want in ((output, exact_output), (h_n, exact_h)):
        assert np.abs(got - want).max() < allowed


class Stepping(nn.Cell):
    """Calls a cell step by step."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h, c):
        outputs = ()
        for t in range(x.shape[0]):
            h, c = self.cell(x[t], (h, c))
            outputs += (h,)
        return ops.stack(outputs), h, c


@needs_open_sizes
@wide_in_graph_mode
def test_open_sizes(mode, device_target):
    """All sizes may be open. Calls may have no steps, samples, inputs or units."""
    opened = [[None] * len(shape) for shape in SHAPES]
    calls = [shapes(*sizes) for sizes in ((4, 2, 5, 3), (0, 2, 3, 4), (2, 0, 3, 4))]
    if VERSION >= (2, 9) and device_target == "CPU":  # MindSpore's MatMul of 0 numbers fails in 2.7, and by cuBLAS
        calls += [shapes(*sizes) for sizes in ((2, 3, 0, 4), (2, 3, 4, 0))]
    check_open_sizes(Sequence(reverse=True), opened, calls)


@needs_open_sizes
def test_open_steps_and_lengths(mode):
    """Steps and lengths may be open in training, too, where gradients reach the Parameters."""

    class Taking(nn.Cell):
        def __init__(self):
            super().__init__()
            self.lltm = msops.LLTM(3, 4, batch_first=True, bidirectional=True)

        def construct(self, x, seq_length):
            return self.lltm(x, seq_length=seq_length)[0]

    def training():
        mindspore.set_seed(1)
        return nn.TrainOneStepCell(Training(net := Taking()), nn.SGD(net.trainable_params(), 0.1))

    known, opened = training(), training()
    opened.set_inputs(*open_tensors((None, None, 3)), Tensor(shape=[None], dtype=mindspore.int64))
    for batch, steps in ((3, 5), (2, 7), (3, 5)):
        x, lengths = random(19, np.float32, (batch, steps, 3))[0], [steps + 2, -1, 1][:batch]
        arguments = Tensor(x), Tensor(lengths, mindspore.int64)
        np.testing.assert_allclose(opened(*arguments).asnumpy(), known(*arguments).asnumpy(), rtol=1e-5)


@needs_open_sizes
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({1: (3, 3)}, "lltm: h must have shape (B, H) = (2, 3), got (3, 3)"),
        pytest.param({2: (3, 3)}, "lltm: c must have shape (B, H) = (2, 3), got (3, 3)", marks=pytest.mark.wide),
    ],
    ids=["h", "c"],
)
def test_open_sizes_that_do_not_fit(changed, words):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Sequence()
    net.set_inputs(*open_tensors(*([None] * len(shape) for shape in SHAPES)))
    with pytest.raises(RuntimeError) as caught:
        run(net, *zeros(*(changed.get(i, shape) for i, shape in enumerate(SHAPES))))
    assert words in str(caught.value)


@needs_open_sizes
@pytest.mark.parametrize(
    ("opened", "words"),
    [
        (((None, None, 4), (1, None, 4), (1, None, 4)), "LLTM: x must have three axes, the last of 3, got (None, None"),
        (((None, None, 3), (1, None, 5), (1, None, 4)), "LLTM: h_0 must have shape (1, None, 4), got (1, None, 5)"),
        ((None, (1, None, 4), (1, None, 4)), "LLTM: x must have three axes, the last of 3, got (-2,)"),
    ],
    ids=["x", "h_0", "rank"],
)
def test_what_is_known_beside_open_sizes(opened, words):
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = Flat(msops.LLTM(3, 4))
    net.set_inputs(*open_tensors(*opened))
    with pytest.raises(ValueError, match=re.escape(words)):
        run(net, *zeros(*(tuple(size or 2 for size in shape or (5, 2, 3)) for shape in opened)))


class TestLayers:
    """Tests the Cell."""

    @wide_in_graph_mode
    def test_equals_stepping(self, mode):
        """The Cell equals stepping up to the rounding of other orders of addition, and to_cells returns equal copies of
        the parameters."""
        cell = msops.LLTMCell(5, 7, mindspore.float64)
        net = msops.LLTM.from_cells([cell])
        x, h, c = random(13, np.float64, (6, 4, 5), (4, 7), (4, 7))
        inputs, douts = [x, h, c], random(14, np.float64, (6, 4, 7), (4, 7), (4, 7))
        layered, stacked = [x, h[None], c[None]], [douts[0], douts[1][None], douts[2][None]]
        pairs = [*zip(run(Flat(net), *layered), run(Stepping(cell), *inputs))]
        pairs += zip(run_gradient(Flat(net), layered, stacked), run_gradient(Stepping(cell), inputs, douts))
        for got, want in pairs:
            np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-12, atol=1e-13)
        (again,) = net.to_cells()
        np.testing.assert_array_equal(again.weight.asnumpy(), cell.weight.asnumpy())
        np.testing.assert_array_equal(again.bias.asnumpy(), cell.bias.asnumpy())

    @wide_in_graph_mode
    @pytest.mark.parametrize("way", MIXED)
    def test_mixed_precision(self, mode, way, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)  # MindSpore writes the networks of level O1 into a folder

        def reference(x, h, c, *parameters):
            output, *state = TestLLTM.reference(x, h[0], c[0], *parameters)
            return output, *(each[None] for each in state)

        def reference_gradient(x, h, c, *rest):
            *parameters, doutput, dh, dc = rest
            gradients = TestLLTM.reference_gradient(x, h[0], c[0], *parameters, doutput, dh[0], dc[0])
            return gradients[0], *(each[None] for each in gradients[1:3]), *gradients[3:]

        mindspore.set_seed(1)
        inputs = random(20, np.float32, (5, 9, 6), (1, 9, 7), (1, 9, 7))
        douts = random(21, np.float32, (5, 9, 7), (1, 9, 7), (1, 9, 7))
        check_mixed_precision(way, msops.LLTM(6, 7), inputs, douts, reference, reference_gradient)

    @wide_in_graph_mode
    def test_layers_in_mixed_precision(self, mode):
        """The state of the second layer is cast, too."""
        net, x = msops.LLTM(3, 4, 2, bidirectional=True), random(22, np.float32, (5, 2, 3))[0]
        state = random(23, np.float32, (4, 2, 4), (4, 2, 4))
        want = run(Flat(net), x, *state)
        net.to_float(mindspore.float16)
        got = run(Flat(net), x, *state)
        assert {each.dtype for each in got} == {np.dtype(np.float16)}
        for each, wanted in zip(got, want):
            assert 0 < np.abs(each - wanted).max() < 2**-8 * np.abs(wanted).max()

    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_layers(self, mode, bidirectional, has_bias, batch_first):
        """The Cell equals NumPy's layers with its parameters, with lengths and a state."""
        settings = dict(
            bidirectional=bidirectional, has_bias=has_bias, batch_first=batch_first, dtype=mindspore.float64
        )
        net = msops.LLTM(3, 4, num_layers=2, **settings)
        parameters = {p.name: p.asnumpy() for p in net.get_parameters()}
        suffixes = [f"_l{i}{way}" for i in (0, 1) for way in ("", "_reverse")[: 1 + bidirectional]]
        kinds = ("weight_ih", "weight_hh", "bias")[: 2 + has_bias]
        assert set(parameters) == {kind + suffix for kind in kinds for suffix in suffixes}
        count, lengths = len(suffixes), [5, 2, 0]
        x, h, c = random(15, np.float64, (5, 3, 3), (count, 3, 4), (count, 3, 4))
        want, states = x, []
        for i in (0, 1):
            outputs = []
            for suffix in suffixes[i * count // 2 : (i + 1) * count // 2]:
                k, (wi, wh, *bias) = len(states), (parameters[kind + suffix] for kind in kinds)
                bias = bias[0] if bias else np.zeros(12)
                reverse = suffix.endswith("reverse")
                output, *state = recur(want @ wi.T, wh, bias, h[k], c[k], lengths, reverse)[:3]
                outputs.append(output)
                states.append(state)
            want = np.concatenate(outputs, 2)
        given = x.swapaxes(0, 1) if batch_first else x
        output, state = net(Tensor(given.copy()), (Tensor(h), Tensor(c)), Tensor(np.array(lengths, np.int64)))
        got = output.asnumpy()
        np.testing.assert_allclose(got.swapaxes(0, 1) if batch_first else got, want, rtol=1e-12, atol=1e-14)
        for got, want in zip(state, zip(*states)):
            np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-12, atol=1e-14)

    def test_default_state_is_zero(self, mode):
        net, x = msops.LLTM(3, 4, 2), Tensor(random(16, np.float32, (5, 2, 3))[0])
        zero = Tensor(np.zeros((2, 2, 4), np.float32))
        np.testing.assert_array_equal(net(x)[0].asnumpy(), net(x, (zero, zero))[0].asnumpy())

    @wide_in_graph_mode
    def test_dropout(self, mode):
        """Dropout acts between layers in training: about half of the first layer's outputs are 0, and the others are
        twice as large."""
        mindspore.set_seed(1)
        net, x = msops.LLTM(3, 50, 2, dropout=0.5), Tensor(random(17, np.float32, (4, 6, 3))[0])
        plain = msops.LLTM(3, 50, 2)
        for to, parameter in zip(plain.get_parameters(), net.get_parameters()):
            to.set_data(parameter)
        net.set_train(False)
        exact = plain(x)[0].asnumpy()
        np.testing.assert_array_equal(net(x)[0].asnumpy(), exact)
        net.set_train()
        first, second = (net(x) for _ in range(2))
        assert (first[0].asnumpy() != exact).any()
        assert (first[0].asnumpy() != second[0].asnumpy()).any()
        np.testing.assert_array_equal(first[1][0][0].asnumpy(), plain(x)[1][0][0].asnumpy())  # layer 0 gets all of x
        assert (first[0].asnumpy() != 0).all()  # no dropout after the last layer

    def test_training(self, mode):
        x = random(18, np.float32, (5, 4, 6))[0]
        check_training(msops.LLTM(6, 7, num_layers=2, bidirectional=True), x)

    def test_parameters(self):
        """The parameters start uniformly distributed within 1 / sqrt(H)."""
        mindspore.set_seed(1)
        for parameter in msops.LLTM(30, 40, dtype=mindspore.float16).get_parameters():
            values = parameter.asnumpy()
            assert values.dtype == np.float16
            assert 0.9 / 40**0.5 < np.abs(values).max() <= 1.001 / 40**0.5
            assert abs(values.astype(np.float64).mean()) < 0.03

    def test_cells_of_layers(self):
        net = msops.LLTM(3, 4, 2, bidirectional=True)
        cells = net.to_cells()
        again = msops.LLTM.from_cells(cells, bidirectional=True)
        assert (again.num_layers, again.bidirectional) == (2, True)
        for got, want in zip(again.get_parameters(), net.get_parameters()):
            assert got.name == want.name
            np.testing.assert_array_equal(got.asnumpy(), want.asnumpy())
        assert not msops.LLTM(3, 4, has_bias=False).to_cells()[0].bias.asnumpy().any()

    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ((0, 4), ValueError, "LLTM: input_size must be at least 1, got 0"),
            ((4, 4.0), TypeError, "LLTM: hidden_size must be an int, got float"),
            ((4, 4, -1), ValueError, "LLTM: num_layers must be at least 1, got -1"),
            ((4, 4, 1, 1), TypeError, "LLTM: has_bias must be a bool, got int"),
            ((4, 4, 1, True, None), TypeError, "LLTM: batch_first must be a bool, got NoneType"),
            ((4, 4, 1, True, False, "0"), TypeError, "LLTM: dropout must be a float, got str"),
            ((4, 4, 1, True, False, 1.0), ValueError, "LLTM: dropout must be at least 0 and less than 1, got 1.0"),
            ((4, 4, 1, True, False, 0.0, 2), TypeError, "LLTM: bidirectional must be a bool, got int"),
            ((4, 4, 1, True, False, 0.0, True, 0), TypeError, "LLTM: allow_tf32 must be a bool, got int"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_wrong_settings(self, arguments, error, words):
        with pytest.raises(error) as caught:
            msops.LLTM(*arguments)
        assert words in str(caught.value)
        with pytest.raises(TypeError, match="LLTM: dtype must be float16, float32 or float64, got Int32"):
            msops.LLTM(4, 4, dtype=mindspore.int32)

    @pytest.mark.parametrize(
        ("x", "state", "error", "words"),
        [
            ((2, 3), None, ValueError, "LLTM: x must have three axes, the last of 3, got (2, 3)"),
            ((5, 2, 4), None, ValueError, "LLTM: x must have three axes, the last of 3, got (5, 2, 4)"),
            ((5, 2, 3), 3, TypeError, "LLTM: state must be a tuple (h_0, c_0)"),
            ((5, 2, 3), ((1, 2, 4), (2, 4)), ValueError, "LLTM: c_0 must have shape (1, 2, 4), got (2, 4)"),
            ((5, 2, 3), ((1, 1, 4), (1, 1, 4)), ValueError, "LLTM: h_0 must have shape (1, 2, 4), got (1, 1, 4)"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_wrong_inputs(self, mode, x, state, error, words):
        if isinstance(state, tuple):
            state = tuple(Tensor(a) for a in zeros(*state))
        with pytest.raises(error) as caught:
            msops.LLTM(3, 4)(Tensor(zeros(x)[0]), state)
        assert words in str(caught.value)

    def test_what_is_no_tensor(self, mode):
        with pytest.raises(TypeError, match="LLTM: x must be a Tensor, got float"):
            msops.LLTM(3, 4)(1.5)
        x, h = (Tensor(a) for a in zeros((5, 2, 3), (1, 2, 4)))
        with pytest.raises(TypeError, match="LLTM: c_0 must be a Tensor, got int"):
            msops.LLTM(3, 4)(x, (h, 7))

    def test_repr(self):
        assert "allow_tf32=True" in repr(msops.LLTM(3, 4, allow_tf32=True))

    def test_wrong_cells(self):
        for cells, error, words in (
            ([], ValueError, "LLTM: cells must be 1 for each layer, got 0"),
            (msops.LLTMCell(3, 4), TypeError, "LLTM: cells must be a list of LLTMCells, got LLTMCell"),
            ([nn.Dense(3, 4)], TypeError, "LLTM: cells must be LLTMCells, got Dense"),
            (
                [msops.LLTMCell(3, 4), msops.LLTMCell(3, 4)],
                ValueError,
                r"cells\[1\].weight must be float32 of shape \(12",
            ),
            ([msops.LLTMCell(3, 4), msops.LLTMCell(4, 4, mindspore.float64)], ValueError, "got float64 of"),
        ):
            with pytest.raises(error, match=words):
                msops.LLTM.from_cells(cells)
        with pytest.raises(ValueError, match="LLTM: cells must be 2 for each layer, got 1"):
            msops.LLTM.from_cells([msops.LLTMCell(3, 4)], bidirectional=True)
