"""Makes clouds of points for the tests of sampling and neighbours, and the distances that the operators compute.

The coordinates of `lattice` are small multiples of 1/8, whose distances no dtype rounds. So results are equal in all
dtypes, and many distances are equal, where indices decide.
"""

import numpy as np
from hypothesis import strategies as st

from card import Card
from operator_test import OperatorTest


def lattice(seed, dtype, *shapes):
    """Returns clouds with equal points, some of them together in a corner."""
    rng = np.random.default_rng(seed)
    clouds = []
    for shape in shapes:
        points = rng.integers(-16, 17, shape)
        corner = rng.random(shape[:-1]) < 0.3
        clouds.append(np.asarray(np.where(corner[..., None], points // 8 + 14, points) / 8, dtype))
    return clouds


def squared_distances(a, b):
    """Returns the squared distances of (..., N, 3) and (..., M, 3) as (..., M, N), rounded as the operators round them:
    x^2, then the sums with y^2 and z^2. A long double holds the exact sums of float32."""
    if a.dtype.itemsize < 8:
        d = (b[..., :, None, :].astype(np.float32) - a[..., None, :, :].astype(np.float32)).astype(np.longdouble)
        total = (d[..., 0] ** 2).astype(np.float32)
        for axis in (1, 2):
            total = (d[..., axis] ** 2 + total).astype(np.float32)
        return total
    d = b[..., :, None, :] - a[..., None, :, :]
    return (d * d).sum(-1)


class CloudTest(OperatorTest):
    """Tests an operator of clouds, whose results are exact for the coordinates of `lattice`."""

    def inputs(self, shapes, dtype, seed=1, **settings):
        return lattice(seed, dtype, *shapes)

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        exact = {0.1: 0.125, 1: 1, 5: 4}[scale]  # powers of 2, which keep distances exact
        return Card.entry_calls(self, shapes, settings, dtype, seed, exact, parts)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape  # no scratch of these operators has parts


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -1.0, 1e-30, 1e-22, 3e38, -1e20, np.inf, -np.inf, np.nan]),
    st.floats(-4, 4, width=16),
    st.floats(width=32),
)


@st.composite
def clouds(draw, least=1):
    """Draws a cloud of points: few different numbers, lines, planes, equal points, outliers, and many points."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = int(rng.integers(*draw(st.sampled_from([(least, 13), (least, 70), (512, 1300)]))))
    kind = draw(st.sampled_from(["numbers", "uniform", "line", "plane", "equal", "outlier", "clusters"]))
    if kind == "numbers":
        pool = np.array(draw(st.lists(numbers, min_size=1, max_size=6)), np.float32)
        return rng.choice(pool, (size, 3))
    points = rng.uniform(-1, 1, (size, 3)) * 10.0 ** draw(st.integers(-20, 18))
    if kind in ("line", "plane"):
        points[:, rng.permutation(3)[: 2 if kind == "line" else 1]] = draw(st.sampled_from([0.0, 1.0, -7.5]))
    if kind == "equal":
        points[:] = points[0]
    if kind == "outlier":
        points[rng.integers(size)] *= 1e9
    if kind == "clusters":
        points[:] = points[rng.integers(0, min(size, 5), size)] + rng.integers(0, 2, (size, 3)) * points[0]
    points = points.astype(np.float32)
    if draw(st.booleans()):
        points[rng.random((size, 3)) < 0.05] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return points


def uniform(seed, *shapes):
    """Returns clouds that fill a cube, so that about all bounds of a search matter for some query."""
    rng = np.random.default_rng(seed)
    return [rng.random((1, *shape, 3)).astype(np.float32) for shape in shapes]


def nearest(points, queries, k):
    """Returns the indices of the k nearest points to each query, and their squared distances."""
    with np.errstate(all="ignore"):
        distances = squared_distances(points, queries)
        distances = np.where(np.isnan(distances), distances.dtype.type(np.inf), distances)
        idx = np.argsort(distances, -1, kind="stable")[..., :k]
        return idx.astype(np.int32), np.take_along_axis(distances, idx, -1)


def distance_gradients(points, queries, idx, ddist):
    """Returns the gradients of the points and of the queries."""
    offsets = np.stack([cloud[i] for cloud, i in zip(points, idx)]) if len(points) else points[:, :, None][:, :0]
    offsets = offsets.reshape(*idx.shape, 3) - queries[:, :, None]
    dist = np.sqrt((offsets * offsets).sum(-1))
    terms = (ddist / np.where(dist > 0, dist, np.inf))[..., None] * offsets
    dpoints = np.zeros_like(points)
    for cloud in range(len(points)):
        np.add.at(dpoints[cloud], idx[cloud].reshape(-1), terms[cloud].reshape(-1, 3))
    return dpoints, -terms.sum(-2)


def check_directions(gradients, inputs, total):
    """Compares gradients with finite differences of total(*inputs), along a random direction of each input."""
    rng, step = np.random.default_rng(4), 1e-6
    for which, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        sides = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[which] = moved[which] + sign * step * direction
            sides.append(total(*moved))
        np.testing.assert_allclose((gradient * direction).sum(), (sides[0] - sides[1]) / (2 * step), rtol=1e-6)
