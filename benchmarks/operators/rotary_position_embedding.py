"""Benchmarks rotary embedding by tables of all features, which serves patch_mindspore alone. A size is (B, H, T, D),
the shape of queries or keys.
"""

from mindspore import ops

from msops.operators.rotary_position_embedding import operators
from test_rotary_position_embedding import TestRotaryPositionEmbedding

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, share


def composed(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + ops.concat((-x[..., half:], x[..., :half]), -1) * sin


class RotaryPositionEmbedding(Benchmark):
    card = TestRotaryPositionEmbedding()
    sizes = {
        "GPU": [Sizes(named=((4, 32, 4096, 128), (4, 8, 4096, 128)), sweep=((64, 32, 1, 128), (1, 32, 512, 64)))],
        "CPU": [Sizes(named=((1, 8, 512, 128),), sweep=((1, 32, 1, 128),))],
    }
    targets = {
        "GPU": [Target("4 x 32 heads of 4096 x 128", "share 0.85", 0.85, share(lambda case: case.startswith("4 x 32")))]
    }

    def inputs(self, size):
        *_, length, width = size
        return [size, (1, 1, length, width), (1, 1, length, width)]

    def settings(self, size):
        return {"interleaved": False}

    def torch_formula(self, case):
        import torch

        def formula(x, cos, sin):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat((-b, a), -1) * sin

        return formula

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(operators(False)), "MindSpore": OfFunction(composed)}
