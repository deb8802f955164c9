"""Benchmarks the logistic sigmoid, y = 1 / (1 + e^-x)."""

from mindspore import ops

import msops
from test_sigmoid import TestSigmoid

from ..benchmark import ELEMENTS, Benchmark
from ..figures import Target, best_peer, share


class Sigmoid(Benchmark):
    card = TestSigmoid()
    sizes = ELEMENTS
    cells = (msops.Sigmoid, ops.sigmoid)
    targets = {
        "GPU": [
            Target("2^28", "share 0.97", 0.97, share("2^28")),
            Target("2^28", "at most 1 % slower than the best peer", 0.99, best_peer("2^28")),
            Target("2^20", "not slower than the best peer", 1, best_peer("2^20")),
        ]
    }

    def torch_formula(self, case):
        import torch

        return torch.sigmoid
