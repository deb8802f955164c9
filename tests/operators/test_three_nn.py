import numpy as np

import msops
from card import zeros
from clouds import CloudTest, check_directions, distance_gradients, nearest
from msops.operators.three_nn import forward
from operator_test import run, run_gradient


def three_nn(unknown, known):
    idx, squares = nearest(known, unknown, 3)
    return np.sqrt(squares), idx


def three_nn_backward(unknown, known, idx, ddist):
    return distance_gradients(known, unknown, idx, ddist)[::-1]


def shapes(batch, unknown, known):
    return [(batch, unknown, 3), (batch, known, 3)]


class TestThreeNN(CloudTest):
    function, cell = msops.three_nn, msops.ThreeNN
    operator = forward
    formulas = (three_nn, three_nn_backward)
    cases = {
        "neighbours": (shapes(2, 7, 9), {}),
        "three": (shapes(1, 5, 3), {}),
        "large": (shapes(2, 600, 700), {}),
        "none": (shapes(2, 0, 5), {}),
    }
    further = {
        f"{unknown} of {known}": (shapes(2, unknown, known), {})
        for unknown, known in (
            (1, 3),
            (65, 31),
            (40, 512),
            (33, 4097),
            (1100, 33),
            (300, 1300),
            (600, 3000),
            (50_000, 70),
        )
    }
    small = "neighbours"
    roundings = 64  # of sums of terms of both signs
    wrong = (
        (zeros((1, 5, 3), (1, 4, 3), dtype=np.int32), {}, TypeError,
         "three_nn: unknown must be float16, float32 or float64, got int32"),
        (zeros((1, 5, 3), (1, 2, 3)), {}, ValueError, "three_nn: known must have at least 3 points, got 2"),
    )  # fmt: skip

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Moves the unknown points off the known ones, so that distances have gradients, except the first."""
        unknown, known = super().inputs(shapes, dtype, seed)
        unknown += np.asarray([0.25, 0.125, -0.375], dtype)
        if unknown.size:
            unknown[:, 0] = known[:, 0]
        return [unknown, known]

    def result_dtype(self, dtype):
        return dtype, "int32"

    def random_case(self, random):
        batch, known = random.randrange(4), random.randrange(3, random.choice((6, 40, 900)))
        return shapes(batch, random.randrange(70), known), {}

    def test_gradient_against_finite_differences(self, mode):
        """Takes other points than those of a lattice, where equal distances are kinks."""
        rng = np.random.default_rng(3)
        inputs = [rng.standard_normal(shape) for shape in shapes(2, 6, 20)]
        ddist = rng.standard_normal((2, 6, 3))
        gradients = run_gradient(self.net(), inputs, [ddist, np.zeros((2, 6, 3), np.int32)])
        check_directions(gradients, inputs, lambda *moved: (three_nn(*moved)[0] * ddist).sum())


def test_equals_knn(mode):
    unknown, known = TestThreeNN().inputs(shapes(2, 50, 600), "float32")
    dist, idx = run(msops.ThreeNN(), unknown, known)
    want_idx, want_dist = run(msops.KNN(3, return_distances=True), known, unknown)
    np.testing.assert_array_equal(idx, want_idx)
    np.testing.assert_array_equal(dist, want_dist)
