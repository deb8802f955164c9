"""Benchmarks rotary embedding of pairs of halves. A size is (B, H, T, D), the shape of queries or keys; d = D."""

from mindspore import ops

import msops
from test_rotary_embedding import TestRotaryEmbedding

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer, share

LLAMA = ("4 x 32 x 2^12 x 128", "4 x 8 x 2^12 x 128")


def composed(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return ops.concat((a * cos - b * sin, b * cos + a * sin), -1)


class RotaryEmbedding(Benchmark):
    card = TestRotaryEmbedding()
    sizes = {
        "GPU": [
            Sizes(
                named=((4, 32, 4096, 128), (4, 8, 4096, 128)),
                sweep=((1, 32, 1, 128), (64, 32, 1, 128), (1, 32, 512, 64), (8, 16, 2048, 80)),
                ragged={(4, 8, 4096, 126): (4, 8, 4096, 128)},
            )
        ],
        "CPU": [
            Sizes(
                named=((1, 8, 512, 128), (2, 8, 512, 64)),
                sweep=((1, 32, 1, 128),),
                ragged={(1, 8, 512, 126): (1, 8, 512, 128)},
            )
        ],
    }
    targets = {
        "GPU": [
            Target("4 x 32 and 4 x 8 heads of 4096 x 128", "share 0.95", 0.95, share(lambda case: case in LLAMA)),
            Target("4 x 32 and 4 x 8 heads of 4096 x 128", "faster than the best peer", 1,
                   best_peer(lambda case: case in LLAMA)),
        ]
    }  # fmt: skip

    def inputs(self, size):
        *_, length, width = size
        return [size, (length, width // 2), (length, width // 2)]

    def torch_formula(self, case):
        import torch

        def formula(x, cos, sin):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return formula

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(msops.rotary_embedding), "MindSpore": OfFunction(composed)}
