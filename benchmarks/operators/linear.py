"""Benchmarks linear layers with a bias, which serve patch_mindspore alone. A size is (rows, outputs, terms): those of
BERT and DeiT."""

from mindspore import ops

from msops.operators.linear import linear
from test_linear import Linear as Card

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer

PROJECT, UP, DOWN = (16384, 768, 768), (16384, 3072, 768), (16384, 768, 3072)


class Linear(Benchmark):
    card = Card()
    compiled = False
    trains = False
    sizes = {
        "GPU": [Sizes(named=(PROJECT, UP, DOWN), sweep=((12672, 1152, 384), (4096, 4096, 4096)))],
        "CPU": [Sizes(named=((64, 256, 256),))],
    }
    targets = {
        "GPU": [Target("float16", "not slower than PyTorch", 0.99, best_peer(by(UP), dtype="float16"))],
    }

    def inputs(self, size):
        rows, outputs, deep = size
        return [(rows, deep), (outputs, deep), (outputs,)]

    def flops(self, case, direction):
        rows, outputs, deep = self.size_of(case)
        return 2 * rows * outputs * deep

    def torch_formula(self, case):
        import torch

        return torch.nn.functional.linear

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(linear), "MindSpore": OfFunction(ops.dense)}
