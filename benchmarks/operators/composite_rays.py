"""Benchmarks the compositing of samples along rays. A size is (rays, samples of each)."""

import functools

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import msops
from test_composite_rays import TestCompositeRays

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster
from ..neural_fields import NeuralField, rays_of


class CompositeRays(NeuralField, Benchmark):
    card = TestCompositeRays()
    sizes = {
        "GPU": [Sizes(named=((8192, 128),), sweep=((1024, 32), (2**16, 64)), ragged={(8191, 127): (8192, 128)})],
        "CPU": [Sizes(named=((1024, 128),), sweep=((64, 32),), ragged={(1023, 127): (1024, 128)})],
    }
    targets = {
        "GPU": [Target("8192 x 128", "share 0.33", 0.33, share(lambda case: case == "2^13 x 128"))],
        "CPU": [Target("whole Cells", "5 times faster than MindSpore", 5, times_faster("MindSpore", "graph"))],
    }
    folders = {"torch-ngp": "raymarching/src", "ngp_pl": "models/csrc"}

    def inputs(self, size):
        rays, each = size
        return [(rays * each,), (rays * each, 3), (rays * each,), (rays * each,), (rays + 1,)]

    def settings(self, size):
        return {"threshold": 0.0}

    def contents(self, name, size):
        rays, each = size
        if name == "offsets":
            return np.arange(rays + 1, dtype=np.int32) * each
        if name in ("sigmas", "dts"):
            return np.random.default_rng(0).uniform(0, 4 / each if name == "sigmas" else 1, rays * each)
        return None

    def cell_inputs(self, size):
        return self.inputs(size)[1:2]

    def networks(self, size, dtype, device):
        return {"msops": Composited(size, dtype), "MindSpore": Composed(size, dtype)}

    def torch_formula(self, case):
        import torch

        rays, each = case.size

        def formula(sigmas, rgbs, dts, ts, offsets):
            depth = (sigmas * dts).view(rays, each)
            through = torch.exp(-(torch.cumsum(depth, 1) - depth))
            weights = through * (1 - torch.exp(-depth))
            rgb = (weights[:, :, None] * rgbs.view(rays, each, 3)).sum(1)
            return rgb, (weights * ts.view(rays, each)).sum(1), weights.sum(1), weights.flatten()

        return formula

    def torch_ngp_forward(self, case, extension, sigmas, rgbs, dts, ts, offsets):
        """Gives no weights. It adds the distance of each sample from the one before up to the samples' distances."""
        import torch

        steps = ts.view(case.size).diff(prepend=ts.new_zeros(case.size[0], 1)).flatten()
        inputs = sigmas, rgbs, torch.stack([dts, steps], 1), rays_of(offsets, torch.int32), *self.their_sizes(case)
        opacity, depth, rgb = (sigmas.new_empty(len(offsets) - 1, *last) for last in ((), (), (3,)))

        def call():
            extension.composite_rays_train_forward(*inputs, opacity, depth, rgb)
            return rgb, depth, opacity, None

        return call, lambda got: got

    def torch_ngp_backward(self, case, extension, sigmas, rgbs, dts, ts, offsets, drgb, ddepth, dopacity, dweights):
        """Has no gradients from the depth and the weights, so that only those of the colours are ours."""
        import torch

        forward, _ = self.torch_ngp_forward(case, extension, sigmas, rgbs, dts, ts, offsets)
        rgb, _, opacity, _ = forward()
        lengths, rays = torch.stack([dts, dts], 1), rays_of(offsets, torch.int32)
        dsigmas, drgbs = torch.empty_like(sigmas), torch.empty_like(rgbs)
        inputs = dopacity, drgb, sigmas, rgbs, lengths, rays, opacity, rgb, *self.their_sizes(case), dsigmas, drgbs

        def call():
            dsigmas.zero_()
            drgbs.zero_()
            extension.composite_rays_train_backward(*inputs)

        return call, lambda _: (None, drgbs)

    def their_sizes(self, case):
        rays, each = case.size
        return rays * each, rays, self.settings(case.size)["threshold"]

    def ngp_pl_forward(self, case, extension, sigmas, rgbs, dts, ts, offsets):
        """Also makes room for the results, and counts the samples of each ray."""
        import torch

        rays, threshold = rays_of(offsets, torch.int64), self.settings(case.size)["threshold"]

        def ours(got):
            _, opacity, depth, rgb, weights = got
            return rgb, depth, opacity, weights

        return functools.partial(extension.composite_train_fw, sigmas, rgbs, dts, ts, rays, threshold), ours

    def ngp_pl_backward(self, case, extension, sigmas, rgbs, dts, ts, offsets, drgb, ddepth, dopacity, dweights):
        forward, ours = self.ngp_pl_forward(case, extension, sigmas, rgbs, dts, ts, offsets)
        rgb, depth, opacity, weights = ours(forward())
        *_, rays, threshold = forward.args
        douts, results = (dopacity, ddepth, drgb, dweights), (opacity, depth, rgb)
        inputs = *douts, sigmas, rgbs, weights, dts, ts, rays, *results, threshold
        return functools.partial(extension.composite_train_bw, *inputs), lambda got: got


class Network(nn.Cell):
    """Composites colours. The densities are a Parameter, since they must not be negative; places are no inputs, since
    they have no gradients."""

    def __init__(self, size, dtype):
        super().__init__()
        sigmas, dts = (Tensor(CompositeRays().contents(name, size), mindspore.float32) for name in ("sigmas", "dts"))
        dtype = getattr(mindspore, dtype)
        self.sigmas, self.dts = Parameter(sigmas.astype(dtype)), dts.astype(dtype)


class Composited(Network):
    def __init__(self, size, dtype):
        super().__init__(size, dtype)
        self.composite = msops.CompositeRays(0.0)
        self.offsets = Tensor(CompositeRays().contents("offsets", size))

    def construct(self, rgbs):
        return self.composite(self.sigmas, rgbs, self.dts, self.dts, self.offsets)[0]


class Composed(Network):
    """Takes the same number of samples for each ray."""

    def __init__(self, size, dtype):
        super().__init__(size, dtype)
        self.shape = size

    def construct(self, rgbs):
        depth = (self.sigmas * self.dts).reshape(self.shape)
        through = ops.exp(depth - ops.cumsum(depth, 1))
        weights = through * (1 - ops.exp(-depth))
        return (weights.expand_dims(2) * rgbs.reshape(*self.shape, 3)).sum(1)
