import functools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from card import chain, length, random, zeros
from gpu import BIG
from msops.operators.causal_conv1d import operators
from operator_test import (
    OperatorTest,
    check_dtypes,
    check_in_two_calls,
    check_training,
    wide_in_graph_mode,
)
from test_silu import silu, silu_backward


def given(x, weight, rest):
    """Returns the bias and x with the steps before it, zeros where there is none."""
    bias = next((a for a in rest if a.ndim == 1), np.zeros_like(weight[:, 0]))
    state = next((a for a in rest if a.ndim == 3), np.zeros((*x.shape[:2], weight.shape[1] - 1), x.dtype))
    return bias[:, None], np.concatenate([state, x], 2)


def convolved(extended, weight, steps):
    """Returns the sum over taps w of weight_w extended_(t+w)."""
    out = np.zeros((*extended.shape[:2], steps), np.result_type(extended, weight))
    for w in range(weight.shape[1]):
        out += weight[:, w, None] * extended[:, :, w : w + steps]
    return out


def causal_conv1d(x, weight, *rest, activation=None, **_):
    bias, extended = given(x, weight, rest)
    z = convolved(extended, weight, x.shape[2]) + bias
    return silu(z)[0] if activation else z, extended[:, :, x.shape[2] :]


def causal_conv1d_backward(x, weight, *rest, activation=None, **_):
    *rest, dout, dfinal = rest
    steps, history = x.shape[2], weight.shape[1] - 1
    bias, extended = given(x, weight, rest)
    g = silu_backward(convolved(extended, weight, steps) + bias, dout)[0] if activation else dout
    padded = np.pad(g, ((0, 0), (0, 0), (history, history)))
    dextended = convolved(padded, weight[:, ::-1], steps + history)
    dextended[:, :, steps:] += dfinal
    dweight = np.zeros(weight.shape, g.dtype)
    for w in range(history + 1):
        dweight[:, w] = (g * extended[:, :, w : w + steps]).sum((0, 2))
    gradients = {1: g.sum((0, 2)), 3: dextended[:, :, :history]}
    return dextended[:, :, history:], dweight, *(gradients[a.ndim] for a in rest)


def case(b, d, steps, width, bias=True, state=True, silu=False):
    shapes = [(b, d, steps), (d, width), *[(d,)] * bias, *[(b, d, width - 1)] * state]
    return shapes, dict(activation="silu" if silu else None, has_bias=bias, has_state=state)


class TestCausalConv1d(OperatorTest):
    function = msops.causal_conv1d
    formulas = causal_conv1d, causal_conv1d_backward
    cases = {
        "small": case(2, 3, 5, 4, silu=True),
        "neither": case(2, 3, 6, 4, False, False),
        "only a state": case(2, 3, 7, 3, bias=False),
        "short": case(2, 3, 2, 5, silu=True),
        "one tap": case(2, 3, 4, 1, silu=True),
        "no steps": case(2, 3, 0, 4),
        "no channels": case(2, 0, 3, 4),
        "no samples": case(0, 3, 4, 2, silu=True),
        "one": case(1, 1, 1, 2),
        "many taps": case(2, 3, 70, 9, silu=True),
        "more taps than steps": case(1, 2, 20, 33),
        "packs": case(2, 3, 1040, 4, silu=True),
        "large": case(3, 5, 2051, 4, silu=True),
    }
    further = {
        "eight taps": case(2, 3, 129, 8, silu=True),
        "five taps, packs": case(1, 2, 640, 5, False, False),
        "two taps": case(3, 2, 77, 2, state=False, silu=True),
        "rows shorter than a pack": case(9, 13, 3, 4, silu=True),
        "rows of a pack": case(9, 13, 8, 4),
        "few steps, eight taps": case(5, 15, 6, 8, silu=True),
        "parts": case(1, 2, 9000, 4, silu=True),
        "parts that packs do not tile": case(1, 3, 5001, 7, silu=True),
        "parts of many taps": case(1, 2, 5001, 17, silu=True),
        "wide": case(1, 2, 1500, 300, silu=True),
        "wider than a tile": case(1, 1, 600, 1100),
        "wide, without activation": case(2, 2, 90, 16, False, False),
    }
    small = "small"
    hostile = ("small", "neither", "many taps")
    roundings = 64
    wrong = (
        (zeros((2, 3), (3, 4)), {}, ValueError, "causal_conv1d: x must have shape (B, D, L), got (2, 3)"),
        (zeros((2, 3, 5), (3, 0)), {}, ValueError, "weight must have shape (D, W) with W of at least 1, got (3, 0)"),
        ([*zeros((2, 3, 5)), 1.0], {}, TypeError, "causal_conv1d: weight must be a Tensor, got float"),
        (
            zeros((2, 3, 5), (3, 4)),
            dict(activation="relu"),
            ValueError,
            "causal_conv1d: activation must be None or 'silu', got 'relu'",
        ),
    )
    huge = ((1, 1, BIG + 5, 4), (BIG // 64, 8, 9, 4), (2, 3, BIG // 6 + 1, 9))

    def net(self, activation=None, has_bias=True, has_state=True):
        return OnlyState(activation) if has_state and not has_bias else Convolution(activation)

    def operators(self, shapes=(), activation=None, has_bias=True, has_state=True):
        absent = ["bias"] * (not has_bias) + ["initial_state"] * (not has_state)
        return chain(operators(activation).without(*absent))

    def random_case(self, random):
        width = random.choice((1, 2, 3, 4, 4, 4, 7, 8, 9, 20))
        chances = [random.random() < 0.5 for _ in range(3)]
        return case(length(random), length(random), length(random), width, *chances)

    def check_huge(self, gpu, b, d, steps, width):
        """Compares the last steps, and their gradients, with sums of products. All of these are exact in float16."""
        shapes, settings = case(b, d, steps, width, False, False)
        forward, backward = self.operators(shapes, **settings)
        x, weight, dout = (gpu.random(*shape) for shape in (*shapes, shapes[0]))
        count, history = min(1000, steps - width), width - 1

        def summed(tensor, weight):
            return sum(weight[:, w : w + 1] * tensor[:, :, w : w + count] for w in range(width))

        out, _ = gpu.run(forward, x, weight)
        gpu.assert_equal(out[:, :, -count:], summed(x[:, :, -count - history :], weight))
        del out
        dx, _ = gpu.run(backward, x, weight, dout, gpu.random(b, d, history) * 0)[:2]
        padded = gpu.torch.nn.functional.pad(dout[:, :, -count:], (0, history))
        gpu.assert_equal(dx[:, :, -count:], summed(padded, weight.flip(1)))


class Convolution(nn.Cell):
    def __init__(self, activation=None):
        super().__init__()
        self.activation = activation

    def construct(self, x, weight, bias=None, state=None):
        return msops.causal_conv1d(x, weight, bias, state, self.activation, True)


class OnlyState(Convolution):
    def construct(self, x, weight, state):
        return msops.causal_conv1d(x, weight, None, state, self.activation, True)


@pytest.mark.parametrize(("width", "activation"), [(4, "silu"), (11, None)])
@wide_in_graph_mode
def test_sequence_in_two_calls(mode, width, activation):
    inputs = random(1, np.float64, *case(2, 3, 9, width)[0])
    douts = random(2, np.float64, (2, 3, 9), (2, 3, width - 1))
    check_in_two_calls(Convolution(activation), (0,), -1, inputs, douts)


@pytest.mark.parametrize("width", [4, 9])
def test_results_see_no_other_steps(width):
    """An infinity reaches the results whose window has it, and no others."""
    x, weight = random(3, np.float32, (1, 1, 100), (1, width))
    x[0, 0, 40] = np.inf
    out = msops.causal_conv1d(Tensor(x), Tensor(weight)).asnumpy()[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(out)), np.arange(40, 40 + width))


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16"), ("float64", "float32")], ids=str)
def test_dtypes_of_parameters(mode, dtypes):
    shapes, settings = case(2, 3, 40, 4, silu=True)
    kinds = (dtypes[0], dtypes[1], dtypes[1], dtypes[0])
    inputs = [np.asarray(a, kind) for a, kind in zip(random(4, np.float64, *shapes), kinds)]
    douts = [np.asarray(a, dtypes[0]) for a in random(5, np.float64, (2, 3, 40), (2, 3, 3))]
    formulas = (functools.partial(formula, **settings) for formula in (causal_conv1d, causal_conv1d_backward))
    check_dtypes(Convolution(settings["activation"]), inputs, douts, *formulas)


@pytest.mark.parametrize("has_bias", [True, False])
def test_parameters(mode, has_bias):
    (x,) = random(6, np.float32, (2, 8, 30))
    net = msops.CausalConv1d(8, 4, has_bias, "silu", return_final_state=True)
    out, state = net(Tensor(x))
    weight, *bias = (p.asnumpy() for p in net.get_parameters())
    want, last = causal_conv1d(x, weight, *bias, activation="silu")
    np.testing.assert_allclose(out.asnumpy(), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.asnumpy(), last)
    zero = net(Tensor(x), Tensor(np.zeros_like(last)))[0]
    np.testing.assert_array_equal(zero.asnumpy(), out.asnumpy())
    check_training(net, x)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(channels=0), ValueError, "channels must be at least 1, got 0"),
        (dict(width=2.0), TypeError, "width must be an int, got float"),
        (dict(has_bias=1), TypeError, "has_bias must be a bool, got int"),
        (dict(return_final_state=1), TypeError, "return_final_state must be a bool, got int"),
        (dict(activation="relu"), ValueError, "activation must be None or 'silu', got 'relu'"),
        (dict(dtype=mindspore.int32), TypeError, "dtype must be float16, float32 or float64, got Int32"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=f"^(CausalConv1d|causal_conv1d): {words}"):
        msops.CausalConv1d(**(dict(channels=4, width=4) | settings))
