"""Benchmarks the choice between two tensors with broadcasting, which serves patch_mindspore alone.

A size is (layout, shape of the result).
"""

from mindspore import ops

from msops.operators.select import select
from test_select import Select as Card

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer

LAYOUTS = "same", "masked fill", "mask of columns"
LARGE, MIDDLE, SMALL = (2**14, 2**10), (2**10, 2**10), (2**8, 2**10)


def of_shape(*shapes):
    return tuple((layout, shape) for shape in shapes for layout in LAYOUTS)


class Select(Benchmark):
    card = Card()
    sizes = {
        "GPU": [Sizes(named=of_shape(LARGE), sweep=of_shape(MIDDLE, SMALL))],
        "CPU": [Sizes(named=of_shape(SMALL))],
    }
    trains = False
    targets = {
        "GPU": [
            Target("16384 x 1024", "not slower than the best peer", 1, best_peer(lambda case: "2^14 x 2^10" in case)),
        ]
    }

    def describe(self, size):
        layout, shape = size
        return f"{by(shape)}, {layout}"

    def inputs(self, size):
        layout, (rows, columns) = size
        shape = rows, columns
        others = {
            "same": (shape, shape, shape),
            "masked fill": (shape, (), shape),
            "mask of columns": ((1, columns), shape, shape),
        }
        return list(others[layout])

    def cell_dtypes(self, size, dtype):
        return ["bool", dtype, dtype]

    def torch_formula(self, case):
        import torch

        return torch.where

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(select), "MindSpore": OfFunction(ops.where)}
