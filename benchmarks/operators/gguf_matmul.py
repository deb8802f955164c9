"""Benchmarks products with weights that lie in blocks as in GGUF files. A size is (rows of x, K, M, kind): those of
Llama-3-8B's layers. The peer `dense` multiplies by the same numbers, unpacked before to the dtype of x, and so does
NumPy."""

import functools
import math

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import msops
from blocks import dequantized, random_blocks
from test_gguf_matmul import TestGgufMatmul, case

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster

QKV, OUT, UP, DOWN = (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)
ONE_ROW = tuple((1, *UP, kind) for kind in ("Q4_K", "Q8_0", "Q6_K"))
MANY = (512, *UP, "Q4_K")
CPU_ONE, CPU_MANY = tuple((1, *OUT, kind) for kind in ("Q4_0", "Q8_0", "Q4_K")), (64, *OUT, "Q4_0")
REPEATED = 256  # rows of a weight, which are repeated


def name(size):
    rows, deep, columns, kind = size
    return f"{rows} x {deep} x {columns} {kind}"


@functools.lru_cache(4)
def blocks_of(size):
    _, deep, columns, kind = size
    return np.resize(random_blocks(0, kind, min(columns, REPEATED), deep), case(*size)[0][1])


@functools.lru_cache(4)
def weight_of(size):
    _, deep, columns, kind = size
    return np.resize(dequantized(blocks_of(size)[:REPEATED], kind), (columns, deep))


class Dense(nn.Cell):
    """Multiplies by the unpacked weight."""

    def __init__(self, size, dtype):
        super().__init__()
        self.weight = Parameter(Tensor(weight_of(size), dtype), name="weight", requires_grad=False)
        self.multiply = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.multiply(x, self.weight)


class GgufMatmul(Benchmark):
    card = TestGgufMatmul()
    compiled = False
    trains = False
    sizes = {
        "GPU": [
            Sizes(
                named=(*ONE_ROW, (1, *DOWN, "Q4_K"), (1, *OUT, "Q4_K"), (8, *UP, "Q4_K"), MANY),
                sweep=(
                    *((1, *UP, kind) for kind in ("Q4_0", "Q4_1", "Q5_K")),
                    (1, *QKV, "Q4_K"),
                    *((rows, *UP, "Q4_K") for rows in (16, 64, 128, 2048)),
                    (512, *UP, "Q8_0"),
                ),
            )
        ],
        "CPU": [Sizes(named=(*CPU_ONE, CPU_MANY), sweep=tuple((1, *OUT, kind) for kind in ("Q4_1", "Q5_K", "Q6_K")))],
    }
    cell_sizes = {"GPU": (ONE_ROW[0],), "CPU": (CPU_ONE[0],)}
    targets = {
        "GPU": [
            *(Target(f"one row, {size[3]}", "share 0.75", 0.75,
                     share(name(size), direction="forward", dtype="float16")) for size in ONE_ROW),
            Target("512 rows", "0.6 of the dense product", 0.6,
                   times_faster("dense", "kernel", case=name(MANY), direction="forward", dtype="float16")),
        ],
        "CPU": [
            *(Target(f"one row, {size[3]}", "1.3 times faster than NumPy's product in float32", 1.3,
                     times_faster("NumPy", "kernel", case=name(size), direction="forward", dtype="float32"))
              for size in CPU_ONE),
            Target("64 rows", "0.7 of NumPy's product in float32", 0.7,
                   times_faster("NumPy", "kernel", case=name(CPU_MANY), direction="forward", dtype="float32")),
        ],
    }  # fmt: skip

    def describe(self, size):
        return name(size)

    def inputs(self, size):
        return case(*size)[0]

    def settings(self, size):
        return case(*size)[1]

    def contents(self, name, size):
        return blocks_of(size) if name == "blocks" else None

    def bytes(self, case, dtype):
        """Counts bytes of the weight as such."""
        numbers = sum(math.prod(shape) for shape in (case.inputs[0], *case.results))
        return math.prod(case.inputs[1]) + numbers * (2 if dtype == "float16" else 4)

    def flops(self, case, direction):
        """Few rows are bounded by the weight's bytes."""
        rows, deep, columns, _ = self.size_of(case)
        return 2 * rows * deep * columns if rows > 64 else None

    def numpy_formula(self, case):
        weight = weight_of(case.size)

        def formula(x, blocks):
            return x.astype(np.float32) @ (weight.T if case.direction == "forward" else weight)

        return formula

    def torch_formula(self, case):
        return None

    def prepared_peers(self, case, like):
        return {"dense": functools.partial(self.dense, case)}

    def dense(self, case, x, blocks):
        import torch

        part = torch.from_numpy(weight_of(case.size)[:REPEATED]).to(x)
        weight = part.repeat(-(-case.size[2] // REPEATED), 1)[: case.size[2]].contiguous()
        return (lambda: x @ weight.T) if case.direction == "forward" else (lambda: x @ weight)

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        _, deep, columns, kind = size
        net = msops.GGUFMatmul(deep, columns, kind)
        net.blocks.set_data(Tensor(blocks_of(size)))
        return {"msops": net, "MindSpore": Dense(size, getattr(mindspore, dtype))}
