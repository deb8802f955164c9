import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as limits, strategies as st

import msops
from card import chain, check_formula, results_of, zeros
from clouds import (
    CloudTest,
    check_directions,
    check_range_of_length,
    clouds,
    distance_gradients,
    nearest,
    random_lengths,
    searched,
    uniform,
)
from msops.operators.knn import operators
from msops.testing.checks import Net
from operator_test import run, run_gradient


def knn(xyz, new_xyz, lengths=None, new_lengths=None, k=1, **_):
    idx, squares = nearest(xyz, new_xyz, k, lengths, new_lengths)
    return idx, np.sqrt(squares)


def knn_backward(xyz, new_xyz, idx, ddist, **_):
    return distance_gradients(xyz, new_xyz, idx, ddist)


def shapes(batch, size, queries, axes=3, lengths=0):
    """Returns the shapes of a call with no lengths, those of the points, or both."""
    return [(batch, size, axes), (batch, queries, axes), *[(batch,)] * lengths]


class TestKNN(CloudTest):
    function = msops.knn
    formulas = (knn, knn_backward)
    cases = {
        "neighbours": (shapes(2, 33, 7), {"k": 5}),
        "one": (shapes(1, 40, 9), {"k": 1}),
        "all": (shapes(2, 6, 3), {"k": 6}),
        "large": (shapes(1, 2000, 300), {"k": 16}),
        "no queries": (shapes(2, 5, 0), {"k": 2}),
        "no clouds": (shapes(0, 5, 3), {"k": 2}),
        "lengths": (shapes(3, 33, 7, lengths=2), {"k": 5}),
        "five coordinates": (shapes(2, 33, 7, axes=5), {"k": 5}),
        "more than there are": (shapes(2, 3, 4), {"k": 5}),
        "no points": (shapes(2, 0, 3, axes=2), {"k": 2}),
    }
    further = {
        **{f"{size} points, {queries} queries, {k}": (shapes(2, size, queries), {"k": k})
           for size, queries, k in (
               (1, 3, 1), (31, 5, 31), (33, 65, 32), (64, 7, 33), (511, 40, 8), (512, 40, 3), (1025, 100, 32),
               (2100, 33, 64), (4097, 70, 5), (600, 32, 260), (1024, 20, 100), (2047, 9, 64))},
        **{f"{axes} coordinates, {size} points": (shapes(2, size, queries, axes), {"k": k})
           for axes in (1, 2, 4, 5, 6, 7, 8) for size, queries, k in ((40, 33, 3), (2100, 33, 9))},
        **{f"lengths, {axes} coordinates, {size} points, {k}": (shapes(4, size, queries, axes, lengths), {"k": k})
           for axes, size, queries, k, lengths in (
               (3, 40, 9, 3, 1), (3, 2100, 40, 33, 2), (3, 2100, 40, 3, 1), (2, 600, 40, 300, 2), (8, 2100, 35, 7, 2),
               (1, 31, 5, 40, 2), (4, 33, 0, 2, 2), (3, 1, 3, 2, 2))},
        "all of many": (shapes(1, 300, 4), {"k": 300}),
        "many": (shapes(1, 20_001, 50), {"k": 20}),
    }  # fmt: skip
    small = "neighbours"
    hostile = ("neighbours", "lengths", "five coordinates")
    roundings = 64  # of sums of terms of both signs
    wrong = (
        (zeros((1, 5, 3), (1, 2, 3), dtype=np.int32), {"k": 1}, TypeError,
         "knn: xyz must be float16, float32 or float64, got int32"),
        (zeros((1, 5, 9), (1, 2, 9)), {"k": 1}, ValueError, "knn: xyz must have 1 to 8 coordinates, got 9"),
        (zeros((1, 5, 0), (1, 2, 0)), {"k": 1}, ValueError, "knn: xyz must have 1 to 8 coordinates, got 0"),
        ([*zeros((1, 5, 3), (1, 2, 3)), np.zeros(2, np.int32)], {"k": 1}, ValueError,
         "knn: lengths must have shape (B,) = (1,), got (2,)"),
        ([*zeros((1, 5, 3), (1, 2, 3)), *zeros(1, 1, dtype=np.float32)], {"k": 1}, TypeError,
         "knn: lengths must be int32, got float32"),
        ([*zeros((1, 5, 3), (1, 2, 3)), np.zeros(1, np.int32), np.zeros((1, 2), np.int64)], {"k": 1}, ValueError,
         "knn: new_lengths must have shape (B,)"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 0}, ValueError, "knn: k must be at least 1, got 0"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 1.5}, TypeError, "knn: k must be an int, got float"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 1, "return_distances": None}, TypeError,
         "knn: return_distances must be a bool, got NoneType"),
    )  # fmt: skip

    def operators(self, shapes=(), k=1):
        return chain(operators(k).without(*("lengths", "new_lengths")[max(len(shapes) - 2, 0) :]))

    def net(self, **settings):
        return Net(knn_of, **{"return_distances": True, **settings})

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Moves the queries off the points, so that distances have gradients, except the first point."""
        xyz, new_xyz = super().inputs(shapes[:2], dtype, seed)
        new_xyz += np.resize(np.asarray([0.25, 0.125, -0.375], dtype), new_xyz.shape[-1:])
        if xyz.size and new_xyz.size:
            new_xyz[:, 0] = xyz[:, 0]
        return [xyz, new_xyz, *random_lengths(seed, *zip((xyz.shape[1], new_xyz.shape[1]), shapes[2:]))]

    def result_dtype(self, dtype):
        return "int32", dtype

    def reference_gradient(self, xyz, new_xyz, *rest, k):
        *lengths, _, ddist = rest
        gradients = distance_gradients(xyz, new_xyz, nearest(xyz, new_xyz, k, *lengths)[0], ddist)
        return *gradients, *(np.zeros_like(each) for each in lengths)

    def random_case(self, random):
        batch, size = random.randrange(4), random.randrange(random.choice((6, 40, 900)))
        axes, lengths = random.choice((3, random.randrange(1, 9))), random.choice((0, 0, 1, 2))
        return shapes(batch, size, random.randrange(70), axes, lengths), {"k": random.randrange(1, 42)}

    def test_cell(self, mode):
        inputs, settings = self.case_inputs("neighbours", np.float32)
        idx, dist = run(msops.KNN(**settings, return_distances=True), *inputs)
        np.testing.assert_array_equal(idx, self.reference(*inputs, **settings)[0])
        np.testing.assert_array_equal(dist, run(self.net(**settings), *inputs)[1])
        for net in (msops.KNN(**settings), self.net(**settings, return_distances=False)):
            (alone,) = run(net, *inputs)
            np.testing.assert_array_equal(alone, idx)
        inputs, settings = self.case_inputs("lengths", np.float32)
        for got, want in zip(
            run(msops.KNN(**settings, return_distances=True), *inputs), self.reference(*inputs, **settings)
        ):
            np.testing.assert_array_equal(got, want.astype(got.dtype))

    @pytest.mark.parametrize("axes", [2, 3, 8])
    def test_grid(self, axes):
        """The sizes that pytorch3d tests, without lengths."""
        rng = np.random.default_rng(axes)
        for batch, queries, size in itertools.product((1, 4), (1, 8, 64), (32, 128, 513)):
            xyz, new_xyz = (
                np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes(batch, size, queries, axes)
            )
            for k in (1, 3, 10):
                idx, dist = results_of(self.operators(k=k)[0], xyz, new_xyz)
                want, squares = nearest(xyz, new_xyz, k)
                np.testing.assert_array_equal(idx, want)
                np.testing.assert_array_equal(dist, np.sqrt(squares))

    @pytest.mark.parametrize("axes", [3, 5, 8])
    def test_grid_of_gradients(self, axes):
        """The sizes for which pytorch3d tests gradients; 10 neighbours are more than 8 points have."""
        for batch, queries, size, k in itertools.product((1, 4), (8, 24), (8, 16, 32), (1, 3, 10)):
            for call, formula in zip(
                self.entry_calls(shapes(batch, size, queries, axes), {"k": k}, "float32"), self.formulas
            ):
                check_formula(call, lambda *x, formula=formula, k=k: formula(*x, k=k), self.roundings, self.units())

    @pytest.mark.parametrize("axes", [1, 5, 8])
    def test_gradient_of_other_dimensions_against_finite_differences(self, axes):
        rng = np.random.default_rng(5)
        xyz, new_xyz = (rng.standard_normal(shape) for shape in shapes(2, 20, 5, axes))
        lengths, ddist = np.array([20, 2], np.int32), rng.standard_normal((2, 5, 4))
        inputs = [xyz, new_xyz, lengths]
        gradients = run_gradient(self.net(k=4), inputs, [np.zeros((2, 5, 4), np.int32), ddist])[:2]
        assert not gradients[0][1, 2:].any()
        check_directions(gradients, inputs[:2], lambda *moved: (knn(*moved, lengths, k=4)[1] * ddist).sum())

    def test_gradient_against_finite_differences(self, mode):
        """Takes other points than those of a lattice, where equal distances are kinks."""
        rng = np.random.default_rng(3)
        inputs = [rng.standard_normal(shape) for shape in shapes(2, 20, 5)]
        ddist = rng.standard_normal((2, 5, 4))
        gradients = run_gradient(self.net(k=4), inputs, [np.zeros((2, 5, 4), np.int32), ddist])
        check_directions(gradients, inputs, lambda *moved: (knn(*moved, k=4)[1] * ddist).sum())


def knn_of(xyz, new_xyz, *lengths, k, return_distances=True):
    return msops.knn(k, xyz, new_xyz, return_distances, *lengths)


@pytest.mark.parametrize("k", [1, 9, 10, 11, 101])
def test_ragged(mode, k):
    """The lengths that pytorch3d tests, in int64: they give what each cloud alone gives."""
    new_lengths, lengths = np.array([10, 100, 10, 100]), np.array([10, 10, 100, 100])
    rng = np.random.default_rng(k)
    xyz, new_xyz = (np.asarray(rng.standard_normal((4, 100, 3)), np.float32) for _ in range(2))
    xyz[lengths[:, None] <= np.arange(100)] = np.nan  # they are never read
    idx, dist = run(Net(knn_of, k=k), xyz, new_xyz, lengths, new_lengths)
    for b in range(4):
        points, queries, most = xyz[b : b + 1, : lengths[b]], new_xyz[b : b + 1, : new_lengths[b]], min(k, lengths[b])
        of_cloud, of_cloud_dist = run(Net(knn_of, k=most), points, queries)
        np.testing.assert_array_equal(idx[b, : new_lengths[b], :most], of_cloud[0])
        np.testing.assert_array_equal(dist[b, : new_lengths[b], :most], of_cloud_dist[0])
        for missing in (np.s_[b, new_lengths[b] :], np.s_[b, :, most:]):
            np.testing.assert_array_equal(idx[missing], -1)
            np.testing.assert_array_equal(dist[missing], 0)


def knn_of_queries(xyz, new_xyz, new_lengths):
    return msops.knn(3, xyz, new_xyz, new_lengths=new_lengths)


def test_lengths_of_queries_alone(mode):
    xyz, new_xyz = TestKNN().inputs(shapes(2, 40, 9), np.float32)
    new_lengths = np.array([0, 5])
    want, _ = nearest(xyz, new_xyz, 3, None, new_lengths)
    (of_function,) = run(Net(knn_of_queries), xyz, new_xyz, new_lengths)
    np.testing.assert_array_equal(of_function, want)


@pytest.mark.parametrize(("which", "name", "most"), [(2, "lengths", 33), (3, "new_lengths", 7)])
def test_length_out_of_range(capfd, which, name, most):
    check_range_of_length(TestKNN(), which, name, most, capfd)


@limits(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(clouds(), st.sampled_from(["float16", "float32"]), st.randoms(use_true_random=False))
def test_any_cloud(points, dtype, random):
    """Any coordinates, equal ones, NaN and infinity among them, give what all distances give."""
    with np.errstate(all="ignore"):
        xyz, queries = searched(points, dtype, random)
        k = random.randint(1, min(len(points), random.choice((1, 3, 40, 400))))
        idx, dist = results_of(TestKNN().operators(k=k)[0], xyz, queries)
        want, squares = nearest(xyz, queries, k)
        np.testing.assert_array_equal(idx, want)
        np.testing.assert_array_equal(dist, np.sqrt(squares).astype(dtype))


def test_many_queries():
    xyz, queries = uniform(0, (2000,), (1500,))
    for k in (1, 7, 20):
        np.testing.assert_array_equal(
            results_of(TestKNN().operators(k=k)[0], xyz, queries)[0], nearest(xyz, queries, k)[0]
        )
