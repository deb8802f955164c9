"""Benchmarks RWKV-7's time mixing. A size is (samples, steps, heads, features)."""

import functools

import numpy as np
from mindspore import Tensor, ops

import msops
from test_wkv7 import TestWKV7, case

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer

LARGE = "8 x 2^12 x 32 x 64"


class WKV7(Benchmark):
    card = TestWKV7()
    sizes = {
        "GPU": [
            Sizes(
                named=((8, 4096, 32, 64), (1, 4096, 32, 64)),
                sweep=((1, 2**16, 12, 64), (64, 512, 32, 64), (8, 1024, 16, 128)),
                ragged={(8, 4095, 32, 63): (8, 4096, 32, 64)},
            )
        ],
        "CPU": [Sizes(named=((2, 128, 4, 64), (1, 64, 12, 64)), ragged={(2, 127, 4, 63): (2, 128, 4, 64)})],
    }
    cell_sizes = {"GPU": ((8, 128, 32, 64),), "CPU": ((2, 64, 4, 64),)}
    targets = {"GPU": [Target("large", "as fast as the best peer", 1, best_peer(LARGE))]}
    compiled = False  # it would take hours for the loop over steps

    def inputs(self, size):
        return case(*size, state=False)[0]

    def contents(self, name, size):
        """Returns decays, and what the delta rule reads and writes, so that states stay bounded."""
        names = self.card.operators(self.inputs(size))[0].names()[0]
        if name not in ("w", "a", "b"):
            return None
        return np.repeat(self.of_one_sample(size[1:])[names.index(name)], size[0], 0)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one benchmark of an operator)
    def of_one_sample(self, sizes):
        return self.card.inputs(self.inputs((1, *sizes)), np.float32)

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("y", "last"))]

    def torch_formula(self, case):
        import torch

        if case.size[1] > 1024:  # PyTorch takes 0.15 s for a loop over 4096 steps, and runs out of memory backward
            return None

        def formula(r, w, k, v, a, b):
            state = torch.zeros_like(k[:, 0, :, :, None] * k[:, 0, :, None], dtype=torch.float32)
            return step_by_step(*(x.float() for x in (r, w, k, v, a, b)), state, torch, r.dtype)

        return formula

    def library_formulas(self, case):
        """Returns fla's chunked kernel, which takes logarithms of decays, and gives states (key, value)."""

        def formula(fla, r, w, k, v, a, b):
            settings = dict(gk=-w.float().exp(), scale=1.0, output_final_state=True)
            y, last = fla.chunk_dplr_delta_rule(r, k, v, a, b, **settings)
            return y, last.transpose(-1, -2)

        return {"fla": formula} if case.size[3] == 64 else {}

    def networks(self, size, dtype, device):
        def theirs(r, w, k, v, a, b):
            state = ops.zeros_like(k[:, 0, :, :, None] * k[:, 0, :, None]) + Tensor(0.0)
            return step_by_step(r, w, k, v, a, b, state, ops, r.dtype)

        return {"msops": msops.WKV7(), "MindSpore": OfFunction(theirs)}


def step_by_step(r, w, k, v, a, b, state, library, dtype):
    decay, outputs = library.exp(-library.exp(w)), ()
    for t in range(r.shape[1]):
        read = (state * a[:, t, :, None]).sum(-1)
        state = (
            state * decay[:, t, :, None] + read[..., None] * b[:, t, :, None] + v[:, t, :, :, None] * k[:, t, :, None]
        )
        outputs += ((state * r[:, t, :, None]).sum(-1),)
    y = library.stack(outputs, 1)
    return y.to(dtype), state
