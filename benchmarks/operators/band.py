"""Benchmarks the upper triangles of square matrices. The operator serves patch_mindspore alone. A size is the shape."""

from mindspore import ops

from msops.operators.band import band
from test_band import Band as Card

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer


def upper(x):
    return band(x, True, 0)


class Band(Benchmark):
    card = Card()
    sizes = {
        "GPU": [
            Sizes(named=((4096, 4096), (64, 512, 512)), sweep=((2048, 2048),), ragged={(4095, 4097): (4096, 4096)})
        ],
        "CPU": [Sizes(named=((1024, 1024),))],
    }
    targets = {"GPU": [Target("4096 x 4096", "not slower than the best peer", 1, best_peer("2^12 x 2^12"))]}

    def inputs(self, size):
        return [size]

    def settings(self, size):
        return {"upper": True}

    def torch_formula(self, case):
        import torch

        return torch.triu

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(upper), "MindSpore": OfFunction(ops.triu)}
