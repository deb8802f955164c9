"""Benchmarks softmax. A size is (rows, columns), or (sets, length, columns) along the axis in the middle."""

from mindspore import ops

import msops
from test_softmax import TestSoftmax

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer, share

LARGE = ("2^15 x 2^12", "2^12 x 2^15")


class Softmax(Benchmark):
    card = TestSoftmax()
    sizes = {
        "GPU": [
            Sizes(
                named=((32768, 4096), (4096, 32768), (16, 64, 2**16)),
                sweep=((64, 4096), (65536, 128), (2**20, 10), (64, 1000, 196)),
                ragged={(32768, 4095): (32768, 4096), (16, 63, 2**16 - 1): (16, 64, 2**16)},
            )
        ],
        "CPU": [
            Sizes(
                named=((512, 2048), (4, 21, 2**14)),
                sweep=((4, 1000), (1000, 10), (1000, 100)),
                ragged={(512, 2047): (512, 2048)},
            )
        ],
    }
    targets = {
        "GPU": [
            Target("rows of 4096 and 32768", "share 0.9", 0.9, share(lambda case: case in LARGE)),
            Target("rows of 4096 and 32768", "not slower than the best peer", 1, best_peer(lambda case: case in LARGE)),
            Target("16 x 64 x 2^16", "share 0.85", 0.85, share("16 x 64 x 2^16")),
        ]
    }

    def inputs(self, size):
        return [size]

    def settings(self, size):
        return dict(axis=1)

    def torch_formula(self, case):
        import torch

        return lambda x: torch.softmax(x, 1)

    def library_formulas(self, case):
        if len(case.size) > 2:  # they take the last axis alone
            return {}
        return {
            "Liger": lambda liger, x: liger.LigerSoftmaxFunction.apply(x),
            "quack": lambda quack, x: quack.softmax(x),
        }

    def networks(self, size, dtype, device):
        return {"msops": msops.Softmax(1), "MindSpore": OfFunction(along_second_axis)}


def along_second_axis(x):
    return ops.softmax(x, 1)
