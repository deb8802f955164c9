"""Benchmarks x + y z, where y is a gate of each sample, which serves patch_mindspore alone.

A size is (samples, rows of a sample, columns).
"""

from mindspore import ops

from msops.operators.addcmul import addcmul
from test_addcmul import TestAddcmul

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer

LARGE, MIDDLE, SMALL = (16, 1024, 1024), (4, 1024, 1024), (4, 64, 512)


class Addcmul(Benchmark):
    card = TestAddcmul()
    sizes = {
        "GPU": [Sizes(named=(LARGE,), sweep=(MIDDLE, SMALL), ragged={(16, 1024, 1023): LARGE})],
        "CPU": [Sizes(named=(SMALL,))],
    }
    trains = False
    targets = {
        "GPU": [
            Target("16 x 1024", "not slower than the best peer", 1, best_peer(lambda case: "16 x 2^10 x 2^10" in case))
        ]
    }

    def describe(self, size):
        return by(size)

    def inputs(self, size):
        samples, _, columns = size
        return [size, (samples, 1, columns), size]

    def torch_formula(self, case):
        import torch

        return torch.addcmul

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(addcmul), "MindSpore": OfFunction(ops.addcmul)}
