import numpy as np
import pytest

import msops
from card import DTYPES, chain, length, lengths, random, zeros
from gpu import BIG
from msops.operators import swiglu as operators
from msops.testing.checks import Gradient, Net, assert_equal
from operator_test import OperatorTest, check_second_order, run, run_gradient
from test_sigmoid import sigmoid


def swiglu(gate, up):
    return (gate * sigmoid(gate) * up,)


def swiglu_backward(gate, up, dout):
    s = sigmoid(gate)
    return dout * up * s * (1 + gate * (1 - s)), dout * gate * s


def swiglu_backward_backward(gate, up, dout, ddgate, ddup):
    s = sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    bend = s * (1 - s) * (2 + gate * (1 - 2 * s))
    return (
        dout * (ddgate * up * bend + ddup * slope),
        dout * ddgate * slope,
        ddgate * up * slope + ddup * gate * s,
    )


def halves(x):
    return np.split(x, 2, -1)


def taking_halves(forward, backward, backward_backward):
    """Returns the formulas of a gated activation so that they also take one tensor of both halves."""

    def of_inputs(gate, *up, **settings):
        return forward(*((gate, *up) if up else halves(gate)), **settings)

    def of_gradient(gate, *rest, **settings):
        if len(rest) == 2:
            return backward(gate, *rest, **settings)
        return (np.concatenate(backward(*halves(gate), *rest, **settings), -1),)

    def of_second_gradient(gate, *rest, **settings):
        if len(rest) == 4:
            return backward_backward(gate, *rest, **settings)
        dout, ddgate = rest
        dgate, dup, ddout = backward_backward(*halves(gate), dout, *halves(ddgate), **settings)
        return np.concatenate((dgate, dup), -1), ddout

    return of_inputs, of_gradient, of_second_gradient


class GatedTest(OperatorTest):
    """Tests a gated activation of two tensors, or of one tensor of both halves."""

    packed = {
        "packed, none": [(2, 0)],
        "packed, no rows": [(0, 6)],
        "packed, one": [(2,)],
        "packed, prime": [(7, 26)],
        "packed, past a block": [(2, 3, 514)],
        "packed, large": [(300, 2048)],
    }
    further_packed = {f"packed, {n}": [(3, 2 * n)] for n in (2, 8, 31, 257, 1000, 4099)}

    def reference_gradient(self, *arguments, **settings):
        return self.formulas[1](*arguments, **settings)

    def random_case(self, random):
        if random.randrange(2):
            return [(*lengths(random)[:4], 2 * length(random))], {}
        return super().random_case(random)


class TestSwiglu(GatedTest):
    function, cell = msops.swiglu, msops.SwiGLU
    formulas = taking_halves(swiglu, swiglu_backward, swiglu_backward_backward)
    cases = {
        "scalar": ([(), ()], {}),
        "empty": ([(2, 0)] * 2, {}),
        "one": ([(1,)] * 2, {}),
        "prime": ([(7, 13)] * 2, {}),
        "past a pack": ([(1025,)] * 2, {}),
        "large": ([(3, 100_003)] * 2, {}),
        **{name: (shapes, {}) for name, shapes in GatedTest.packed.items()},
    }
    further = {
        **{f"{n}": ([(n,)] * 2, {}) for n in (2, 31, 257, 1000, 4099)},
        **{name: (shapes, {}) for name, shapes in GatedTest.further_packed.items()},
    }
    small = "prime"
    hostile = ("prime", "packed, prime")
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        (zeros(3, 3, dtype=np.int32), {}, TypeError, "swiglu: gate must be float16, float32 or float64, got int32"),
        ([*zeros(3), 1.5], {}, TypeError, "swiglu: up must be a Tensor, got float"),
        (zeros((2, 3)), {}, ValueError, "swiglu: gate must have a last axis of even length where there is no up, got"),
        (zeros(()), {}, ValueError, "swiglu: gate must have a last axis of even length where there is no up, got"),
    )
    huge = ((BIG,),)

    def operators(self, shapes=()):
        return chain(operators.packed_forward if len(shapes) == 1 else operators.forward)

    def check_huge(self, gpu, n):
        gate = gpu.random(n)
        up = gate.flip(0)
        (out,) = gpu.run(operators.forward, gate, up)
        gpu.assert_close(out, gpu.torch.nn.functional.silu(gate) * up)
        del out
        _, dup = gpu.run(operators.backward, gate, up, up)
        gpu.assert_close(dup, gpu.torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(mode, dtype):
    """Large gates pass the other input or become 0; NaN stays."""
    info = np.finfo(dtype)
    gate = np.array([info.min, -1e4, -0.0, 0.0, 1e4, info.max, np.inf, np.nan], dtype)
    want = np.array([0, 0, 0, 0, 1e4, info.max, np.inf, np.nan], dtype)
    np.testing.assert_array_equal(run(msops.SwiGLU(), gate, np.ones_like(gate))[0], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cell_of_halves(mode, dtype):
    """The Cell, its gradient and its gradient's gradient are those of two tensors."""
    gate, up, dout = random(1, dtype, (5, 6), (5, 6), (5, 6))
    both = np.concatenate((gate, up), -1)
    assert_equal(run(msops.SwiGLU(), both), run(msops.SwiGLU(), gate, up))
    of_two = run_gradient(msops.SwiGLU(), [gate, up], [dout])
    assert_equal(run_gradient(msops.SwiGLU(), [both], [dout]), [np.concatenate(of_two, -1)])


def test_second_gradient_of_halves(mode):
    both, dout = random(1, np.float64, (5, 6), (5, 3))
    check_second_order(Gradient(Net(msops.swiglu), 1), [both, dout], mode)
