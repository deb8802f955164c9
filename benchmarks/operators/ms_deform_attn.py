"""Benchmarks multi-scale deformable attention as deformable DETR has it: 8 heads of 32 features, 4 points on each of 4
levels. A size is (samples, queries, rows of the first level); each level has half as many as the one before.
"""

import functools

import numpy as np
from mindspore import nn, ops

import msops
from test_ms_deform_attn import TestMSDeformAttn, levels_of

from ..benchmark import Benchmark, Sizes
from ..figures import Target, times_faster

HEADS, FEATURES, LEVELS, POINTS = 8, 32, 4, 4
DECODER, ENCODER = "2 x 900 x 100", "2 x 22223 x 100"


def levels(size):
    """Returns the levels of an image that is a third wider than high."""
    rows = [-(-size[2] // 2**level) for level in range(LEVELS)]
    return tuple((height, -(-4 * height // 3)) for height in rows)


def composed(value, shapes, locations, weights):
    """Samples each level by MindSpore's own grid_sample."""
    n, _, heads, features = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    samples, start = (), 0
    for level, (height, width) in enumerate(shapes):
        pixels = value[:, start : start + height * width].transpose(0, 2, 3, 1)
        grid = (2 * locations[:, :, :, level] - 1).transpose(0, 2, 1, 3, 4).reshape(-1, queries, points, 2)
        samples += (ops.grid_sample(pixels.reshape(-1, features, height, width), grid, align_corners=False),)
        start += height * width
    factors = weights.transpose(0, 2, 1, 3, 4).reshape(n * heads, 1, queries, -1)
    out = (ops.concat(samples, -1) * factors).sum(-1)
    return out.reshape(n, heads * features, queries).transpose(0, 2, 1)


class Sampled(nn.Cell):
    """Makes locations in (0, 1) of random numbers."""

    def __init__(self, function, shapes):
        super().__init__()
        self.function, self.shapes = function, shapes

    def construct(self, value, locations, weights):
        return self.function(value, self.shapes, ops.sigmoid(locations), weights)


class MSDeformAttn(Benchmark):
    card = TestMSDeformAttn()
    sizes = {
        "GPU": [Sizes(named=((2, 900, 100), (2, 22223, 100)), sweep=((1, 100, 32),))],
        "CPU": [Sizes(named=((1, 300, 32), (1, 1400, 32)))],
    }
    targets = {
        "GPU": [
            Target(f"{case}, {direction}", "2 times faster than grid_sample on torch", 2,
                   times_faster("torch", "kernel", direction=direction, case=case))
            for case in (DECODER, ENCODER) for direction in ("forward", "backward")
        ],
        "CPU": [Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative"))],
    }  # fmt: skip

    def inputs(self, size):
        n, queries, _ = size
        pixels = sum(height * width for height, width in levels(size))
        of_samples = (n, queries, HEADS, LEVELS, POINTS)
        return [(n, pixels, HEADS, FEATURES), (LEVELS, 2), (LEVELS,), (*of_samples, 2), of_samples]

    def contents(self, name, size):
        if name == "sampling_locations":
            return np.random.default_rng(0).uniform(size=self.inputs(size)[3])
        return dict(zip(("spatial_shapes", "level_start_index"), levels_of(levels(size)))).get(name)

    def cell_inputs(self, size):
        value, _, _, *of_samples = self.inputs(size)
        return [value, *of_samples]

    def networks(self, size, dtype, device):
        return {
            "msops": Sampled(msops.ms_deform_attn, levels(size)),
            "MindSpore": Sampled(composed, levels(size)),
        }

    def torch_formula(self, case):
        return functools.partial(sampled_by_torch, levels=levels(case.size))


def sampled_by_torch(value, shapes, starts, locations, weights, levels):
    import torch

    n, _, heads, features = value.shape
    queries = locations.shape[1]
    samples, start = [], 0
    for level, (height, width) in enumerate(levels):
        pixels = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(-1, features, height, width)
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
        samples.append(torch.nn.functional.grid_sample(pixels, grid, align_corners=False))
        start += height * width
    factors = weights.transpose(1, 2).reshape(n * heads, 1, queries, -1)
    out = (torch.cat(samples, -1) * factors).sum(-1)
    return out.view(n, heads * features, queries).transpose(1, 2)
