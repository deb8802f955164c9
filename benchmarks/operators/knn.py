"""Benchmarks the search of the 16 nearest points. A size is (clouds, points, queries)."""

import numpy as np
from mindspore import ops

import msops
from test_knn import TestKNN

from .. import pointnet2
from ..benchmark import Benchmark, OfFunction
from ..figures import Target, times_faster

K = 16


class KNN(Benchmark):
    card = TestKNN()
    sizes = pointnet2.SEARCHES
    cell_sizes = {"GPU": ((32, 1024, 512), (1, 16384, 4096)), "CPU": ((2, 1024, 512), (1, 16384, 1024))}
    targets = {
        "GPU": [
            Target(f"{case}, forward", "20 times faster than torch", 20,
                   times_faster("torch", "kernel", direction="forward", case=case))
            for case in ("16 x 2^14 x 2^12", "1 x 2^17 x 2^14")
        ],
        "CPU": [
            Target("16384, 4096 queries, forward", "10 times faster than NumPy", 10,
                   times_faster("NumPy", "kernel", direction="forward", case="1 x 2^14 x 2^12")),
            Target("whole Cells", "10 times faster than MindSpore", 10,
                   times_faster("MindSpore", "graph", "pynative", case="1 x 2^14 x 2^10")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        clouds, points, queries = size
        return [(clouds, points, 3), (clouds, queries, 3)]

    def index_below(self, size):
        return size[1]

    def settings(self, size):
        return {"k": K}

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("dist",))]

    def numpy_formula(self, case):
        return nearest if case.direction == "forward" else self.card.formulas[1]

    def torch_formula(self, case):
        import torch

        if case.direction == "backward":
            return None  # cdist's gradient in torch 2.11 accesses memory illegally for the largest sizes

        def find(xyz, new_xyz):
            dist, idx = torch.cdist(new_xyz.float(), xyz.float()).topk(K, largest=False)
            return idx, dist.to(xyz.dtype)

        return find

    def networks(self, size, dtype, device):
        def find(xyz, new_xyz):
            offsets = ops.expand_dims(new_xyz, 2) - ops.expand_dims(xyz, 1)
            squares, idx = ops.topk(-(offsets * offsets).sum(-1), K)
            return idx, ops.sqrt(-squares)

        return {"msops": msops.KNN(K, return_distances=True), "MindSpore": OfFunction(find)}


def nearest(xyz, new_xyz):
    idx = np.empty((*new_xyz.shape[:2], K), np.int32)
    dist = np.empty(idx.shape, xyz.dtype)
    for cloud, points in enumerate(xyz):
        for m, center in enumerate(new_xyz[cloud]):
            offsets = (points - center).astype(np.float32)
            squares = (offsets * offsets).sum(-1)
            few = np.argpartition(squares, K)[:K]
            idx[cloud, m] = few = few[squares[few].argsort(kind="stable")]
            dist[cloud, m] = np.sqrt(squares[few])
    return idx, dist
