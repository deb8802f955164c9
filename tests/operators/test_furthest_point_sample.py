import mindspore
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as limits, strategies as st
from mindspore import nn

import msops
from card import chain, results_of, zeros
from clouds import CloudTest, clouds, random_lengths, squared_distances, uniform
from guarded_call import GuardedCall
from msops.operators.furthest_point_sample import operators
from msops.testing.checks import Net
from msops.testing.entry import Status
from operator_test import run


def sample(points, samples, length, start):
    """Samples a cloud, by all distances."""
    out = np.zeros(samples, np.int32)
    if length == 0:
        return out
    points, out[0] = points[:length], start
    distances = np.where(np.isfinite(points).all(-1), np.inf, 0).astype(np.promote_types(points.dtype, np.float32))
    for s in range(1, samples):
        d = squared_distances(points, points[out[s - 1]][None])[0]
        distances = np.where(d < distances, d, distances)  # a distance that is NaN changes nothing
        out[s] = distances.argmax()
    return out


def furthest_point_sample(xyz, lengths=None, starts=None, npoint=1, start=0, **_):
    lengths = [xyz.shape[1]] * len(xyz) if lengths is None else lengths
    starts = [start] * len(xyz) if starts is None else starts
    out = [sample(points, npoint, *each) for points, *each in zip(xyz, lengths, starts)]
    return (np.array(out, np.int32).reshape(len(xyz), npoint),)


class TestFurthestPointSample(CloudTest):
    function = msops.furthest_point_sample
    formulas = (furthest_point_sample,)
    constants = (0,)
    cases = {
        "cloud": ([(2, 33, 3)], {"npoint": 9}),
        "lengths": ([(3, 40, 3), (3,)], {"npoint": 12}),
        "start": ([(2, 33, 3)], {"npoint": 9, "start": 5}),
        "starts": ([(3, 40, 3), (3,), (3,)], {"npoint": 12}),
        "all": ([(1, 500, 3)], {"npoint": 500}),
        "one": ([(2, 1, 3)], {"npoint": 1}),
        "no clouds": ([(0, 5, 3)], {"npoint": 2}),
    }
    further = {
        **{f"{size} to {npoint}": ([(2, size, 3)], {"npoint": npoint})
           for size, npoint in ((2, 2), (31, 1), (64, 20), (129, 129), (1000, 37), (1024, 64), (2049, 50), (4097, 33))},
        "lengths of many": ([(5, 700, 3), (5,)], {"npoint": 60}),
        **{f"starts of {size}": ([(3, size, 3), (3,), (3,)], {"npoint": 7}) for size in (64, 2049, 9001)},
        "start of large": ([(1, 9001, 3)], {"npoint": 7, "start": 8999}),
        "start of larger": ([(1, 20_011, 3)], {"npoint": 4, "start": 20_010}),
        "start of largest": ([(1, 140_001, 3)], {"npoint": 2, "start": 777}),
        "many clouds": ([(70, 30, 3)], {"npoint": 5}),
        "large": ([(1, 9001, 3)], {"npoint": 40}),
        "larger": ([(1, 20_011, 3)], {"npoint": 9}),
        "largest": ([(1, 140_001, 3)], {"npoint": 3}),
    }  # fmt: skip
    small = "cloud"
    hostile = ("cloud", "lengths", "starts")
    wrong = (
        (zeros((1, 5, 3), dtype=np.int32), {"npoint": 1}, TypeError,
         "furthest_point_sample: xyz must be float16, float32 or float64, got int32"),
        (zeros((1, 5, 3)), {"npoint": 6}, ValueError, "furthest_point_sample: npoint must be at most N = 5, got 6"),
        (zeros((1, 5, 3)), {"npoint": 0}, ValueError, "furthest_point_sample: npoint must be at least 1, got 0"),
        (zeros((1, 5, 3)), {"npoint": 2.0}, TypeError, "furthest_point_sample: npoint must be an int, got float"),
        ([*zeros((1, 5, 3)), np.zeros(2, np.int32)], {"npoint": 2}, ValueError,
         "furthest_point_sample: lengths must have shape (B,) = (1,), got (2,)"),
        ([*zeros((1, 5, 3)), np.zeros(1, np.uint8)], {"npoint": 2}, TypeError,
         "furthest_point_sample: lengths must be int32, got uint8"),
        (zeros((1, 5, 3)), {"npoint": 1, "start": 5}, ValueError,
         "furthest_point_sample: start must be less than N = 5, got 5"),
        (zeros((1, 5, 3)), {"npoint": 1, "start": -1}, ValueError,
         "furthest_point_sample: start must be at least 0, got -1"),
        (zeros((1, 5, 3)), {"npoint": 1, "start": 1.0}, TypeError,
         "furthest_point_sample: start must be an int, got float"),
        ([*zeros((1, 5, 3)), np.zeros(1, np.int32), np.zeros(2, np.int32)], {"npoint": 2}, ValueError,
         "furthest_point_sample: start must have shape (B,) = (1,), got (2,)"),
        ([*zeros((1, 5, 3)), np.zeros(1, np.int32), np.zeros(1, np.float32)], {"npoint": 2}, TypeError,
         "furthest_point_sample: start must be int32, got float32"),
    )  # fmt: skip

    def operators(self, shapes=(), npoint=1, start=0):
        return chain(operators(npoint, start).without(*("lengths", "start")[max(len(shapes) - 1, 0) :]))

    def net(self, **settings):
        return Net(sample_of, **settings)

    def inputs(self, shapes, dtype, seed=1, **settings):
        xyz = super().inputs(shapes[:1], dtype, seed)
        lengths = random_lengths(seed, *((shapes[0][1], shape) for shape in shapes[1:2]))
        starts = [np.random.default_rng(seed).integers(0, np.maximum(each, 1), dtype=np.int32) for each in lengths]
        return [*xyz, *lengths, *starts[: len(shapes) - 2]]

    def result_dtype(self, dtype):
        return "int32"

    def reference_gradient(self, xyz, *rest, **settings):
        return np.zeros_like(xyz), *(np.zeros_like(lengths) for lengths in rest[:-1])

    def random_case(self, random):
        batch, size = random.randrange(4), random.randrange(1, random.choice((6, 40, 300)))
        shapes = [(batch, size, 3), (batch,), (batch,)][: random.randrange(1, 4)]
        start = random.choice((0, random.randrange(size))) if len(shapes) == 1 else 0
        return shapes, {"npoint": random.randrange(1, size + 1), "start": start}

    def test_cell(self, mode):
        for case in ("cloud", "lengths", "starts"):
            inputs, settings = self.case_inputs(case, np.float32)
            got = run(msops.FurthestPointSample(**settings), *inputs)
            np.testing.assert_array_equal(got, self.reference(*inputs, **settings))
        inputs, settings = self.case_inputs("start", np.float32)
        got = run(Net(CellFromStart(**settings)), *inputs)
        np.testing.assert_array_equal(got, self.reference(*inputs, **settings))


def sample_of(xyz, *rest, npoint, start=0):
    if len(rest) == 2:
        return msops.furthest_point_sample(xyz, npoint, *rest)
    return msops.furthest_point_sample(xyz, npoint, *rest, start=start)


def sample_from(xyz, start, npoint):
    return msops.furthest_point_sample(xyz, npoint, start=start)


class CellFromStart(nn.Cell):
    def __init__(self, npoint, start):
        super().__init__()
        self.sample, self.start = msops.FurthestPointSample(npoint), start

    def construct(self, xyz):
        return self.sample(xyz, start=self.start)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_starts_of_whole_clouds(mode, dtype):
    (xyz,) = TestFurthestPointSample().inputs([(3, 40, 3)], np.float32)
    starts = np.array([39, 0, 7], dtype)
    (got,) = run(Net(sample_from, npoint=40), xyz, starts)
    np.testing.assert_array_equal(got, furthest_point_sample(xyz, None, starts, npoint=40)[0])


def test_start_of_short_clouds(capfd):
    """An int start beyond a cloud's length is an error, unless the cloud is empty."""
    call = TestFurthestPointSample().entry_calls([(2, 5, 3), (2,)], {"npoint": 3, "start": 2}, "float32")[0]
    call.inputs[1][:] = 0, 3
    status, _ = GuardedCall(call, capfd).call()
    assert status == Status.OK
    call.inputs[1][:] = 0, 2
    status, errors = GuardedCall(call, capfd).call()
    assert status == Status.BAD_VALUE
    assert "the start of cloud 1 is 2, expected 0 to 1" in errors[0]


def test_start_out_of_range(capfd):
    call = TestFurthestPointSample().entry_calls([(2, 5, 3), (2,), (2,)], {"npoint": 3}, "float32")[0]
    call.inputs[1][1] = 4
    for start in (-1, 4):
        call.inputs[2][1] = start
        status, errors = GuardedCall(call, capfd).call()
        assert status == Status.BAD_VALUE
        assert f"the start of cloud 1 is {start}, expected 0 to 3" in errors[0]


@limits(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(clouds(), st.sampled_from(["float16", "float32"]), st.randoms(use_true_random=False))
def test_any_cloud(points, dtype, random):
    """Any coordinates, equal ones, NaN and infinity among them, give what all distances give."""
    with np.errstate(all="ignore"):
        xyz = points.astype(dtype)[None]
        npoint = random.randint(1, min(len(points), 60))
        (got,) = results_of(operators(npoint).without("lengths", "start"), xyz)
        np.testing.assert_array_equal(got, furthest_point_sample(xyz, npoint=npoint)[0])


def test_length_out_of_range(capfd):
    call = TestFurthestPointSample().entry_calls([(2, 5, 3), (2,)], {"npoint": 3}, "float32")[0]
    for length in (-1, 6):
        call.inputs[1][1] = length
        status, errors = GuardedCall(call, capfd).call()
        assert status == Status.BAD_VALUE
        assert f"lengths[1] is {length}, expected 0 to 5" in errors[0]


def test_points_far_from_the_origin_and_near_it(mode):
    """No point is left out, as in kernels that skip those near the origin."""
    xyz = np.array([[[1, 0, 0], [0, 0, 0], [1e-3, 0, 0], [-4, 0, 0]]], np.float32)
    (got,) = run(Net(sample_of, npoint=4), mindspore.Tensor(xyz))
    np.testing.assert_array_equal(got, [[0, 3, 1, 2]])


def test_many_samples():
    (xyz,) = uniform(0, (3000,))
    (got,) = results_of(operators(1500).without("lengths", "start"), xyz)
    np.testing.assert_array_equal(got, furthest_point_sample(xyz, npoint=1500)[0])
