import re

import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import random, zeros
from msops.operators.group_points import forward
from operator_test import run, run_gradient, wide_in_graph_mode
from test_gather_points import GatherTest, check_far, gather, sizes


class TestGroupPoints(GatherTest):
    function, cell, operator = msops.group_points, msops.GroupPoints, forward
    cases = {
        "small": sizes(2, 3, 5, 7, 4),
        "one": sizes(1, 1, 1, 1, 1),
        "no groups": sizes(2, 3, 5, 0, 4),
        "empty groups": sizes(2, 3, 5, 4, 0),
        "no points": sizes(1, 2, 0, 0, 3),
        "large": sizes(2, 9, 1500, 200, 17),
    }
    further = {
        f"{shape}": sizes(*shape)
        for shape in (
            (2, 16, 1024, 256, 32),
            (2, 17, 1024, 901, 33),
            (1, 5, 40_000, 700, 3),
            (1, 64, 100, 1, 100),
            (2, 7, 513, 129, 31),
            (1, 70, 30_000, 300, 31),
            (1, 3, 90_000, 260, 36),
            (1, 5, 41_000, 1300, 32),
        )
    }
    huge = ((5, 64, 4096, 2**15, 211),)
    wrong = (
        ([*zeros((2, 3, 4), dtype=np.int32), np.zeros((2, 5, 1), np.int32)], {}, TypeError,
         "group_points: features must be float16, float32 or float64, got int32"),
    )  # fmt: skip


@wide_in_graph_mode
def test_index_out_of_range(mode, capfd):
    idx = np.array([[[0, 1], [4, 4]], [[3, 2], [1, 0]]])
    check_far(capfd, mode, TestGroupPoints(), "group_points", idx, (1, 0, 1))


def grouped(radius, nsample, use_xyz, xyz, new_xyz, features):
    """Groups by brute force."""
    distances = ((new_xyz[:, :, None] - xyz[:, None]) ** 2).sum(-1)
    idx = np.zeros((*new_xyz.shape[:2], nsample), np.int32)
    for place, inside in zip(np.ndindex(*new_xyz.shape[:2]), (distances < radius**2).reshape(-1, xyz.shape[1])):
        found = np.flatnonzero(inside)[:nsample]
        if len(found):
            idx[place] = np.r_[found, np.full(nsample - len(found), found[0])]
    relative = gather(xyz.swapaxes(1, 2), idx)[0] - new_xyz.swapaxes(1, 2)[..., None]
    return np.concatenate([relative] * use_xyz + ([] if features is None else [gather(features, idx)[0]]), 1)


@pytest.mark.parametrize(("use_xyz", "has_features"), [(True, True), (True, False), (False, True)])
def test_query_and_group(mode, use_xyz, has_features):
    """Groups have relative coordinates, then features, with the gradients of both. One center is far from all points,
    so that its group has point 0 only."""
    xyz, new_xyz, features = random(0, np.float32, (2, 40, 3), (2, 5, 3), (2, 4, 40))
    new_xyz[1, 2] = 100
    inputs = [xyz, new_xyz, *[features] * has_features]
    net = msops.QueryAndGroup(1.0, 6, use_xyz)
    want = grouped(1.0, 6, use_xyz, xyz, new_xyz, features if has_features else None)
    np.testing.assert_allclose(run(net, *inputs)[0], want, rtol=1e-6, atol=1e-6)
    gradients = run_gradient(net, inputs, [np.ones_like(want)])
    total = gradients[0].sum() + gradients[1].sum()
    np.testing.assert_allclose(total, 0, atol=1e-3)  # what a point gets, its center loses
    np.testing.assert_allclose(gradients[1], np.full_like(new_xyz, -6 * use_xyz), rtol=1e-6)
    if has_features:
        assert gradients[2].sum() == 2 * 4 * 5 * 6


def test_query_and_group_of_clouds_with_lengths(mode):
    """A cloud's groups are those of its points alone; centers that do not count have groups of point 0."""
    xyz, new_xyz, features = random(0, np.float32, (2, 40, 3), (2, 5, 3), (2, 4, 40))
    (got,) = run(msops.QueryAndGroup(1.0, 6), xyz, new_xyz, features, np.array([9, 40]), np.array([5, 3]))
    of_first = grouped(1.0, 6, True, xyz[:1, :9], new_xyz[:1], features[:1, :, :9])
    np.testing.assert_allclose(got[:1], of_first, rtol=1e-6, atol=1e-6)
    of_second = grouped(1.0, 6, True, xyz[1:], new_xyz[1:, :3], features[1:])
    np.testing.assert_allclose(got[1:, :, :3], of_second, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[1, 3:, 3:], np.broadcast_to(features[1, :, :1, None], (4, 2, 6)))


def test_group_all(mode):
    xyz, features = random(0, np.float32, (2, 7, 3), (2, 4, 7))
    coordinates = xyz.swapaxes(1, 2)
    np.testing.assert_array_equal(run(msops.GroupAll(), xyz)[0], coordinates[:, :, None])
    both = run(msops.GroupAll(), xyz, xyz, features)[0]
    np.testing.assert_array_equal(both, np.concatenate((coordinates, features), 1)[:, :, None])
    out = msops.GroupAll(use_xyz=False)(Tensor(xyz), None, Tensor(features))
    np.testing.assert_array_equal(out.asnumpy(), features[:, :, None])


def test_features_of_another_dtype(mode):
    """Coordinates may be float32 beside features of float16."""
    xyz, new_xyz, features = random(0, np.float32, (1, 9, 3), (1, 2, 3), (1, 4, 9))
    want = grouped(2.0, 3, True, xyz, new_xyz, features)
    for net, expected in (
        (msops.QueryAndGroup(2.0, 3), want),
        (msops.GroupAll(), np.concatenate((xyz.swapaxes(1, 2), features), 1)[:, :, None]),
    ):
        (out,) = run(net, xyz, new_xyz, features.astype(np.float16))
        assert out.dtype == np.float16
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


def test_wrong_groups(mode):
    xyz = Tensor(np.zeros((1, 4, 3), np.float32))
    with pytest.raises(ValueError, match="QueryAndGroup: features must be given if use_xyz is False"):
        msops.QueryAndGroup(1.0, 2, use_xyz=False)(xyz, xyz)
    with pytest.raises(ValueError, match="GroupAll: features must be given if use_xyz is False"):
        msops.GroupAll(use_xyz=False)(xyz)
    with pytest.raises(ValueError, match=r"GroupAll: features must have shape \(B, C, N\), got \(4, 3\)"):
        msops.GroupAll(use_xyz=False)(xyz, None, xyz[0])


XYZ, FEATURES = zeros((2, 4, 3), (2, 5, 4))


@pytest.mark.parametrize(
    ("xyz", "features", "error", "words"),
    [
        (XYZ[0], FEATURES, ValueError, "xyz must have shape (B, N, 3), got (4, 3)"),
        (XYZ[..., :2], FEATURES, ValueError, "xyz must have shape (B, N, 3) = (2, 4, 3), got (2, 4, 2)"),
        (XYZ.astype(np.int32), FEATURES, TypeError, "xyz must be float16, float32 or float64, got int32"),
        (XYZ, FEATURES[..., :3], ValueError, "features must have shape (B, C, N) = (2, 5, 4), got (2, 5, 3)"),
        (XYZ, FEATURES[:1], ValueError, "features must have shape (B, C, N) = (2, 5, 4), got (1, 5, 4)"),
        (XYZ, FEATURES.astype(bool), TypeError, "features must be float16, float32 or float64, got bool"),
        (XYZ, 3, TypeError, "features must be a Tensor, got int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_points_and_features_that_do_not_fit(mode, xyz, features, error, words):
    points = Tensor(xyz)
    for net in (msops.GroupAll(), msops.QueryAndGroup(1.0, 2)):
        with pytest.raises(error, match=re.escape(f"{type(net).__name__}: {words}")):
            net(points, points, Tensor(features) if isinstance(features, np.ndarray) else features)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(radius=-1.0), ValueError, "QueryAndGroup: radius must be finite and at least 0, got -1.0"),
        (dict(nsample=0), ValueError, "QueryAndGroup: nsample must be at least 1, got 0"),
        (dict(use_xyz=1), TypeError, "QueryAndGroup: use_xyz must be a bool, got int"),
    ],
    ids=str,
)
def test_wrong_settings(settings, error, words):
    with pytest.raises(error, match=words):
        msops.QueryAndGroup(**(dict(radius=1.0, nsample=2) | settings))
