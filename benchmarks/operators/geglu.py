"""Benchmarks the gated Gaussian error linear unit, out = gate Phi(gate) up, by the approximation with tanh."""

from mindspore import ops

import msops
from test_geglu import TestGeglu

from .. import libraries
from ..benchmark import GATED, Benchmark
from ..figures import of_gated


def composed(gate, up):
    return ops.gelu(gate, "tanh") * up


class Geglu(Benchmark):
    card = TestGeglu()
    sizes = GATED
    cells = (msops.GeGLU, composed)
    targets = of_gated()

    def inputs(self, size):
        return [size, size]

    def torch_formula(self, case):
        import torch

        return lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up

    def library_formulas(self, case):
        return libraries.gated(case, "LigerGELUMulFunction")
