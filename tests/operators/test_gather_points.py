import math
import re

import mindspore
import numpy as np
import pytest

import msops
from card import length, random, zeros
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.operators.gather_points import forward
from msops.testing.checks import Net, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, run, wide_in_graph_mode


def flat(array, axes):
    """Joins all axes of an array from this number of axes on."""
    return array.reshape(*array.shape[:axes], math.prod(array.shape[axes:]))


def gather(features, idx):
    """Returns features[b, :, idx[b]], for indices of any rank, and 0 for an index out of range."""
    points, places = features.shape[2], flat(idx, 1)
    out = np.zeros((*features.shape[:2], places.shape[1]), features.dtype)
    for of_list, x, i in zip(out, features, places):
        inside = (i >= 0) & (i < points)
        of_list[:, inside] = x[:, i[inside]]
    return (out.reshape(*features.shape[:2], *idx.shape[1:]),)


def gather_backward(idx, dout, features):
    dfeatures = np.zeros_like(features)
    for dx, i, d in zip(dfeatures, flat(idx, 1), flat(dout, 2)):
        inside = (i >= 0) & (i < features.shape[2])
        np.add.at(dx.T, i[inside], d.T[inside])
    return (dfeatures,)


def sizes(lists, channels, points, *places):
    return [(lists, channels, points), (lists, *places)], {}


def indices(rng, points, shape):
    """Returns indices of all points, with runs of equal ones as short neighbourhoods have."""
    idx = rng.integers(0, max(1, points), shape)
    if idx.size and rng.random() < 0.5:
        idx[..., shape[-1] // 2 :] = idx[..., :1]
    return idx.astype(np.int64 if points % 2 else np.int32)


class GatherTest(OperatorTest):
    """Tests a gather. A subclass says which."""

    formulas = (gather, gather_backward)
    second_order = True
    small = "small"
    half_gradient_in_float32 = True

    def inputs(self, shapes, dtype, seed=1, **settings):
        features, idx = shapes
        rng = np.random.default_rng(seed)
        return [np.asarray(rng.standard_normal(features), dtype), indices(rng, features[2], idx)]

    def random_case(self, random):
        """Chooses no indices if there are no points, since no index would be right."""
        _, *places = (length(random) for _ in self.operators()[0].signature.inputs[1].sizes)
        lists, channels, points = (length(random) for _ in range(3))
        return sizes(lists, channels, points, *(places if points else [0] * len(places)))

    def check_huge(self, gpu, lists, channels, points, *places):
        torch = gpu.torch
        forward, backward = self.operators()[:2]
        features = gpu.random(lists, channels, points)
        idx = torch.randint(points, (lists, *places), device="cuda", dtype=torch.int32)
        out, *_ = gpu.run(forward, features, idx)
        gpu.check_parts(forward, [features, idx], [out], lists, 1, gpu.assert_equal)
        dfeatures = gpu.run(backward, idx, out, features)[0]
        gpu.check_parts(backward, [idx, out, features], [dfeatures, None], lists, 1, gpu.assert_equal)
        counts = torch.zeros(lists, points, device="cuda").scatter_add_(
            1, idx.reshape(lists, -1).long(), torch.ones(idx.shape, device="cuda").reshape(lists, -1)
        )
        for part in (slice(0, 1), slice(lists - 1, lists)):
            gpu.assert_close(dfeatures[part], features[part].float() * counts[part, None])


class TestGatherPoints(GatherTest):
    function, cell, operator = msops.gather_points, msops.GatherPoints, forward
    cases = {
        "small": sizes(2, 3, 5, 7),
        "one": sizes(1, 1, 1, 1),
        "no places": sizes(2, 3, 5, 0),
        "no points": sizes(2, 3, 0, 0),
        "no channels": sizes(2, 0, 5, 4),
        "coordinates": sizes(3, 3, 100, 33),
        "many channels": sizes(2, 67, 31, 12),
        "large": sizes(2, 9, 1500, 3001),
    }
    further = {
        f"{shape}": sizes(*shape)
        for shape in (
            (1, 2, 3, 4), (3, 1, 2, 1000), (1, 4, 9000, 70), (2, 5, 8193, 1100), (1, 3, 17_000, 40),
            (1, 8, 20_000, 4096), (1, 5, 30_001, 515), (2, 16, 1024, 8192), (1, 1, 70_000, 300), (5, 12, 64, 64),
            (1, 33, 4, 5000), (1, 6, 1, 9001), (1, 2, 60_001, 20_002),
        )
    }  # fmt: skip
    huge = ((3, 64, 70_000, 2**24 // 1500 * 1001), (2, 3, 2**29, 1000))
    wrong = (
        ([*zeros((2, 3, 4), dtype=np.int32), np.zeros((2, 5), np.int32)], {}, TypeError,
         "gather_points: features must be float16, float32 or float64, got int32"),
        ([*zeros((2, 3, 4)), 3], {}, TypeError, "gather_points: idx must be a Tensor, got int"),
    )  # fmt: skip


def far_indices(mode):
    """Returns indices out of range of 5 points: one on the CPU in graph mode, where each takes MindSpore 3 s."""
    far = (5, -1, 2**31, -(2**31) - 1, 2**32 + 1, 2**40)
    return far[:1] if (mode, mindspore.get_context("device_target")) == ("graph", "CPU") else far


def check_far(capfd, mode, card, name, idx, at):
    """Requires that an index out of range is the entry's error on the CPU, and gives 0 and no gradient on a GPU."""
    features = random(0, np.float32, (2, 3, 5))[0]
    for far in far_indices(mode):
        net = Net(type(card).function)
        wrong = idx.copy()
        wrong[at] = far
        if mindspore.get_context("device_target") == "GPU":
            out, dout = run(net, features, wrong)[0], random(1, np.float32, (2, 3, *idx.shape[1:]))[0]
            np.testing.assert_array_equal(out, *gather(features, wrong))
            gradients = run_gradient(net, [features, wrong], [dout])
            np.testing.assert_allclose(gradients[0], *gather_backward(wrong, dout, features), rtol=1e-6, atol=1e-6)
            continue
        words = f"{name}: idx[{', '.join(map(str, at))}] is {far}, but features has 5 points"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            run(net, features, wrong)
    call = card.entry_calls(*card.cases["small"], "float32")[1]
    call.inputs[0][at] = 5
    assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


@wide_in_graph_mode
def test_index_out_of_range(mode, capfd):
    check_far(capfd, mode, TestGatherPoints(), "gather_points", np.array([[0, 1, 4], [3, 2, 1]]), (1, 1))


def test_first_index_out_of_range_is_named(capfd):
    """Threads look at the indices in no order, but the error names the first one that is wrong."""
    call = TestGatherPoints().entry_calls(*sizes(2, 1, 3, 100_000), "float32")[0]
    call.inputs[1][0, 90_000:] = 3
    call.inputs[1][1, :] = -1
    _, errors = GuardedCall(call, capfd).call()
    assert errors == ["msops: GatherPointsForward: idx[0, 90000] is 3, but features has 3 points"]


def test_third_order(mode):
    """The gradient of the gradient is the gather, and so on."""
    if mode == "pynative" and VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 has none, with a given gradient of the output, in PyNative mode")
    features, dout, ddfeatures = random(0, np.float32, (2, 3, 5), (2, 3, 4), (2, 3, 5))
    idx = np.array([[4, 0, 0, 1], [2, 2, 2, 2]])
    first = mindspore.ops.GradOperation(sens_param=True)(Net(msops.gather_points))
    second = mindspore.ops.GradOperation(get_all=True, sens_param=True)(first)
    got = second(*map(mindspore.Tensor, (features, idx, dout, ddfeatures)))[2].asnumpy()
    np.testing.assert_array_equal(got, *gather(ddfeatures, idx))


def test_special_values(mode):
    """NaN, infinities and numbers below float32's normal ones pass as they are."""
    features = np.array([[[np.nan, np.inf, 1e-44, -0.0, -np.inf]]], np.float32)
    idx = np.array([[4, 3, 2, 1, 0]], np.int32)
    out = run(msops.GatherPoints(), features, idx)[0]
    np.testing.assert_array_equal(out.view(np.int32), features[:, :, ::-1].view(np.int32))
