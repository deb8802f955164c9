"""Benchmarks the codes of rows. A size is (rows, columns)."""

import mindspore
from mindspore import ops

import msops
from test_quantize_rows import TestQuantizeRows, case

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, share, times_faster

MANY, ONE = (8192, 4096), (1, 4096)


class QuantizeRows(Benchmark):
    card = TestQuantizeRows()
    trains = False
    sizes = {
        "GPU": [Sizes(named=(MANY, (2048, 14336)), sweep=(ONE, (64, 4096)), ragged={(8191, 4095): MANY})],
        "CPU": [Sizes(named=((512, 4096),), sweep=(ONE,), ragged={(511, 4095): (512, 4096)})],
    }
    targets = {
        "GPU": [Target("8192 rows", "share 0.8", 0.8, share("2^13 x 2^12", dtype="float16"))],
        "CPU": [Target("whole Cells", "2 times as fast as MindSpore", 2, times_faster("MindSpore", "graph"))],
    }

    def inputs(self, size):
        return case(*size)[0]

    def settings(self, size):
        return case(*size)[1]

    def torch_formula(self, case):
        import torch

        def formula(x):
            scale = x.float().abs().amax(-1) / 127
            return (x.float() / scale[:, None]).round().to(torch.int8), scale

        return formula

    def networks(self, size, dtype, device):
        def quantize(x):
            y = ops.cast(x, mindspore.float32)
            scale = ops.amax(ops.abs(y), -1) / 127
            return ops.cast(ops.round(y / ops.expand_dims(scale, -1)), mindspore.int8), scale

        return {"msops": OfFunction(msops.quantize_rows), "MindSpore": OfFunction(quantize)}
