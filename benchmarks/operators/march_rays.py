"""Benchmarks samples along rays. A size is (rays, cells along an axis): rays go through a cube of these, of which one
in eight is occupied, in up to 1024 steps. Counts of cells are read at random, so that the floor of bytes says little.
"""

import functools

import numpy as np

from test_march_rays import TestMarchRays

from ..benchmark import Benchmark, Sizes
from ..figures import Target, times_faster
from ..neural_fields import NeuralField, bits_of

STEPS = 1024
SETTINGS = dict(low=0.0, high=1.0, step=3**0.5 / STEPS)


class MarchRays(NeuralField, Benchmark):
    card = TestMarchRays()
    compiled = False
    sizes = {
        "GPU": [Sizes(named=((8192, 128),), sweep=((1024, 128), (2**17, 128)), ragged={(8191, 128): (8192, 128)})],
        "CPU": [Sizes(named=((1024, 128),), sweep=((64, 32),))],
    }
    cell_sizes = {"GPU": (), "CPU": ()}  # MindSpore has no sizes that depend on contents
    targets = {
        "GPU": [Target("beside torch-ngp", "5 times faster", 5, times_faster("torch-ngp", "kernel"))],
        "CPU": [Target("1024 rays", "5 times faster than NumPy", 5, times_faster("NumPy", "kernel"))],
    }
    folders = {"torch-ngp": "raymarching/src", "ngp_pl": "models/csrc"}

    def inputs(self, size):
        rays, cells = size
        return [(rays, 3), (rays, 3), (rays,), (rays,), (cells,) * 3]

    def settings(self, size):
        return dict(SETTINGS, capacity=256 * size[0])

    def contents(self, name, size):
        rng, (rays, cells) = np.random.default_rng(0), size
        if name == "occupancy":
            return np.repeat(np.repeat(np.repeat(rng.random((cells // 8,) * 3) < 1 / 8, 8, 0), 8, 1), 8, 2)
        origins = rng.uniform(0.3, 0.7, (rays, 3))
        directions = rng.standard_normal((rays, 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        values = dict(origins=origins - 1.5 * directions, directions=directions)
        values.update(near=np.full(rays, 0.75), far=np.full(rays, 2.25))
        return values.get(name)

    def torch_formula(self, case):
        return None

    # Theirs read bits instead of bools, jump over empty cells, and give places and directions, too. The rays are in any
    # order, so that offsets alone can be compared with ours.

    def torch_ngp_forward(self, case, extension, origins, directions, near, far, occupancy):
        """Its cube is [-1, 1], so that rays have twice our distances."""
        import torch

        (rays, cells), room = case.size, case.results[0][0]
        counter, found = (near.new_empty(*shape, dtype=torch.int32) for shape in ((2,), (rays, 3)))
        samples = [near.new_empty(room, width) for width in (3, 3, 2)]
        sizes = 1.0, 0.0, STEPS, rays, 1, cells, room
        inputs = 2 * origins - 1, directions, bits_of(occupancy), *sizes, 2 * near, 2 * far
        jitter = torch.full_like(near, 0.5)

        def call():
            for array in (*samples, counter):
                array.zero_()
            extension.march_rays_train(*inputs, *samples, found, counter, jitter)

        return call, lambda _: (None, None, None, offsets_of(found))

    def ngp_pl_forward(self, case, extension, origins, directions, near, far, occupancy):
        """Its cube is [-1/2, 1/2]. It also makes room for all steps of each ray."""
        import torch

        limits, jitter = torch.stack([near, far], 1), torch.full_like(near, 0.5)
        inputs = origins - 0.5, directions, limits, bits_of(occupancy), 1, 0.5, 0.0, jitter, case.size[1], STEPS
        call = functools.partial(extension.raymarching_train, *inputs)
        return call, lambda got: (None, None, None, offsets_of(got[0]))


def offsets_of(rows):
    """Returns where the samples of each ray would begin, and at last where they end, from rows (ray, its first sample,
    number of samples) in any order."""
    import torch

    return torch.nn.functional.pad(rows[rows[:, 0].argsort(), 2].cumsum(0), (1, 0))
