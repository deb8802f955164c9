"""Benchmarks samples along rays. A size is (rays, cells along an axis): rays go through a cube of these, of which one
in eight is occupied, in up to 1024 steps. Cells are read at random, so that the floor of bytes says little.
"""

import numpy as np

from test_march_rays import TestMarchRays

from ..benchmark import Benchmark, Sizes
from ..figures import Target, times_faster

SETTINGS = dict(low=0.0, high=1.0, step=3**0.5 / 1024)


class MarchRays(Benchmark):
    card = TestMarchRays()
    compiled = False
    sizes = {
        "GPU": [Sizes(named=((8192, 128),), sweep=((1024, 128), (2**17, 128)), ragged={(8191, 128): (8192, 128)})],
        "CPU": [Sizes(named=((1024, 128),), sweep=((64, 32),))],
    }
    cell_sizes = {"GPU": (), "CPU": ()}  # MindSpore has no sizes that depend on contents
    targets = {
        "CPU": [Target("1024 rays", "5 times faster than NumPy", 5, times_faster("NumPy", "kernel"))],
    }

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
