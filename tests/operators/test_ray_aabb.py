import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import chain, length, random, zeros
from msops.operators.ray_aabb import operators
from operator_test import OperatorTest, run

BOX = dict(low=(-1.0, -0.5, 0.0), high=(1.0, 0.75, 2.0))


def ray_aabb(origins, directions, low, high):
    low, high = (np.asarray(corner, origins.dtype) for corner in (low, high))
    with np.errstate(all="ignore"):
        a, b = (low - origins) / directions, (high - origins) / directions
    inside = (low <= origins) & (origins <= high)
    first = np.where(directions == 0, -np.inf, np.minimum(a, b))
    last = np.where(directions == 0, np.where(inside, np.inf, -np.inf), np.maximum(a, b))
    near, far = np.maximum(first.max(-1), 0), last.min(-1)
    hits = near <= far
    return tuple(np.where(hits, x, -1).astype(origins.dtype) for x in (near, far))


class TestRayAABB(OperatorTest):
    function, cell = msops.ray_aabb, msops.RayAABB
    formulas = (ray_aabb,)
    constants = (0, 1)
    cases = {
        "small": ([(7, 3)] * 2, BOX),
        "one": ([(1, 3)] * 2, dict(low=-1, high=1.5)),
        "none": ([(0, 3)] * 2, BOX),
        "odd": ([(1023, 3)] * 2, dict(low=(-1, -1, -1), high=2)),
    }
    small = "small"
    hostile = ("small",)
    wrong = (
        (zeros((2, 2), (2, 2)), BOX, ValueError, "ray_aabb: origins must have shape (R, 3) = (2, 3), got (2, 2)"),
        (zeros((2, 3), (2, 3)), dict(low=0, high=(1, 1)), ValueError, "ray_aabb: high must have 3 numbers, got (1, 1)"),
        (zeros((2, 3), (2, 3)), dict(low=0, high=(1, 0, 1)), ValueError, "ray_aabb: high must be more than low"),
        (zeros((2, 3), (2, 3)), dict(low="0", high=1), TypeError, "ray_aabb: low must be a number, got str"),
    )

    def operators(self, shapes=(), low=-1, high=1):
        return chain(operators(low, high))

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Rays from near the box to points in it, or away from it."""
        origins, to = random(seed, np.float64, *shapes)
        directions = (np.tanh(to) - 2 * origins) * np.where(np.arange(len(to)) % 3 == 2, -1, 1)[:, None]
        return [np.asarray(x, dtype) for x in (2 * origins, directions)]

    def random_case(self, random):
        low = [round(random.uniform(-2, 0), 3) for _ in range(3)]  # float16 holds no smaller numbers
        high = [round(x + random.uniform(0.1, 2), 3) for x in low]
        return [(length(random), 3)] * 2, dict(low=tuple(low), high=tuple(high))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rays_along_axes(mode, dtype):
    """Faces belong to the box, a ray along two faces is between them or not, and NaN misses."""
    nan, inf = np.nan, np.inf
    rays = [
        ((-2, 0, 0), (1, 0, 0), 1, 3),
        ((-2, 1, -1), (1, 0, 0), 1, 3),
        ((-2, 1.5, 0), (1, 0, 0), -1, -1),
        ((0, 0, 0), (0, 0, -2), 0, 0.5),
        ((0, 0, 0), (0, 0, 0), 0, inf),
        ((2, 0, 0), (0, 0, 0), -1, -1),
        ((2, 0, 0), (1, 0, 0), -1, -1),
        ((1, 1, 1), (1, 1, 1), 0, 0),
        ((nan, 0, 0), (1, 0, 0), -1, -1),
        ((0, 0, 0), (1, nan, 0), -1, -1),
        ((nan, 0, 0), (0, 1, 0), -1, -1),
    ]
    origins, directions, near, far = (np.array(x, dtype) for x in zip(*rays))
    got = run(msops.RayAABB(-1, 1), Tensor(origins), Tensor(directions))
    np.testing.assert_array_equal(got, (near, far))
