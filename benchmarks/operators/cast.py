"""Benchmarks casts, which serve patch_mindspore alone. A size is (dtype of the result, shape)."""

import mindspore
from mindspore import ops

from msops.operators.cast import operators
from test_cast import Cast as Card

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer, share

LARGE, SMALL = ("bool", (2**14, 2**10)), ("bool", (2**8, 2**10))


class Cast(Benchmark):
    card = Card()
    sizes = {
        "GPU": [
            Sizes(named=(LARGE,), sweep=(("int32", (2**14, 2**10)), SMALL), ragged={("bool", (2**14, 1023)): LARGE})
        ],
        "CPU": [Sizes(named=(SMALL,))],
    }
    trains = False
    targets = {
        "GPU": [
            Target("16384 x 1024", "share 0.9", 0.9, share(lambda case: "2^14 x 2^10" in case)),
            Target("16384 x 1024", "not slower than the best peer", 1, best_peer(lambda case: "2^14 x 2^10" in case)),
        ]
    }

    def describe(self, size):
        return f"to {size[0]}, {by(size[1])}"

    def inputs(self, size):
        return [size[1]]

    def settings(self, size):
        return {"to": size[0]}

    def torch_formula(self, case):
        import torch

        return lambda x: x.to(getattr(torch, case.size[0]))

    def networks(self, size, dtype, device):
        kind = {"bool": mindspore.bool_}.get(size[0], getattr(mindspore, size[0], None))
        return {"msops": OfFunction(operators(size[0])), "MindSpore": OfFunction(lambda x: ops.cast(x, kind))}
