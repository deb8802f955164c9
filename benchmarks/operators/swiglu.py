"""Benchmarks the gated sigmoid linear unit, out = gate / (1 + e^-gate) up. A size is (rows, columns of the result), or
(rows, 2, columns of the result) where gate and up are the halves of one tensor."""

from mindspore import ops

import msops
from test_swiglu import TestSwiglu

from .. import libraries
from ..benchmark import GATED, Benchmark, Sizes
from ..figures import Target, of_gated, share


def composed(gate, up):
    return ops.silu(gate) * up


def is_packed(size):
    return len(size) == 3


class Swiglu(Benchmark):
    card = TestSwiglu()
    sizes = {
        "GPU": [*GATED["GPU"], Sizes(named=((16384, 2, 14336),), sweep=((64, 2, 1024), (4096, 2, 4096)))],
        "CPU": [*GATED["CPU"], Sizes(named=((256, 2, 4096),))],
    }
    cell_sizes = {device: [size for each in GATED[device] for size in each.named] for device in GATED}
    cells = (msops.SwiGLU, composed)
    targets = {"GPU": [*of_gated()["GPU"], Target("16384 x 2 x 14336", "share 0.95", 0.95, share("2^14 x 2 x 14336"))]}

    def inputs(self, size):
        if is_packed(size):
            return [(size[0], 2 * size[2])]
        return [size, size]

    def torch_formula(self, case):
        import torch

        if is_packed(case.size):
            return lambda gate: torch.nn.functional.silu(gate.chunk(2, -1)[0]) * gate.chunk(2, -1)[1]
        return lambda gate, up: torch.nn.functional.silu(gate) * up

    def library_formulas(self, case):
        if is_packed(case.size):
            return {"Liger": lambda liger, gate: liger.LigerFusedGateUpSiLUMulFunction.apply(gate)}
        return libraries.gated(case, "LigerSiLUMulFunction")
