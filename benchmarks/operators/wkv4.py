"""Benchmarks RWKV-4's time mixing. A size is (samples, steps, channels).

A thread walks over the steps of a channel, so that 8 x 2048 channels fill an eighth of a large GPU: the time is that of
a step's arithmetic, times the steps. With fewer channels, threads share the steps, and read them twice.
"""

from mindspore import Tensor, ops

import msops
from test_wkv4 import TestWKV4, case

from ..benchmark import Benchmark, OfFunction, Sizes


class WKV4(Benchmark):
    card = TestWKV4()
    sizes = {
        "GPU": [
            Sizes(
                named=((32, 1024, 2048), (8, 1024, 768)),
                sweep=((1, 2**14, 768), (64, 512, 4096)),
                ragged={(32, 1023, 2047): (32, 1024, 2048)},
            )
        ],
        "CPU": [Sizes(named=((8, 256, 256), (1, 128, 1024)), ragged={(8, 255, 255): (8, 256, 256)})],
    }
    cell_sizes = {"GPU": ((32, 128, 2048),), "CPU": ((8, 64, 256),)}
    compiled = False  # it would take hours for the loop over steps

    def inputs(self, size):
        return case(*size, state=False)[0]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("y", "last"))]

    def torch_formula(self, case):
        import torch

        def formula(w, u, k, v):
            zeros = torch.zeros_like(k[:, 0], dtype=torch.float32)
            return step_by_step(w, u, k, v, zeros, torch.exp, torch.maximum, torch.stack)

        return formula

    def networks(self, size, dtype, device):
        def theirs(w, u, k, v):
            zeros = ops.zeros_like(k[:, 0]) + Tensor(0.0)
            return step_by_step(w, u, k, v, zeros, ops.exp, ops.maximum, ops.stack)

        return {"msops": msops.WKV4(), "MindSpore": OfFunction(theirs)}


def step_by_step(w, u, k, v, zeros, exp, maximum, stack):
    p, q, o, decay, means = zeros, zeros, zeros - 1e38, -exp(w), ()
    for t in range(k.shape[1]):
        now, value = k[:, t], v[:, t]
        largest = maximum(o, u + now)
        old, own = exp(o - largest), exp(u + now - largest)
        means += ((old * p + own * value) / (old * q + own),)
        largest = maximum(o + decay, now)
        old, own = exp(o + decay - largest), exp(now - largest)
        p, q, o = old * p + own * value, old * q + own, largest
    return stack(means, 1), stack((p, q, o), 1)
