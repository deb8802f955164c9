"""Benchmarks layer normalization. A size is (rows, columns)."""

import mindspore
from mindspore import nn

import msops
from test_layer_norm import TestLayerNorm

from ..benchmark import Benchmark
from .rms_norm import ROWS, SHARES, of_rows


class LayerNorm(Benchmark):
    card = TestLayerNorm()
    sizes = ROWS
    targets = of_rows(SHARES)

    def inputs(self, size):
        return [size, size[-1:], size[-1:]]

    def torch_formula(self, case):
        from torch.nn.functional import layer_norm

        return lambda x, weight, bias: layer_norm(x, weight.shape, weight, bias, 1e-5)

    def library_formulas(self, case):
        return {"Liger": lambda liger, x, weight, bias: liger.LigerLayerNormFunction.apply(x, weight, bias, 1e-5)}

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        shape, settings = size[-1:], dict(epsilon=1e-5, dtype=getattr(mindspore, dtype))
        return {"msops": msops.LayerNorm(shape, **settings), "MindSpore": nn.LayerNorm(shape, **settings)}
