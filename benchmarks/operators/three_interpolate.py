"""Benchmarks interpolation between three points. A size is (clouds, channels, known points, places)."""

from mindspore import ops

import msops
from test_three_interpolate import TestThreeInterpolate

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster
from ..pointnet2 import PointNet2


def composed(features, idx, weight):
    """Gathers along the last axis by MindSpore's own operator, then multiplies and adds."""
    clouds, channels, _ = features.shape
    flat = idx.reshape(clouds, 1, -1).broadcast_to((clouds, channels, 3 * idx.shape[1]))
    taken = ops.gather_elements(features, 2, flat).reshape(clouds, channels, *idx.shape[1:])
    return (taken * ops.expand_dims(weight, 1)).sum(-1)


class ThreeInterpolate(PointNet2, Benchmark):
    card = TestThreeInterpolate()
    sizes = {
        "GPU": [
            Sizes(
                named=((32, 256, 512, 1024), (16, 256, 4096, 16384), (1, 256, 16384, 131072)),
                sweep=((2, 128, 64, 256), (1, 64, 131072, 131072)),
                ragged={(16, 255, 4095, 16383): (16, 256, 4096, 16384)},
            )
        ],
        "CPU": [Sizes(named=((2, 256, 512, 1024), (1, 256, 4096, 16384)), sweep=((2, 128, 64, 256),))],
    }
    cells = (msops.ThreeInterpolate, composed)
    targets = {
        "GPU": [
            Target(f"{case}, forward, float32", f"share {least}", least,
                   share(case, direction="forward", dtype="float32"))
            for case, least in {
                "32 x 256 x 512 x 2^10": 0.6,
                "16 x 256 x 2^12 x 2^14": 0.8,
                "1 x 256 x 2^14 x 2^17": 0.8,
            }.items()
        ],
        "CPU": [
            Target("named sizes", "10 times faster than NumPy", 10,
                   times_faster("NumPy", "kernel", direction="forward")),
            Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative")),
        ],
    }  # fmt: skip

    def inputs(self, size):
        clouds, channels, points, places = size
        return [(clouds, channels, points), (clouds, places, 3), (clouds, places, 3)]

    def index_below(self, size):
        return size[2]

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32", dtype]

    def torch_formula(self, case):
        import torch

        def interpolate(features, idx, weight):
            flat = idx.flatten(1).long()[:, None].expand(-1, features.shape[1], -1)
            taken = torch.gather(features, 2, flat).view(*features.shape[:2], *idx.shape[1:])
            return (taken * weight[:, None]).sum(-1)

        return interpolate

    def theirs(self, case, extension, features, idx, weight):
        return extension.three_interpolate(features, idx, weight)
