import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from card import random, zeros
from msops.operators.ms_deform_attn import forward
from msops.testing.checks import Net
from operator_test import OperatorTest, check_training, run, run_gradient


def levels_of(spatial_shapes):
    """Returns the sizes of levels, and where they begin."""
    sizes = np.array(spatial_shapes, np.int64).reshape(-1, 2)
    areas = sizes.prod(1)
    return sizes, np.cumsum(areas) - areas


def samples(value, shapes, starts, locations):
    """Yields for each level and corner what a sample reads of value (N, Lq, M, P, D), and at which pixels; the corner's
    share; and by how much the share grows with x and with y."""
    n, queries, heads, _, points, _ = locations.shape
    batch, head = np.arange(n)[:, None, None, None], np.arange(heads)[:, None]
    for level, ((height, width), start) in enumerate(zip(shapes, starts)):
        x, y = (locations[:, :, :, level, :, axis] * (width, height)[axis] - 0.5 for axis in range(2))
        left, top = np.floor(x), np.floor(y)
        for down in range(2):
            for right in range(2):
                i, j = (top + down).astype(int), (left + right).astype(int)
                inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
                pixel = np.where(inside, start + i * width + j, 0)
                across, along = 1 - np.abs(x - left - right), 1 - np.abs(y - top - down)
                if value.shape[1]:
                    read = value[batch, pixel, head] * inside[..., None]
                else:
                    read = np.zeros((n, queries, heads, points, value.shape[3]), value.dtype)
                grow = (2 * right - 1) * along * width, (2 * down - 1) * across * height
                yield level, read, (batch, pixel, head), inside, across * along, grow


def ms_deform_attn(value, shapes, starts, locations, weights, **_):
    n, queries, heads = weights.shape[:3]
    out = np.zeros((n, queries, heads, value.shape[3]), value.dtype)
    for level, read, _, _, share, _ in samples(value, shapes, starts, locations):
        out += ((weights[:, :, :, level] * share)[..., None] * read).sum(3)
    return (out.reshape(n, queries, heads * value.shape[3]),)


def ms_deform_attn_backward(value, shapes, starts, locations, weights, dout, **_):
    n, queries, heads = weights.shape[:3]
    dout = dout.reshape(n, queries, heads, 1, value.shape[3])
    dvalue, dlocations, dweights = map(np.zeros_like, (value, locations, weights))
    for level, read, pixels, inside, share, grow in samples(value, shapes, starts, locations):
        weight = weights[:, :, :, level]
        if value.shape[1]:
            np.add.at(dvalue, pixels, (weight * share * inside)[..., None] * dout)
        product = (read * dout).sum(-1)
        dweights[:, :, :, level] += share * product
        for axis in range(2):
            dlocations[:, :, :, level, :, axis] += weight * grow[axis] * product
    return dvalue, dlocations, dweights


def case(spatial_shapes, n=2, heads=2, features=3, queries=5, points=2):
    pixels, levels = sum(h * w for h, w in spatial_shapes), len(spatial_shapes)
    of_samples = (n, queries, heads, levels, points)
    shapes = [(n, pixels, heads, features), (levels, 2), (levels,), (*of_samples, 2), of_samples]
    return shapes, dict(spatial_shapes=spatial_shapes)


def of_tensors(value, shapes, starts, locations, weights, spatial_shapes):
    """Calls the function, whose levels are not Tensors, with what the operator takes."""
    return msops.ms_deform_attn(value, spatial_shapes, locations, weights)


CALL = zeros((1, 6, 2, 3), (1, 4, 2, 1, 3, 2), (1, 4, 2, 1, 3))


def call(spatial_shapes=((2, 3),), **changed):
    value, locations, weights = (changed.get(name, x) for name, x in zip(("value", "locations", "weights"), CALL))
    sizes, starts = levels_of([(2, 3)])
    return [value, sizes, starts, locations, weights], dict(spatial_shapes=spatial_shapes)


class TestMSDeformAttn(OperatorTest):
    function, operator = msops.ms_deform_attn, forward
    formulas = (ms_deform_attn, ms_deform_attn_backward)
    half_gradient_in_float32 = False
    cases = {
        "small": case(((2, 3), (1, 2))),
        "one": case(((1, 1),), 1, 1, 1, 1, 1),
        "whole packs": case(((5, 4), (3, 2), (2, 1)), 2, 3, 16, 6, 4),
        "no queries": case(((2, 3),), queries=0),
        "no points": case(((2, 3),), points=0),
        "no pixels": case(((0, 3), (2, 0))),
        "no samples": case(((2, 3),), n=0),
        "no features": case(((2, 3),), features=0),
        "large": case(((30, 20), (15, 10), (8, 5), (1, 1)), 2, 4, 32, 60, 4),
    }
    further = {
        f"{features} features of {heads} heads, {queries} queries": case(levels, n, heads, features, queries, points)
        for levels, n, heads, features, queries, points in (
            (((9, 8),), 1, 1, 4, 33, 1), (((9, 8), (4, 4)), 1, 2, 8, 70, 3), (((3, 70),), 2, 1, 20, 9, 2),
            (((6, 5), (3, 3)), 1, 1, 64, 40, 2), (((2, 2),), 1, 2, 40, 700, 3), (((4, 4),), 3, 2, 130, 20, 1),
            (((60, 60), (30, 30)), 1, 2, 8, 100, 2),
        )
    }  # fmt: skip
    small = "small"
    roundings = 64  # of sums of terms of both signs, of which the gradient of a location takes differences
    units_of_largest = 4
    test_wrong_inputs = None  # the function takes levels that are not Tensors
    wrong = (
        (*call(value=np.zeros((1, 6, 6), np.float32)), ValueError,
         "ms_deform_attn: value must have shape (N, S, M, D), got (1, 6, 6)"),
        (*call(((2, 2),)), ValueError, "ms_deform_attn: value must have the 4 pixels of levels ((2, 2),), got 6"),
        (*call(((1, 3), (1, 3))), ValueError, "sampling_locations must have shape (N, Lq, M, L, P, 2)"),
        (*call(weights=np.zeros((1, 4, 2, 1, 2), np.float32)), ValueError,
         "attention_weights must have shape (N, Lq, M, L, P) = (1, 4, 2, 1, 3), got (1, 4, 2, 1, 2)"),
        (*call(locations=np.zeros((1, 4, 2, 1, 3, 2), np.float64)), TypeError,
         "sampling_locations must be float32, got float64"),
        (*call(value=np.zeros((1, 6, 2, 3), np.int32)), TypeError, "value must be float16, float32 or float64"),
        (*call(6), TypeError, "ms_deform_attn: spatial_shapes must be a tuple of (H, W), got 6"),
        (*call((2, 3)), TypeError, "ms_deform_attn: spatial_shapes must be a tuple of (H, W), got (2, 3)"),
        (*call(((2, 3, 1),)), ValueError, "ms_deform_attn: spatial_shapes must have 2 numbers, got (2, 3, 1)"),
        (*call(((-2, -3),)), ValueError, "spatial_shapes must be at least 0 and less than 2^31, got (-2, -3)"),
        (*call(((2.0, 3.0),)), TypeError, "ms_deform_attn: spatial_shapes must be an int or a tuple of ints"),
    )  # fmt: skip

    def net(self, **settings):
        return Net(of_tensors, **settings)

    def inputs(self, shapes, dtype, seed=1, spatial_shapes=()):
        """Keeps samples off the pixels' centers, where the interpolation has kinks."""
        value, _, _, of_locations, of_weights = shapes
        sizes, starts = levels_of(spatial_shapes)
        rng = np.random.default_rng(seed)
        lengths = sizes[:, None, ::-1]
        place = rng.integers(-2, lengths + 2, of_locations) + rng.uniform(0.1, 0.9, of_locations)
        locations = np.asarray((place + 0.5) / np.maximum(lengths, 1), dtype)
        value, weights = random(seed, dtype, value, of_weights)
        return [value, sizes, starts, locations, weights]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        return super().entry_calls(shapes, settings, dtype, seed)  # the locations are not scaled, nor is the scratch

    def random_case(self, random):
        levels = tuple((random.randrange(7), random.randrange(9)) for _ in range(random.randrange(4)))
        return case(levels, *(random.randrange(most) for most in (4, 4, 20, 20, 4)))


def test_level_beyond_the_value(device_target):
    """Levels may be Tensors, as MindSpore's own operator has them. Those that the value lacks are an error on the CPU;
    on a GPU they have no pixels."""
    (value, shapes, starts, locations, weights), _ = call()
    value, weights, shapes = value + 1, weights + 1, np.array([[2, 4]])
    if device_target == "GPU":
        np.testing.assert_array_equal(run(Net(forward), value, shapes, starts, locations, weights)[0], 0)
        return
    for sizes, start in (((2, 4), 0), ((2, 3), 1), ((2, 3), -1), ((-2, -3), 0), ((2**40, 2**40), 0)):
        words = f"level 0 has {sizes[0]} x {sizes[1]} pixels from {start} on, which are not within the 6 of value"
        with pytest.raises(RuntimeError, match=words):
            run(Net(forward), value, np.array([sizes]), np.array([start]), locations, weights)


def test_levels_may_share_pixels(mode):
    """Gradients of a pixel that is in several levels add up."""
    rng = np.random.default_rng(1)
    shapes, starts = np.array([[2, 3], [3, 2], [1, 2]], np.int32), np.array([0, 0, 4], np.int32)
    value, weights, dout = random(1, np.float64, (1, 7, 2, 3), (1, 4, 2, 3, 2), (1, 4, 6))
    inputs = [value, shapes, starts, rng.uniform(0, 1, (1, 4, 2, 3, 2, 2)), weights]
    np.testing.assert_allclose(run(Net(forward), *inputs)[0], ms_deform_attn(*inputs)[0], rtol=1e-12, atol=1e-12)
    got = run_gradient(Net(forward), inputs, [dout])
    for result, want in zip((got[0], *got[3:]), ms_deform_attn_backward(*inputs, dout)):
        np.testing.assert_allclose(result, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outside", [-1.0, -0.3, 1.3, 100.0, -np.inf, np.inf])
def test_samples_outside_are_zeros(mode, outside):
    value, weights = np.ones((1, 6, 1, 2), np.float32), np.ones((1, 1, 1, 1, 1), np.float32)
    sizes, starts = levels_of([(2, 3)])
    for location in ((outside, 0.5), (0.5, outside)):
        inputs = [value, sizes, starts, np.array(location, np.float32).reshape(1, 1, 1, 1, 1, 2), weights]
        np.testing.assert_array_equal(run(Net(forward), *inputs)[0], 0)
        for gradient in run_gradient(Net(forward), inputs, [np.ones((1, 1, 2), np.float32)]):
            np.testing.assert_array_equal(gradient, 0)


def test_location_that_is_not_a_number(mode):
    (value, shapes, starts, locations, weights), _ = call()
    value, weights, locations = value + 1, weights + 1, locations + np.float32(0.5)
    locations[0, 2, 1, 0, 1, 0] = np.nan
    out = run(Net(forward), value, shapes, starts, locations, weights)[0].reshape(4, 2, 3)
    np.testing.assert_array_equal(np.isnan(out).all(2), np.isnan(out).any(2))
    np.testing.assert_array_equal(np.argwhere(np.isnan(out).all(2)), [[2, 1]])


def test_large_level():
    """A location in float32 keeps its digits among 10,000 pixels, where a place in units of pixels would lose three."""
    width = 10_000
    value = (np.arange(width, dtype=np.float32) % 2).reshape(1, width, 1, 1)
    locations = np.random.default_rng(1).uniform(0.1, 0.9, (1, 1000, 1, 1, 1, 2)).astype(np.float32)
    locations[..., 1] = 0.5
    weights = np.ones((1, 1000, 1, 1, 1), np.float32)
    (out,) = run(Net(forward), value, *levels_of([(1, width)]), locations, weights)
    places = locations[..., 0].astype(np.float64).reshape(1, 1000, 1) * width - 0.5
    np.testing.assert_allclose(out, 1 - np.abs(places % 2 - 1), rtol=0, atol=1e-6)


def attend(layer, query, references, pixels, spatial_shapes, mask):
    """Computes the layer in NumPy."""

    def dense(name, x):
        weight, bias = (each.asnumpy().astype(np.float64) for each in getattr(layer, name).get_parameters())
        return x @ weight.T + bias

    n, queries, _ = query.shape
    heads, levels, points = layer.n_heads, layer.n_levels, layer.n_points
    value = dense("value_proj", pixels) * ~mask[..., None]
    offsets = dense("sampling_offsets", query).reshape(n, queries, heads, levels, points, 2)
    weights = np.exp(dense("attention_weights", query).reshape(n, queries, heads, levels * points))
    weights = (weights / weights.sum(-1, keepdims=True)).reshape(n, queries, heads, levels, points)
    sizes, starts = levels_of(spatial_shapes)
    places = references[:, :, None, :, None]
    if references.shape[-1] == 2:
        locations = places + offsets / sizes[:, None, ::-1]
    else:
        locations = places[..., :2] + offsets / points * places[..., 2:] / 2
    value = value.reshape(n, -1, heads, value.shape[2] // heads)
    return dense("output_proj", ms_deform_attn(value, sizes, starts, locations, weights)[0])


@pytest.mark.parametrize("coordinates", [2, 4])
def test_layer(mode, coordinates):
    levels, rng = ((4, 3), (2, 2)), np.random.default_rng(2)
    layer = msops.MSDeformAttn(12, 2, 3, 2)
    for parameter in layer.get_parameters():
        added = Tensor(0.1 * rng.standard_normal(parameter.shape), parameter.dtype)
        parameter.set_data(ops.add(parameter.value(), added))
    query, pixels = random(3, np.float32, (2, 5, 12), (2, 16, 12))
    references = rng.uniform(0.1, 0.9, (2, 5, 2, coordinates)).astype(np.float32)
    mask = rng.random((2, 16)) < 0.3
    (out,) = run(Net(layer, spatial_shapes=levels, padding_mask=Tensor(mask)), query, references, pixels)
    np.testing.assert_allclose(out, attend(layer, query, references, pixels, levels, mask), rtol=1e-4, atol=1e-5)
    check_training(layer, query, references, pixels, levels)


def test_first_offsets():
    """The heads look around like the king of chess, a pixel further with each point."""
    layer = msops.MSDeformAttn(8, 1, 4, 2)
    offsets = layer.sampling_offsets.bias.asnumpy().reshape(4, 2, 2)
    want = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])[:, None] * np.array([1, 2])[:, None]
    np.testing.assert_allclose(offsets, want, atol=1e-6)
    with pytest.raises(ValueError, match="MSDeformAttn: n_heads must divide d_model, 8, got 3"):
        msops.MSDeformAttn(8, 1, 3)
