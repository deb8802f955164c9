"""Benchmarks the Gaussian error linear unit by the error function, y = x Phi(x)."""

from mindspore import ops

import msops
from test_gelu import TestGelu

from ..benchmark import ELEMENTS, Benchmark
from ..figures import of_elements


class Gelu(Benchmark):
    card = TestGelu()
    sizes = ELEMENTS
    cells = (msops.GELU, ops.gelu)
    targets = of_elements()

    def torch_formula(self, case):
        import torch

        return torch.nn.functional.gelu
