"""Benchmarks the layer normalization of a sum, which serves patch_mindspore alone. A size is (rows, columns)."""

from mindspore import ops

from msops.operators.add_layer_norm import add_layer_norm
from test_add_layer_norm import TestAddLayerNorm

from ..benchmark import Benchmark, OfFunction, Sizes, by


def composed(x, residual, weight, bias):
    s = x + residual
    centred = s - s.mean(-1, keep_dims=True)
    return centred * ops.rsqrt((centred * centred).mean(-1, keep_dims=True) + 1e-5) * weight + bias


class AddLayerNorm(Benchmark):
    card = TestAddLayerNorm()
    sizes = {
        "GPU": [Sizes(named=((16384, 768), (16384, 1024)), sweep=((512, 768),))],
        "CPU": [Sizes(named=((512, 768),))],
    }
    trains = False

    def describe(self, size):
        return by(size)

    def inputs(self, size):
        return [size, size, size[-1:], size[-1:]]

    def torch_formula(self, case):
        from torch.nn.functional import layer_norm

        return lambda x, residual, weight, bias: layer_norm(x + residual, x.shape[-1:], weight, bias)

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(add_layer_norm), "MindSpore": OfFunction(composed)}
