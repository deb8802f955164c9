import re

import mindspore
import numpy as np
import pytest

import msops
from card import length, random, zeros
from guarded_call import GuardedCall
from msops.operators.three_interpolate import forward
from msops.testing.checks import Net, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, run, wide_in_graph_mode
from test_gather_points import far_indices, gather, gather_backward


def interpolate(features, idx, weight):
    return ((gather(features, idx)[0] * weight[:, None]).sum(-1),)


def interpolate_backward(features, idx, weight, dout):
    dfeatures = gather_backward(idx, weight[:, None] * dout[..., None], features)[0]
    return dfeatures, (gather(features, idx)[0] * dout[..., None]).sum(1)


def sizes(lists, channels, points, places):
    return [(lists, channels, points), (lists, places, 3), (lists, places, 3)], {}


class TestThreeInterpolate(OperatorTest):
    function, cell, operator = msops.three_interpolate, msops.ThreeInterpolate, forward
    formulas = (interpolate, interpolate_backward)
    second_order = True
    cases = {
        "small": sizes(2, 3, 5, 7),
        "one": sizes(1, 1, 1, 1),
        "no places": sizes(2, 3, 5, 0),
        "no points": sizes(2, 3, 0, 0),
        "no channels": sizes(2, 0, 5, 4),
        "many channels": sizes(2, 131, 31, 12),
        "large": sizes(2, 9, 500, 2003),
    }
    further = {
        f"{shape}": sizes(*shape)
        for shape in (
            (1, 2, 3, 4), (3, 1, 2, 1000), (1, 4, 9000, 70), (2, 5, 8193, 1100), (1, 3, 17_000, 40),
            (1, 8, 20_000, 4096), (2, 16, 256, 1024), (1, 1, 70_000, 300), (5, 12, 64, 64), (1, 33, 4, 5000),
            (1, 6, 1, 3001), (1, 200, 50, 60), (2, 9, 1000, 9001), (2, 70, 1500, 2100), (1, 16, 2500, 1501),
            (1, 16, 3, 3000), (1, 17, 140_000, 1400),
        )
    }  # fmt: skip
    small = "small"
    huge = ((3, 256, 16_384, 2**20 * 5 // 2), (2, 2, 2**29 + 3, 1000))
    wrong = (
        ([*zeros((2, 3, 4), dtype=np.int32), np.zeros((2, 5, 3), np.int32), *zeros((2, 5, 3))], {}, TypeError,
         "three_interpolate: features must be float16, float32 or float64, got int32"),
    )  # fmt: skip

    def inputs(self, shapes, dtype, seed=1, **settings):
        features, idx, weight = shapes
        rng = np.random.default_rng(seed)
        index = rng.integers(0, max(1, features[2]), idx, np.int64 if features[2] % 2 else np.int32)
        return [np.asarray(rng.standard_normal(features), dtype), index, np.asarray(rng.uniform(-1, 1, weight), dtype)]

    def random_case(self, random):
        lists, channels, points, places = (length(random) for _ in range(4))
        return sizes(lists, channels, points, places if points else 0)

    def check_huge(self, gpu, lists, channels, points, places):
        torch = gpu.torch
        forward, backward = self.operators()[:2]
        features, weight = gpu.random(lists, channels, points), gpu.random(lists, places, 3)
        idx = torch.randint(points, (lists, places, 3), device="cuda", dtype=torch.int32)
        out, *_ = gpu.run(forward, features, idx, weight)
        gpu.check_parts(forward, [features, idx, weight], [out], lists, 1, gpu.assert_equal)
        got = gpu.run(backward, features, idx, weight, out)
        gpu.check_parts(backward, [features, idx, weight, out], [*got[:2], None], lists, 1, gpu.assert_equal)
        few = slice(places - 100, places)
        for list_ in (0, lists - 1):
            taken = features[list_][:, idx[list_, few].long()].float()
            gpu.assert_close(out[list_, :, few], (taken * weight[list_, few].float()).sum(-1))
            gpu.assert_close(got[1][list_, few], (taken * out[list_, :, few, None].float()).sum(0))


@wide_in_graph_mode
def test_index_out_of_range(mode, capfd):
    card = TestThreeInterpolate()
    features, idx, weight = card.inputs(card.cases["small"][0], "float32")
    idx = idx.astype(np.int64)
    for far in far_indices(mode):
        idx[1, 2, 1], net = far, Net(msops.three_interpolate)
        if mindspore.get_context("device_target") == "GPU":
            out, dout = run(net, features, idx, weight)[0], random(1, np.float32, (2, 3, 7))[0]
            np.testing.assert_allclose(out, *interpolate(features, idx, weight), rtol=1e-5, atol=1e-6)
            gradients = run_gradient(net, [features, idx, weight], [dout])
            for got, want in zip(gradients[::2], interpolate_backward(features, idx, weight, dout)):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            continue
        words = f"three_interpolate: idx[1, 2, 1] is {far}, but features has 5 points"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            run(net, features, idx, weight)
    call = card.entry_calls(*card.cases["small"], "float32")[1]
    call.inputs[1][1, 2, 1] = 5
    assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


def test_equal_indices(mode):
    """Three taps of one point add up, in the gradient, too."""
    features, weight = np.array([[[1.0, 2.0]]], np.float32), np.array([[[0.5, 0.25, 0.25]]], np.float32)
    idx = np.array([[[1, 1, 1]]])
    net = Net(msops.three_interpolate)
    assert run(net, features, idx, weight)[0] == 2
    dfeatures, _, dweight = run_gradient(net, [features, idx, weight], [np.full((1, 1, 1), 3, np.float32)])
    np.testing.assert_array_equal(dfeatures, [[[0, 3]]])
    np.testing.assert_array_equal(dweight, [[[6, 6, 6]]])
