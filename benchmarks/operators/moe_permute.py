"""Benchmarks the copies of tokens for their experts. A size is (tokens, columns, choices, experts): 16384 tokens as in
DeepSeek-V2-Lite."""

import numpy as np
from mindspore import ops

import msops
from test_moe_permute import TestMoEPermute, case

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer, share, times_faster

LITE, MIXTRAL = (16384, 2048, 6, 64), (16384, 4096, 2, 8)
LARGE = (by(LITE), by(MIXTRAL))


class MoEPermute(Benchmark):
    card = TestMoEPermute()
    sizes = {
        "GPU": [
            Sizes(
                named=(LITE, MIXTRAL),
                sweep=((16, 2048, 6, 64), (512, 2048, 6, 64)),
                ragged={(16383, 2047, 6, 64): LITE},
            )
        ],
        "CPU": [Sizes(named=((1024, 2048, 6, 64),), sweep=((16, 2048, 6, 64),))],
    }
    targets = {
        "GPU": [
            Target("16384 tokens", "share 0.85", 0.85, share(lambda case: case in LARGE)),
            Target("16384 tokens", "not slower than the best peer", 1, best_peer(lambda case: case in LARGE)),
        ],
        "CPU": [
            Target("1024 tokens", "share 0.7", 0.7, share(by((1024, 2048, 6, 64)))),
            Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph")),
        ],
    }

    def inputs(self, size):
        return case(*size)[0]

    def settings(self, size):
        return case(*size)[1]

    def index_below(self, size):
        return size[3]

    def contents(self, name, size):
        if name == "positions":
            return positions_of(size[0], size[2])
        return None

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32"]

    def torch_formula(self, case):
        import torch

        _, _, k, number = case.size

        def permute(x, experts):
            chosen = experts.flatten()
            order = chosen.argsort(stable=True)
            positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            counts = chosen.bincount(minlength=number).int()
            return x.index_select(0, order // k), positions.int().view(experts.shape), counts, counts

        return None if case.direction == "backward" else permute

    def prepared_peers(self, case, like):
        """Adds up the rows of each token, in the gradient's direction."""
        if case.direction == "forward":
            return {}
        tokens, columns, k, _ = case.size

        def torch_gradient(drows, positions):
            places = positions.flatten()
            return lambda: drows.index_select(0, places).view(tokens, k, columns).sum(1)

        return {"torch": torch_gradient}

    def library_formulas(self, case):
        if case.direction == "backward":
            return {}
        return {"TransformerEngine": lambda engine, x, experts: engine.moe_permute(x, experts, map_type="index")}

    def networks(self, size, dtype, device):
        k = size[2]

        def composed(x, experts):
            order = ops.argsort(experts.reshape(-1).astype("float32"))
            return ops.gather(x, order // k, 0), ops.argsort(order.astype("float32"))

        return {"msops": msops.MoEPermute(size[3]), "MindSpore": OfFunction(composed)}


def positions_of(tokens, k):
    """Returns positions in no order, each once, as experts have them that tokens choose at random."""
    return np.random.default_rng(0).permutation(tokens * k).reshape(tokens, k).astype(np.int32)
