import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import chain, length, zeros
from guarded_call import GuardedCall
from msops.operators.composite_rays import operators
from msops.testing.checks import Net
from msops.testing.entry import Status
from operator_test import OperatorTest, run


def parts_of(sigmas, dts, offsets, threshold):
    """Yields (ray, its samples that count, their weights, what comes through up to and with each)."""
    for r in range(len(offsets) - 1):
        begin, end = (min(int(offsets[i]), len(sigmas)) for i in (r, r + 1))
        depth = np.cumsum(sigmas[begin:end] * dts[begin:end])
        after = np.exp(-depth)
        before = np.concatenate((np.ones(1, after.dtype), after))[: end - begin]
        dark = np.flatnonzero(before < threshold)
        n = dark[0] if len(dark) else end - begin
        yield r, slice(begin, begin + n), (before * -np.expm1(-sigmas[begin:end] * dts[begin:end]))[:n], after[:n]


def composite_rays(sigmas, rgbs, dts, ts, offsets, threshold=1e-4):
    rays, dtype = len(offsets) - 1, sigmas.dtype
    rgb, depth, opacity = (np.zeros(shape, dtype) for shape in ((rays, 3), rays, rays))
    weights = np.zeros_like(sigmas)
    for r, samples, w, _ in parts_of(sigmas, dts, offsets, threshold):
        rgb[r], depth[r], opacity[r] = w @ rgbs[samples], w @ ts[samples], w.sum()
        weights[samples] = w
    return rgb, depth, opacity, weights


def composite_rays_backward(sigmas, rgbs, dts, ts, offsets, drgb, ddepth, dopacity, dweights, threshold=1e-4):
    dsigmas, drgbs = np.zeros_like(sigmas), np.zeros_like(rgbs)
    for r, samples, w, after in parts_of(sigmas, dts, offsets, threshold):
        g = rgbs[samples] @ drgb[r] + ddepth[r] * ts[samples] + dopacity[r] + dweights[samples]
        later = np.concatenate((np.cumsum((w * g)[::-1])[::-1], np.zeros(1, w.dtype)))[1:]
        dsigmas[samples] = dts[samples] * (after * g - later)
        drgbs[samples] = w[:, None] * drgb[r]
    return dsigmas, drgbs


def case(samples, rays, **settings):
    return [(samples,), (samples, 3), (samples,), (samples,), (rays + 1,)], settings


class TestCompositeRays(OperatorTest):
    function, cell = msops.composite_rays, msops.CompositeRays
    formulas = composite_rays, composite_rays_backward
    constants = (2, 3, 4)
    roundings = 32
    cases = {
        "small": case(12, 4, threshold=0.0),
        "threshold": case(40, 3, threshold=0.3),
        "one": case(1, 1),
        "no samples": case(0, 3),
        "no rays": case(5, 0),
        "odd": case(1001, 37),
    }
    further = {
        "long": case(3001, 2, threshold=1e-3),
        "one long": case(1031, 1, threshold=0.0),
        "short": case(500, 301),
        "of 128": case(128, 1, threshold=0.0),
        "of 129": case(129, 1, threshold=0.0),
    }
    small = "small"
    hostile = ("small", "threshold")
    wrong = (
        ([*zeros((4,), (4, 2), (4,), (4,)), np.zeros(2, np.int32)], {}, ValueError,
         "composite_rays: rgbs must have shape (S, 3) = (4, 3), got (4, 2)"),
        ([*zeros((4,), (4, 3), (4,), (4,)), np.zeros(0, np.int32)], {}, ValueError,
         "composite_rays: offsets must have at least one number, got shape (0,)"),
        ([*zeros((4,), (4, 3), (4,), (4,)), np.zeros(2, np.int32)], dict(threshold=1.5), ValueError,
         "composite_rays: threshold must be at most 1, got 1.5"),
        ([*zeros((4,), (4, 3), (4,), (4,)), np.zeros(2, np.int32)], dict(threshold=-1), ValueError,
         "composite_rays: threshold must be finite and at least 0, got -1"),
        ([*zeros((4,), (4, 3), (4,), (4,)), np.zeros(2, np.int32)], dict(threshold="0"), TypeError,
         "composite_rays: threshold must be a number, got str"),
    )  # fmt: skip

    def operators(self, shapes=(), threshold=1e-4):
        return chain(operators(threshold))

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Rays of which some have no samples, and samples of which some have no ray."""
        rng = np.random.default_rng(seed)
        samples, rays = shapes[0][0], shapes[4][0] - 1
        low, high = (samples // 20, samples - samples // 20)
        offsets = np.sort(rng.integers(low, high + 1, rays + 1)).astype(np.int32)
        if rays == 1:
            offsets[:] = 0, samples
        mean = max(1.0, samples / max(rays, 1))
        sigmas, dts = rng.uniform(0, 3 / mean, samples), rng.uniform(0.5, 1.5, samples)
        values = sigmas, rng.uniform(0, 1, (samples, 3)), dts, rng.uniform(0, 2, samples)
        return [*(np.asarray(x, dtype) for x in values), offsets]

    def random_case(self, random):
        return case(length(random), random.choice((0, 1, 3, 20)), threshold=random.choice((0.0, 1e-4)))


def test_end_of_a_ray(mode):
    """The sample that makes a ray dark counts, and none after it, not even one that is NaN."""
    sigmas = np.array([0, 20, 5, np.nan], np.float32)
    rgbs = np.array([[1, 2, 3], [4, 5, 6], [np.nan] * 3, [np.nan] * 3], np.float32)
    ones, offsets = np.ones(4, np.float32), np.array([0, 4], np.int32)
    rgb, depth, opacity, weights = run(msops.CompositeRays(), sigmas, rgbs, ones, ones * 3, offsets)
    np.testing.assert_allclose(rgb, [[4, 5, 6]], rtol=1e-6)
    np.testing.assert_allclose(depth, [3], rtol=1e-6)
    np.testing.assert_allclose(opacity, [1], rtol=1e-6)
    np.testing.assert_allclose(weights, [0, 1, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_offsets_beyond_the_samples(mode, dtype):
    inputs, settings = TestCompositeRays().case_inputs("small", np.float64)
    inputs[4] = np.array([0, 5, 20, 20, 2**31 - 1], dtype)
    got = run(Net(msops.composite_rays, **settings), *inputs)
    for a, b in zip(got, composite_rays(*inputs, **settings)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_negative_densities(mode):
    """They give light, as the formula says."""
    inputs, settings = TestCompositeRays().case_inputs("small", np.float32)
    inputs[0] = -4 * inputs[0]
    got = run(Net(msops.composite_rays, **settings), *map(Tensor, inputs))
    exact = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    for a, b in zip(got, composite_rays(*exact, **settings)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("offsets", "words"), [((-1, 2, 3, 4, 5), "[0] is -1"), ((0, 3, 2, 4, 5), "[2] is 2")])
def test_offsets_that_decrease(capfd, offsets, words):
    for call in TestCompositeRays().entry_calls(*case(12, 4, threshold=0.0), "float32"):
        call.inputs[4][:] = offsets
        status, errors = GuardedCall(call, capfd).call()
        assert status == Status.BAD_VALUE
        assert f"offsets{words}" in errors[0]
