"""Benchmarks copies of tensors whose axes are permuted. The operator serves patch_mindspore alone.

A size is (rows, columns) of a matrix, or (batch, rows, columns) of several, which are transposed, or (batch, steps,
heads, features), of which steps and heads change places.
"""

from mindspore import ops

from msops.operators.strided_copy import strided_copy
from test_strided_copy import StridedCopy as Card, permuted

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer, share

ORDERS = {2: (1, 0), 3: (0, 2, 1), 4: (0, 2, 1, 3)}  # of the axes, by their number


class StridedCopy(Benchmark):
    card = Card()
    sizes = {
        "GPU": [
            Sizes(named=((4096, 4096), (8, 1024, 16, 128)), sweep=((2048, 2048),), ragged={(4095, 4097): (4096, 4096)}),
            Sizes(named=((64, 256, 1024),), sweep=((16, 3, 65536), (64, 1024, 256))),
        ],
        "CPU": [Sizes(named=((512, 1024), (2, 128, 16, 128)), sweep=((4, 64, 256),))],
    }
    targets = {
        "GPU": [
            Target("4096 x 4096", "share 0.8", 0.8, share("2^12 x 2^12")),
            Target("8 x 1024 x 16 x 128", "share 0.85", 0.85, share("8 x 2^10 x 16 x 128")),
            Target("4096 x 4096", "not slower than the best peer", 1, best_peer("2^12 x 2^12")),
        ]
    }
    trains = False

    def inputs(self, size):
        return [size]

    def settings(self, size):
        return permuted(size, *ORDERS[len(size)])[1]

    def cases(self, size):
        forward, _ = super().cases(size)
        yield forward  # torch's gradient of a permutation is a view

    def torch_formula(self, case):
        order = ORDERS[len(case.size)]
        return lambda x: x.permute(order).contiguous()

    def networks(self, size, dtype, device):
        order, settings = ORDERS[len(size)], self.settings(size)
        shape, stride = settings["shape"], settings["stride"]

        def copied(x):
            return strided_copy(x, shape, stride)

        def composed(x):
            return ops.transpose(x, order).contiguous()

        return {"msops": OfFunction(copied), "MindSpore": OfFunction(composed)}
