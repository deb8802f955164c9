"""Benchmarks where rays meet a box. A size is a number of rays."""

import functools

import numpy as np
from mindspore import ops

import msops
from test_ray_aabb import BOX, TestRayAABB

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, times_faster
from ..neural_fields import NeuralField


class RayAABB(NeuralField, Benchmark):
    card = TestRayAABB()
    sizes = {
        "GPU": [Sizes(named=(2**13, 2**20), ragged={2**20 + 1: 2**20})],
        "CPU": [Sizes(named=(2**13, 2**17), ragged={2**17 + 1: 2**17})],
    }
    cell_sizes = {"GPU": (2**13,), "CPU": (2**17,)}
    targets = {
        "GPU": [Target("beside ngp_pl", "5 times faster", 5, times_faster("ngp_pl", "kernel"))],
        "CPU": [Target("whole Cells", "5 times faster than MindSpore", 5, times_faster("MindSpore", "graph"))],
    }
    folders = {"torch-ngp": "raymarching/src", "ngp_pl": "models/csrc"}

    def inputs(self, size):
        return [(size, 3), (size, 3)]

    def settings(self, size):
        return BOX

    def torch_formula(self, case):
        import torch

        if case.direction == "backward":
            return None

        def formula(origins, directions):
            low, high = (torch.tensor(BOX[name]).to(origins) for name in ("low", "high"))
            a, b = (low - origins) / directions, (high - origins) / directions
            near, far = torch.minimum(a, b).amax(1).clamp(min=0), torch.maximum(a, b).amin(1)
            return torch.where(near <= far, near, -1), torch.where(near <= far, far, -1)

        return formula

    def torch_ngp_forward(self, case, extension, origins, directions):
        box = origins.new_tensor(BOX["low"] + BOX["high"])
        near, far = origins.new_empty(2, len(origins))

        def call():
            extension.near_far_from_aabb(origins, directions, box, len(origins), 0.0, near, far)

        def ours(_):
            hits = (near <= far) & (far < np.finfo(np.float32).max)  # what a miss has
            return near.where(hits, -1), far.where(hits, -1)

        return call, ours

    def ngp_pl_forward(self, case, extension, origins, directions):
        """Also makes room for results, counts boxes, and sorts them: their function is for many boxes."""
        low, high = (origins.new_tensor([BOX[name]]) for name in ("low", "high"))
        inputs = origins, directions, (low + high) / 2, (high - low) / 2, 1
        return functools.partial(extension.ray_aabb_intersect, *inputs), lambda got: got[1].squeeze(1).unbind(1)

    def networks(self, size, dtype, device):
        return {"msops": msops.RayAABB(**BOX), "MindSpore": OfFunction(composed)}


def composed(origins, directions):
    near, far = (), ()
    for axis in range(3):
        o, d = origins[:, axis], directions[:, axis]
        a, b = (BOX["low"][axis] - o) / d, (BOX["high"][axis] - o) / d
        near += (ops.minimum(a, b),)
        far += (ops.maximum(a, b),)
    first = ops.maximum(ops.maximum(near[0], near[1]), ops.maximum(near[2], 0 * near[2]))
    last = ops.minimum(ops.minimum(far[0], far[1]), far[2])
    miss = 0 * first - 1
    return ops.where(first <= last, first, miss), ops.where(first <= last, last, miss)
