"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np

from card import lengths, zeros
from gpu import BIG
from msops.operators.addcmul import addcmul, operators
from operator_test import OperatorTest
from test_add import sum_to

HALF = dict(value=0.5)


class TestAddcmul(OperatorTest):
    function = addcmul
    formulas = (lambda x, y, z, value=1.0: (x + value * y * z,),)
    cases = {
        "same": ([(7, 13)] * 3, {}),
        "scalars": ([()] * 3, {}),
        "one": ([(1,)] * 3, HALF),
        "empty": ([(0, 3), (3,), (0, 1)], {}),
        "prime": ([(10_007,)] * 3, HALF),
        "gate": ([(2, 6, 16), (2, 1, 16), (2, 6, 16)], {}),
        "gate, odd": ([(3, 5, 7), (3, 1, 7), (3, 5, 7)], {}),
        "gate behind": ([(3, 5, 7), (3, 5, 7), (7,)], dict(value=-2.0)),
        "gate of rows": ([(3, 5, 8), (3, 5, 1), (3, 5, 8)], {}),
        "outer": ([(1, 7, 1), (5, 1, 1), (1, 1, 16)], {}),
        "six axes": ([(3, 1, 4, 1, 5, 16), (1, 2, 1, 6, 1, 16), ()], {}),
        "two blocks": ([(300, 512), (512,), (300, 1)], {}),
    }
    further = {f"{n}": ([(n,), (1,), (n,)], {}) for n in (2, 31, 257, 4099)}
    small = "gate, odd"
    second_order = True
    half_gradient_in_float32 = False  # it rounds products before it adds them up
    wrong = (
        (zeros(3, 3, 3, dtype=np.int64), {}, TypeError, "x must be float16, float32 or float64, got int64"),
        ([*zeros(3, 3), 1.0], {}, TypeError, "addcmul: z must be a Tensor, got float"),
        (
            zeros((2, 3), 4, 3),
            {},
            ValueError,
            "addcmul: x, y and z must have shapes that broadcast, got (2, 3), (4,) and",
        ),
        (zeros(3, 3, 3), dict(value="1"), TypeError, "addcmul: value must be a number, got str"),
    )
    huge = ((BIG // 3,),)

    def operators(self, shapes=(), value=1.0):
        return [operators(value)]

    def reference_gradient(self, x, y, z, dout, value=1.0):
        return *sum_to(dout, x), *sum_to(value * dout * z, y), *sum_to(value * dout * y, z)

    def check_huge(self, gpu, rows):
        x, gate = gpu.random(rows, 3), gpu.random(3)
        (out,) = gpu.run(operators(1.0), x, gate, x)
        gpu.assert_close(out, x + gate * x)

    def random_case(self, random):
        axes = [random.choice(((n, n, n), (n, 1, n), (1, n, 1), (1, 1, n))) for n in lengths(random)]
        return [tuple(each[k] for each in axes) for k in range(3)], dict(value=random.choice((1.0, 0.25)))
