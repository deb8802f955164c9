import numpy as np
import pytest

import msops
from card import DTYPES, zeros
from gpu import BIG
from msops.operators import swiglu as operators
from operator_test import OperatorTest, run
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


class TestSwiglu(OperatorTest):
    function, cell = msops.swiglu, msops.SwiGLU
    operator = operators.forward
    formulas = (swiglu, swiglu_backward, swiglu_backward_backward)
    cases = {
        "scalar": ([(), ()], {}),
        "empty": ([(2, 0)] * 2, {}),
        "one": ([(1,)] * 2, {}),
        "prime": ([(7, 13)] * 2, {}),
        "past a pack": ([(1025,)] * 2, {}),
        "large": ([(3, 100_003)] * 2, {}),
    }
    further = {f"{n}": ([(n,)] * 2, {}) for n in (2, 31, 257, 1000, 4099)}
    small = "prime"
    roundings = 64  # the second derivative is a difference of numbers that are larger than it
    second_order = True
    wrong = (
        (zeros(3, 3, dtype=np.int32), {}, TypeError, "swiglu: gate must be float16, float32 or float64, got int32"),
        ([*zeros(3), 1.5], {}, TypeError, "swiglu: up must be a Tensor, got float"),
        (
            [*zeros(3), *zeros(3, dtype=np.float16)],
            {},
            TypeError,
            "swiglu: up must be float32 as gate is, got float16",
        ),
        (zeros((2, 3), 3), {}, ValueError, "swiglu: up must have shape (*S,) = (2, 3), got (3,)"),
    )
    huge = ((BIG,),)

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
