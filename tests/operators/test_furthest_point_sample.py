import mindspore
import numpy as np
from hypothesis import HealthCheck, given, settings as limits, strategies as st

import msops
from card import chain, results_of, zeros
from clouds import CloudTest, clouds, squared_distances, uniform
from guarded_call import GuardedCall
from msops.operators.furthest_point_sample import operators
from msops.testing.checks import Net
from msops.testing.entry import Status
from operator_test import run


def sample(points, samples, length):
    """Samples a cloud, by all distances."""
    out = np.zeros(samples, np.int32)
    if length == 0:
        return out
    points = points[:length]
    distances = np.where(np.isfinite(points).all(-1), np.inf, 0).astype(np.promote_types(points.dtype, np.float32))
    for s in range(1, samples):
        d = squared_distances(points, points[out[s - 1]][None])[0]
        distances = np.where(d < distances, d, distances)  # a distance that is NaN changes nothing
        out[s] = distances.argmax()
    return out


def furthest_point_sample(xyz, lengths=None, npoint=1, **_):
    lengths = [xyz.shape[1]] * len(xyz) if lengths is None else lengths
    return (np.array([sample(*each) for each in zip(xyz, [npoint] * len(xyz), lengths)]).reshape(len(xyz), npoint),)


class TestFurthestPointSample(CloudTest):
    function = msops.furthest_point_sample
    formulas = (furthest_point_sample,)
    constants = (0,)
    cases = {
        "cloud": ([(2, 33, 3)], {"npoint": 9}),
        "lengths": ([(3, 40, 3), (3,)], {"npoint": 12}),
        "all": ([(1, 500, 3)], {"npoint": 500}),
        "one": ([(2, 1, 3)], {"npoint": 1}),
        "no clouds": ([(0, 5, 3)], {"npoint": 2}),
    }
    further = {
        **{f"{size} to {npoint}": ([(2, size, 3)], {"npoint": npoint})
           for size, npoint in ((2, 2), (31, 1), (64, 20), (129, 129), (1000, 37), (1024, 64), (2049, 50), (4097, 33))},
        "lengths of many": ([(5, 700, 3), (5,)], {"npoint": 60}),
        "many clouds": ([(70, 30, 3)], {"npoint": 5}),
        "large": ([(1, 9001, 3)], {"npoint": 40}),
        "larger": ([(1, 20_011, 3)], {"npoint": 9}),
        "largest": ([(1, 140_001, 3)], {"npoint": 3}),
    }  # fmt: skip
    small = "cloud"
    hostile = ("cloud", "lengths")
    wrong = (
        (zeros((1, 5, 3), dtype=np.int32), {"npoint": 1}, TypeError,
         "furthest_point_sample: xyz must be float16, float32 or float64, got int32"),
        (zeros((1, 5, 2)), {"npoint": 1}, ValueError, "xyz must have shape (B, N, 3) = (1, 5, 3), got (1, 5, 2)"),
        (zeros((1, 5, 3)), {"npoint": 6}, ValueError, "furthest_point_sample: npoint must be at most N = 5, got 6"),
        (zeros((1, 5, 3)), {"npoint": 0}, ValueError, "furthest_point_sample: npoint must be at least 1, got 0"),
        (zeros((1, 5, 3)), {"npoint": 2.0}, TypeError, "furthest_point_sample: npoint must be an int, got float"),
        ([*zeros((1, 5, 3)), np.zeros(2, np.int32)], {"npoint": 2}, ValueError,
         "furthest_point_sample: lengths must have shape (B,) = (1,), got (2,)"),
        ([*zeros((1, 5, 3)), np.zeros(1, np.uint8)], {"npoint": 2}, TypeError,
         "furthest_point_sample: lengths must be int32, got uint8"),
    )  # fmt: skip

    def operators(self, shapes=(), npoint=1):
        forward = operators(npoint)
        return chain(forward if len(shapes) == 2 else forward.without("lengths"))

    def net(self, **settings):
        return Net(sample_of, **settings)

    def inputs(self, shapes, dtype, seed=1, **settings):
        xyz = super().inputs(shapes[:1], dtype, seed)
        lengths = [np.random.default_rng(seed).integers(0, shapes[0][1] + 1, shape) for shape in shapes[1:]]
        return [*xyz, *(np.asarray(length, np.int32) for length in lengths)]

    def result_dtype(self, dtype):
        return "int32"

    def reference_gradient(self, xyz, *rest, **settings):
        return np.zeros_like(xyz), *(np.zeros_like(lengths) for lengths in rest[:-1])

    def random_case(self, random):
        batch, size = random.randrange(4), random.randrange(1, random.choice((6, 40, 300)))
        shapes = [(batch, size, 3), (batch,)][: random.randrange(1, 3)]
        return shapes, {"npoint": random.randrange(1, size + 1)}

    def test_cell(self, mode):
        for case in ("cloud", "lengths"):
            inputs, settings = self.case_inputs(case, np.float32)
            got = run(msops.FurthestPointSample(**settings), *inputs)
            np.testing.assert_array_equal(got, self.reference(*inputs, **settings))


def sample_of(xyz, *lengths, npoint):
    return msops.furthest_point_sample(xyz, npoint, *lengths)


@limits(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(clouds(), st.sampled_from(["float16", "float32"]), st.randoms(use_true_random=False))
def test_any_cloud(points, dtype, random):
    """Any coordinates, equal ones, NaN and infinity among them, give what all distances give."""
    with np.errstate(all="ignore"):
        xyz = points.astype(dtype)[None]
        npoint = random.randint(1, min(len(points), 60))
        (got,) = results_of(operators(npoint).without("lengths"), xyz)
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
    (got,) = results_of(operators(1500).without("lengths"), xyz)
    np.testing.assert_array_equal(got, furthest_point_sample(xyz, npoint=1500)[0])
