"""Benchmarks the query of balls. A size is (clouds, points, queries); queries are about as dense as points."""

import numpy as np
from mindspore import ops

import msops
from test_ball_query import TestBallQuery

from ..benchmark import Benchmark, OfFunction
from ..figures import Target, times_faster
from ..pointnet2 import SEARCHES, THEIRS, PointNet2

SAMPLES = 32


class BallQuery(PointNet2, Benchmark):
    card = TestBallQuery()
    sizes = SEARCHES
    cell_sizes = {"GPU": ((32, 1024, 512), (1, 16384, 4096)), "CPU": ((2, 1024, 512), (1, 16384, 1024))}
    headline = (("16 x 2^14 x 2^12", "float32"),)
    targets = {
        "GPU": [
            Target("32 x 1024, 512 queries", f"4 times faster than {THEIRS}", 4,
                   times_faster(THEIRS, "kernel", case="32 x 2^10 x 512")),
            Target("16 x 16384, 4096 queries", f"30 times faster than {THEIRS}", 30,
                   times_faster(THEIRS, "kernel", case="16 x 2^14 x 2^12")),
            Target("131072, 16384 queries", f"300 times faster than {THEIRS}", 300,
                   times_faster(THEIRS, "kernel", case="1 x 2^17 x 2^14")),
        ],
        "CPU": [
            Target("16384, 4096 queries", "10 times faster than NumPy", 10,
                   times_faster("NumPy", "kernel", case="1 x 2^14 x 2^12")),
            Target("whole Cells", "10 times faster than MindSpore", 10,
                   times_faster("MindSpore", "graph", "pynative", direction="forward", case="1 x 2^14 x 2^10")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        clouds, points, queries = size
        return [(clouds, points, 3), (clouds, queries, 3)]

    def radius(self, size):
        """Returns a radius within which the middle of a cloud has some 64 points."""
        return round(float((64 / size[1] / 0.266) ** (1 / 3)), 3)

    def settings(self, size):
        return dict(radius=self.radius(size), nsample=SAMPLES)

    def numpy_formula(self, case):
        square = np.float32(self.radius(case.size) ** 2)

        def query(xyz, new_xyz):
            idx = np.zeros((*new_xyz.shape[:2], SAMPLES), np.int32)
            counts = np.zeros(new_xyz.shape[:2], np.int32)
            for cloud, points in enumerate(xyz):
                for m, center in enumerate(new_xyz[cloud]):
                    offsets = (points - center).astype(np.float32)
                    found = np.flatnonzero((offsets * offsets).sum(-1) < square)[:SAMPLES]
                    if len(found):
                        idx[cloud, m] = found[0]
                        idx[cloud, m, : len(found)] = found
                    counts[cloud, m] = len(found)
            return idx, counts

        return query

    def torch_formula(self, case):
        import torch

        square = self.radius(case.size) ** 2

        def query(xyz, new_xyz):
            size = xyz.shape[1]
            squares = torch.cdist(new_xyz.float(), xyz.float(), compute_mode="donot_use_mm_for_euclid_dist").square()
            index = torch.arange(size, dtype=torch.int32, device=xyz.device)
            index = torch.where(squares < square, index, size)
            idx = index.topk(min(SAMPLES, size), largest=False).values
            counts = (idx < size).sum(-1, dtype=torch.int32)
            first = torch.where(counts > 0, idx[..., 0], 0)[..., None]
            return torch.where(idx < size, idx, first), counts

        return query

    def theirs(self, case, extension, xyz, new_xyz):
        return extension.ball_query(new_xyz, xyz, self.radius(case.size), SAMPLES)

    def networks(self, size, dtype, device):
        radius, points = self.radius(size), size[1]
        index = ops.arange(points).astype("int32")

        def query(xyz, new_xyz):
            offsets = ops.expand_dims(new_xyz, 2) - ops.expand_dims(xyz, 1)
            inside = (offsets * offsets).sum(-1) < radius * radius
            found = ops.select(inside, index.broadcast_to(inside.shape), ops.full_like(inside.astype("int32"), points))
            idx = ops.sort(found.astype("float32"), -1)[0][..., :SAMPLES].astype("int32")
            first = idx[..., :1]
            idx = ops.select(idx < points, idx, first.broadcast_to(idx.shape))
            return ops.select(idx < points, idx, ops.zeros_like(idx))

        return {"msops": msops.BallQuery(radius, SAMPLES), "MindSpore": OfFunction(query)}
