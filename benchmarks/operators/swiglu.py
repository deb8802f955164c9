"""Benchmarks the gated sigmoid linear unit, out = gate / (1 + e^-gate) up."""

from mindspore import ops

import msops
from test_swiglu import TestSwiglu

from .. import libraries
from ..benchmark import GATED, Benchmark
from ..figures import of_gated


def composed(gate, up):
    return ops.silu(gate) * up


class Swiglu(Benchmark):
    card = TestSwiglu()
    sizes = GATED
    cells = (msops.SwiGLU, composed)
    targets = of_gated()

    def inputs(self, size):
        return [size, size]

    def torch_formula(self, case):
        import torch

        return lambda gate, up: torch.nn.functional.silu(gate) * up

    def library_formulas(self, case):
        return libraries.gated(case, "LigerSiLUMulFunction")
