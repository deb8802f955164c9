"""Benchmarks a linear layer with its cross-entropy. A size is (rows, hidden, classes)."""

from mindspore import ops

import msops
from test_linear_cross_entropy import TestLinearCrossEntropy

from ..benchmark import Benchmark, OfFunction
from ..figures import Target, times_faster

_matmul = ops.MatMul(transpose_b=True)


def of_msops(x, weight, labels):
    return msops.cross_entropy(_matmul(x, weight), labels)


def of_mindspore(x, weight, labels):
    return ops.cross_entropy(_matmul(x, weight), labels)


class LinearCrossEntropy(Benchmark):
    card = TestLinearCrossEntropy()
    cell_sizes = {
        "GPU": [(8192, 4096, 131072), (8192, 2048, 32768)],
        "CPU": [(128, 64, 8192)],
    }
    targets = {
        "GPU": [
            Target("2^13 x 2^12 x 2^17, float16", "at most 1.15 x the time of matmul and cross_entropy", 1 / 1.15,
                   times_faster("matmul, cross_entropy", "graph", case="2^13 x 2^12 x 2^17", dtype="float16",
                                direction="forward+backward")),
        ]
    }  # fmt: skip

    def index_below(self, size):
        return size[2]

    def cell_inputs(self, size):
        rows, hidden, classes = size
        return [(rows, hidden), (classes, hidden), (rows,)]

    def cell_dtypes(self, size, dtype):
        return [dtype, dtype, "int32"]

    def networks(self, size, dtype, device):
        return {
            "msops": OfFunction(msops.linear_cross_entropy),
            "matmul, cross_entropy": OfFunction(of_msops),
            "MindSpore": OfFunction(of_mindspore),
        }
