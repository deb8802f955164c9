"""Benchmarks dropout of random elements, by the words that uniform numbers come from.

The operator serves patch_mindspore alone.
"""

from mindspore import Tensor, ops

from msops.operators.random import dropout
from test_random import Random as Card

from ..benchmark import ELEMENTS, Benchmark, OfFunction

P = 0.5


def dropped(x):
    return dropout(x, P, Tensor(1), Tensor(2))


def composed(x):
    return ops.dropout(x, P, True)


class Random(Benchmark):
    card = Card()
    sizes = ELEMENTS

    def settings(self, size):
        return {"draws": "dropout", "p": P}

    def inputs(self, size):
        return [(size,), (), ()]

    def index_below(self, size):
        return 1000

    def cell_inputs(self, size):
        return [(size,)]

    def torch_formula(self, case):
        return None  # its dropout drops others

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(dropped), "MindSpore": OfFunction(composed)}
