"""Benchmarks the writes of new rows into a cache of blocks. A size is (tokens, heads, features, blocks, rows of each):
8 heads of 128 features as in Llama-3.1-8B, in blocks of 16 rows."""

import math

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import msops
from test_write_cache import TestWriteCache, case

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share, times_faster

MANY, SOME = (8192, 8, 128, 16384, 16), (1024, 8, 128, 16384, 16)
SMALL = (1024, 2, 64, 512, 16)


class Written(nn.Cell):
    """Writes rows into a Parameter by a function of (cache, rows, slots)."""

    def __init__(self, function, shape, dtype):
        super().__init__()
        self.cache = Parameter(Tensor(np.zeros(shape, dtype)), requires_grad=False, name="cache")
        self.function = function

    def construct(self, rows, slots):
        self.function(self.cache, rows, slots)
        return slots


class WriteCache(Benchmark):
    card = TestWriteCache()
    trains = False
    sizes = {
        "GPU": [Sizes(named=(SOME, MANY), sweep=((64, 8, 128, 16384, 16), (2048, 8, 128, 16384, 16)))],
        "CPU": [Sizes(named=(SMALL,), sweep=((8, 2, 64, 512, 16),))],
    }
    cell_sizes = {"GPU": (SOME,), "CPU": (SMALL,)}
    targets = {
        "GPU": [Target("1024 tokens and more", "share 0.8", 0.8, share(lambda case: case in (by(SOME), by(MANY))))],
        "CPU": [Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph"))],
    }

    def inputs(self, size):
        tokens, heads, features, blocks, block_size = size
        return case(blocks, block_size, tokens, heads, features)[0]

    def bytes(self, case, dtype):
        """Counts the rows alone, each of which is read and written."""
        return 2 * math.prod(case.inputs[1]) * (2 if dtype == "float16" else 4)

    def contents(self, name, size):
        """Returns slots in no order, each once."""
        if name != "slots":
            return None
        return np.random.default_rng(0).permutation(size[3] * size[4])[: size[0]].astype(np.int32)

    def numpy_formula(self, case):
        def write(cache, rows, slots):
            cache.reshape(-1, *cache.shape[2:])[slots] = rows
            return (np.ones(len(slots), np.int32),)

        return write

    def torch_formula(self, case):
        def write(cache, rows, slots):
            return cache.flatten(0, 1).index_copy_(0, slots.long(), rows)

        return write

    def cell_inputs(self, size):
        return self.inputs(size)[1:]

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32"]

    def index_below(self, size):
        return size[3] * size[4]

    def networks(self, size, dtype, device):
        """Compares with ScatterUpdate, whose Parameter has an axis of rows in place of blocks."""
        shape = self.inputs(size)[0]
        flat = (shape[0] * shape[1], *shape[2:])
        update = ops.ScatterUpdate()

        def write(cache, rows, slots):
            return update(cache, slots, rows)

        return {"msops": Written(msops.write_cache, shape, dtype), "MindSpore": Written(write, flat, dtype)}
