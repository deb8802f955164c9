"""Benchmarks furthest point sampling. A size is (clouds, points, samples)."""

import numpy as np

from test_furthest_point_sample import TestFurthestPointSample

from ..benchmark import Benchmark, Sizes
from ..figures import Target, times_faster
from ..pointnet2 import THEIRS, PointNet2


class FurthestPointSample(PointNet2, Benchmark):
    card = TestFurthestPointSample()
    compiled = False
    sizes = {
        "GPU": [
            Sizes(
                named=((32, 1024, 512), (16, 16384, 4096), (1, 131072, 16384)),
                sweep=((1, 256, 64), (1, 4096, 1024), (128, 2048, 512), (2, 300_000, 1024)),
                ragged={(32, 1023, 511): (32, 1024, 512)},
            )
        ],
        "CPU": [Sizes(named=((2, 1024, 256), (1, 16384, 1024)), sweep=((1, 256, 64),))],
    }
    cell_sizes = {"GPU": (), "CPU": ()}  # MindSpore has no loop that takes points
    headline = (("16 x 2^14 to 2^12", "float32"),)
    targets = {
        "GPU": [
            Target("32 x 1024 to 512", f"2 times faster than {THEIRS}", 2,
                   times_faster(THEIRS, "kernel", case="32 x 2^10 to 512")),
            Target("16 x 16384 to 4096", f"5 times faster than {THEIRS}", 5,
                   times_faster(THEIRS, "kernel", case="16 x 2^14 to 2^12")),
            Target("131072 to 16384", f"20 times faster than {THEIRS}", 20,
                   times_faster(THEIRS, "kernel", case="1 x 2^17 to 2^14")),
        ],
        "CPU": [
            Target("16384 to 1024", "10 times faster than NumPy", 10,
                   times_faster("NumPy", "kernel", case="1 x 2^14 to 2^10")),
        ],
    }  # fmt: skip

    def describe(self, size):
        clouds, points, samples = size
        return f"{super().describe((clouds, points))} to {super().describe((samples,))}"

    def inputs(self, size):
        clouds, points, _ = size
        return [(clouds, points, 3)]

    def settings(self, size):
        return {"npoint": size[-1]}

    def numpy_formula(self, case):
        samples = case.size[-1]

        def sample(xyz):
            clouds = np.arange(len(xyz))
            idx = np.zeros((len(xyz), samples), np.int32)
            distances = np.full(xyz.shape[:2], np.inf, np.float32)
            for s in range(1, samples):
                offsets = (xyz - xyz[clouds, idx[:, s - 1]][:, None]).astype(np.float32)
                distances = np.minimum(distances, (offsets * offsets).sum(-1))
                idx[:, s] = distances.argmax(-1)
            return idx

        return sample

    def torch_formula(self, case):
        import torch

        samples = case.size[-1]
        if samples > 1024:
            return None  # a loop of several launches for each sample takes minutes

        def sample(xyz):
            xyz = xyz.float()
            clouds = torch.arange(len(xyz), device=xyz.device)
            idx = torch.zeros(len(xyz), samples, dtype=torch.int64, device=xyz.device)
            distances = torch.full(xyz.shape[:2], torch.inf, device=xyz.device)
            for s in range(1, samples):
                offsets = xyz - xyz[clouds, idx[:, s - 1]][:, None]
                distances = torch.minimum(distances, (offsets * offsets).sum(-1))
                idx[:, s] = distances.argmax(-1)
            return idx

        return sample

    def theirs(self, case, extension, xyz):
        return extension.furthest_point_sampling(xyz, case.size[-1])
