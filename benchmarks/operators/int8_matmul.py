"""Benchmarks products of int8. A size is (rows, terms, outputs): those of Llama 8B."""

import mindspore
import numpy as np
from mindspore import nn, ops

import msops
from test_int8_matmul import TestInt8Matmul, case

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share, times_faster

MANY, ONE, SIXTEEN = (2048, 4096, 4096), (1, 4096, 28672), (16, 4096, 28672)
CPU_MANY, CPU_ONE = (64, 4096, 4096), (1, 4096, 4096)


class OfCodes(nn.Cell):
    """Multiplies codes of rows, or their numbers in a floating dtype, by a matrix."""

    def __init__(self, terms, outputs, dtype, are_codes):
        super().__init__()
        weight = np.random.default_rng(0).integers(-128, 128, (outputs, terms), np.int8)
        kind = mindspore.int8 if are_codes else dtype
        self.weight = mindspore.Parameter(mindspore.Tensor(weight).astype(kind), requires_grad=False)
        self.scale = mindspore.Parameter(ops.full((outputs,), 1e-3, dtype=mindspore.float32), requires_grad=False)
        self.are_codes, self.dtype, self.multiply = are_codes, dtype, ops.MatMul(transpose_b=True)

    def construct(self, x):
        if self.are_codes:
            return msops.int8_matmul(ops.cast(x, mindspore.int8), self.weight, self.scale, dtype=self.dtype)
        return self.multiply(x, self.weight)


class Int8Matmul(Benchmark):
    card = TestInt8Matmul()
    trains = False
    compiled = False
    sizes = {
        "GPU": [
            Sizes(
                named=(MANY, ONE, SIXTEEN),
                sweep=(*((rows, 4096, 4096) for rows in (1, 16, 64, 256)), (8192, 4096, 14336)),
                ragged={(2047, 4095, 4095): MANY},
            )
        ],
        "CPU": [Sizes(named=(CPU_MANY, CPU_ONE), ragged={(63, 4095, 4095): CPU_MANY})],
    }
    cell_sizes = {"GPU": (MANY, ONE), "CPU": (CPU_MANY, CPU_ONE)}
    targets = {
        "GPU": [
            Target("2048 rows", "0.8 of torch._int_mm", 0.8,
                   times_faster("torch._int_mm", "kernel", case=by(MANY), dtype="float16")),
            Target("1 row", "share 0.75", 0.75, share(by(ONE), dtype="float16")),
        ],
        "CPU": [
            Target("whole Cells, 1 row", "as fast as MindSpore's float32", 1,
                   times_faster("MindSpore", "graph", case=by(CPU_ONE), dtype="float32")),
            Target("whole Cells, 64 rows", "0.7 of MindSpore's float32", 0.7,
                   times_faster("MindSpore", "graph", case=by(CPU_MANY), dtype="float32")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        return case(*size, optional="x_scale")[0]

    def settings(self, size):
        return case(*size, optional="x_scale")[1]

    def contents(self, name, size):
        shapes = dict(zip(("x", "weight", "scale", "x_scale"), self.inputs(size)))
        rng = np.random.default_rng(len(name))
        if name in ("x", "weight"):
            return rng.integers(-128, 128, shapes[name], np.int8)
        return (1e-3 if name == "scale" else 1) * rng.random(shapes[name], np.float32)

    def flops(self, case, direction):
        """Few rows are bounded by the weight's bytes."""
        rows, terms, outputs = self.size_of(case)
        return 2 * rows * terms * outputs if rows > 64 else None

    def torch_formula(self, case):
        def formula(x, weight, scale, x_scale):
            return (x.double() @ weight.double().T * scale * x_scale[:, None]).half()

        return formula

    def prepared_peers(self, case, like):
        """PyTorch's product, of cuBLASLt, gives the sums alone."""
        import torch

        rows, terms, outputs = case.size
        if not like.is_cuda or rows <= 16 or terms % 8 or outputs % 8 or not hasattr(torch, "_int_mm"):
            return {}

        def prepare(x, weight, scale, x_scale):
            return lambda: torch._int_mm(x, weight.T)

        return {"torch._int_mm": prepare}

    def networks(self, size, dtype, device):
        _, terms, outputs = size
        kind = getattr(mindspore, dtype)
        return {"msops": OfCodes(terms, outputs, kind, True), "MindSpore": OfCodes(terms, outputs, kind, False)}

    def cell_inputs(self, size):
        return self.inputs(size)[:1]
