"""Benchmarks the reciprocal root mean square of rows, which serves patch_mindspore alone. A size is (rows, columns)."""

from mindspore import ops

from msops.operators.reciprocal_rms import reciprocal_rms
from test_reciprocal_rms import ReciprocalRms as Card

from ..benchmark import Benchmark, OfFunction
from .rms_norm import ROWS


def composed(x):
    return ops.rsqrt((x * x).mean(-1) + 1e-6)


class ReciprocalRms(Benchmark):
    card = Card()
    sizes = ROWS

    def inputs(self, size):
        return [size]

    def torch_formula(self, case):
        import torch

        return lambda x: torch.rsqrt((x * x).mean(-1) + 1e-6)

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(reciprocal_rms), "MindSpore": OfFunction(composed)}
