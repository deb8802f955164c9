"""Benchmarks interpolation, at points in a cube, of features at its eight corners. A size is (points, features)."""

from mindspore import ops

import msops
from test_trilinear_interpolation import TestTrilinearInterpolation

from ..benchmark import Benchmark, Sizes
from ..figures import Target, ends, share


def of_mindspore(feats, points):
    far = (points + 1) / 2
    near = 1 - far
    u, v, w = far[:, 0], far[:, 1], far[:, 2]
    ru, rv, rw = near[:, 0], near[:, 1], near[:, 2]
    weights = (ru * rv * rw, ru * rv * w, ru * v * rw, ru * v * w, u * rv * rw, u * rv * w, u * v * rw, u * v * w)
    return (feats * ops.stack(weights, 1).expand_dims(2)).sum(1)


class TrilinearInterpolation(Benchmark):
    card = TestTrilinearInterpolation()
    sizes = {
        "GPU": [
            Sizes(
                named=((65536, 256), (2**20, 16), (2**22, 2)),
                sweep=((64, 16), (2**10, 16), (2**14, 16), (2**17, 16), (2**22, 16)),
                ragged={
                    (65537, 256): (65536, 256),
                    (65536, 257): (65536, 256),
                    (2**20 + 1, 16): (2**20, 16),
                    (2**20, 17): (2**20, 16),
                    (2**22, 3): (2**22, 2),
                },
            )
        ],
        "CPU": [
            Sizes(
                named=((4096, 256), (2**16, 16), (2**18, 2)),
                sweep=((64, 16), (2**10, 16), (2**13, 16)),
                ragged={(4096, 257): (4096, 256), (2**16, 17): (2**16, 16)},
            )
        ],
    }
    cells = (msops.TrilinearInterpolation, of_mindspore)
    line = "16 features"
    targets = {
        "GPU": [
            Target("256 features", "share 0.95", 0.95, share("2^16 x 256")),
            Target("16 and 2 features, forward", "share 0.90", 0.90,
                   share(ends("x 16", "x 2"), named=True, direction="forward")),
            Target("16 and 2 features, backward", "share 0.85", 0.85,
                   share(ends("x 16", "x 2"), named=True, direction="backward")),
        ]
    }  # fmt: skip

    def inputs(self, size):
        points, features = size
        return [(points, 8, features), (points, 3)]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(serial=8 * size[1])]

    def torch_formula(self, case):
        import torch

        def trilinear(feats, points):
            u, v, w = ((points + 1) / 2).unbind(1)
            weights = torch.stack([a * b * c for a in (1 - u, u) for b in (1 - v, v) for c in (1 - w, w)], 1)
            return (feats * weights.unsqueeze(2)).sum(1)

        return trilinear

    def on_line(self, case):
        return case.endswith(" x 16")
