"""Benchmarks sums over every other axis. The operator serves patch_mindspore alone.

A size is (rows, columns), of which the larger one is summed away: rows of a bias's gradient, or long rows.
"""

from mindspore import ops

from msops.operators.reduce import reduce
from test_reduce import Reduce as Card

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer, share


def first_of(size):
    return size[0] >= size[1]


class Reduce(Benchmark):
    card = Card()
    sizes = {
        "GPU": [
            Sizes(named=((32768, 3072),), sweep=((16384, 1024),), ragged={(32768, 3071): (32768, 3072)}),
            Sizes(named=((4096, 4097), (1024, 16384)), sweep=((2**20, 3), (1, 2**24))),
        ],
        "CPU": [Sizes(named=((4096, 512), (512, 4096)))],
    }
    targets = {
        "GPU": [
            Target("32768 x 3072", "share 0.8", 0.8, share("2^15 x 3072")),
            Target("32768 x 3072", "not slower than the best peer", 1, best_peer("2^15 x 3072")),
        ]
    }
    trains = False

    def inputs(self, size):
        return [size]

    def settings(self, size):
        return {"operation": "sum", "first": first_of(size)}

    def torch_formula(self, case):
        axis = 0 if first_of(case.size) else 1
        return lambda x: x.sum(axis)

    def networks(self, size, dtype, device):
        first = first_of(size)

        def reduced(x):
            return reduce(x, "sum", first)

        def composed(x):
            return ops.reduce_sum(x, 0 if first else 1)

        return {"msops": OfFunction(reduced), "MindSpore": OfFunction(composed)}
