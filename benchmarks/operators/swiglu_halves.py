"""Benchmarks swiglu of the halves of one tensor. A size is (rows, columns of the result)."""

from mindspore import ops

from msops.operators.swiglu_halves import swiglu_halves
from test_swiglu_halves import TestSwigluHalves

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, share


def composed(x):
    return ops.silu(x[:, 0]) * x[:, 1]


class SwigluHalves(Benchmark):
    card = TestSwigluHalves()
    sizes = {
        "GPU": [Sizes(named=((16384, 14336),), sweep=((64, 1024), (4096, 4096)))],
        "CPU": [Sizes(named=((256, 4096),), sweep=((64, 1024),))],
    }
    targets = {"GPU": [Target("16384 x 14336", "share 0.95", 0.95, share(lambda case: case == "2^14 x 14336"))]}

    def inputs(self, size):
        rows, columns = size
        return [(rows, 2, columns)]

    def torch_formula(self, case):
        import torch

        return lambda x: torch.nn.functional.silu(x[:, 0]) * x[:, 1]

    def library_formulas(self, case):
        return {"Liger": lambda liger, x: liger.LigerFusedGateUpSiLUMulFunction.apply(x.flatten(1))}

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(swiglu_halves), "MindSpore": OfFunction(composed)}
