import numpy as np
import pytest

import msops
from card import chain, length, random, zeros
from msops.operators.wkv7 import operators
from operator_test import OperatorTest, check_in_two_calls, run, run_gradient, wide_in_graph_mode


def walk(r, w, k, v, a, b, state=None):
    """Yields the step's number, the state before it, the state after it, and that before it times a."""
    batch, steps, heads, d = r.shape
    after = np.zeros((batch, heads, d, d), r.dtype) if state is None else np.asarray(state, r.dtype)
    for t in range(steps):
        before = after
        read = np.einsum("bhij,bhj->bhi", before, a[:, t])
        after = before * np.exp(-np.exp(w[:, t]))[:, :, None]
        after = after + read[..., None] * b[:, t, :, None] + v[:, t, :, :, None] * k[:, t, :, None]
        yield t, before, after, read


def wkv7(r, w, k, v, a, b, state=None):
    batch, _, heads, d = r.shape
    y, reads = np.zeros_like(r), np.zeros_like(r)
    last = np.zeros((batch, heads, d, d), r.dtype) if state is None else np.asarray(state, r.dtype)
    for t, _, last, reads[:, t] in walk(r, w, k, v, a, b, state):
        y[:, t] = np.einsum("bhij,bhj->bhi", last, r[:, t])
    return y, last, reads


def wkv7_backward(r, w, k, v, a, b, *rest):
    *given, _, dy, dlast = rest
    dr, dw, dk, dv, da, db = (np.zeros_like(r) for _ in range(6))
    g = np.asarray(dlast, r.dtype)
    for t, before, after, read in reversed(list(walk(r, w, k, v, a, b, *given))):
        g = g + dy[:, t, :, :, None] * r[:, t, :, None]
        dr[:, t] = np.einsum("bhij,bhi->bhj", after, dy[:, t])
        dv[:, t] = np.einsum("bhij,bhj->bhi", g, k[:, t])
        dk[:, t] = np.einsum("bhij,bhi->bhj", g, v[:, t])
        db[:, t] = np.einsum("bhij,bhi->bhj", g, read)
        dread = np.einsum("bhij,bhj->bhi", g, b[:, t])
        da[:, t] = np.einsum("bhij,bhi->bhj", before, dread)
        rate = np.exp(w[:, t])
        decay = np.exp(-rate)
        dw[:, t] = -rate * decay * (g * before).sum(2)
        g = g * decay[:, :, None] + dread[..., None] * a[:, t, :, None]
    return dr, dw, dk, dv, da, db, *([g] if given else [])


def case(b, t, h, d, state=True):
    return [(b, t, h, d)] * 6 + [(b, h, d, d)] * state, {}


class TestWKV7(OperatorTest):
    function, cell = msops.wkv7, msops.WKV7
    formulas = wkv7, wkv7_backward
    cases = {
        "small": case(1, 4, 2, 3),
        "no state": case(2, 5, 2, 4, state=False),
        "one": case(1, 1, 1, 1),
        "no steps": case(2, 0, 2, 3),
        "no steps, no state": case(1, 0, 2, 3, state=False),
        "no features": case(2, 3, 2, 0),
        "no heads": case(2, 3, 0, 4),
        "odd": case(2, 9, 3, 37),
        "64": case(1, 33, 2, 64),
        "whole chunks": case(2, 48, 3, 64, state=False),
        "most": case(1, 5, 1, 128, state=False),
    }
    further = {
        f"{b} x {t} x {h} x {d}": case(b, t, h, d, state=t % 2 == 1)
        for b, t, h, d in ((1, 2, 1, 64), (3, 5, 2, 32), (1, 12, 2, 65), (2, 3, 1, 127), (1, 67, 1, 16), (0, 3, 2, 4))
    }
    small = "small"
    hostile = ("small", "no state")
    roundings = 64  # a state stays in sums for some steps
    wrong = (
        (zeros(*[(2, 3, 4)] * 6), {}, ValueError, "wkv7: r must have shape (B, T, H, D), got (2, 3, 4)"),
        (zeros(*[(1, 2, 1, 129)] * 6), {}, ValueError, "wkv7: r must have at most 128 features, got 129"),
        ([*zeros(*[(2, 3, 4, 5)] * 6), 0.0], {}, TypeError, "wkv7: state must be a Tensor, got float"),
    )
    huge = ((2**15 + 1, 1030, 1, 64), (5, 2**17 + 3, 52, 64))

    def operators(self, shapes=()):
        return chain(operators() if not shapes or len(shapes) > 6 else operators().without("state"))

    def inputs(self, shapes, dtype, seed=1):
        """As in RWKV-7, raw decays are below -1/2, a is minus a key of length 1, and b is the same key times a rate."""
        r, w, k, v, a, b, *state = random(seed, np.float64, *shapes)
        a = -a / np.maximum(np.sqrt((a * a).sum(-1, keepdims=True)), 1e-3)
        b = -a / (1 + np.exp(-b))
        k = k / max(1, k.shape[-1]) ** 0.5
        wide = np.promote_types(dtype, np.float32)
        return [np.asarray(x, dtype) for x in (r, -0.5 - np.log1p(np.exp(w)), k, v, a, b)] + [
            np.asarray(x, wide) for x in state
        ]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        """Inputs are not scaled up: with longer keys, states would grow from step to step, beyond all numbers."""
        return super().entry_calls(shapes, settings, dtype, seed, min(scale, 1), parts)

    def result_dtype(self, dtype):
        return dtype, np.promote_types(dtype, np.float32).name

    def reference(self, *inputs):
        return wkv7(*inputs)[:2]

    def reference_gradient(self, *arguments):
        *inputs, dy, dlast = arguments
        return wkv7_backward(*inputs, None, dy, dlast)

    def random_case(self, random):
        return case(*(length(random) for _ in range(4)), random.random() < 0.5)

    def check_huge(self, gpu, b, t, h, d):
        """The gradient takes more memory than most GPUs have; its kernel is that of the forward pass."""
        forward, _ = self.operators(case(b, t, h, d, state=False)[0])
        x = gpu.random(b, t, h, d)
        w = -0.5 - x.abs()
        key = x / x.norm(dim=-1, keepdim=True)
        inputs = [x, w, key, x, -key, key]
        y, last, *_ = gpu.run(forward, *inputs)
        gpu.check_parts(forward, inputs, [y, last], b, 1, gpu.assert_close)


@wide_in_graph_mode
def test_sequence_in_two_calls(mode):
    inputs = TestWKV7().inputs(case(2, 9, 2, 3)[0], np.float64)
    douts = random(2, np.float64, (2, 9, 2, 3), (2, 2, 3, 3))
    check_in_two_calls(msops.WKV7(), (0, 1, 2, 3, 4, 5), 1, inputs, douts)


def test_state_of_float16(mode):
    """A state of float16 counts as that of float32, and its gradient is float16."""
    *inputs, state = TestWKV7().inputs(case(2, 3, 1, 4)[0], np.float16)
    half, net = state.astype(np.float16), msops.WKV7()
    for got, want in zip(run(net, *inputs, half), run(net, *inputs, half.astype(np.float32))):
        np.testing.assert_array_equal(got, want)
    assert run_gradient(net, [*inputs, half], [inputs[0], state])[6].dtype == np.float16


@pytest.mark.parametrize("raw", [-100.0, 5.0, 80.0])
def test_decays_of_any_size(mode, raw):
    """A column may stay for ever, or vanish at once; gradients are accurate beside the largest of them."""
    inputs = TestWKV7().inputs(case(1, 50, 1, 8)[0], np.float32)
    inputs[1] = np.where(np.arange(8) % 2 == 0, np.float32(raw), inputs[1])
    douts = random(2, np.float32, (1, 50, 1, 8), (1, 1, 8, 8))
    wide = [np.float64(x) for x in (*inputs, *douts)]
    for got, want in zip(run_gradient(msops.WKV7(), inputs, douts), TestWKV7().reference_gradient(*wide)):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
