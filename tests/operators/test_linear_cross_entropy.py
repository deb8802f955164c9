import os
import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import msops
from card import Card, random, zeros
from child import run_python
from gpu import BIG
from msops.compat import VERSION, jit
from msops.operators import linear_cross_entropy as module
from msops.shared import linear_cross_entropy as operators, losses_by_chunks
from msops.testing.checks import Net
from operator_test import OperatorTest, check_training, run, run_gradient, wide_in_graph_mode
from test_cross_entropy import DEFAULTS, accumulator, cross_entropy, gradient as gradient_of_logits

pytestmark = pytest.mark.skipif(VERSION < (2, 0), reason="its gradient needs MindSpore 2.0")

ALL = dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0)


def logits_of(x, weight, bias):
    return x @ weight.T + (bias[0] if bias else x.dtype.type(0))


def shapes(rows, hidden, classes, bias=False, weighted=False):
    return [(rows, hidden), (classes, hidden), (rows,), *[(classes,)] * (bias + weighted)]


def take_way(monkeypatch, in_one):
    """Lets one operator compute all, as on a GPU, or MindSpore's operators the chunks, as on the CPU."""
    monkeypatch.setattr(module, "is_on_gpu", ops.constexpr(lambda: in_one, name=f"is_on_gpu_{in_one}"))


@pytest.fixture(params=[False, True])
def in_one(request, monkeypatch):
    take_way(monkeypatch, request.param)
    return request.param


WAYS = ("mean", False), ("mean", True), ("none", False)
in_all_ways = pytest.mark.parametrize(("reduction", "in_one"), WAYS, indirect=["in_one"])
in_one_way = pytest.mark.parametrize(  # the others are wide
    ("reduction", "in_one"),
    [WAYS[1], *(pytest.param(*way, marks=pytest.mark.wide) for way in WAYS[::2])],
    indirect=["in_one"],
)


class TestLinearCrossEntropy(OperatorTest):
    function = msops.linear_cross_entropy
    cases = {
        "mean": (shapes(9, 3, 7, True), {"chunk": 4, **ALL}),
        "sum": (shapes(5, 8, 40), {"reduction": "sum", "chunk": 2}),
        "none": (shapes(10, 3, 17, True), {"reduction": "none", "ignore_index": 3, "chunk": 6, **ALL}),
        "weights": (shapes(9, 3, 7, True, True), {"chunk": 4, "weights": "common", **ALL}),
        "weights, plain": (shapes(9, 3, 7, False, True), {"chunk": 5, "weights": "common"}),
        "weights, sum": (shapes(5, 8, 40, True, True), {"reduction": "sum", "weights": "float32", **ALL}),
        "weights, none": (
            shapes(10, 3, 17, False, True),
            {"reduction": "none", "weights": "float32", "chunk": 6, **ALL},
        ),
        "weights, ignored": (shapes(6, 3, 7, False, True), {"ignore_index": 3, "weights": "common", "z_loss": 0.5}),
        "weights, no rows": (shapes(0, 4, 5, False, True), {"weights": "common"}),
        "one row": (shapes(1, 1, 1), {}),
        "no rows": (shapes(0, 4, 5, True), {}),
        "nothing to multiply": (shapes(3, 0, 5, True), {}),
        "large": (shapes(300, 64, 1009), {"chunk": 160}),
    }
    small = "mean"
    half_in_float32 = half_gradient_in_float32 = False  # logits and their gradients are rounded
    units_of_largest = 4  # a mean is one number: NumPy's error of it is a matter of luck
    wrong = (
        ([*zeros((2, 3)), np.zeros((5, 3), np.float16), np.zeros(2, np.int32)], {}, TypeError,
         "linear_cross_entropy: weight must be float32 as x is, got float16"),
        ([*zeros((2, 3), (5, 4)), np.zeros(2, np.int32)], {}, ValueError,
         "linear_cross_entropy: weight must have shape (V, C) = (5, 3), got (5, 4)"),
        (zeros((2, 3), (5, 3), 2), {}, TypeError,
         "linear_cross_entropy: labels must be int32 or int64, got float32"),
        ([*zeros((2, 3), (5, 3)), np.zeros(2, np.int32), *zeros(3)], {}, ValueError,
         "linear_cross_entropy: bias must have shape (V,) = (5,), got (3,)"),
        ([*zeros((2, 3), (5, 3)), np.zeros(2, np.int32), *zeros(3)], {"weights": "common"}, ValueError,
         "linear_cross_entropy: class_weight must have shape (V,) = (5,), got (3,)"),
        ([*zeros((2, 3), (5, 3)), np.zeros(2, np.int32), np.zeros(5)], {"weights": "common"}, TypeError,
         "linear_cross_entropy: class_weight must be float32, got float64"),
        ([*zeros((2, 3), (5, 3)), np.zeros(2, np.int32)], {"chunk": 0}, ValueError,
         "linear_cross_entropy: chunk must be at least 1, got 0"),
        ([*zeros((2, 3), (5, 3)), np.zeros(2, np.int32)], {"reduction": "max"}, ValueError,
         "linear_cross_entropy: reduction must be one of none, sum, mean, got 'max'"),
    )  # fmt: skip

    def operators(self, shapes=(), **settings):
        return []

    def net(self, weights=None, **settings):
        return (WithClassWeight if weights else Net)(msops.linear_cross_entropy, **settings)

    def inputs(self, shapes, dtype, seed=1, ignore_index=-100, weights=None, **settings):
        """Returns random tensors, and labels of which about a fifth is ignored. `weights` says which dtype the weights
        of classes have, if there are any."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, shapes[1][0], shapes[2])
        labels[rng.random(len(labels)) < 0.2] = ignore_index
        x, weight, *rest = random(seed, dtype, *shapes[:2], *shapes[3:])
        if weights:
            rest[-1] = np.abs(rest[-1]).astype(dtype if weights == "common" else "float32")
        return [x, weight, labels.astype(np.int64 if shapes[1][0] % 2 else np.int32), *rest]

    def result_dtype(self, dtype):
        return accumulator(dtype).name

    def reference(self, x, weight, labels, *rest, chunk=None, weights=None, **settings):
        bias, classes = parted(rest, weights)
        return cross_entropy(logits_of(x, weight, bias), labels, *classes, **settings)[:1]

    def reference_gradient(self, x, weight, labels, *rest, chunk=None, weights=None, **settings):
        *rest, dloss = rest
        bias, classes = parted(rest, weights)
        dlogits = gradient_of_logits(logits_of(x, weight, bias), labels, (*classes, None)[0], dloss, settings)
        dbias = [dlogits.sum(0)] if bias else []
        return dlogits @ weight, dlogits.T @ x, np.zeros_like(labels), *dbias, *map(np.zeros_like, classes)


def parted(rest, weights):
    """Returns the bias and the weights of classes, each in a list that may be empty."""
    rest = list(rest)
    return (rest[:-1], rest[-1:]) if weights else (rest, [])


class WithClassWeight(Net):
    """Calls a function whose last input is the weights of classes."""

    def construct(self, *inputs):
        return self.operator(*inputs[:-1], class_weight=inputs[-1], **self.settings)


class InOneCard(Card):
    """test_in_one_operator compares the results with those of MindSpore's operators, which have formulas."""

    cases = {
        "mean": (shapes(9, 3, 7), {"chunk": 4, **ALL}),
        "sum": (shapes(5, 8, 40), {"reduction": "sum", "chunk": 2}),
        "losses alone": (shapes(9, 3, 7), {"chunk": 4, "gives": False, "z_loss": 0.5}),
        "one row": (shapes(1, 1, 1), {}),
        "no rows": (shapes(0, 4, 5), {}),
        "no classes": (shapes(2, 4, 0), {}),
        "nothing to multiply": (shapes(3, 0, 5), {}),
        "nothing": (shapes(0, 0, 0), {"gives": False}),
    }
    further = {
        "odd": (shapes(35, 13, 1009), {"chunk": 10}),
        "packs": (shapes(70, 16, 264), {"chunk": 64}),
        "packs, all": (shapes(70, 16, 264), {"chunk": 64, **ALL}),
        "long rows": (shapes(3, 2, 5003), {"chunk": 2, **ALL}),
        "longer rows": (shapes(3, 2, 9008), {"chunk": 2}),
        "several chunks by default": (shapes(1050, 1, 1009), {}),
        "many rows": (shapes(20_001, 1, 3), {"chunk": 9000}),
    }
    small = "mean"
    right_numbers = {"ignore_index": (-1, 2**40), "z_loss": (2**40,), "softcap": (2**40,), "chunk": (2**40,)}

    def operators(self, shapes=(), gives=True, chunk=None, **settings):
        operator = operators.operators_of_all(**{**DEFAULTS, **settings}, chunk=chunk)
        return [operator if gives else operator.without("dx", "dweight")]

    def inputs(self, shapes, dtype, seed=1, gives=True, **settings):
        if not shapes[1][0]:
            return [*random(seed, dtype, *shapes[:2]), np.full(shapes[2], -100)]
        return TestLinearCrossEntropy().inputs(shapes, dtype, seed, **settings)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        settings = dict(
            reduction=random.choice(("sum", "mean")),
            label_smoothing=random.choice((0.0, 0.0, 0.2)),
            z_loss=random.choice((0.0, 0.1)),
            softcap=random.choice((0.0, 0.0, 2.0)),
            chunk=random.choice((None, 1, 3, 100)),
            gives=random.random() < 0.7,
        )
        return shapes(
            random.randrange(30), random.randrange(20), random.randrange(random.choice((4, 40, 300)))
        ), settings


class ResultCard(Card):
    operator = operators.make_result(-100, None)
    right_numbers = {"ignore_index": (-1, 2**40)}
    formulas = (lambda x, weight, labels, bias, class_weight, loss, dx, dweight, dbias, factor: (loss,),)
    cases = {
        "mean": ([(3, 2), (5, 2), (3,), (5,), (5,), (), (3, 2), (5, 2), (5,), ()], {}),
        "none": ([(3000, 1), (2, 1), (3000,), (2,), (2,), (3000,), (3000, 1), (2, 1), (2,), ()], {}),
    }
    small = "mean"

    def inputs(self, shapes, dtype, seed=1, **settings):
        x, weight, labels, bias, class_weight, loss, *gradients, factor = random(seed, dtype, *shapes)
        classes = np.random.default_rng(seed).integers(0, max(1, len(weight)), labels.shape)
        labels = np.where(len(weight) > 0, classes, -100).astype(np.int32)
        wide = accumulator(dtype)
        return [x, weight, labels, bias, class_weight.astype(wide), loss.astype(wide), *gradients, factor.astype(wide)]


class ScaleCard(Card):
    operator = operators.scale
    formulas = (lambda x, factor: ((x * factor).astype(x.dtype),),)
    cases = {
        "matrix": ([(7, 13), ()], {}),
        "scalar": ([(), ()], {}),
        "empty": ([(0, 3), ()], {}),
        "large": ([(1, 300_001), ()], {}),
    }
    small = "matrix"
    huge = ((BIG,),)

    def inputs(self, shapes, dtype, seed=1, **settings):
        x, factor = random(seed, dtype, *shapes)
        return [x, factor.astype(accumulator(dtype))]

    def check_huge(self, gpu, n):
        x = gpu.random(n)
        (y,) = gpu.run(operators.scale, x, gpu.torch.tensor(0.5, device="cuda"))
        gpu.assert_equal(y, x / 2)


@wide_in_graph_mode
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "settings", [{"chunk": 4, **ALL}, {"reduction": "sum", "ignore_index": 3}], ids=["mean", "sum"]
)
def test_in_one_operator(mode, settings, dtype, monkeypatch):
    """The operator that GPUs take gives what MindSpore's operators do."""
    inputs = TestLinearCrossEntropy().inputs(shapes(10, 8, 40), dtype, **settings)
    results = []
    for in_one in (False, True):
        take_way(monkeypatch, in_one)
        net = Net(msops.linear_cross_entropy, **settings)
        (loss,) = run(net, *inputs)
        results.append([loss, *run_gradient(net, inputs, [np.full_like(loss, 0.75)])])
    tolerance = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-13}[dtype]
    for got, want in zip(*results[::-1]):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@wide_in_graph_mode
@in_all_ways
def test_chunks(mode, reduction, in_one):
    """Losses do not depend on the chunks, and gradients do by rounding alone."""
    inputs = TestLinearCrossEntropy().inputs(shapes(6, 8, 30, True), np.float64)
    results = []
    for chunk in (2, 4, 1000):
        net = Net(msops.linear_cross_entropy, reduction=reduction, chunk=chunk)
        (loss,) = run(net, *inputs)
        results.append([loss, *run_gradient(net, inputs, [np.ones_like(loss)])])
    for result in results[1:]:
        for got, want in zip(result, results[0]):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_no_row_counts(mode, in_one):
    x, weight = random(1, np.float32, (4, 3), (5, 3))
    labels = np.full(4, -100, np.int32)
    net = Net(msops.linear_cross_entropy)
    assert run(net, x, weight, labels)[0] == 0
    for gradient in run_gradient(net, [x, weight, labels], [np.float32(1)]):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@wide_in_graph_mode
def test_float16_means_of_many_rows(mode, in_one):
    """A gradient that is divided by the number of rows keeps its digits, although 1e-7 is the smallest float16; one
    that is a sum over many rows does not overflow before it is divided."""
    rows = 2**15  # eight chunks
    x, weight = np.full((rows, 2), 20, np.float16), np.zeros((64, 2), np.float16)
    net = Net(msops.linear_cross_entropy)
    _, dweight, _ = run_gradient(net, [x, weight, np.zeros(rows, np.int32)], [np.float32(1)])
    np.testing.assert_allclose(dweight, np.where(np.arange(64) == 0, -63 / 64, 1 / 64)[:, None] * [20, 20], rtol=2e-3)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_gradients_are_left_out(mode, monkeypatch):
    """PyNative mode computes no gradients if none are wanted."""
    take_way(monkeypatch, in_one=False)
    inputs = TestLinearCrossEntropy().inputs(shapes(6, 4, 9), np.float32)
    net = Net(msops.linear_cross_entropy)
    (want,) = run(net, *inputs)

    calls, multiply = [], losses_by_chunks.transposed_times
    monkeypatch.setattr(losses_by_chunks, "transposed_times", lambda *inputs: calls.append(1) or multiply(*inputs))
    assert run(net, *inputs)[0] == want
    assert not calls
    run_gradient(net, inputs, [np.float32(1)])
    assert calls


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_one_operator_leaves_gradients_out(mode, monkeypatch):
    take_way(monkeypatch, in_one=True)
    inputs = TestLinearCrossEntropy().inputs(shapes(6, 4, 9), np.float32)
    net = Net(msops.linear_cross_entropy)
    run(net, *inputs)

    calls, cell = [], losses_by_chunks.make_losses((-100, "mean", 0.0, 0.0, 0.0), None, False, True)
    compute = cell.gradients_op
    monkeypatch.setattr(cell, "gradients_op", lambda *inputs: calls.append(1) or compute(*inputs))
    run(net, *inputs)
    assert not calls
    run_gradient(net, inputs, [np.float32(1)])
    assert calls


@wide_in_graph_mode
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_1(mode, reduction):
    """They change nothing."""
    card, settings = TestLinearCrossEntropy(), dict(reduction=reduction, chunk=4, **ALL)
    inputs = card.inputs(shapes(9, 3, 7), np.float64)
    weighted = [*inputs, np.ones(7)]
    loss, got = run(card.net(**settings), *inputs)[0], run(card.net(weights="common", **settings), *weighted)[0]
    np.testing.assert_allclose(got, loss, rtol=1e-13)
    want = run_gradient(card.net(**settings), inputs, [np.ones_like(loss)])
    *others, of_classes = run_gradient(card.net(weights="common", **settings), weighted, [np.ones_like(loss)])
    assert not of_classes.any()
    for each, other in zip(others, want):
        np.testing.assert_allclose(each, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("form", ["", "bias", "class_weight"])
def test_cell_trains(mode, form):
    x, _, labels, *_ = TestLinearCrossEntropy().inputs(shapes(2, 8, 20), np.float32)
    classes = [np.linspace(0.5, 1, 20, dtype=np.float16)] if form == "class_weight" else []
    class_weight = Tensor(classes[0]) if classes else None
    has_bias = form == "bias"
    net = msops.LinearCrossEntropyLoss(8, 20, has_bias=has_bias, label_smoothing=0.1, class_weight=class_weight)
    given = [net.bias.asnumpy()] if has_bias else [each.astype(np.float32) for each in classes]
    function = TestLinearCrossEntropy().net("common" if classes else None, label_smoothing=0.1)
    want = run(function, x, net.weight.asnumpy(), labels, *given)
    np.testing.assert_array_equal(run(net, x, labels), want)
    assert run(net, x.astype(np.float16), labels)[0].dtype == np.float32
    check_training(net, Tensor(x), Tensor(labels))


class Sum(nn.Cell):
    """Sums what a Cell returns."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x, labels):
        return self.net(x, labels).sum()


class Gradients(nn.Cell):
    """Computes the gradients of the sum of what a Cell returns."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.gradient = ops.GradOperation(get_all=True)

    def construct(self, x, weight, labels):
        return self.gradient(self.net)(x, weight, labels)


class Outer(nn.Cell):
    """Calls the Cell, as a network does."""

    def __init__(self, reduction, has_bias, weight, bias):
        super().__init__()
        self.loss = msops.LinearCrossEntropyLoss(
            8, 20, has_bias, reduction=reduction, chunk=5, weight_init=weight, bias_init=bias
        )

    def construct(self, x, labels):
        return self.loss(x, labels)


@wide_in_graph_mode
@in_all_ways
def test_mixed_precision(mode, reduction, in_one, tmp_path, monkeypatch):
    """At every level of amp, the loss and the gradients of x, weight and bias are those of O0 but for the rounding of
    float16."""
    monkeypatch.chdir(tmp_path)  # MindSpore writes the source for level O1 into a folder here
    x, weight, labels, bias = TestLinearCrossEntropy().inputs(shapes(10, 8, 20, True), np.float32)
    expected = None
    for level in ("O0", "O1", "O2", "O3", "auto", "to_float"):
        net = Outer(reduction, not in_one, Tensor(weight), Tensor(bias))
        parameters = net.trainable_params()
        net = net.to_float(mindspore.float16) if level == "to_float" else amp.auto_mixed_precision(net, level)
        loss, (dx, dparameters) = ops.value_and_grad(Sum(net), 0, parameters)(Tensor(x), Tensor(labels))
        results = [each.asnumpy() for each in (loss, dx, *dparameters)]
        assert {result.dtype.name for result in results} == {"float32"}
        expected = expected or results
        for got, want in zip(results, expected):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max(), err_msg=level)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@in_one_way
def test_gradient_of_compiled_function(mode, reduction, in_one):
    x, weight, labels = map(Tensor, TestLinearCrossEntropy().inputs(shapes(6, 8, 20), np.float32))

    def loss(x, weight):
        return msops.linear_cross_entropy(x, weight, labels, reduction=reduction, chunk=4).sum()

    compiled = jit(loss)
    want = mindspore.grad(loss, (0, 1))(x, weight)
    for got, each in zip(mindspore.grad(lambda x, weight: compiled(x, weight), (0, 1))(x, weight), want):
        np.testing.assert_allclose(got.asnumpy(), each.asnumpy(), rtol=1e-5, atol=1e-7)


@wide_in_graph_mode
@in_one_way
def test_vmap(mode, reduction, in_one):
    weight = Tensor(random(1, np.float32, (20, 8))[0])
    x = random(2, np.float32, (3, 9, 8))[0]
    labels = np.random.default_rng(0).integers(0, 20, (3, 9)).astype(np.int32)

    class Loss(nn.Cell):
        def construct(self, x, labels):
            return msops.linear_cross_entropy(x, weight, labels, reduction=reduction, chunk=5)

    net = Loss()
    for in_axes, each in ((0, labels), ((0, None), [labels[0]] * 3)):
        want = [run(net, *one)[0] for one in zip(x, each)]
        of_all = Tensor(labels if in_axes == 0 else labels[0])
        got = ops.vmap(net, in_axes)(Tensor(x), of_all).asnumpy()
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-6)


@pytest.mark.wide
@pytest.mark.skipif(VERSION < (2, 7), reason="open sizes need MindSpore 2.7")
@pytest.mark.parametrize("mode", ["graph"], indirect=True)
@in_all_ways
def test_open_rows(mode, reduction, in_one):
    """A Cell that is compiled once, and its gradient, take any number of rows. No chunk may be given then."""
    calls = [TestLinearCrossEntropy().inputs(shapes(rows, 8, 20), np.float32) for rows in (9, 4, 0)]
    types = Tensor(shape=[None, 8], dtype=mindspore.float32), Tensor(calls[0][1])
    types = *types, Tensor(shape=[None], dtype=mindspore.int32)
    net, fixed = (Net(msops.linear_cross_entropy, reduction=reduction) for _ in range(2))
    gradient = Gradients(net)
    want = [run(fixed, *call) for call in calls]
    wanted = [run_gradient(fixed, call, [np.ones_like(*loss)]) for call, loss in zip(calls, want)]
    net.set_inputs(*types)
    gradient.set_inputs(*types)
    for call, loss, gradients in zip(calls, want, wanted):
        for got, each in zip([*run(net, *call), *run(gradient, *call)], [*loss, *gradients]):
            np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-7)
    chunked = Net(msops.linear_cross_entropy, chunk=4)
    chunked.set_inputs(*types)
    with pytest.raises(ValueError, match="chunk must be None"):
        run(chunked, *calls[0])


@wide_in_graph_mode
@in_all_ways
def test_label_out_of_range(mode, reduction, in_one, device_target):
    """On the CPU it is an error, also for many calls in a row, whose matmuls are queued; on a GPU the loss is NaN."""
    inputs = TestLinearCrossEntropy().inputs(shapes(9, 3, 7), np.float32)
    inputs[2][8] = 9
    net = Net(msops.linear_cross_entropy, reduction=reduction, chunk=4)
    dloss = np.ones(9 if reduction == "none" else (), np.float32)
    if device_target == "GPU":
        assert np.isnan(run(net, *inputs)[0].flat[-1])
        return
    words = "linear_cross_entropy: labels[8] is 9, expected a class from 0 to 6, or ignore_index"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        run(net, *inputs)
    for _ in range(15 if mode == "pynative" else 1):  # in graph mode, each takes MindSpore 3 s
        with pytest.raises(RuntimeError):
            run_gradient(net, inputs, [dloss])


MEMORY = """
import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import msops

rows, hidden, classes, mode = 8192, 8, 16000, sys.argv[1]
mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
x, weight = (Tensor(np.ones((n, hidden), np.float32)) for n in (rows, classes))
labels = Tensor(np.zeros(rows, np.int32))


def held(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


class Loss(nn.Cell):
    def construct(self, x, weight, labels):
        return msops.linear_cross_entropy(x, weight, labels)


gradient = ops.value_and_grad(Loss(), (0, 1))
gradient(x, Tensor(np.ones((50, hidden), np.float32)), labels)[0].asnumpy()
before = held("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak VmHWM begins anew
loss, (dx, dweight) = gradient(x, weight, labels)
dweight.asnumpy()
print((held("VmHWM") - before) / (4 * rows * classes))
"""


@pytest.mark.wide
def test_memory(mode, device_target, tmp_path):
    """A gradient holds less than half of the logits at a time, by default."""
    if device_target == "GPU" or not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("reads the peak of a process on the CPU")
    (tmp_path / "memory.py").write_text(MEMORY)
    done = run_python("memory.py", mode, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.5
