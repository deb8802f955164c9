import numpy as np
from hypothesis import HealthCheck, given, settings as limits, strategies as st

import msops
from card import chain, results_of, zeros
from clouds import CloudTest, check_directions, clouds, distance_gradients, nearest, uniform
from msops.operators.knn import operators
from msops.testing.checks import Net
from operator_test import run, run_gradient


def knn(xyz, new_xyz, k=1, **_):
    idx, squares = nearest(xyz, new_xyz, k)
    return idx, np.sqrt(squares)


def knn_backward(xyz, new_xyz, idx, ddist, **_):
    return distance_gradients(xyz, new_xyz, idx, ddist)


def shapes(batch, size, queries):
    return [(batch, size, 3), (batch, queries, 3)]


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
    }
    further = {
        **{f"{size} points, {queries} queries, {k}": (shapes(2, size, queries), {"k": k})
           for size, queries, k in (
               (1, 3, 1), (31, 5, 31), (33, 65, 32), (64, 7, 33), (511, 40, 8), (512, 40, 3), (1025, 100, 32),
               (2100, 33, 64), (4097, 70, 5), (600, 32, 260))},
        "all of many": (shapes(1, 300, 4), {"k": 300}),
        "many": (shapes(1, 20_001, 50), {"k": 20}),
    }  # fmt: skip
    small = "neighbours"
    roundings = 64  # of sums of terms of both signs
    wrong = (
        (zeros((1, 5, 3), (1, 2, 3), dtype=np.int32), {"k": 1}, TypeError,
         "knn: xyz must be float16, float32 or float64, got int32"),
        (zeros((1, 5, 3), (2, 2, 3)), {"k": 1}, ValueError,
         "new_xyz must have shape (B, M, 3) = (1, 2, 3), got (2, 2, 3)"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 6}, ValueError, "knn: k must be at most N = 5, got 6"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 0}, ValueError, "knn: k must be at least 1, got 0"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 1.5}, TypeError, "knn: k must be an int, got float"),
        (zeros((1, 5, 3), (1, 2, 3)), {"k": 1, "return_distances": None}, TypeError,
         "knn: return_distances must be a bool, got NoneType"),
    )  # fmt: skip

    def operators(self, shapes=(), k=1):
        return chain(operators(k))

    def net(self, **settings):
        return Net(knn_of, **{"return_distances": True, **settings})

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Moves the queries off the points, so that distances have gradients, except the first point."""
        xyz, new_xyz = super().inputs(shapes, dtype, seed)
        new_xyz += np.asarray([0.25, 0.125, -0.375], dtype)
        if xyz.size and new_xyz.size:
            new_xyz[:, 0] = xyz[:, 0]
        return [xyz, new_xyz]

    def result_dtype(self, dtype):
        return "int32", dtype

    def reference_gradient(self, xyz, new_xyz, didx, ddist, k):
        return distance_gradients(xyz, new_xyz, nearest(xyz, new_xyz, k)[0], ddist)

    def random_case(self, random):
        batch, size = random.randrange(4), random.randrange(1, random.choice((6, 40, 900)))
        return shapes(batch, size, random.randrange(70)), {"k": random.randrange(1, min(size, 40) + 1)}

    def test_cell(self, mode):
        inputs, settings = self.case_inputs("neighbours", np.float32)
        idx, dist = run(msops.KNN(**settings, return_distances=True), *inputs)
        np.testing.assert_array_equal(idx, self.reference(*inputs, **settings)[0])
        np.testing.assert_array_equal(dist, run(self.net(**settings), *inputs)[1])
        for net in (msops.KNN(**settings), self.net(**settings, return_distances=False)):
            (alone,) = run(net, *inputs)
            np.testing.assert_array_equal(alone, idx)

    def test_gradient_against_finite_differences(self, mode):
        """Takes other points than those of a lattice, where equal distances are kinks."""
        rng = np.random.default_rng(3)
        inputs = [rng.standard_normal(shape) for shape in shapes(2, 20, 5)]
        ddist = rng.standard_normal((2, 5, 4))
        gradients = run_gradient(self.net(k=4), inputs, [np.zeros((2, 5, 4), np.int32), ddist])
        check_directions(gradients, inputs, lambda *moved: (knn(*moved, k=4)[1] * ddist).sum())


def knn_of(xyz, new_xyz, k, return_distances=True):
    return msops.knn(k, xyz, new_xyz, return_distances)


@limits(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(clouds(), st.sampled_from(["float16", "float32"]), st.randoms(use_true_random=False))
def test_any_cloud(points, dtype, random):
    """Any coordinates, equal ones, NaN and infinity among them, give what all distances give."""
    with np.errstate(all="ignore"):
        xyz = points.astype(dtype)[None]
        queries = xyz[:, random.choices(range(len(points)), k=random.choice((3, 40, 40)))]
        if random.random() < 0.5:
            queries = queries * queries.dtype.type(random.choice((0.9, 1.5)))
        k = random.randint(1, min(len(points), random.choice((1, 3, 40, 400))))
        idx, dist = results_of(operators(k), xyz, queries)
        want, squares = nearest(xyz, queries, k)
        np.testing.assert_array_equal(idx, want)
        np.testing.assert_array_equal(dist, np.sqrt(squares).astype(dtype))


def test_many_queries():
    xyz, queries = uniform(0, (2000,), (1500,))
    for k in (1, 7, 20):
        np.testing.assert_array_equal(results_of(operators(k), xyz, queries)[0], nearest(xyz, queries, k)[0])
