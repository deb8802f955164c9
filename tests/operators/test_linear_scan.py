import numpy as np
import pytest
from mindspore import nn, ops

import msops
from card import chain, length, random, zeros
from msops.operators.linear_scan import operators
from operator_test import OperatorTest, run, run_gradient, wide_in_graph_mode


def walk(length, reverse):
    return range(length - 1, -1, -1) if reverse else range(length)


def linear_scan(a, b, h0=None, reverse=False):
    h = np.empty_like(b)
    state = np.zeros((a.shape[0], a.shape[2]), a.dtype) if h0 is None else h0
    for t in walk(a.shape[1], reverse):
        h[:, t] = state = a[:, t] * state + b[:, t]
    return (h,)


def linear_scan_backward(a, *rest, reverse=False):
    *given, h, dh = rest
    da, db = np.zeros_like(a), np.zeros_like(a)
    state = np.zeros((a.shape[0], a.shape[2]), a.dtype)
    back = -1 if reverse else 1
    for t in walk(a.shape[1], not reverse):
        db[:, t] = g = state + dh[:, t]
        if 0 <= t - back < a.shape[1]:
            da[:, t] = g * h[:, t - back]
        elif given:
            da[:, t] = g * given[0]
        state = a[:, t] * g
    return da, db, *([state] if given else [])


def case(b, length, d, state=False, **settings):
    return [(b, length, d)] * 2 + [(b, d)] * state, settings


class TestLinearScan(OperatorTest):
    function, cell = msops.linear_scan, msops.LinearScan
    formulas = linear_scan, linear_scan_backward
    half_gradient_in_float32 = False  # the gradient takes the saved output, which is rounded to float16
    cases = {
        "small": case(2, 5, 3),
        "state": case(2, 5, 3, state=True),
        "reversed": case(2, 7, 4, state=True, reverse=True),
        "one": case(1, 1, 1, state=True),
        "no steps": case(2, 0, 3, state=True),
        "no channels": case(2, 3, 0),
        "odd": case(3, 67, 65, state=True),
        "parts": case(1, 2100, 33, state=True),
        "large": case(4, 513, 200, reverse=True),
    }
    further = {
        f"{b} x {steps} x {d}": case(b, steps, d, state=b == 2, reverse=d % 2 == 0)
        for b, steps, d in (
            (1, 64, 64),
            (2, 65, 32),
            (1, 129, 8),
            (2, 1024, 1),
            (2, 1600, 40),
            (9, 3, 100),
            (1, 4099, 6),
        )
    }
    small = "state"
    hostile = ("small", "state")
    roundings = 32  # a state stays in a sum for some steps
    wrong = (
        (zeros((2, 3), (2, 3)), {}, ValueError, "linear_scan: a must have shape (B, L, D), got (2, 3)"),
        ([*zeros((2, 3, 4), (2, 3, 4)), 0.0], {}, TypeError, "linear_scan: h0 must be a Tensor, got float"),
        (zeros((2, 3, 4), (2, 3, 4)), dict(reverse=1), TypeError, "linear_scan: reverse must be a bool, got int"),
    )
    huge = ((2**21 + 3, 1030, 1), (5, 2**19 + 3, 1030))

    def operators(self, shapes=(), reverse=False):
        forward = operators(reverse)
        return chain(forward if not shapes or [len(shape) for shape in shapes[2:3]] == [2] else forward.without("h0"))

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Factors of about a half keep the states as large as the terms. The state is wider than float16."""
        a, b, *h0 = random(seed, np.float64, *shapes)
        a, b = np.asarray(1 / (1 + np.exp(-a)), dtype), np.asarray(b, dtype)
        return [a, b, *[np.asarray(x, np.promote_types(dtype, np.float32)) for x in h0]]

    def random_case(self, random):
        return case(
            length(random), length(random), length(random), random.random() < 0.5, reverse=random.random() < 0.5
        )

    def check_huge(self, gpu, b, length, d):
        shapes, _ = case(b, length, d)
        forward, backward = self.operators(shapes)
        inputs = [gpu.random(*shape) / 4 for shape in shapes]
        outputs = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, outputs, b, 1, gpu.assert_close)
        inputs = [inputs[0], outputs[0], inputs[1]]
        gpu.check_parts(backward, inputs, gpu.run(backward, *inputs), b, 1, gpu.assert_close)


class InTwo(nn.Cell):
    """Cuts a sequence, and carries the state over."""

    def __init__(self, cut, reverse):
        super().__init__()
        self.cut, self.reverse, self.scan = cut, reverse, msops.LinearScan(reverse)

    def construct(self, a, b, h0):
        cut, scan = self.cut, self.scan
        if self.reverse:
            later = scan(a[:, cut:], b[:, cut:], h0)
            return ops.concat((scan(a[:, :cut], b[:, :cut], later[:, 0]), later), 1)
        earlier = scan(a[:, :cut], b[:, :cut], h0)
        return ops.concat((earlier, scan(a[:, cut:], b[:, cut:], earlier[:, -1])), 1)


@pytest.mark.parametrize("reverse", [False, True])
@wide_in_graph_mode
def test_sequence_in_two_calls(mode, reverse):
    """The state carries results and gradients over a cut anywhere."""
    inputs = TestLinearScan().inputs(case(2, 9, 3, state=True)[0], np.float64)
    (dh,) = random(2, np.float64, (2, 9, 3))
    whole = msops.LinearScan(reverse)
    want, gradients = run(whole, *inputs), run_gradient(whole, inputs, [dh])
    for cut in (1, 4, 8):
        net = InTwo(cut, reverse)
        np.testing.assert_allclose(run(net, *inputs)[0], want[0], rtol=1e-13)
        for got, expected in zip(run_gradient(net, inputs, [dh]), gradients):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_state_of_float16(mode):
    """Beside float16, a state of float16 counts as that of float32, and its gradient is float16."""
    a, b, h0 = TestLinearScan().inputs(case(2, 5, 3, state=True)[0], np.float16)
    half = h0.astype(np.float16)
    net = msops.LinearScan()
    np.testing.assert_array_equal(run(net, a, b, half)[0], run(net, a, b, half.astype(np.float32))[0])
    assert run_gradient(net, [a, b, half], [b])[2].dtype == np.float16
