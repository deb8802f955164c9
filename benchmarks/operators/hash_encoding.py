"""Benchmarks the encoding of instant-NGP: 16 levels of 2 features, from 16 to 2048 cells, and up to 2^19 entries. A size
is a number of points. The backward pass is the gradient of the table."""

import mindspore
import numpy as np
from mindspore import Tensor, ops

import msops
from test_hash_encoding import PRIMES, TestHashEncoding, entries_of, levels_of

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, times_faster

SETTINGS = dict(levels=16, base_resolution=16, growth=2 ** (7 / 15), log2_size=19)
GRIDS = tuple(levels_of(3, **SETTINGS))
CORNERS = np.array([[c >> d & 1 for d in range(3)] for c in range(8)])


class HashEncoding(Benchmark):
    card = TestHashEncoding()
    sizes = {
        "GPU": [Sizes(named=(2**18, 2**21), sweep=(2**14,), ragged={2**18 + 1: 2**18})],
        "CPU": [Sizes(named=(2**16,), sweep=(2**13,))],
    }
    targets = {
        "CPU": [
            Target("whole Cells", "5 times faster than MindSpore", 5, times_faster("MindSpore", "graph", "pynative"))
        ]
    }
    compiled = False

    def inputs(self, size):
        return [(size, 3), (entries_of(3, **SETTINGS), 2)]

    def settings(self, size):
        return dict(SETTINGS, interpolation="linear")

    def contents(self, name, size):
        return np.random.default_rng(0).uniform(size=(size, 3)) if name == "points" else None

    def networks(self, size, dtype, device):
        corners = Tensor(CORNERS[None])
        return {
            "msops": OfFunction(lambda points, table: msops.hash_encoding(ops.sigmoid(points), table, **SETTINGS)),
            "MindSpore": OfFunction(lambda points, table: composed(ops.sigmoid(points), table, corners)),
        }

    def torch_formula(self, case):
        return encoded_by_torch


def composed(points, table, corners):
    """Finds the eight corners of all points at once, level by level."""
    outs = ()
    for scale, first, size, resolution in GRIDS:
        at = ops.clamp(points, 0, 1) * scale + 0.5
        cell = ops.floor(at)
        t = (at - cell).expand_dims(1)
        place = cell.astype(mindspore.int64).expand_dims(1) + corners
        x, y, z = place[..., 0], place[..., 1], place[..., 2]
        if resolution:
            entry = (x + y * resolution + z * resolution**2) % size
        else:
            entry = ops.bitwise_xor(ops.bitwise_xor(x, y * PRIMES[1]), z * PRIMES[2])
            entry = ops.bitwise_and(entry, Tensor(size - 1, mindspore.int64))
        sides = corners.astype(t.dtype)
        sides = sides * t + (1 - sides) * (1 - t)
        weight = (sides[..., 0] * sides[..., 1] * sides[..., 2]).expand_dims(2)
        outs += ((weight * ops.gather(table, first + entry, 0)).sum(1),)
    return ops.concat(outs, 1)


def encoded_by_torch(points, table):
    import torch

    corners = torch.from_numpy(CORNERS).to(points.device)
    outs = []
    for scale, first, size, resolution in GRIDS:
        at = points.clamp(0, 1).float() * scale + 0.5
        cell = at.floor()
        t = (at - cell)[:, None]
        place = cell.long()[:, None] + corners
        if resolution:
            entry = (place * torch.tensor([1, resolution, resolution**2], device=points.device)).sum(-1) % size
        else:
            entry = place[..., 0] ^ place[..., 1] * PRIMES[1] ^ place[..., 2] * PRIMES[2]
            entry = entry & size - 1
        weight = torch.where(corners.bool(), t, 1 - t).prod(-1).to(table.dtype)
        outs.append((weight[..., None] * table[first + entry]).sum(1))
    return torch.cat(outs, 1)
