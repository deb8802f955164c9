"""Benchmarks the grouping of features. A size is (clouds, channels, points, groups, points of a group)."""

from mindspore import ops

import msops
from test_group_points import TestGroupPoints

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster
from ..pointnet2 import PointNet2Gather


def composed(features, idx):
    """Gathers along the last axis by MindSpore's own operator."""
    clouds, channels, _ = features.shape
    flat = idx.reshape(clouds, 1, -1).broadcast_to((clouds, channels, idx.shape[1] * idx.shape[2]))
    return ops.gather_elements(features, 2, flat).reshape(clouds, channels, *idx.shape[1:])


class GroupPoints(PointNet2Gather, Benchmark):
    card = TestGroupPoints()
    sizes = {
        "GPU": [
            Sizes(
                named=((32, 64, 1024, 512, 32), (16, 64, 16384, 4096, 32), (1, 64, 131072, 16384, 32)),
                sweep=((2, 3, 1024, 128, 16), (16, 3, 16384, 4096, 32), (32, 128, 512, 128, 64)),
                ragged={(16, 63, 16383, 4095, 31): (16, 64, 16384, 4096, 32)},
            )
        ],
        "CPU": [
            Sizes(
                named=((2, 64, 1024, 512, 32), (1, 64, 16384, 4096, 32)),
                sweep=((1, 3, 1024, 128, 16), (1, 3, 16384, 4096, 32)),
                ragged={(1, 63, 16383, 4095, 31): (1, 64, 16384, 4096, 32)},
            )
        ],
    }
    cells = (msops.GroupPoints, composed)
    targets = {
        "GPU": [
            *(
                Target(f"{case}, {direction}, float32", f"share {least}", least,
                       share(case, direction=direction, dtype="float32"))
                for case, leasts in {
                    "32 x 64 x 2^10 x 512 x 32": (0.6, 0.5),
                    "16 x 64 x 2^14 x 2^12 x 32": (0.8, 0.6),
                    "1 x 64 x 2^17 x 2^14 x 32": (0.8, 0.6),
                }.items()
                for direction, least in zip(("forward", "backward"), leasts)
            )
        ],
        "CPU": [
            Target("named sizes", "5 times faster than NumPy", 5, times_faster("NumPy", "kernel")),
            Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        clouds, channels, points, groups, samples = size
        return [(clouds, channels, points), (clouds, groups, samples)]

    def index_below(self, size):
        return size[2]

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32"]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(unread=1)]

    def torch_formula(self, case):
        import torch

        def group(features, idx):
            flat = idx.flatten(1).long()[:, None].expand(-1, features.shape[1], -1)
            return torch.gather(features, 2, flat).view(*features.shape[:2], *idx.shape[1:])

        return group
