"""Benchmarks rows of tables that lie in blocks as in GGUF files. A size is (places, rows, numbers of a row, kind, dtype
of the results): the tables of SmolLM2-135M and Llama-3-8B."""

import math

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import msops
from blocks import dequantized, random_blocks
from test_gguf_embedding import TestGgufEmbedding, case

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share

SMOLLM2, LLAMA = (49152, 576, "Q8_0", "float16"), (128256, 4096, "Q4_K", "float16")
CPU_SIZE = (2048, 49152, 576, "Q8_0", "float32")


def name(size):
    *sizes, kind, to = size
    return f"{' x '.join(map(str, sizes))} {kind} {to}"


class Table(nn.Cell):
    def __init__(self, blocks, kind, dtype):
        super().__init__()
        self.blocks = Parameter(Tensor(blocks), name="blocks", requires_grad=False)
        self.kind, self.dtype = kind, dtype

    def construct(self, ids):
        return msops.gguf_embedding(ids, self.blocks, self.kind, self.dtype)


class Dense(nn.Cell):
    """Takes rows of the unpacked table."""

    def __init__(self, table):
        super().__init__()
        self.table = Parameter(table, name="table", requires_grad=False)

    def construct(self, ids):
        return ops.gather(self.table, ids, 0)


class GgufEmbedding(Benchmark):
    card = TestGgufEmbedding()
    compiled = trains = False
    sizes = {
        "GPU": [Sizes(named=((8192, *LLAMA), (32768, *SMOLLM2)), sweep=((64, *LLAMA),))],
        "CPU": [Sizes(named=(CPU_SIZE,), sweep=((64, 8000, 4096, "Q4_K", "float32"),))],
    }
    targets = {
        "GPU": [Target("8192 places", "share 0.5", 0.5, share(name((8192, *LLAMA))))],
        "CPU": [Target("2048 places", "share 0.2", 0.2, share(name(CPU_SIZE)))],
    }

    def describe(self, size):
        return name(size)

    def inputs(self, size):
        places, *rest = size
        return case((places,), *rest)[0]

    def settings(self, size):
        places, *rest = size
        return case((places,), *rest)[1]

    def index_below(self, size):
        return size[1]

    def contents(self, name, size):
        _, rows, columns, kind, _ = size
        if name != "blocks":
            return None
        return np.resize(random_blocks(0, kind, min(rows, 256), columns), self.inputs(size)[1])

    def bytes(self, case, dtype):
        """Counts the rows that are taken."""
        places, rows, *_, to = case.size
        taken = places * math.prod(case.inputs[1]) // rows
        return 4 * places + taken + math.prod(case.results[0]) * np.dtype(to).itemsize

    def torch_formula(self, case):
        return None

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def cell_dtypes(self, size, dtype):
        return ["int32"]

    def networks(self, size, dtype, device):
        blocks, kind, to = self.contents("blocks", size), size[3], getattr(mindspore, size[4])
        table = Tensor(np.resize(dequantized(blocks[:256], kind), (size[1], size[2])), to)
        return {"msops": Table(blocks, kind, to), "MindSpore": Dense(table)}
