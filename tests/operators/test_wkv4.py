import numpy as np
import pytest

import msops
from card import chain, length, random, zeros
from msops.operators.wkv4 import operators
from operator_test import OperatorTest, check_in_two_calls, run, run_gradient, wide_in_graph_mode

EVERY = 32  # steps from one kept state to the next
NO_STEPS = -1e38  # the exponent of a state before all steps


def no_steps(shape, dtype):
    with np.errstate(over="ignore"):  # float16 has minus infinity instead
        return np.full(shape, NO_STEPS).astype(dtype)


def walk(w, u, k, v, state=None):
    """Yields the step's number, the state before it, the state after it, and the mean."""
    p = q = np.zeros((len(k), k.shape[2]), k.dtype)
    o = no_steps(p.shape, p.dtype)
    if state is not None:
        p, q, o = np.moveaxis(np.asarray(state, w.dtype), 1, 0)
        o = np.where(q == 0, -np.abs(o), o)  # no steps, also where the card's checks ask for magnitudes
    decay = -np.exp(w)
    for t in range(k.shape[1]):
        before, now = (p, q, o), k[:, t]
        largest = np.maximum(o, u + now)
        old, own = np.exp(o - largest), np.exp(u + now - largest)
        y = (old * p + own * v[:, t]) / (old * q + own)
        largest = np.maximum(o + decay, now)
        old, own = np.exp(o + decay - largest), np.exp(now - largest)
        p, q, o = old * p + own * v[:, t], old * q + own, largest
        yield t, before, (p, q, o), y


def wkv4(w, u, k, v, state=None):
    batch, steps, channels = k.shape
    y, kept = np.zeros_like(k), np.zeros((batch, steps // EVERY + 1, 3, channels), k.dtype)
    last = np.zeros((batch, 3, channels), k.dtype)
    if state is None:
        last[:, 2] = no_steps(last[:, 2].shape, k.dtype)
    else:
        last[:] = state
    kept[:, 0] = last
    for t, _, after, y[:, t] in walk(w, u, k, v, state):
        last = np.stack(after, 1)
        if (t + 1) % EVERY == 0:
            kept[:, (t + 1) // EVERY] = last
    return y, last, kept


def wkv4_backward(w, u, k, v, *rest):
    *given, _, kept, dy, dlast = rest
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    dw, du = np.zeros_like(w), np.zeros_like(u)
    decay = -np.exp(w)
    dp, dq, do = np.moveaxis(np.asarray(dlast, k.dtype), 1, 0)
    for t, (p, q, o), after, y in reversed(list(walk(w, u, k, v, kept[:, 0]))):
        now, value = k[:, t], v[:, t]
        # p = old p + own v and q = old q + own with old = e^(o + decay - largest) and own = e^(k - largest)
        largest = after[2]
        old, own = np.exp(o + decay - largest), np.exp(now - largest)
        dold, down = dp * p + dq * q, dp * value + dq
        is_old = o + decay >= now
        dlargest = do - old * dold - own * down
        dsum = old * dold + dlargest * is_old  # of o + decay
        dk[:, t] = own * down + dlargest * ~is_old
        dv[:, t] = own * dp
        dw += dsum.sum(0) * decay
        dp, dq, do = old * dp, old * dq, dsum
        # y = (e^o p + e^(u + k) v) / (e^o q + e^(u + k))
        largest = np.maximum(o, u + now)
        old, own = np.exp(o - largest), np.exp(u + now - largest)
        part = dy[:, t] / (old * q + own)
        dbonus = part * own * (value - y)
        dk[:, t] += dbonus
        dv[:, t] += part * own
        du += dbonus.sum(0)
        dp, dq, do = dp + part * old, dq - part * old * y, do + part * old * (p - y * q)
    return dw, du, dk, dv, *([np.stack((dp, dq, do), 1)] if given else [])


def direct(w, u, k, v):
    """Computes the means as sums over all earlier steps."""
    y = np.empty_like(k)
    for t in range(k.shape[1]):
        ages = np.arange(t - 1, -1, -1)[:, None]
        logs = np.concatenate((k[:, :t] - ages * np.exp(w), (u + k[:, t])[:, None]), 1)
        weights = np.exp(logs - logs.max(1, keepdims=True))
        y[:, t] = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
    return y


def case(b, t, c, state=True):
    return [(c,)] * 2 + [(b, t, c)] * 2 + [(b, 3, c)] * state, {}


class TestWKV4(OperatorTest):
    function, cell = msops.wkv4, msops.WKV4
    formulas = wkv4, wkv4_backward
    cases = {
        "small": case(2, 5, 3),
        "no state": case(2, 7, 3, state=False),
        "one": case(1, 1, 1),
        "no steps": case(2, 0, 3),
        "no steps, no state": case(2, 0, 3, state=False),
        "no channels": case(2, 3, 0),
        "no samples": case(0, 3, 2),
        "kept": case(3, 64, 5),
        "odd": case(3, 67, 65),
        "large": case(4, 131, 200, state=False),
    }
    further = {"parts": case(1, 500, 33)} | {
        f"{b} x {t} x {c}": case(b, t, c, state=t % 2 == 1)
        for b, t, c in ((1, 31, 64), (2, 33, 32), (1, 129, 8), (2, 1025, 1), (2, 417, 40), (9, 3, 100), (1, 385, 2))
    }
    small = "small"
    hostile = ("small", "no state")
    roundings = 256  # a state stays in a sum for some steps, and in an exponent: NumPy errs as much with these dtypes
    wrong = (
        (zeros((4,), (4,), (2, 3), (2, 3)), {}, ValueError, "wkv4: k must have shape (B, T, C), got (2, 3)"),
        ([*zeros((4,), (4,), (2, 3, 4), (2, 3, 4)), 0.0], {}, TypeError, "wkv4: state must be a Tensor, got float"),
    )
    huge = ((2**21 + 3, 1030, 1), (5, 2**19 + 3, 1030))

    def operators(self, shapes=()):
        return chain(operators() if not shapes or len(shapes) > 4 else operators().without("state"))

    def inputs(self, shapes, dtype, seed=1):
        """The sum of weights of a state is positive. The state is wider than float16."""
        (*inputs,) = random(seed, np.float64, *shapes)
        if len(inputs) > 4:
            inputs[4][:, 1] = np.exp(inputs[4][:, 1])
        wide = np.promote_types(dtype, np.float32)
        return [np.asarray(x, dtype) for x in inputs[:4]] + [np.asarray(x, wide) for x in inputs[4:]]

    def result_dtype(self, dtype):
        return dtype, np.promote_types(dtype, np.float32).name

    def reference(self, *inputs):
        return wkv4(*inputs)[:2]

    def reference_gradient(self, *arguments):
        *inputs, dy, dlast = arguments
        return wkv4_backward(*inputs, *wkv4(*inputs)[1:], dy, dlast)

    def random_case(self, random):
        return case(length(random), length(random), length(random), random.random() < 0.5)

    def check_huge(self, gpu, b, t, c):
        forward, backward = self.operators(case(b, t, c, state=False)[0])
        inputs = [gpu.random(*shape) for shape in case(b, t, c, state=False)[0]]
        y, last, kept, _ = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, [y, last, kept], b, 1, gpu.assert_close)
        inputs += [last, kept, y, last]
        dw, du, dk, dv, *_ = gpu.run(backward, *inputs)
        gpu.check_parts(backward, inputs, [None, None, dk, dv], b, 1, gpu.assert_close)
        assert not dw.isnan().any()
        assert not du.isnan().any()


@wide_in_graph_mode
def test_sequence_in_two_calls(mode):
    inputs = TestWKV4().inputs(case(2, 9, 3)[0], np.float64)
    check_in_two_calls(msops.WKV4(), (2, 3), 1, inputs, random(2, np.float64, (2, 9, 3), (2, 3, 3)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_means_are_sums_over_all_steps(mode, dtype):
    """Keys may be so large, or so small, that their powers overflow or vanish."""
    w, u, k, v = TestWKV4().inputs(case(2, 70, 4, state=False)[0], dtype)
    for factor in (1, 300):
        y, _ = run(msops.WKV4(), w, u, factor * k, v)
        want = direct(*(np.float64(x) for x in (w, u, factor * k, v)))
        np.testing.assert_allclose(y, want, rtol=1e-3 if dtype == "float32" else 1e-11, atol=1e-4)


def test_state_of_float16(mode):
    """A state of float16, whose first exponent is minus infinity, counts as that of float32."""
    w, u, k, v, state = TestWKV4().inputs(case(2, 5, 3)[0], np.float16)
    half = state.astype(np.float16)
    half[0, :2], half[0, 2] = 0, -np.inf
    net = msops.WKV4()
    for got, want in zip(run(net, w, u, k, v, half), run(net, w, u, k, v, half.astype(np.float32))):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(run(net, w, u, k[:1], v[:1], half[:1])[0], run(net, w, u, k[:1], v[:1])[0])
    gradients = run_gradient(net, [w, u, k, v, half], [v, state])
    assert gradients[4].dtype == np.float16
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("raw", [-100.0, 5.0, 100.0])
def test_decays_of_any_size(raw):
    """A channel may remember for ever, or nothing; gradients are accurate beside the largest of them."""
    inputs = TestWKV4().inputs(case(1, 450, 4)[0], np.float32)
    inputs[0][::2] = raw
    douts = random(2, np.float32, (1, 450, 4), (1, 3, 4))
    wide = [np.float64(x) for x in (*inputs, *douts)]
    got = [*run(msops.WKV4(), *inputs), *run_gradient(msops.WKV4(), inputs, douts)]
    want = [*TestWKV4().reference(*wide[:5]), *TestWKV4().reference_gradient(*wide)]
    for a, b in zip(got, want):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_gradient_of_the_exponent(mode):
    """For results that depend on p e^o and q e^o alone, the gradient of o is p dp + q dq."""
    inputs = TestWKV4().inputs(case(2, 5, 3)[0], np.float64)
    (dy,) = random(2, np.float64, (2, 5, 3))
    dstate = run_gradient(msops.WKV4(), inputs, [dy, np.zeros((2, 3, 3))])[4]
    np.testing.assert_allclose(dstate[:, 2], (inputs[4][:, :2] * dstate[:, :2]).sum(1), rtol=1e-12)
