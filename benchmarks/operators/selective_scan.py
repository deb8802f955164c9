"""Benchmarks Mamba's selective scan, with its gate, D, the bias of delta and softplus. A size is (samples, channels,
steps, states)."""
# ruff: noqa: N803 (the field's names of matrices)

import numpy as np
from mindspore import nn, ops

import msops
from test_selective_scan import TestSelectiveScan, case

from ..benchmark import Benchmark, Sizes
from ..figures import Target, share, times_faster

LARGE = "8 x 2^11 x 2^12 x 16"
OPTIONAL = ("D", "z", "delta_bias")
OF_EXPONENTIAL = 16  # floating-point operations in the time of an exponential: a multiprocessor starts 16 of 128 lanes'


class Scanned(nn.Cell):
    """Calls a function with A = -e^x for random numbers x, since Mamba's A is negative."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, u, delta, A, B, C, D, z, delta_bias):
        return self.function(u, delta, -ops.exp(A), B, C, D, z, delta_bias)


def scanned(u, delta, A, B, C, D, z, delta_bias):
    return msops.selective_scan(u, delta, A, B, C, D, z, delta_bias, True)


def step_by_step(u, delta, A, B, C, D, z, delta_bias):
    dt = ops.log(1 + ops.exp(delta + delta_bias.expand_dims(1)))
    terms, y, state = dt * u, (), 0.0
    for t in range(u.shape[2]):
        decay = ops.exp(dt[:, :, t].expand_dims(2) * A)
        state = decay * state + terms[:, :, t].expand_dims(2) * B[:, :, t].expand_dims(1)
        y += ((C[:, :, t].expand_dims(1) * state).sum(2),)
    return (ops.stack(y, 2) + D.expand_dims(1) * u) * z * ops.sigmoid(z)


class SelectiveScan(Benchmark):
    card = TestSelectiveScan()
    sizes = {
        "GPU": [
            Sizes(
                named=((8, 2048, 4096, 16), (2, 5120, 2048, 16)),
                sweep=((1, 64, 256, 16), (1, 2048, 2**16, 16), (8, 2048, 4096, 1), (2, 1024, 4096, 64)),
                ragged={(8, 2048, 4095, 16): (8, 2048, 4096, 16)},
            )
        ],
        "CPU": [Sizes(named=((2, 256, 512, 16), (1, 1024, 64, 16)), ragged={(2, 255, 511, 16): (2, 256, 512, 16)})],
    }
    cell_sizes = {"GPU": ((8, 2048, 256, 16),), "CPU": ((2, 256, 128, 16),)}
    targets = {
        "GPU": [
            Target("large", "share 0.77 of memory or exponentials", 0.77, share(LARGE, direction="forward")),
            Target("whole Cells", "20 times faster than MindSpore", 20, times_faster("MindSpore", "graph", "pynative")),
        ],
        "CPU": [Target("whole Cells", "faster than MindSpore", 1, times_faster("MindSpore", "graph", "pynative"))],
    }
    compiled = False  # a loop over the steps

    def inputs(self, size):
        b, d, steps, n = size
        return case(b, d, steps, n, optional=OPTIONAL)[0]

    def settings(self, size):
        return dict(optional=OPTIONAL, delta_softplus=True)

    def contents(self, name, size):
        if name == "A":
            return -np.exp(np.random.default_rng(0).standard_normal(self.inputs(size)[2]))
        return None

    def cases(self, size):
        b, d, steps, n = size
        for each in super().cases(size):
            results = tuple(name for name in each.formula_results if name != "states")  # these serve the gradient alone
            yield each._replace(formula_results=results, operations=OF_EXPONENTIAL * b * d * steps * n)

    def networks(self, size, dtype, device):
        return {"msops": Scanned(scanned), "MindSpore": Scanned(step_by_step)}

    def torch_formula(self, case):
        return scanned_by_torch


def scanned_by_torch(u, delta, A, B, C, D, z, delta_bias):
    import torch

    dt = torch.nn.functional.softplus(delta + delta_bias[:, None]).float()
    terms, y = dt * u, []
    state = torch.zeros(1, device=u.device)
    for t in range(u.shape[2]):
        state = torch.exp(dt[:, :, t, None] * A) * state + terms[:, :, t, None] * B[:, None, :, t]
        y.append((C[:, None, :, t] * state).sum(2))
    return ((torch.stack(y, 2) + D[:, None] * u) * torch.nn.functional.silu(z)).to(u.dtype), state
