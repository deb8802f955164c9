"""Benchmarks products with codes of 4 and 8 bits. A size is (rows, terms, outputs, bits), with groups of 128: the
layers of Llama 8B are qkv, out, gate and up, and down."""

import functools

import mindspore
import numpy as np
from mindspore import nn, ops

import msops
from test_weight_quant_matmul import TestWeightQuantMatmul, case

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share, times_faster

GROUP = 128
QKV, OUT, GATE_UP, DOWN = (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)
ONE, ONE_OF_8, FEW, MANY = (1, *GATE_UP, 4), (1, *GATE_UP, 8), (16, *GATE_UP, 4), (2048, *GATE_UP, 4)
CPU_ONE, CPU_MANY = (1, 4096, 4096, 4), (64, 4096, 4096, 4)


class Dense(nn.Cell):
    """Multiplies by a matrix of the dtype of x."""

    def __init__(self, terms, outputs, dtype):
        super().__init__()
        self.weight = mindspore.Parameter(ops.standard_normal((outputs, terms)).astype(dtype), requires_grad=False)
        self.multiply = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.multiply(x, self.weight)


class WeightQuantMatmul(Benchmark):
    card = TestWeightQuantMatmul()
    sizes = {
        "GPU": [
            Sizes(
                named=(ONE, ONE_OF_8, FEW, MANY),
                sweep=(
                    *((1, *layer, 4) for layer in (QKV, OUT, DOWN)),
                    *((rows, *OUT, bits) for rows in (1, 4, 8, 16, 32, 64, 256, 2048) for bits in (4, 8)),
                ),
                ragged={(1, 4095, 28671, 4): ONE},
            )
        ],
        "CPU": [Sizes(named=(CPU_ONE, CPU_MANY, (1, 4096, 4096, 8)), ragged={(1, 4095, 4095, 4): CPU_ONE})],
    }
    cell_sizes = {"GPU": (ONE, MANY), "CPU": (CPU_ONE, CPU_MANY)}
    trains = False
    compiled = False
    targets = {
        "GPU": [
            Target("1 row", "share 0.8", 0.8, share(lambda text: text.startswith("1 x"), direction="forward",
                                                    dtype="float16")),
            Target("16 rows", "3.2 times as fast as the product of float16", 3.2,
                   times_faster("one matmul", "kernel", case=f"{by(FEW[:3])}, 4 bits", direction="forward",
                                dtype="float16")),
            Target("2048 rows", "0.75 of the product of float16", 0.75,
                   times_faster("one matmul", "kernel", case=f"{by(MANY[:3])}, 4 bits", direction="forward",
                                dtype="float16")),
            Target("4 bits", "1.1 times as fast as tinygemm", 1.1,
                   times_faster("tinygemm", "kernel", direction="forward", dtype="float16")),
        ],
        "CPU": [
            Target("whole Cells, 1 row", "2 times as fast as MindSpore's float32", 2,
                   times_faster("MindSpore", "graph", "pynative", case=f"{by(CPU_ONE[:3])}, 4 bits", dtype="float32")),
            Target("whole Cells, 64 rows", "0.7 of MindSpore's float32", 0.7,
                   times_faster("MindSpore", "graph", "pynative", case=f"{by(CPU_MANY[:3])}, 4 bits",
                                dtype="float32")),
        ],
    }  # fmt: skip

    def describe(self, size):
        return f"{by(size[:3])}, {size[3]} bits"

    def inputs(self, size):
        return case(*size, GROUP)[0]

    def settings(self, size):
        return case(*size, GROUP)[1]

    def contents(self, name, size):
        shapes = dict(zip(("x", "weight", "scale", "zero_point"), self.inputs(size)))
        rng = np.random.default_rng(0)
        if name == "scale":
            return 0.01 * rng.random(shapes[name], np.float32)
        if name == "weight":
            return rng.integers(0, 256, shapes[name], np.uint8)
        return rng.integers(0, 2 ** size[3], shapes[name], np.uint8) if name == "zero_point" else None

    def flops(self, case, direction):
        """Few rows are bounded by the weight's bytes."""
        rows, terms, outputs, _ = self.size_of(case)
        return 2 * rows * terms * outputs if rows > 64 else None

    def torch_formula(self, case):
        return functools.partial(matrix_product, case.size)

    def prepared_peers(self, case, like):
        """The product with a matrix of the dtype of x reads more, and tinygemm computes in bfloat16."""
        import torch

        if not like.is_cuda or case.direction != "forward":
            return {}
        peers = {"one matmul": functools.partial(one_matmul, case.size)}
        whole = case.size[1] % 1024 == 0 and case.size[2] % 8 == 0
        if like.dtype == torch.float16 and case.size[3] == 4 and whole and hasattr(torch, "_weight_int4pack_mm"):
            peers["tinygemm"] = tinygemm
        return peers

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        _, terms, outputs, bits = size
        kind = getattr(mindspore, dtype)
        return {
            "msops": msops.WeightQuantMatmul(terms, outputs, bits, GROUP, dtype=kind),
            "MindSpore": Dense(terms, outputs, kind),
        }


def matrix_of(size, x, weight, scale, zero_point):
    """Returns the matrix that the codes stand for."""
    import torch

    _, terms, outputs, bits = size
    codes = torch.stack([weight & 15, weight >> 4], -1).reshape(outputs, -1)[:, :terms] if bits == 4 else weight
    place = torch.arange(terms, device=x.device) // GROUP
    return ((codes.to(x.dtype) - zero_point.to(x.dtype)[:, place]) * scale[:, place]).to(x.dtype)


def matrix_product(size, x, weight, scale, zero_point):
    return x @ matrix_of(size, x, weight, scale, zero_point).T


def one_matmul(size, x, weight, scale, zero_point):
    matrix = matrix_of(size, x, weight, scale, zero_point)
    return lambda: x @ matrix.T


def tinygemm(x, weight, scale, zero_point):
    import torch

    swapped = weight >> 4 | (weight & 15) << 4  # it has the first code in the upper half
    packed = torch._convert_weight_to_int4pack(swapped, 8)
    # It computes (code - 8) scale + zero.
    zeros = (8 - zero_point.float()) * scale.float()
    both = torch.stack([scale.float(), zeros], -1).transpose(0, 1).contiguous().bfloat16()
    x = x.bfloat16()
    return lambda: torch._weight_int4pack_mm(x, packed, GROUP, both)
