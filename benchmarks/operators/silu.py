"""Benchmarks the sigmoid linear unit, y = x / (1 + e^-x)."""

from mindspore import ops

import msops
from test_silu import TestSilu

from ..benchmark import ELEMENTS, Benchmark
from ..figures import Target, best_peer, share


class Silu(Benchmark):
    card = TestSilu()
    sizes = ELEMENTS
    cells = (msops.SiLU, ops.silu)
    targets = {
        "GPU": [
            Target("2^28", "share 0.97", 0.97, share("2^28")),
            Target("2^20", "not slower than the best peer", 1, best_peer("2^20")),
        ]
    }

    def torch_formula(self, case):
        import torch

        return torch.nn.functional.silu
