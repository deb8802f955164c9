import itertools

import numpy as np
from mindspore import Parameter, Tensor, nn

import msops
from card import random, zeros
from msops.operators.trilinear_interpolation import forward
from operator_test import OperatorTest, check_training, run

CORNERS = tuple(itertools.product((0, 1), repeat=3))  # (iu, iv, iw), in the order of the index 4 iu + 2 iv + iw


def corners(points):
    """Yields (weight, its slope along each axis) of each corner of the cube."""
    far = (points + 1) / 2
    sides = (1 - far, far)
    for corner in CORNERS:
        u, v, w = (sides[i][:, d] for d, i in enumerate(corner))
        su, sv, sw = (i - 0.5 for i in corner)
        yield u * v * w, np.stack([su * v * w, u * sv * w, u * v * sw], 1).astype(points.dtype)


def trilinear(feats, points):
    weights = np.stack([weight for weight, _ in corners(points)], 1)
    return (np.einsum("ncf,nc->nf", feats, weights),)


def trilinear_backward(feats, points, dout):
    weights, slopes = (np.stack(arrays, 1) for arrays in zip(*corners(points)))
    dfeats = weights[:, :, None] * dout[:, None]
    dpoints = np.einsum("ncd,nc->nd", slopes, np.einsum("ncf,nf->nc", feats, dout))
    return dfeats, dpoints


class TestTrilinearInterpolation(OperatorTest):
    function = msops.trilinear_interpolation
    cell = msops.TrilinearInterpolation
    operator = forward
    formulas = (trilinear, trilinear_backward)
    cases = {
        "small": ([(3, 8, 4), (3, 3)], {}),
        "one": ([(1, 8, 1), (1, 3)], {}),
        "no points": ([(0, 8, 4), (0, 3)], {}),
        "no features": ([(4, 8, 0), (4, 3)], {}),
        "two features": ([(1001, 8, 2), (1001, 3)], {}),
        "odd features": ([(67, 8, 7), (67, 3)], {}),
        "16 features": ([(129, 8, 16), (129, 3)], {}),
        "many features": ([(5, 8, 1000), (5, 3)], {}),
        "very many features": ([(1, 8, 20_011), (1, 3)], {}),
        "large": ([(1033, 8, 128), (1033, 3)], {}),
    }
    further = {
        f"{n} x {f}": ([(n, 8, f), (n, 3)], {})
        for n, f in (
            *((0, 3), (0, 5), (5, 0), (35, 1), (33, 2), (17, 3), (9, 4), (17, 7), (9, 8), (11, 15), (9, 16), (11, 31)),
            *((5, 72), (3, 301), (2000, 3), (1200, 17), (600, 65), (2, 3001), (1009, 65)),
        )
    }
    small = "small"
    second_order = True
    huge = ((2**24 + 3, 16),)
    wrong = (
        (zeros((2, 8, 4), (2, 3), dtype=np.int32), {}, TypeError, "feats must be float16, float32"),
        ([*zeros((2, 8, 4)), [[0.0] * 3] * 2], {}, TypeError, "points must be a Tensor, got"),
    )

    def check_huge(self, gpu, n, f):
        forward, backward, *_ = self.operators()
        feats, points = gpu.random(n, 8, f), gpu.random(n, 3) / 2
        (out,) = gpu.run(forward, feats, points)
        dfeats, dpoints = gpu.run(backward, feats, points, out)
        gpu.check_parts(forward, [feats, points], [out], n, 1000, gpu.assert_equal)
        gpu.check_parts(backward, [feats, points, out], [dfeats, dpoints], n, 1000, gpu.assert_equal)
        assert not dfeats.isnan().any()
        assert not out.isnan().any()


def test_corners_and_outside(mode):
    """At a corner only its features count. Outside the cube, the trilinear function continues."""
    points = np.array(CORNERS, np.float32) * 2 - 1
    feats = np.repeat(random(0, np.float32, (1, 8, 5))[0], 8, 0)
    np.testing.assert_allclose(run(msops.TrilinearInterpolation(), feats, points)[0], feats[0], rtol=1e-6)
    far = np.array([[3, -5, 2]], np.float32)
    linear = (np.array(CORNERS, np.float32) @ np.array([1, 10, 100], np.float32))[None, :, None]
    expected = (far + 1) / 2 @ np.array([[1], [10], [100]])
    np.testing.assert_allclose(run(msops.TrilinearInterpolation(), linear, far)[0], expected, rtol=1e-6)


def test_nan_stays_in_its_row(mode):
    feats, points = random(0, np.float32, (4, 8, 6), (4, 3))
    clean = run(msops.TrilinearInterpolation(), feats, points)[0]
    points[1, 2], feats[2, 5, 3] = np.nan, np.inf
    out = run(msops.TrilinearInterpolation(), feats, points)[0]
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2, 3])
    out[1], out[2, 3] = clean[1], clean[2, 3]
    np.testing.assert_array_equal(out, clean)


class Learned(nn.Cell):
    """Learns the features and the points."""

    def __init__(self):
        super().__init__()
        feats, points = random(3, np.float32, (6, 8, 5), (6, 3))
        self.feats, self.points = Parameter(Tensor(feats), name="feats"), Parameter(Tensor(points), name="points")
        self.interpolation = msops.TrilinearInterpolation()

    def construct(self):
        return self.interpolation(self.feats, self.points)


def test_training(mode):
    check_training(Learned())
