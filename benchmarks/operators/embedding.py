"""Benchmarks the rows of a table, as the vectors of tokens. A size is (places, rows, columns)."""

from mindspore import ops

import msops
from test_embedding import TestEmbedding, case

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, times_faster

SMOLLM2, LLAMA = (49152, 576), (128256, 2048)


class Embedding(Benchmark):
    card = TestEmbedding()
    sizes = {
        "GPU": [
            Sizes(
                named=((32768, *SMOLLM2), (8192, *LLAMA)),
                sweep=((64, *SMOLLM2), (32768, 2, 768)),
                ragged={(32767, 49151, 575): (32768, *SMOLLM2)},
            )
        ],
        "CPU": [Sizes(named=((2048, *SMOLLM2), (512, 32000, 512)), sweep=((64, 1000, 64),))],
    }
    targets = {
        "GPU": [Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph"))],
        "CPU": [Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph"))],
    }

    def inputs(self, size):
        return case(*size)[0]

    def index_below(self, size):
        return size[1]

    def cell_dtypes(self, size, dtype):
        return ["int32", dtype]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(unread=1)]

    def torch_formula(self, case):
        import torch

        return lambda ids, weight: torch.nn.functional.embedding(ids, weight)

    def networks(self, size, dtype, device):
        return {
            "msops": OfFunction(msops.embedding),
            "MindSpore": OfFunction(lambda ids, weight: ops.gather(weight, ids, 0)),
        }
