"""Benchmarks the sigmoid linear unit, y = x / (1 + e^-x)."""

from mindspore import ops

import msops
from test_silu import TestSilu

from ..benchmark import ELEMENTS, Benchmark
from ..figures import of_elements


class Silu(Benchmark):
    card = TestSilu()
    sizes = ELEMENTS
    cells = (msops.SiLU, ops.silu)
    targets = of_elements()

    def torch_formula(self, case):
        import torch

        return torch.nn.functional.silu
