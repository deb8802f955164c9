"""Benchmarks the numbers of weights that lie in blocks as in GGUF files. A size is (rows, numbers of a row, kind, dtype
of the results), such as one matrix of Llama-3-8B's."""

import math

import numpy as np

from blocks import random_blocks
from test_gguf_dequantize import TestGgufDequantize, case

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share

LARGE = tuple((14336, 4096, kind, "float16") for kind in ("Q4_K", "Q8_0"))
CPU_LARGE = tuple((1024, 4096, kind, "float32") for kind in ("Q4_0", "Q4_K"))


def name(size):
    rows, columns, kind, to = size
    return f"{rows} x {columns} {kind} {to}"


class GgufDequantize(Benchmark):
    card = TestGgufDequantize()
    compiled = trains = False
    cell_sizes = {"GPU": (), "CPU": ()}  # MindSpore has nothing like it
    sizes = {
        "GPU": [Sizes(named=LARGE, sweep=tuple((14336, 4096, kind, "float16") for kind in ("Q4_0", "Q5_K", "Q6_K")))],
        "CPU": [Sizes(named=CPU_LARGE, sweep=((1024, 4096, "Q6_K", "float32"),))],
    }
    targets = {
        "GPU": [Target("a matrix", "share 0.6", 0.6, share(lambda case: case in [*map(name, LARGE)]))],
        "CPU": [Target("a matrix", "share 0.2", 0.2, share(lambda case: case in [*map(name, CPU_LARGE)]))],
    }

    def describe(self, size):
        return name(size)

    def inputs(self, size):
        rows, *rest = size
        return case((rows,), *rest)[0]

    def settings(self, size):
        rows, *rest = size
        return case((rows,), *rest)[1]

    def contents(self, name, size):
        rows, columns, kind, _ = size
        return np.resize(random_blocks(0, kind, min(rows, 256), columns), self.inputs(size)[0])

    def bytes(self, case, dtype):
        """Counts bytes of the weight as such, and the results in their own dtype."""
        return math.prod(case.inputs[0]) + math.prod(case.results[0]) * np.dtype(case.size[3]).itemsize

    def torch_formula(self, case):
        return None
