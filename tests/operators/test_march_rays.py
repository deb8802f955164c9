import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import chain, length, random, zeros
from msops.operators.march_rays import operators
from msops.testing.checks import Net
from operator_test import OperatorTest, run
from test_ray_aabb import ray_aabb

BOX = dict(low=(-1.0, -1.0, 0.0), high=(1.0, 1.5, 2.0))


def march_rays(origins, directions, near, far, occupancy, *jitter, low, high, step, capacity):
    low, high = (np.broadcast_to(np.asarray(corner, origins.dtype), 3) for corner in (low, high))
    cells, found = len(occupancy), []
    jitter = np.clip(jitter[0], 0, 1) if jitter else np.full(len(near), 0.5, origins.dtype)
    counts = np.zeros(len(near), np.int64)
    for r in range(len(near)):
        t = near[r] + (np.arange(max(0, int((far[r] - near[r]) / step) + 2)) + jitter[r]) * step
        t = t[t < far[r]]
        places = (origins[r] + t[:, None] * directions[r] - low) / (high - low) * cells
        x, y, z = np.clip(np.floor(places), 0, cells - 1).astype(int).T
        t = t[occupancy[x, y, z]] if cells else t[:0]
        counts[r] = len(t)
        found += [(each, r) for each in t]
    ts, dts, rays = np.zeros(capacity, near.dtype), np.zeros(capacity, near.dtype), np.full(capacity, -1, np.int32)
    for i, (each, r) in enumerate(found[:capacity]):
        ts[i], dts[i], rays[i] = each, step, r
    return ts, dts, rays, np.concatenate(([0], counts.cumsum())).astype(np.int32)


def case(rays, cells, capacity, jitter=False, step=0.125, box=BOX):
    shapes = [(rays, 3), (rays, 3), (rays,), (rays,), (cells,) * 3]
    return shapes + [(rays,)] * jitter, dict(**box, step=step, capacity=capacity)


class TestMarchRays(OperatorTest):
    function = msops.march_rays
    formulas = (march_rays,)
    constants = (0, 1, 2, 3, 4, 5)
    cases = {
        "small": case(5, 4, 60),
        "jitter": case(6, 3, 200, jitter=True, step=0.0625),
        "too many": case(9, 4, 20),
        "one": case(1, 1, 3),
        "no rays": case(0, 3, 7),
        "no room": case(4, 3, 1),
        "odd": case(301, 7, 5000),
    }
    further = {
        "no cells": case(4, 0, 9),
        "fine": case(17, 16, 4000, step=0.0078125, jitter=True),
        "parts": case(1001, 8, 20_000),
        "capacity 0": case(5, 4, 0),
    }
    small = "small"
    hostile = ("small", "jitter")
    wrong = (
        ([*zeros((2, 3), (2, 3), (2,), (2,)), np.zeros((2, 2, 3), bool)], case(2, 2, 3)[1], ValueError,
         "march_rays: occupancy must have shape (G, G, G) = (2, 2, 2), got (2, 2, 3)"),
        (zeros((2, 3), (2, 3), (2,), (2,), (2, 2, 2)), case(2, 2, 3)[1], TypeError,
         "march_rays: occupancy must be bool, got float32"),
        ([*zeros((2, 3), (2, 3), (2,), (2,)), np.zeros((2, 2, 2), bool)], dict(**BOX, step=0, capacity=3), ValueError,
         "march_rays: step must be more than 0, got 0"),
        ([*zeros((2, 3), (2, 3), (2,), (2,)), np.zeros((2, 2, 2), bool)], dict(**BOX, step=1, capacity=-1), ValueError,
         "march_rays: capacity must be at least 0 and less than 2^31, got -1"),
        ([*zeros((2, 3), (2, 3), (2,), (2,)), np.zeros((2, 2, 2), bool)], dict(**BOX, step=1, capacity=1.5), TypeError,
         "march_rays: capacity must be an int, got float"),
        ([*zeros((2, 3), (2, 3), (2,), (2,)), np.zeros((2, 2, 2), bool)], dict(low=1, high=0, step=1, capacity=1),
         ValueError, "march_rays: high must be more than low"),
    )  # fmt: skip

    def operators(self, shapes=(), low=0, high=1, step=1.0, capacity=1):
        forward = operators(low, high, step, capacity)
        return chain(forward if not shapes or len(shapes) == 6 else forward.without("jitter"))

    def net(self, **settings):
        return Net(march_of, **settings)

    def result_dtype(self, dtype):
        return dtype, dtype, "int32", "int32"

    def inputs(self, shapes, dtype, seed=1, low=0, high=1, **settings):
        """Rays of which every fourth misses the box, and a grid of which half is occupied."""
        rng = np.random.default_rng(seed)
        origins, to = random(seed, np.float64, *shapes[:2])
        directions = (np.tanh(to) - 2 * origins) / 2
        origins, directions = (np.asarray(x, dtype) for x in (2 * origins, directions))
        near, far = ray_aabb(origins.astype(np.float64), directions.astype(np.float64), low, high)
        near, far = (np.asarray(np.where(np.arange(len(x)) % 4 == 3, -1, x), dtype) for x in (near, far))
        jitter = [np.asarray(rng.uniform(0, 1, shape), dtype) for shape in shapes[5:]]
        return [origins, directions, near, far, rng.random(shapes[4]) < 0.5, *jitter]

    def reference_gradient(self, *arguments, **settings):
        n = len(arguments) - 4
        return tuple(np.zeros_like(x) for x in arguments[:n])

    def random_case(self, random):
        return case(
            length(random), random.randrange(1, 6), random.randrange(200), random.random() < 0.5,
            random.choice((0.1, 0.3, 1.0)),
        )  # fmt: skip

    def test_cell(self, mode):
        for name in ("small", "jitter"):
            inputs, settings = self.case_inputs(name, np.float32)
            got, want = run(msops.MarchRays(**settings), *inputs), run(self.net(**settings), *inputs)
            for a, b in zip(got, want):
                np.testing.assert_array_equal(a, b)


def march_of(origins, directions, near, far, occupancy, *jitter, low, high, step, capacity):
    if jitter:
        return msops.march_rays(origins, directions, near, far, occupancy, low, high, step, capacity, jitter=jitter[0])
    return msops.march_rays(origins, directions, near, far, occupancy, low, high, step, capacity)


def march(origin, direction, near, far, grid, **settings):
    inputs = (np.array(x, np.float32) for x in ([origin], [direction], [near], [far]))
    return run(Net(msops.march_rays, **settings), *map(Tensor, inputs), Tensor(grid))


def test_outside_counts_as_nearest_cell(mode):
    grid = np.zeros((2, 2, 2), bool)
    grid[1, 0, 0] = True
    t, dt, ray, offsets = march((-1, -5, 0), (1, 0, 0), 0, 4, grid, low=0, high=1, step=0.5, capacity=6)
    np.testing.assert_array_equal(t, [1.75, 2.25, 2.75, 3.25, 3.75, 0])
    np.testing.assert_array_equal(dt, [0.5] * 5 + [0])
    np.testing.assert_array_equal(ray, [0] * 5 + [-1])
    np.testing.assert_array_equal(offsets, [0, 5])


@pytest.mark.parametrize(("near", "far"), [(np.nan, 1), (0, np.nan), (0, np.inf), (-np.inf, 1), (-1, -1), (1, 0)])
def test_ray_without_samples(mode, near, far):
    t, _, ray, offsets = march((0, 0, 0), (1, 0, 0), near, far, np.ones((2, 2, 2), bool), low=0, high=1, step=0.5,
                               capacity=2)  # fmt: skip
    assert (t == 0).all()
    assert (ray == -1).all()
    assert (offsets == 0).all()


@pytest.mark.parametrize("direction", [(1, 0, 0), (0, -1, 0), (0.3, 0.4, -0.2), (-1, 1e-7, 1e-7), (0, 0, 0)])
def test_empty_cells_are_passed_over(direction):
    """Passing over empty cells finds what taking every step finds."""
    rng = np.random.default_rng(3)
    grid = rng.random((16, 16, 16)) < 0.05
    one, d = np.array([[0.51, 0.52, 0.53]]), np.array([direction], float)
    settings = dict(low=0, high=1, step=1 / 1024, capacity=4096)
    got = run(Net(msops.march_rays, **settings), *map(Tensor, (one, d, np.array([0.0]), np.array([2.0]))), Tensor(grid))
    want = march_rays(one, d, np.array([0.0]), np.array([2.0]), grid, **settings)
    np.testing.assert_array_equal(got[3], want[3])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-15)
