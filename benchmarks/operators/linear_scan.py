"""Benchmarks linear recurrences. A size is (samples, steps, channels)."""

from mindspore import ops

import msops
from test_linear_scan import TestLinearScan

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, share

LARGE = ("8 x 2^16 x 1536", "64 x 2^11 x 2^10")


class LinearScan(Benchmark):
    card = TestLinearScan()
    sizes = {
        "GPU": [
            Sizes(
                named=((8, 65536, 1536), (64, 2048, 1024)),
                sweep=((1, 2048, 64), (1, 2**20, 64), (2**14, 16, 256)),
                ragged={(8, 65535, 1535): (8, 65536, 1536)},
            )
        ],
        "CPU": [Sizes(named=((8, 1024, 256), (1, 256, 1024)), ragged={(8, 1023, 255): (8, 1024, 256)})],
    }
    targets = {"GPU": [Target("large", "share 0.85", 0.85, share(lambda case: case in LARGE))]}
    compiled = False  # the peer compiles itself

    def inputs(self, size):
        return [size, size]

    def torch_formula(self, case):
        if case.direction == "backward":
            return None
        from torch._higher_order_ops.associative_scan import associative_scan

        def chained(earlier, later):
            return earlier[0] * later[0], earlier[1] * later[0] + later[1]

        return lambda a, b: associative_scan(chained, (a, b), 1)[1]

    def networks(self, size, dtype, device):
        return {"msops": msops.LinearScan(), "MindSpore": OfFunction(step_by_step)}


def step_by_step(a, b):
    state, states = b[:, 0], ()
    for t in range(1, a.shape[1]):
        state = a[:, t] * state + b[:, t]
        states += (state,)
    return ops.stack((b[:, 0], *states), 1)
