"""Benchmarks the gathering of features. A size is (clouds, channels, points, places)."""

from mindspore import ops

import msops
from test_gather_points import TestGatherPoints

from ..benchmark import Benchmark, Sizes
from ..figures import Target, times_faster
from ..pointnet2 import PointNet2Gather


def composed(features, idx):
    """Gathers along the last axis by MindSpore's own operator."""
    places = ops.expand_dims(idx, 1).broadcast_to((*features.shape[:2], idx.shape[1]))
    return ops.gather_elements(features, 2, places)


class GatherPoints(PointNet2Gather, Benchmark):
    card = TestGatherPoints()
    sizes = {
        "GPU": [
            Sizes(
                named=((32, 3, 1024, 512), (16, 256, 16384, 4096)),
                sweep=((2, 3, 1024, 128), (1, 64, 131072, 16384)),
                ragged={(16, 255, 16383, 4095): (16, 256, 16384, 4096)},
            )
        ],
        "CPU": [Sizes(named=((8, 3, 1024, 512), (2, 256, 16384, 4096)), sweep=((2, 3, 1024, 128),))],
    }
    cells = (msops.GatherPoints, composed)
    targets = {
        "CPU": [Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative"))]
    }

    def inputs(self, size):
        clouds, channels, points, places = size
        return [(clouds, channels, points), (clouds, places)]

    def index_below(self, size):
        return size[2]

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32"]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(unread=1)]

    def torch_formula(self, case):
        import torch

        return lambda features, idx: torch.gather(features, 2, idx.long()[:, None].expand(-1, features.shape[1], -1))
