import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import msops
from card import chain, random, results_of, zeros
from gpu import BIG
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.core.compiled import forget_recording, records_gradients
from msops.shared.cross_entropy import operators
from msops.shared.cross_entropy_of_probabilities import of_probabilities
from msops.testing.checks import Gradient, Net
from msops.testing.entry import Status
from operator_test import OperatorTest, check_second_order, run, run_gradient, wide_in_graph_mode

DEFAULTS = dict(ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=0.0)


def accumulator(dtype):
    return np.promote_types(dtype, np.float32)


class Rows:
    """Holds what the loss and its gradient need of the rows, in the dtype of the logits."""

    def __init__(self, logits, labels, weight, of):
        probabilities = labels if labels.ndim == 2 else None
        if probabilities is not None:
            labels = np.zeros(len(labels), int)
        self.count = labels != of["ignore_index"]
        self.y = np.where(self.count, labels, 0)
        self.w = np.ones(logits.shape[1], logits.dtype) if weight is None else weight
        self.w_y = np.where(self.count, np.append(self.w, 0)[self.y], 0)
        self.a = None  # the shares of the classes, if the labels are probabilities
        if probabilities is not None:
            e = logits.dtype.type(of["label_smoothing"])
            self.a = ((1 - e) * probabilities + e / max(1, logits.shape[1])) * self.w
            self.w_y = np.ones(len(labels), logits.dtype)
        s = logits.dtype.type(of["softcap"])
        x = s * np.tanh(logits / s) if s else logits
        self.x = np.where(self.count[:, None], x, 0)
        self.max = self.x.max(1, initial=-np.inf if logits.shape[1] else 0)
        exponentials = np.exp(self.x - self.max[:, None])
        total = exponentials.sum(1)
        self.max, total = np.where(self.count, self.max, 0), np.where(self.count, total, 1)
        self.share, self.lse = 1 / total, self.max + np.log(total)
        self.softmax = exponentials * self.share[:, None]
        self.log_softmax = (self.x - self.max[:, None]) + np.log(self.share)[:, None]
        self.derivative = 1 - (self.x / s) ** 2 if s else np.ones_like(self.x)
        is_mean = of["reduction"] == "mean"
        self.by_weight, self.by_rows = (self.w_y.sum(), self.count.sum()) if is_mean else (1, 1)


def loss_of_rows(rows, z_loss, label_smoothing, **_):
    """Returns the cross-entropy of the rows, and z lse^2."""
    classes, e = max(1, len(rows.w)), rows.x.dtype.type(label_smoothing)
    own = np.append(rows.log_softmax, np.zeros((len(rows.y), 1), rows.x.dtype), 1)[np.arange(len(rows.y)), rows.y]
    cross = -(1 - e) * rows.w_y * own
    if rows.a is not None:
        cross = -(rows.a * rows.log_softmax).sum(1)
    elif e:
        cross = cross - e / classes * (rows.log_softmax * rows.w).sum(1)
    return cross * rows.count, z_loss * rows.lse**2 * rows.count


def cross_entropy(logits, labels, weight=None, return_lse=False, wide_weight=False, gives="", **settings):
    of = {**DEFAULTS, **settings}
    rows = Rows(logits, labels, weight, of)
    cross, squares = loss_of_rows(rows, **of)
    if of["reduction"] == "none":
        loss = cross + squares
    elif rows.by_rows == 0:
        loss = logits.dtype.type(0)
    else:
        loss = cross.sum() / rows.by_weight + squares.sum() / rows.by_rows
    mean_weight = rows.w.sum() / max(1, len(rows.w)) if of["label_smoothing"] else min(1, len(rows.w))
    totals = np.array([rows.by_weight, rows.by_rows, mean_weight], accumulator(logits.dtype))
    stats = np.stack([rows.max, rows.share], 1), totals, *([rows.a.sum(1)] if gives else [])
    return (loss, rows.lse * rows.count, *stats) if return_lse or wide_weight or gives else (loss, *stats)


def gradient(logits, labels, weight, dloss, settings, dlse=0, of_labels=False):
    """Returns the gradient of the logits or of the labels, which then are probabilities."""
    of = {**DEFAULTS, **settings}
    rows = Rows(logits, labels, weight, of)
    e, hot = logits.dtype.type(of["label_smoothing"]), np.arange(logits.shape[1]) == rows.y[:, None]
    classes = max(1, logits.shape[1])
    dloss = np.broadcast_to(dloss, len(labels))[:, None] * rows.count[:, None]
    if of_labels:
        return -(1 - e) * rows.w * rows.log_softmax * dloss / max(1, rows.by_weight)
    if rows.a is not None:
        cross = rows.softmax * rows.a.sum(1)[:, None] - rows.a
    else:
        cross = rows.w_y[:, None] * (1 - e) * (rows.softmax - hot)
        cross = cross + e / classes * (rows.softmax * rows.w.sum() - rows.w)
    square = 2 * of["z_loss"] * rows.lse[:, None] * rows.softmax
    with np.errstate(all="ignore"):
        dx = (cross / rows.by_weight + square / rows.by_rows) * dloss
    dx = dx + np.broadcast_to(dlse, len(labels))[:, None] * rows.softmax
    return np.where(rows.count[:, None], dx, 0) * rows.derivative


def cross_entropy_backward(logits, labels, *rest, return_lse=False, wide_weight=False, gives="", **settings):
    dlse = 0
    if return_lse or wide_weight or gives:
        *rest, dlse = rest
    *rest, dloss = rest
    weight = rest[0] if len(rest) > 2 + bool(gives) else None  # beside statistics, totals and masses
    which = {"both": (False, True), "labels": (True,)}.get(gives, (False,))
    return tuple(gradient(logits, labels, weight, dloss, settings, dlse, of_labels) for of_labels in which)


ALL = dict(label_smoothing=0.1, z_loss=0.01, softcap=3.0)


def shapes(rows, classes, weight=False):
    return [(rows, classes), (rows,), *[(classes,)] * weight]


def with_probabilities(rows, classes, weight=False):
    return [(rows, classes), (rows, classes), *[(classes,)] * weight]


class TestCrossEntropy(OperatorTest):
    function, cell = msops.cross_entropy, msops.CrossEntropyLoss
    formulas = (cross_entropy, cross_entropy_backward)
    cases = {
        "mean": (shapes(7, 13), ALL),
        "plain": (shapes(5, 31), {}),
        "sum": (shapes(4, 64), {"reduction": "sum", "z_loss": 0.25}),
        "none": (shapes(9, 17), {"reduction": "none", "ignore_index": 3, **ALL}),
        "weights": (shapes(6, 100, True), {}),
        "weights, all": (shapes(6, 33, True), ALL),
        "weights, none": (shapes(3, 40, True), {"reduction": "none", **ALL}),
        "one class": (shapes(3, 1), {}),
        "empty": (shapes(0, 5), {}),
        "empty, none": (shapes(0, 5), {"reduction": "none"}),
        "large": (shapes(50, 8003), {}),
        "lse": (shapes(7, 13), {"return_lse": True, **ALL}),
        "lse, weights": (shapes(7, 13, True), {"return_lse": True, "reduction": "none", **ALL}),
    }
    further = {
        **{f"{rows} x {classes}": (shapes(rows, classes), {}) for rows, classes in (
            (1, 1), (2, 2), (3, 3), (70, 7), (33, 16), (5, 127), (3, 1024), (3, 1025), (2, 2048), (3, 4099),
            (2, 10_000), (2, 16_391), (1, 20_000), (1200, 40))},
        **{f"{classes} classes, all": (shapes(3, classes), ALL) for classes in (5, 257, 1031, 5003)},
        "many rows": (shapes(20_001, 3), ALL),
        "many rows, weights": (shapes(9001, 3, True), ALL),
        "many rows, none": (shapes(9001, 2), {"reduction": "none"}),
        "smoothing alone": (shapes(4, 300), {"label_smoothing": 0.5}),
        "smoothing of all": (shapes(4, 30), {"label_smoothing": 1.0}),
        "nothing": (shapes(0, 0), {}),
        "no classes": (shapes(3, 0), {}),
        "long": (shapes(1, 150_001), {}),
        "wide weights": (shapes(6, 33, True), dict(wide_weight=True, **ALL)),
        "wide weights, short rows": (shapes(70, 7, True), dict(wide_weight=True)),
        "wide weights, no classes": (shapes(3, 0, True), dict(wide_weight=True)),
        "lse": (shapes(5, 1031), dict(return_lse=True, **ALL)),
        "lse, many rows": (shapes(9001, 3), dict(return_lse=True, reduction="none")),
        "lse, no rows": (shapes(0, 3), dict(return_lse=True)),
        **{f"probabilities, {rows} x {classes}": (with_probabilities(rows, classes), {"gives": gives})
           for rows, classes, gives in (
            (1, 1, "both"), (3, 2, "logits"), (70, 7, "both"), (33, 16, "labels"), (5, 127, "both"), (3, 1024, "both"),
            (3, 1025, "logits"), (2, 4099, "both"), (2, 16_391, "both"), (1200, 40, "both"), (0, 3, "both"),
            (0, 0, "both"), (9001, 3, "both"), (1, 150_001, "both"))},
        "probabilities, all": (with_probabilities(7, 13), dict(gives="both", **ALL)),
        "probabilities, weights": (with_probabilities(6, 100, True), dict(gives="both", reduction="sum")),
        "probabilities, weights, all": (with_probabilities(4, 1031, True), dict(gives="both", **ALL)),
        "probabilities, weights, none": (with_probabilities(3, 41, True), dict(gives="both", reduction="none", **ALL)),
        "probabilities, weights, long": (with_probabilities(2, 5003, True), dict(gives="logits", z_loss=0.01)),
        "probabilities, softcap": (with_probabilities(3, 300), dict(gives="labels", softcap=2.0)),
        "probabilities, smoothing": (with_probabilities(3, 300), dict(gives="logits", label_smoothing=1.0)),
    }  # fmt: skip
    small = "mean"
    hostile = ("mean", "wide weights", "probabilities, all", "probabilities, weights, none")
    units_of_largest = 4  # a mean is one number: NumPy's error of it is a matter of luck
    roundings = 32  # of exponents, which are as large as the largest logit
    right_numbers = {"ignore_index": (-1, 2**40), "z_loss": (2**40,), "softcap": (2**40,)}
    wrong = (
        ([*zeros((2, 3), dtype=np.int32), np.zeros(2, np.int32)], {}, TypeError,
         "cross_entropy: logits must be float16, float32 or float64, got int32"),
        ([*zeros((2, 3)), np.zeros(2, np.int32), *zeros(2)], {}, ValueError,
         "cross_entropy: weight must have shape (V,) = (3,), got (2,)"),
        ([*zeros((2, 3)), np.zeros(2, np.int32)], {"reduction": "max"}, ValueError,
         "cross_entropy: reduction must be one of none, sum, mean, got 'max'"),
        ([*zeros((2, 3)), np.zeros(2, np.int32)], {"label_smoothing": 1.5}, ValueError,
         "cross_entropy: label_smoothing must be at most 1, got 1.5"),
        ([*zeros((2, 3)), np.zeros(2, np.int32)], {"softcap": -1.0}, ValueError,
         "cross_entropy: softcap must be finite and at least 0, got -1.0"),
        ([*zeros((2, 3)), np.zeros(2, np.int32)], {"ignore_index": 0.5}, TypeError,
         "cross_entropy: ignore_index must be an int, got float"),
    )  # fmt: skip
    huge = tuple((*size, gives) for size in ((8192, BIG // 8192 + 1), (BIG // 5 + 1, 5)) for gives in ("", "both"))

    def operators(self, shapes=(), return_lse=False, wide_weight=False, gives="", **settings):
        of = {**DEFAULTS, **settings}
        is_general = return_lse or wide_weight
        forward = of_probabilities(**of, gives=gives) if gives else operators(**of, is_general=is_general)
        return chain(forward if len(shapes) == 3 else forward.without("weight"))

    def inputs(
        self, shapes, dtype, seed=1, ignore_index=-100, return_lse=False, wide_weight=False, gives="", **settings
    ):
        """Returns logits, labels of which about a fifth is ignored, or probabilities, and positive weights."""
        rng = np.random.default_rng(seed)
        (rows, classes), *_ = shapes
        logits = np.asarray(3 * rng.standard_normal((rows, classes)), dtype)
        labels = rng.integers(0, max(1, classes), rows)
        labels[rng.random(rows) < (0.2 if classes else 1)] = ignore_index
        labels = labels.astype(np.int64 if classes % 2 else np.int32)
        if gives:
            labels = rng.random((rows, classes)) ** 4
            labels = np.asarray(labels / labels.sum(1, keepdims=True), dtype)
        of_weights = accumulator(dtype) if wide_weight or return_lse or gives else dtype
        weights = [np.asarray(rng.uniform(0.25, 2, shape), of_weights) for shape in shapes[2:]]
        return [logits, labels, *weights]

    def result_dtype(self, dtype):
        return accumulator(dtype).name

    def reference(self, *inputs, **settings):
        return cross_entropy(*inputs, **settings)[: 1 + settings.get("return_lse", False)]

    def reference_gradient(self, logits, labels, *rest, return_lse=False, **settings):
        dlse = 0
        if return_lse:
            *rest, dlse = rest
        *weight, dloss = rest
        dlogits = gradient(logits, labels, weight[0] if weight else None, dloss, settings, dlse)
        return dlogits, np.zeros_like(labels), *(np.zeros_like(w) for w in weight)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        rows, classes = random.randrange(30), random.randrange(random.choice((4, 40, 3000)))
        settings = dict(
            reduction=random.choice(("none", "sum", "mean")),
            label_smoothing=random.choice((0.0, 0.0, 0.2)),
            z_loss=random.choice((0.0, 0.1)),
            softcap=random.choice((0.0, 0.0, 2.0)),
        )
        has_weight, gives = random.random() < 0.3, random.choice(("", "", "logits", "labels", "both"))
        if gives:  # lse of no classes is -infinity
            return with_probabilities(rows, max(1, classes), has_weight), dict(gives=gives, **settings)
        return shapes(rows, classes, has_weight), settings

    def check_huge(self, gpu, rows, classes, gives):
        torch = gpu.torch
        logits, labels = gpu.random(rows, classes), torch.randint(classes, (rows,), device="cuda")
        if gives:
            labels = torch.rand_like(logits)
        forward, backward = self.operators(reduction="none", gives=gives)
        loss, *kept = gpu.run(forward, logits, labels)
        lse, kept = (kept[0], kept[1:4]) if gives else (None, kept[:2])
        dloss = torch.ones_like(loss)
        gradients = gpu.run(backward, logits, labels, *kept, dloss, *([torch.zeros_like(lse)] if gives else []))
        few = min(rows, 1000)
        for part in (slice(0, few), slice(rows - few, rows)):
            x = logits[part].double().requires_grad_()
            y = labels[part].double().requires_grad_() if gives else labels[part]
            want = torch.nn.functional.cross_entropy(x, y, reduction="none")
            gpu.assert_close(loss[part], want.detach())
            for got, each in zip(gradients, torch.autograd.grad(want.sum(), [x, y] if gives else [x])):
                gpu.assert_close(got[part], each)


@wide_in_graph_mode
def test_label_out_of_range(mode, capfd):
    """On the CPU, a label that is not a class is the entry's error, which names the label; on a GPU the loss is NaN."""
    logits = np.zeros((3, 4), np.float32)
    for label in (4, -1, 2**40):
        if mindspore.get_context("device_target") == "GPU":
            net = msops.CrossEntropyLoss(reduction="none")
            (losses,) = run(net, logits, np.array([0, label, 1]))
            np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
            continue
        words = f"cross_entropy: labels[1] is {label}, expected a class from 0 to 3, or ignore_index (CrossEntropyF"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            run(msops.CrossEntropyLoss(), logits, np.array([0, label, 1]))
    call = TestCrossEntropy().entry_calls(shapes(3, 4), {}, "float32")[1]
    call.inputs[1][1] = 4
    assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_rows_are_not_read(mode, reduction):
    """NaN in an ignored row is harmless, and without other rows loss and gradient are 0."""
    logits, labels = np.array([[np.nan, np.inf], [0, 0]], np.float32), np.array([-100, -100])
    net = Net(msops.cross_entropy, reduction=reduction)
    for label, want in ((-100, 0), (1, np.log(2))):
        labels[1] = label
        (loss,) = run(net, logits, labels)
        np.testing.assert_allclose(loss.sum(), want, rtol=1e-6)
        dlogits = run_gradient(net, [logits, labels], [np.ones_like(loss)])[0]
        np.testing.assert_allclose(dlogits, [[0, 0], [0.5, -0.5] if label == 1 else [0, 0]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extremes(mode, dtype):
    """Neither large logits nor infinite ones overflow; NaN stays."""
    most, inf, nan = np.finfo(dtype).max, np.inf, np.nan
    logits = np.array([[most, most, -inf], [-most, -inf, -most], [most, -most, 0], [0, nan, 0], [inf, 0, 0]], dtype)
    net = Net(msops.cross_entropy, reduction="none")
    (loss,) = run(net, logits, np.array([0, 2, 0, 0, 0]))
    np.testing.assert_allclose(loss, [np.log(2), np.log(2), 0, nan, nan], rtol=1e-6)
    dlogits = run_gradient(net, [logits[:3], np.array([0, 2, 0])], [np.ones_like(loss[:3])])[0]
    np.testing.assert_allclose(dlogits, [[-0.5, 0.5, 0], [0.5, 0, -0.5], [0, 0, 0]])


def test_cell_with_weights(mode):
    """The Cell has the weights, and casts them to the dtype of the logits."""
    logits, labels, weight = TestCrossEntropy().inputs(shapes(6, 10, True), "float32")
    want = run(Net(msops.cross_entropy), logits, labels, weight)
    net = msops.CrossEntropyLoss(Tensor(weight.astype(np.float64)))
    np.testing.assert_array_equal(run(net, logits, labels), want)
    net = msops.CrossEntropyLoss(Tensor(weight), return_lse=True)
    np.testing.assert_array_equal(run(net, logits, labels)[0], want[0])
    with pytest.raises(TypeError, match="CrossEntropyLoss: weight must be a Tensor, got list"):
        msops.CrossEntropyLoss([1.0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@wide_in_graph_mode
def test_weights_of_float32(mode, dtype, reduction):
    """Weights of float32 are not rounded to float16; both the function and the Cell take them."""
    (logits, labels, _), of = TestCrossEntropy().inputs(shapes(6, 33, True), dtype), dict(reduction=reduction, **ALL)
    weight = np.random.default_rng(2).uniform(0.25, 2, 33).astype(np.float32)
    want = cross_entropy(logits.astype(np.float64), labels, weight, **of)[0]
    for net, inputs in (
        (Net(msops.cross_entropy, **of), [logits, labels, weight]),
        (msops.CrossEntropyLoss(Tensor(weight), **of), [logits, labels]),
    ):
        (loss,) = run(net, *inputs)
        np.testing.assert_allclose(loss, want, rtol=1e-6 if dtype == "float16" else 1e-14)
        dlogits = run_gradient(net, inputs, [np.ones_like(loss)])[0]
        assert dlogits.dtype == dtype
        of_logits = gradient(logits.astype(np.float64), labels, weight, np.ones(()), of)
        np.testing.assert_allclose(dlogits, of_logits, rtol=2e-3 if dtype == "float16" else 1e-12, atol=1e-6)


@pytest.mark.parametrize("axes", [(3,), (2, 3), (1, 1), (0, 2)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@wide_in_graph_mode
def test_logits_of_more_axes(mode, axes, reduction):
    (logits, labels, weight), of = TestCrossEntropy().inputs(shapes(12, 5, True), "float32"), dict(ALL)
    rows = 2 * int(np.prod(axes))
    logits, labels = logits[:rows], labels[:rows]
    net = Net(msops.cross_entropy, reduction=reduction, return_lse=True, **of)
    moved = np.moveaxis(logits.reshape(2, *axes, 5), -1, 1)
    inputs = [np.ascontiguousarray(moved), labels.reshape(2, *axes), weight]
    want = cross_entropy(logits, labels, weight, True, reduction=reduction, **of)[:2]
    results = run(net, *inputs)
    for got, each in zip(results, want):
        assert got.shape == (() if got is results[0] and reduction == "mean" else (2, *axes))
        np.testing.assert_allclose(got.ravel(), np.ravel(each), rtol=1e-5, atol=1e-6)
    douts = [np.full_like(results[0], 0.5), np.full_like(results[1], 0.25)]
    dlogits = run_gradient(net, inputs, douts)[0]
    of_rows = gradient(logits, labels, weight, np.float32(0.5), dict(reduction=reduction, **of), np.float32(0.25))
    np.testing.assert_allclose(dlogits, np.moveaxis(of_rows.reshape(2, *axes, 5), -1, 1), rtol=1e-5, atol=1e-6)
    (loss,) = run(Net(msops.cross_entropy, reduction=reduction, **of), *inputs)
    np.testing.assert_array_equal(loss, results[0])


@pytest.mark.parametrize(
    ("inputs", "settings", "error", "words"),
    [
        ([*zeros((2, 3, 4)), np.zeros((2, 3), np.int32)], {}, ValueError, r"labels must have shape \(N, \*D\)"),
        ([*zeros((2, 3, 4)), np.zeros((2, 4), np.int32), *zeros(4)], {}, ValueError, r"weight must have shape \(V,\)"),
        ([*zeros((2, 3)), np.zeros(2, np.int32), np.zeros(3, np.int32)], {}, TypeError, "weight must be float32"),
        ([*zeros((2, 3)), np.zeros(2, int), np.zeros(3)], {"return_lse": True}, TypeError, "weight must be float32"),
        ([*zeros((2, 3)), np.zeros(2, np.int32)], {"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ],
)  # fmt: skip
def test_wrong_forms(mode, inputs, settings, error, words):
    with pytest.raises(error, match=f"cross_entropy: {words}"):
        run(Net(msops.cross_entropy, **settings), *inputs)


def fails(x):
    raise ValueError("a mistake")


@pytest.mark.skipif(VERSION < (2, 7), reason="older versions were not tried")
def test_graph_after_an_error_in_a_gradient():
    """An exception while PyNative mode records a gradient does not break the gradients of graph mode."""
    labels = Tensor([0, 2, 1], mindspore.int32)
    mode = mindspore.get_context("mode")

    def loss(x):
        return msops.cross_entropy(x, labels)

    try:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        want = mindspore.grad(loss)(Tensor(np.eye(3, dtype=np.float32)))
        with pytest.raises(ValueError, match="a mistake"):
            mindspore.grad(fails)(want)
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        got = mindspore.grad(loss)(Tensor(np.eye(3, dtype=np.float32)))
    finally:
        mindspore.set_context(mode=mode)
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-6)


@pytest.mark.skipif(VERSION < (2, 7), reason="older versions do not say whether they record")
@pytest.mark.parametrize("time", ["first", "second"])
def test_errors_in_gradients_change_no_other_test(time):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert not records_gradients()
    with pytest.raises(ValueError, match="a mistake"):
        mindspore.grad(fails)(Tensor(np.eye(3, dtype=np.float32)))
    assert records_gradients()  # until conftest.py ends the recording


def test_versions_that_tell_nothing_of_recordings(monkeypatch):
    monkeypatch.setattr(mindspore.common.api, "_pynative_executor", object())
    forget_recording()
    assert records_gradients()


@pytest.mark.parametrize(
    ("reduction", "shape", "dtype"),
    [
        ("none", (7, 5), "float32"),
        ("none", (2, 5, 3, 2), "float16"),
        ("sum", (2, 5, 3, 2), "float64"),
        ("mean", (2, 5, 3, 2), "float16"),
        ("mean", (0, 5), "float32"),
    ],
)
def test_probabilities(mode, reduction, shape, dtype):
    rng = np.random.default_rng(1)
    logits, q, weight = (np.asarray(x, dtype) for x in (rng.normal(size=shape), rng.random(shape), rng.random(5)))
    eps = 2e-3 if dtype == "float16" else 100 * np.finfo(dtype).eps
    for more, weights in (({}, []), (ALL, [weight.astype(np.float32)])):
        settings = dict(reduction=reduction, **more)
        rows = [np.moveaxis(x.astype(np.float64), 1, -1).reshape(-1, 5) for x in (logits, q)]
        of_weights = weights[0].astype(np.float64) if weights else None
        results = cross_entropy(*rows, of_weights, gives="both", **settings)[:2]
        dlogits, dq = (
            np.moveaxis(each.reshape(shape[:1] + shape[2:] + (5,)), -1, 1)
            for each in (gradient(*rows, of_weights, 1, settings, 0.5, of_labels) for of_labels in (False, True))
        )
        net = Net(msops.cross_entropy, return_lse=True, **settings)
        inputs = [logits, q, *weights]
        got = run(net, *inputs)
        assert [each.dtype for each in got] == [accumulator(dtype)] * 2
        gradients = run_gradient(net, inputs, [np.ones_like(got[0]), np.full_like(got[1], 0.5)])
        assert [each.dtype for each in gradients[:2]] == [dtype] * 2
        for each, want in zip(got, results):
            assert each.shape == (() if each is got[0] and reduction != "none" else shape[:1] + shape[2:])
            np.testing.assert_allclose(each.ravel(), np.ravel(want), rtol=min(eps, 2e-5), atol=min(eps, 2e-5))
        for each, want in zip(gradients, (dlogits, dq)):
            np.testing.assert_allclose(each, want, rtol=eps, atol=eps)
        if weights:
            assert not gradients[2].any()
    cell = msops.CrossEntropyLoss(Tensor(weights[0]), return_lse=True, reduction=reduction, **ALL)
    np.testing.assert_array_equal(run(cell, logits, q)[0], got[0])


@pytest.mark.parametrize("settings", [{"reduction": "none"}, ALL], ids=["none", "all"])
def test_second_order_of_probabilities(mode, settings):
    rng = np.random.default_rng(1)
    inputs = [rng.normal(size=(3, 4)), rng.random((3, 4)), *([rng.random(4)] if "softcap" in settings else [])]
    arguments = [*inputs, rng.normal(size=3 if "reduction" in settings else ()), rng.normal(size=3)]
    gradient = Gradient(Net(msops.cross_entropy, return_lse=True, **settings), len(inputs))
    check_second_order(gradient, arguments, mode, [i for i, x in enumerate(arguments) if np.shape(x) != (4,)])


def of_constants(logits, labels):
    return msops.cross_entropy(logits, mindspore.ops.stop_gradient(labels))


@wide_in_graph_mode
def test_probabilities_without_gradient(mode):
    """Where nobody asks for the gradient of the probabilities, that of the logits is the same."""
    rng = np.random.default_rng(1)
    inputs, dloss = [rng.normal(size=(7, 5)), rng.random((7, 5))], [np.ones(())]
    want = run_gradient(Net(msops.cross_entropy), inputs, dloss)[0]
    dlogits, dlabels = run_gradient(Net(of_constants), inputs, dloss)
    np.testing.assert_array_equal(dlogits, want)
    assert not dlabels.any()


def test_probabilities_of_no_classes():
    for gives in ("logits", "both"):
        forward = of_probabilities(**DEFAULTS, gives=gives).without("weight")
        assert results_of(forward, *zeros((3, 0), (3, 0)))[0] == 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extremes_of_probabilities(mode, dtype):
    """Large logits do not overflow; a class that cannot be gives an infinite loss if it has a probability."""
    most, inf = np.finfo(dtype).max, np.inf
    logits = np.array([[most, most, most], [-most, -most, -most], [0, 0, -inf], [np.nan, 0, 0]], dtype)
    labels = np.array([[0.5, 0.25, 0.25], [0, 0, 1], [0.5, 0, 0.5], [0, 1, 0]], dtype)
    (loss,) = run(Net(msops.cross_entropy, reduction="none"), logits, labels)
    np.testing.assert_allclose(loss, [np.log(3), np.log(3), inf, np.nan], rtol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "settings", "error", "words"),
    [
        (zeros((2, 3), (2, 3)), {"ignore_index": 1}, ValueError, "ignore_index must be -100 where labels are prob"),
        ([*zeros((2, 3)), np.zeros((2, 3), np.float16)], {}, TypeError, "labels must be float32 as logits is"),
        (zeros((2, 3), (2, 3), 2), {}, ValueError, r"weight must have shape \(V,\) = \(3,\)"),
        (zeros((2, 3), (2, 3)), {"z_loss": -1.0}, ValueError, "z_loss must be finite and at least 0"),
        (zeros((2, 3), (2, 3)), {"return_lse": 1}, TypeError, "return_lse must be a bool"),
    ],
)
def test_wrong_probabilities(mode, inputs, settings, error, words):
    with pytest.raises(error, match=f"cross_entropy: {words}"):
        run(Net(msops.cross_entropy, **settings), *inputs)


class Weighted(nn.Cell):
    """Has a loss with weights of classes of float32."""

    def __init__(self, of):
        super().__init__()
        weight = Tensor(random(3, np.float32, (20,))[0] ** 2)
        self.of = of
        self.loss = msops.CrossEntropyLoss(weight, return_lse=of == "lse")
        if of == "linear":
            self.loss = msops.LinearCrossEntropyLoss(
                8, 20, weight_init=Tensor(random(4, np.float32, (20, 8))[0]), class_weight=weight
            )

    def construct(self, x, labels):
        result = self.loss(x, labels)
        if self.of == "lse":
            result = result[0]
        return result


@pytest.mark.skipif(VERSION < (2, 7), reason="MindSpore 1.10 casts before the operator is called")
@wide_in_graph_mode
@pytest.mark.parametrize("of", ["classes", "lse", "probabilities", "linear"])
def test_weights_in_mixed_precision(mode, of):
    """Weights of float32 stay so, where MindSpore casts what operators get to float16."""
    x, labels = random(1, np.float32, (10, 8 if of == "linear" else 20), (10, 20))
    labels = np.abs(labels) if of == "probabilities" else labels.argmax(1).astype(np.int32)
    results = []
    for level in ("O0", "O2", "O3", "to_float"):
        net = Weighted(of)
        net = net.to_float(mindspore.float16) if level == "to_float" else amp.auto_mixed_precision(net, level)
        loss, dx = ops.value_and_grad(net)(Tensor(x), Tensor(labels))
        assert dx.dtype == mindspore.float32
        results.append((loss.asnumpy(), dx.asnumpy()))
    for loss, dx in results[1:]:
        np.testing.assert_allclose(loss, results[0][0], 2e-3)
        np.testing.assert_allclose(dx, results[0][1], 0, 2e-3 * np.abs(dx).max())


@pytest.mark.parametrize("wrong", [[1, 2], None, 1])
def test_labels_that_are_no_tensor(mode, wrong):
    with pytest.raises(TypeError, match="cross_entropy: labels must be a Tensor, got"):
        msops.cross_entropy(Tensor(np.ones((2, 3), np.float32)), wrong)


def test_label_that_no_integer_of_64_bits_holds():
    arrays = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.zeros(2, np.int32)
    x, weight, labels = map(Tensor, arrays)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: ignore_index must fit into 64 bits"):
        msops.linear_cross_entropy(x, weight, labels, ignore_index=10**30)
    with pytest.raises(ValueError, match=r"^cross_entropy: ignore_index must fit into 64 bits"):
        msops.cross_entropy(x, labels, ignore_index=10**30)
