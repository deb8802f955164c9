"""Benchmarks group normalization in 32 groups followed by silu, as in diffusion models. A size is the shape of x."""

import mindspore
from mindspore import nn, ops

import msops
from test_group_norm import TestGroupNorm

from ..benchmark import Benchmark, Sizes
from ..figures import Target, best_peer, share

GROUPS = 32


class Theirs(nn.Cell):
    """Holds MindSpore's norm, and computes silu of it."""

    def __init__(self, channels, dtype):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, dtype=dtype)

    def construct(self, x):
        return ops.silu(self.norm(x))


class GroupNorm(Benchmark):
    card = TestGroupNorm()
    sizes = {
        "GPU": [
            Sizes(
                named=((2, 320, 64, 64), (4, 512, 128, 128)),
                sweep=((1, 320, 64, 64), (2, 1280, 16, 16), (2, 2560, 8, 8), (64, 256, 32, 32)),
                ragged={(2, 320, 63, 65): (2, 320, 64, 64)},
            )
        ],
        "CPU": [Sizes(named=((2, 320, 32, 32), (1, 128, 128, 128)), sweep=((1, 640, 8, 8),))],
    }
    targets = {
        "GPU": [
            Target("4 x 512 x 128 x 128", "share 0.9", 0.9, share("4 x 512 x 128 x 128")),
            Target("2 x 320 x 64 x 64", "not slower than the best peer", 1, best_peer("2 x 320 x 64 x 64")),
        ]
    }

    def inputs(self, size):
        return [size, size[1:2], size[1:2]]

    def settings(self, size):
        return dict(num_groups=GROUPS, activation="silu")

    def torch_formula(self, case):
        from torch.nn.functional import group_norm, silu

        return lambda x, weight, bias: silu(group_norm(x, GROUPS, weight, bias, 1e-5))

    def cell_inputs(self, size):
        return [size]

    def networks(self, size, dtype, device):
        kind = getattr(mindspore, dtype)
        ours = msops.GroupNorm(GROUPS, size[1], activation="silu", dtype=kind)
        return {"msops": ours, "MindSpore": Theirs(size[1], kind)}
