"""Makes clouds of points for the tests of sampling and neighbours, and the distances that the operators compute.

The coordinates of `lattice` are small multiples of 1/8, whose distances no dtype rounds. So results are equal in all
dtypes, and many distances are equal, where indices decide.
"""

import numpy as np
from hypothesis import strategies as st

from card import Card
from guarded_call import GuardedCall
from msops.testing.entry import Status
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
    """Returns the squared distances of (..., N, D) and (..., M, D) as (..., M, N), rounded as the operators round them:
    x^2, then the sums with y^2, z^2 and so on. A long double holds the exact sums of float32."""
    if a.dtype.itemsize < 8:
        d = (b[..., :, None, :].astype(np.float32) - a[..., None, :, :].astype(np.float32)).astype(np.longdouble)
        total = (d[..., 0] ** 2).astype(np.float32)
        for axis in range(1, d.shape[-1]):
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


def searched(points, dtype, random):
    """Returns a cloud of one sample, and points that look for neighbours: some of the cloud's, or some beside these."""
    xyz = points.astype(dtype)[None]
    queries = xyz[:, random.choices(range(len(points)), k=random.choice((3, 40, 40)))]
    return xyz, queries * queries.dtype.type(random.choice((1, 1, 0.9, 1.5)))


def uniform(seed, *shapes):
    """Returns clouds that fill a cube, so that about all bounds of a search matter for some query."""
    rng = np.random.default_rng(seed)
    return [rng.random((1, *shape, 3)).astype(np.float32) for shape in shapes]


def random_lengths(seed, *limits_and_shapes):
    """Returns lengths of clouds from 0 to a limit, both of which are among them if there are two clouds or more."""
    rng = np.random.default_rng(seed)
    found = []
    for limit, shape in limits_and_shapes:
        lengths = rng.integers(0, limit + 1, shape)
        lengths[:2] = rng.permutation([0, limit])[: len(lengths)]
        found.append(lengths.astype(np.int32))
    return found


def nearest(points, queries, k, lengths=None, new_lengths=None):
    """Returns the indices of the k nearest points to each query, and their squared distances; -1 and 0 where there is
    no such point or query."""
    with np.errstate(all="ignore"):
        distances = squared_distances(points, queries)
        distances = np.where(np.isnan(distances), distances.dtype.type(np.inf), distances)
    clouds, number, size = distances.shape
    idx, squares = np.full((clouds, number, k), -1, np.int32), np.zeros((clouds, number, k), distances.dtype)
    for b in range(clouds):
        m = number if new_lengths is None else new_lengths[b]
        of_cloud = distances[b, :m, : size if lengths is None else lengths[b]]
        first = np.argsort(of_cloud, -1, kind="stable")[:, :k]
        idx[b, :m, : first.shape[1]] = first
        squares[b, :m, : first.shape[1]] = np.take_along_axis(of_cloud, first, -1)
    return idx, squares


def distance_gradients(points, queries, idx, ddist):
    """Returns the gradients of the points and of the queries. A neighbour of index -1 has none."""
    terms = np.zeros((*idx.shape, points.shape[-1]), points.dtype)
    dpoints = np.zeros_like(points)
    for cloud, of_cloud in enumerate(idx):
        there = of_cloud >= 0
        offsets = points[cloud][of_cloud[there]] - queries[cloud][np.nonzero(there)[0]]
        dist = np.sqrt((offsets * offsets).sum(-1))
        terms[cloud][there] = (ddist[cloud][there] / np.where(dist > 0, dist, np.inf))[..., None] * offsets
        np.add.at(dpoints[cloud], of_cloud[there], terms[cloud][there])
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


def check_range_of_length(card, which, name, most, capfd):
    """Requires the card's entry to refuse lengths beyond [0, most] as input `which`, and to name the cloud."""
    call = card.entry_calls(*card.cases["lengths"], "float32")[0]
    for length in (-1, most + 1):
        call.inputs[which][1] = length
        status, errors = GuardedCall(call, capfd).call()
        assert status == Status.BAD_VALUE
        assert f"{name}[1] is {length}, expected 0 to {most}" in errors[0]
