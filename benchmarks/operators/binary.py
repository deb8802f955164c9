"""Benchmarks functions of two tensors with broadcasting, which serve patch_mindspore alone.

A size is (function, layout of the second tensor, shape of the first one).
"""

import mindspore
import numpy as np
from mindspore import Tensor, ops

from msops.operators.binary import SCALED_SUMS, operators
from test_binary import Binary as Card

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer, share

LAYOUTS = (
    ("mul", "same"),
    ("add", "row"),
    ("sub", "column"),
    ("real_div", "number"),
    ("pow", "number"),
    ("add_ext", "same"),
    ("mul", "row of each image"),
)
LARGE, MIDDLE, SMALL = (2**14, 2**10), (2**10, 2**10), (2**8, 2**10)
IMAGES = 16
NAMES = {"real_div": "div", "add_ext": "add"}  # of functions that torch and MindSpore call otherwise


def of_shape(*shapes):
    return tuple((*layout, shape) for shape in shapes for layout in LAYOUTS)


def scaled_sum(x, y):
    return operators("add_ext")(x, y, Tensor(0.5, mindspore.float32))


def composed_sum(x, y):
    return x + 0.5 * y


class Binary(Benchmark):
    card = Card()
    sizes = {
        "GPU": [
            Sizes(
                named=of_shape(LARGE),
                sweep=of_shape(MIDDLE, SMALL),
                ragged={("add", "row", (2**14, 1023)): ("add", "row", LARGE)},
            )
        ],
        "CPU": [Sizes(named=of_shape(SMALL))],
    }
    trains = False
    targets = {
        "GPU": [
            Target("16384 x 1024", "share 0.9", 0.9, share(lambda case: "2^14 x 2^10" in case)),
            Target("16384 x 1024", "not slower than the best peer", 1, best_peer(lambda case: "2^14 x 2^10" in case)),
            Target("256 x 1024", "not slower than the best peer", 1, best_peer(lambda case: "256 x 2^10" in case)),
        ]
    }

    def describe(self, size):
        function, layout, shape = size
        return f"{function} {by(shape)}, {layout}"

    def inputs(self, size):
        function, layout, (rows, columns) = size
        alpha = [()] * (function in SCALED_SUMS)
        if layout == "row of each image":
            return [(IMAGES, rows // IMAGES, columns), (IMAGES, 1, columns), *alpha]
        other = {"same": (rows, columns), "row": (columns,), "column": (rows, 1), "number": ()}[layout]
        return [(rows, columns), other, *alpha]

    def settings(self, size):
        return {"function": size[0]}

    def contents(self, name, size):
        return np.array(2.0) if (size[0], name) == ("pow", "y") else None

    def torch_formula(self, case):
        import torch

        function = getattr(torch, NAMES.get(case.size[0], case.size[0]))
        # torch takes alpha from the host
        return (lambda x, y, alpha: x + alpha * y) if case.size[0] in SCALED_SUMS else function

    def cell_inputs(self, size):
        return self.inputs(size)[:2]

    def networks(self, size, dtype, device):
        function = size[0]
        if function in SCALED_SUMS:
            return {"msops": OfFunction(scaled_sum), "MindSpore": OfFunction(composed_sum)}
        theirs = getattr(ops, NAMES.get(function, function))
        return {"msops": OfFunction(operators(function)), "MindSpore": OfFunction(theirs)}
