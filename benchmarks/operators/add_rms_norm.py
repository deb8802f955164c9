"""Benchmarks RMSNorm of a sum. A size is (rows, columns)."""

import mindspore

import msops
from test_add_rms_norm import TestAddRmsNorm

from ..benchmark import Benchmark
from .rms_norm import ROWS, ComposedRMSNorm, of_rows


class ComposedAddRMSNorm(ComposedRMSNorm):
    """Computes the sum and its RMSNorm by MindSpore's operators."""

    def construct(self, x, residual):
        s = x + residual
        return super().construct(s), s


class AddRmsNorm(Benchmark):
    card = TestAddRmsNorm()
    sizes = ROWS
    targets = of_rows({"float16": {"2^15 x 2^12": (0.97, 0.90)}})

    def inputs(self, size):
        return [size, size, size[-1:]]

    def torch_formula(self, case):
        from torch.nn.functional import rms_norm

        def add_rms_norm(x, residual, weight):
            s = x + residual
            return rms_norm(s, weight.shape, weight, 1e-6), s

        return add_rms_norm

    def library_formulas(self, case):
        def of_liger(liger, x, residual, weight):
            return liger.LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False)

        def of_quack(quack, x, residual, weight):
            return quack.rmsnorm(x, weight, residual=residual, eps=1e-6, prenorm=True)

        return {"Liger": of_liger, "quack": of_quack}

    def cell_inputs(self, size):
        return self.inputs(size)[:2]

    def networks(self, size, dtype, device):
        dtype = getattr(mindspore, dtype)
        return {"msops": msops.AddRMSNorm(size[-1], dtype=dtype), "MindSpore": ComposedAddRMSNorm(size[-1], dtype)}
