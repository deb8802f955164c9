"""Benchmarks the logistic sigmoid, y = 1 / (1 + e^-x)."""

from mindspore import ops

import msops
from test_sigmoid import TestSigmoid

from ..benchmark import ELEMENTS, Benchmark
from ..figures import of_elements


class Sigmoid(Benchmark):
    card = TestSigmoid()
    sizes = ELEMENTS
    cells = (msops.Sigmoid, ops.sigmoid)
    targets = of_elements()

    def torch_formula(self, case):
        import torch

        return torch.sigmoid
