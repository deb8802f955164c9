import numpy as np
from mindspore import Tensor, nn

import msops
from operator_test import OperatorTest, zeros
from test_lltm import pointwise, pointwise_gradient


def steps_of(steps, reverse):
    return range(steps - 1, -1, -1) if reverse else range(steps)


def active(t, lengths, batch):
    return np.ones((batch, 1), bool) if lengths is None else (t < np.asarray(lengths))[:, None]


def recur(product, weight, bias, h, c, lengths=None, reverse=False):
    """The outputs, the last state, and of each step its gates, h and c before it."""
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


class Sequence(nn.Cell):
    """The function with its settings; `seq_length` is a list."""

    def __init__(self, seq_length=None, reverse=False, **settings):
        super().__init__()
        self.seq_length = Tensor(np.array(seq_length, np.int32)) if isinstance(seq_length, list) else seq_length
        self.reverse, self.settings = reverse, settings

    def construct(self, *inputs):
        return msops.lltm(*inputs, self.seq_length, self.reverse, **self.settings)


def shapes(t, b, i, h):
    return [(t, b, i), (b, h), (b, h), (3 * h, i), (3 * h, h), (3 * h,)]


SMALL = zeros(*shapes(4, 2, 5, 3))


def wrong(at, array):
    return [*SMALL[:at], array, *SMALL[at + 1 :]]


class TestLLTM(OperatorTest):
    cases = {
        "small": (shapes(4, 2, 3, 3), {}),
        "one step": (shapes(1, 3, 2, 5), {}),
        "one": (shapes(3, 1, 1, 1), {}),
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
        (SMALL, {"allow_tf32": None}, TypeError, "lltm: allow_tf32 must be a bool, got NoneType"),
    )

    def net(self, **settings):
        return Sequence(**settings)

    def inputs(self, case, dtype):
        x, h, c, weight_ih, weight_hh, bias = super().inputs(case, dtype)
        # As large as what is usual in training, so that rounding errors do not grow from step to step.
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
