"""Benchmarks the encoding of instant-NGP: 16 levels of 2 features, from 16 to 2048 cells, and up to 2^19 entries.

A size is a number of points. The backward pass is the gradient of the table.
"""

import functools

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import msops
from test_hash_encoding import PRIMES, TestHashEncoding, entries_of, levels_of

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, times_faster
from ..neural_fields import NeuralField

GROWTH = 2 ** (7 / 15)
SETTINGS = dict(levels=16, base_resolution=16, growth=GROWTH, log2_size=19)
GRIDS = tuple(levels_of(3, **SETTINGS))
CORNERS = np.array([[c >> d & 1 for d in range(3)] for c in range(8)])


class HashEncoding(NeuralField, Benchmark):
    card = TestHashEncoding()
    sizes = {
        "GPU": [Sizes(named=(2**18, 2**21), sweep=(2**14,), ragged={2**18 + 1: 2**18})],
        "CPU": [Sizes(named=(2**16,), sweep=(2**13,))],
    }
    targets = {
        "GPU": [
            Target(f"beside torch-ngp, {direction}", f"{least} times faster", least,
                   times_faster("torch-ngp", "kernel", direction=direction))
            for direction, least in (("forward", 1.5), ("backward", 2))
        ],
        "CPU": [
            Target("whole Cells", "5 times faster than MindSpore", 5, times_faster("MindSpore", "graph", "pynative"))
        ],
    }  # fmt: skip
    compiled = False
    folders = {"torch-ngp": "gridencoder/src"}
    their_dtypes = ("float32", "float16")

    def inputs(self, size):
        return [(size, 3), (entries_of(3, **SETTINGS), 2)]

    def settings(self, size):
        return dict(SETTINGS, interpolation="linear")

    def contents(self, name, size):
        return np.random.default_rng(0).uniform(size=(size, 3)) if name == "points" else None

    def networks(self, size, dtype, device):
        return {"msops": OfFunction(encoded), "MindSpore": Composed()}

    def torch_formula(self, case):
        return encoded_by_torch

    def torch_ngp_forward(self, case, extension, points, table):
        """Takes points of float32 also beside a float16 table, and gives (levels, points, features)."""
        points, (offsets, entries) = points.float(), their_table(points.device)
        table = table[entries]
        out = table.new_empty(16, len(points), 2)

        def call():
            extension.grid_encode_forward(points, table, offsets, out, *their_settings(points), None, 0, False, 0)

        return call, lambda _: (out.transpose(0, 1).flatten(1),)

    def torch_ngp_backward(self, case, extension, points, dout):
        points, (offsets, entries) = points.float(), their_table(points.device)
        dout = dout.view(len(points), 16, 2).transpose(0, 1).contiguous()
        table, dtable = dout.new_zeros(2, len(entries), 2)  # the kernel does not read the table

        def call():
            dtable.zero_()
            extension.grid_encode_backward(
                dout, points, table, offsets, dtable, *their_settings(points), None, None, 0, False, 0
            )

        return call, lambda _: (dtable.new_zeros(case.results[0]).float().index_add_(0, entries, dtable.float()),)


def their_settings(points):
    return *points.shape, 2, SETTINGS["levels"], np.log2(GROWTH), SETTINGS["base_resolution"]


def their_table(device):
    """Returns where the levels of torch-ngp's table begin, and which entry of ours each of its entries is, as tensors.
    The tables differ in the levels without a hash: theirs have a corner more along each axis, which wraps in ours."""
    import torch

    return [torch.from_numpy(array).to(device) for array in their_layout()]


@functools.cache
def their_layout():
    offsets, entries = [0], []
    for _, first, size, resolution in GRIDS:
        side = resolution + 1
        entry = np.arange(-(-(side**3) // 8) * 8 if resolution else size)
        if resolution:
            entry = (entry % side + entry // side % side * resolution + entry // side**2 * resolution**2) % size
        entries.append(first + entry)
        offsets.append(offsets[-1] + len(entry))
    return np.array(offsets, np.int32), np.concatenate(entries)


def encoded(points, table):
    """Makes points in (0, 1) of random numbers."""
    return msops.hash_encoding(ops.sigmoid(points), table, 16, 16, GROWTH, 19)


class Composed(nn.Cell):
    """Finds the eight corners of all points at once, level by level."""

    def __init__(self):
        super().__init__()
        self.corners = Tensor(CORNERS[None], mindspore.int64)

    def construct(self, points, table):
        points, corners, outs = ops.sigmoid(points), self.corners, ()
        for scale, first, size, resolution in GRIDS:
            at = points * scale + 0.5
            cell = ops.floor(at)
            t = (at - cell).expand_dims(1)
            place = cell.astype(mindspore.int64).expand_dims(1) + corners
            x, y, z = place[:, :, 0], place[:, :, 1], place[:, :, 2]
            if resolution:
                entry = (x + y * resolution + z * resolution**2) % size
            else:
                entry = ops.bitwise_xor(ops.bitwise_xor(x, y * PRIMES[1]), z * PRIMES[2])
                entry = entry % size
            sides = corners.astype(t.dtype)
            sides = sides * t + (1 - sides) * (1 - t)
            weight = (sides[:, :, 0] * sides[:, :, 1] * sides[:, :, 2]).expand_dims(2)
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
