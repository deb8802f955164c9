"""Benchmarks the products of experts. A size is (experts, rows of each, terms, columns), as in DeepSeek-V2-Lite and
Mixtral. With a fifth number, rows are by Zipf's law: expert number e has 1 / e of those of the first."""

import functools

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import msops
from test_grouped_matmul import TestGroupedMatmul, case

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share, times_faster

UP, DOWN = (2048, 2816), (1408, 2048)  # DeepSeek-V2-Lite's layers, of 64 experts
MIXTRAL_UP, MIXTRAL_DOWN = (4096, 28672), (14336, 4096)  # of 8 experts
FEW, MANY, ZIPF = (64, 16, *UP), (64, 256, *UP), (64, 256, *UP, 1)
CPU_FEW, CPU_MANY = (8, 4, 1024, 1408), (8, 64, 1024, 1408)


def sizes_of(size):
    """Returns how many rows each expert has."""
    experts, rows, _, _, *zipf = size
    if not zipf:
        return [rows] * experts
    ends = np.cumsum(1 / np.arange(1, experts + 1))
    return np.diff(np.rint(ends / ends[-1] * rows * experts), prepend=0).astype(int).tolist()


class Loop(nn.Cell):
    """Multiplies each expert's rows by itself."""

    def __init__(self, size, dtype):
        super().__init__()
        experts, _, deep, columns, *_ = size
        self.sizes = tuple(sizes_of(size))
        self.weight = mindspore.Parameter(ops.standard_normal((experts, columns, deep)).astype(dtype), name="weight")
        self.multiply = ops.MatMul(transpose_b=True)

    def construct(self, x):
        outs, first = (), 0
        for expert, rows in enumerate(self.sizes):
            outs += (self.multiply(x[first : first + rows], self.weight[expert]),)
            first += rows
        return ops.concat(outs)


class Grouped(nn.Cell):
    def __init__(self, size, dtype):
        super().__init__()
        experts, _, deep, columns, *_ = size
        self.multiply = msops.GroupedMatmul(experts, deep, columns, transpose_weight=True, dtype=dtype)
        self.sizes = Tensor(sizes_of(size), mindspore.int32)

    def construct(self, x):
        return self.multiply(x, self.sizes)


class GroupedMatmul(Benchmark):
    card = TestGroupedMatmul()
    sizes = {
        "GPU": [
            Sizes(
                named=(FEW, (64, 64, *UP), MANY, ZIPF),
                sweep=(
                    (64, 1024, *UP),
                    *((64, rows, *DOWN) for rows in (16, 256)),
                    *((8, rows, *MIXTRAL_UP) for rows in (16, 256, 1024)),
                    (8, 256, *MIXTRAL_DOWN),
                ),
                ragged={(64, 255, 2047, 2815): MANY},
            )
        ],
        "CPU": [Sizes(named=(CPU_FEW, CPU_MANY), ragged={(8, 63, 1023, 1407): CPU_MANY})],
    }
    cell_sizes = {"GPU": (FEW, MANY), "CPU": (CPU_FEW, CPU_MANY)}
    compiled = False
    targets = {
        "GPU": [
            Target("16 rows each", "share 0.8", 0.8, share(by(FEW), direction="forward", dtype="float16")),
            Target("256 rows each", "0.9 of one product of as many rows", 0.9,
                   times_faster("one matmul", "kernel", case=by(MANY), direction="forward", dtype="float16")),
            Target("Zipf", "0.8 of one product of as many rows", 0.8,
                   times_faster("one matmul", "kernel", case=f"{by(MANY)} Zipf", direction="forward", dtype="float16")),
            Target("float16", "as fast as PyTorch's grouped product in bfloat16", 1,
                   times_faster("torch._grouped_mm", "kernel", dtype="float16")),
        ],
        "CPU": [
            Target("whole Cells, 64 rows each", "0.8 of a loop", 0.8,
                   times_faster("MindSpore", "graph", "pynative", case=by(CPU_MANY), dtype="float32")),
            Target("whole Cells, 4 rows each", "not slower than a loop", 1,
                   times_faster("MindSpore", "graph", "pynative", case=by(CPU_FEW), dtype="float32")),
        ],
    }  # fmt: skip

    def describe(self, size):
        return by(size[:4]) + " Zipf" * (len(size) > 4)

    def shapes_and_settings(self, size):
        return case(tuple(sizes_of(size)), *size[2:4], transpose_weight=True)

    def inputs(self, size):
        return self.shapes_and_settings(size)[0]

    def settings(self, size):
        return self.shapes_and_settings(size)[1]

    def contents(self, name, size):
        return np.array(sizes_of(size)) if name == "group_sizes" else None

    def flops(self, case, direction):
        """Few rows are bounded by the weight's bytes."""
        experts, rows, deep, columns, *_ = self.size_of(case)
        return (2 if direction == "forward" else 4) * experts * rows * deep * columns if rows > 64 else None

    def torch_formula(self, case):
        import torch

        def loop(x, weight, group_sizes):
            parts = zip(x.split(sizes_of(case.size)), weight.unbind())
            return torch.cat([rows @ matrix.T for rows, matrix in parts])

        return loop

    def prepared_peers(self, case, like):
        """The product of all rows with the first matrix computes something else, but shows what is possible where rows
        are so many that the bytes of the other matrices do not count. PyTorch's grouped product takes bfloat16."""
        import torch

        if not like.is_cuda:
            return {}
        peers = {}
        if self.flops(case.name, case.direction):
            peers["one matmul"] = functools.partial(self.one_matmul, case)
        if like.dtype == torch.float16 and hasattr(torch, "_grouped_mm"):
            peers["torch._grouped_mm"] = functools.partial(self.grouped_mm, case)
        return peers

    def one_matmul(self, case, x, weight, group_sizes, *dout):
        matrix = weight[0]
        if case.direction == "forward":
            return lambda: x @ matrix.T
        return lambda: (dout[0] @ matrix, dout[0].T @ x)

    def grouped_mm(self, case, x, weight, group_sizes, *dout):
        import torch

        x, weight, *dout = (tensor.bfloat16() for tensor in (x, weight, *dout))
        ends = group_sizes.cumsum(0, dtype=torch.int32)
        multiply = torch._grouped_mm
        if case.direction == "forward":
            return lambda: multiply(x, weight.transpose(1, 2), offs=ends)
        return lambda: (multiply(dout[0], weight, offs=ends), multiply(dout[0].T, x, offs=ends))

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        kind = getattr(mindspore, dtype)
        return {"msops": Grouped(size, kind), "MindSpore": Loop(size, kind)}
