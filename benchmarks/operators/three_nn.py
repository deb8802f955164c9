"""Benchmarks the search of the three nearest points. A size is (clouds, unknown points, known points)."""

import numpy as np
from mindspore import ops

import msops
from test_three_nn import TestThreeNN

from ..benchmark import Benchmark, OfFunction
from ..figures import Target, times_faster
from ..pointnet2 import SEARCHES, THEIRS, PointNet2


class ThreeNN(PointNet2, Benchmark):
    card = TestThreeNN()
    sizes = SEARCHES
    cell_sizes = {"GPU": ((32, 1024, 512), (1, 16384, 4096)), "CPU": ((2, 1024, 512), (1, 4096, 4096))}
    targets = {
        "GPU": [
            Target("32 x 1024, 512 known", f"4 times faster than {THEIRS}", 4,
                   times_faster(THEIRS, "kernel", case="32 x 2^10 x 512")),
            Target("16 x 16384, 4096 known", f"50 times faster than {THEIRS}", 50,
                   times_faster(THEIRS, "kernel", case="16 x 2^14 x 2^12")),
            Target("131072, 16384 known", f"500 times faster than {THEIRS}", 500,
                   times_faster(THEIRS, "kernel", case="1 x 2^17 x 2^14")),
        ],
        "CPU": [
            Target("16384, 4096 known, forward", "10 times faster than NumPy", 10,
                   times_faster("NumPy", "kernel", direction="forward", case="1 x 2^14 x 2^12")),
            Target("whole Cells", "10 times faster than MindSpore", 10,
                   times_faster("MindSpore", "graph", "pynative", case="1 x 2^12 x 2^12")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        clouds, unknown, known = size
        return [(clouds, unknown, 3), (clouds, known, 3)]

    def index_below(self, size):
        return size[2]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("dist",))]

    def numpy_formula(self, case):
        return nearest if case.direction == "forward" else self.card.formulas[1]

    def torch_formula(self, case):
        import torch

        gradient = case.direction == "backward"

        def find(unknown, known):
            distances = torch.cdist(unknown.float(), known.float(), compute_mode="donot_use_mm_for_euclid_dist")
            dist, idx = distances.topk(3, largest=False)
            return (dist.to(unknown.dtype),) if gradient else (dist.to(unknown.dtype), idx)

        return find

    def theirs(self, case, extension, unknown, known):
        return extension.three_nn(unknown, known)

    def networks(self, size, dtype, device):
        def find(unknown, known):
            offsets = ops.expand_dims(unknown, 2) - ops.expand_dims(known, 1)
            squares, idx = ops.topk(-(offsets * offsets).sum(-1), 3)
            return ops.sqrt(-squares), idx

        return {"msops": msops.ThreeNN(), "MindSpore": OfFunction(find)}


def nearest(unknown, known):
    idx = np.empty(unknown.shape, np.int32)
    dist = np.empty(unknown.shape, unknown.dtype)
    for cloud, points in enumerate(known):
        for n, center in enumerate(unknown[cloud]):
            offsets = (points - center).astype(np.float32)
            squares = (offsets * offsets).sum(-1)
            few = np.argpartition(squares, 3)[:3]
            idx[cloud, n] = few = few[squares[few].argsort(kind="stable")]
            dist[cloud, n] = np.sqrt(squares[few])
    return dist, idx
