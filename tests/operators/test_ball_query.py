import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as limits, strategies as st

import msops
from card import chain, results_of, zeros
from clouds import CloudTest, check_range_of_length, clouds, random_lengths, searched, squared_distances, uniform
from msops.operators.ball_query import operators
from msops.testing.checks import Net
from operator_test import run


def ball_query(xyz, new_xyz, lengths=None, new_lengths=None, radius=1.0, nsample=1, min_radius=0.0, **_):
    distances = squared_distances(xyz, new_xyz)
    low, high = (distances.dtype.type(r * r) for r in (min_radius, radius))
    inside = (low <= distances) & (distances < high)
    for b in range(len(xyz)):
        inside[b, :, xyz.shape[1] if lengths is None else lengths[b] :] = False
        inside[b, new_xyz.shape[1] if new_lengths is None else new_lengths[b] :] = False
    counts = np.minimum(inside.sum(-1), nsample).astype(np.int32)
    idx = np.zeros((*counts.shape, nsample), np.int32)
    for at in np.ndindex(counts.shape):
        first = np.flatnonzero(inside[at])[:nsample]
        idx[at] = first[0] if len(first) else 0
        idx[at][: len(first)] = first
    return idx, counts


def shapes(batch, size, queries, lengths=0):
    """Returns the shapes of a call with no lengths, those of the points, or both."""
    return [(batch, size, 3), (batch, queries, 3), *[(batch,)] * lengths]


class TestBallQuery(CloudTest):
    function, cell = msops.ball_query, msops.BallQuery
    formulas = (ball_query,)
    constants = (0, 1)
    cases = {
        "balls": (shapes(2, 33, 7), {"radius": 1.5, "nsample": 5}),
        "shells": (shapes(1, 50, 9), {"radius": 2.0, "nsample": 4, "min_radius": 1.25}),
        "one sample": (shapes(2, 40, 3), {"radius": 1.0, "nsample": 1}),
        "large": (shapes(1, 3000, 300), {"radius": 0.75, "nsample": 16}),
        "empty balls": (shapes(1, 20, 4), {"radius": 0.0, "nsample": 3}),
        "no points": (shapes(2, 0, 3), {"radius": 1.0, "nsample": 2}),
        "lengths": (shapes(3, 33, 7, lengths=2), {"radius": 1.5, "nsample": 5}),
        "no queries": (shapes(2, 5, 0), {"radius": 1.0, "nsample": 2}),
    }
    further = {
        **{f"{size} points, radius {radius}, {nsample}": (
               shapes(2, size, 65), {"radius": radius, "nsample": nsample, "min_radius": min_radius})
           for size, radius, nsample, min_radius in (
               (1, 1.0, 3, 0.0), (31, 1.0, 32, 0.0), (64, 9.0, 65, 0.0), (511, 0.5, 4, 0.25), (512, 0.5, 4, 0.0),
               (1025, 1.0, 33, 0.5), (4097, 0.25, 32, 0.0), (4097, 1.0, 300, 0.0), (6000, 3.0, 8, 0.0))},
        **{f"lengths, {size} points, {nsample}": (
               shapes(4, size, 45, lengths), {"radius": radius, "nsample": nsample, "min_radius": 0.25})
           for size, radius, nsample, lengths in (
               (40, 1.0, 3, 1), (2100, 0.5, 9, 2), (2100, 3.0, 40, 1), (700, 1.0, 300, 2), (1, 9.0, 2, 2))},
        "more samples than points": (shapes(1, 600, 40), {"radius": 100.0, "nsample": 700}),
        "many": (shapes(1, 20_001, 50), {"radius": 0.3, "nsample": 20}),
    }  # fmt: skip
    small = "balls"
    hostile = ("balls", "lengths")
    wrong = (
        (zeros((1, 5, 3), (1, 2, 3), dtype=np.int32), {"radius": 1.0, "nsample": 1}, TypeError,
         "ball_query: xyz must be float16, float32 or float64, got int32"),
        ([*zeros((1, 5, 3), (1, 2, 3)), np.zeros(2, np.int32)], {"radius": 1.0, "nsample": 1}, ValueError,
         "ball_query: lengths must have shape (B,) = (1,), got (2,)"),
        ([*zeros((1, 5, 3), (1, 2, 3)), *zeros(1, 1, dtype=np.float32)], {"radius": 1.0, "nsample": 1}, TypeError,
         "ball_query: lengths must be int32, got float32"),
        (zeros((1, 5, 3), (1, 2, 3)), {"radius": -1.0, "nsample": 1}, ValueError,
         "ball_query: radius must be finite and at least 0, got -1.0"),
        (zeros((1, 5, 3), (1, 2, 3)), {"radius": 1.0, "nsample": 0}, ValueError,
         "ball_query: nsample must be at least 1, got 0"),
        (zeros((1, 5, 3), (1, 2, 3)), {"radius": 1.0, "nsample": 1, "min_radius": -0.5}, ValueError,
         "ball_query: min_radius must be finite and at least 0, got -0.5"),
        (zeros((1, 5, 3), (1, 2, 3)), {"radius": 1.0, "nsample": 1, "return_counts": 1}, TypeError,
         "ball_query: return_counts must be a bool, got int"),
    )  # fmt: skip

    def operators(self, shapes=(), radius=1.0, nsample=1, min_radius=0.0, **_):
        operator = operators(radius, nsample, min_radius)
        return chain(operator.without(*("lengths", "new_lengths")[max(len(shapes) - 2, 0) :]))

    def net(self, **settings):
        return Net(query_of, **{"return_counts": True, **settings})

    def inputs(self, shapes, dtype, seed=1, **settings):
        xyz, new_xyz = super().inputs(shapes[:2], dtype, seed)
        return [xyz, new_xyz, *random_lengths(seed, *zip((xyz.shape[1], new_xyz.shape[1]), shapes[2:]))]

    def result_dtype(self, dtype):
        return "int32"

    def reference_gradient(self, *inputs_and_douts, **settings):
        return tuple(np.zeros_like(x) for x in inputs_and_douts[:-2])

    def random_case(self, random):
        batch, size = random.randrange(4), random.randrange(random.choice((6, 40, 900)))
        settings = dict(
            radius=random.choice((0.5, 1.0, 3.0)),
            nsample=random.randrange(1, random.choice((4, 70))),
            min_radius=random.choice((0.0, 0.0, 0.75)),
        )
        return shapes(batch, size, random.randrange(70), random.choice((0, 0, 1, 2))), settings

    def test_cell(self, mode):
        inputs, settings = self.case_inputs("balls", np.float32)
        want = self.reference(*inputs, **settings)
        np.testing.assert_array_equal(run(msops.BallQuery(**settings), *inputs)[0], want[0])
        for got, each in zip(run(msops.BallQuery(**settings, return_counts=True), *inputs), want):
            np.testing.assert_array_equal(got, each)
        (idx,) = run(Net(query_of, **settings, return_counts=False), *inputs)
        np.testing.assert_array_equal(idx, want[0])
        inputs, settings = self.case_inputs("lengths", np.float32)
        for got, each in zip(
            run(msops.BallQuery(**settings, return_counts=True), *inputs), self.reference(*inputs, **settings)
        ):
            np.testing.assert_array_equal(got, each)


def query_of(xyz, new_xyz, *lengths, radius, nsample, min_radius=0.0, return_counts=False):
    return msops.ball_query(radius, nsample, xyz, new_xyz, min_radius, return_counts, *lengths)


def query_of_queries(xyz, new_xyz, new_lengths):
    return msops.ball_query(1.5, 4, xyz, new_xyz, new_lengths=new_lengths)


def test_ragged(mode):
    """Clouds with lengths, in int64, give what each cloud alone gives."""
    new_lengths, lengths = np.array([10, 100, 10, 0]), np.array([10, 10, 100, 700])
    xyz, new_xyz = TestBallQuery().inputs([(4, 700, 3), (4, 100, 3)], np.float32)
    xyz[lengths[:, None] <= np.arange(700)] = np.nan  # they are never read
    settings = dict(radius=1.5, nsample=20, min_radius=0.5, return_counts=True)
    idx, counts = run(Net(query_of, **settings), xyz, new_xyz, lengths, new_lengths)
    for b in range(4):
        of_cloud = run(Net(query_of, **settings), xyz[b : b + 1, : lengths[b]], new_xyz[b : b + 1, : new_lengths[b]])
        np.testing.assert_array_equal(idx[b, : new_lengths[b]], of_cloud[0][0])
        np.testing.assert_array_equal(counts[b, : new_lengths[b]], of_cloud[1][0])
        assert not idx[b, new_lengths[b] :].any()
        assert not counts[b, new_lengths[b] :].any()


def test_lengths_of_queries_alone(mode):
    xyz, new_xyz = TestBallQuery().inputs(shapes(2, 40, 9), np.float32)
    new_lengths = np.array([0, 5])
    want, _ = ball_query(xyz, new_xyz, None, new_lengths, 1.5, 4)
    np.testing.assert_array_equal(run(Net(query_of_queries), xyz, new_xyz, new_lengths)[0], want)


@pytest.mark.parametrize(("which", "name", "most"), [(2, "lengths", 33), (3, "new_lengths", 7)])
def test_length_out_of_range(capfd, which, name, most):
    check_range_of_length(TestBallQuery(), which, name, most, capfd)


def check(xyz, queries, **settings):
    found = results_of(TestBallQuery().operators(**settings)[0], xyz, queries)
    for got, want in zip(found, ball_query(xyz, queries, **settings)):
        np.testing.assert_array_equal(got, want)


@limits(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(clouds(), st.sampled_from(["float16", "float32"]), st.randoms(use_true_random=False))
def test_any_cloud(points, dtype, random):
    """Any coordinates, equal ones, NaN and infinity among them, give what all distances give."""
    with np.errstate(all="ignore"):
        xyz, queries = searched(points, dtype, random)
        size = (
            np.nanmedian(np.where(np.isfinite(points), np.abs(points, dtype=np.float64), np.nan))
            if np.isfinite(points).any()
            else 1
        )
        settings = dict(
            radius=float(size) * random.choice((0, 0.1, 1, 30)),
            nsample=random.choice((1, 3, 40)),
            min_radius=float(size) * random.choice((0, 0, 0.3)),
        )
        check(xyz, queries, **settings)


def test_many_queries():
    xyz, queries = uniform(0, (2000,), (1500,))
    for radius, nsample in ((0.1, 16), (0.2, 100)):
        check(xyz, queries, radius=radius, nsample=nsample)
