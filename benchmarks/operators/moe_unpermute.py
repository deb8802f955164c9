"""Benchmarks the sums of the rows of each token's slots. A size is (tokens, columns, choices): 16384 tokens as in
DeepSeek-V2-Lite."""

from mindspore import ops

import msops
from test_moe_unpermute import TestMoEUnpermute, case

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer, share, times_faster
from .moe_permute import positions_of

LITE, MIXTRAL = (16384, 2048, 6), (16384, 4096, 2)
LARGE = (by(LITE), by(MIXTRAL))


class MoEUnpermute(Benchmark):
    card = TestMoEUnpermute()
    sizes = {
        "GPU": [Sizes(named=(LITE, MIXTRAL), sweep=((16, 2048, 6), (512, 2048, 6)), ragged={(16383, 2047, 6): LITE})],
        "CPU": [Sizes(named=((1024, 2048, 6),), sweep=((16, 2048, 6),))],
    }
    targets = {
        "GPU": [
            Target("16384 tokens", "share 0.85", 0.85, share(lambda case: case in LARGE)),
            Target("16384 tokens", "not slower than the best peer", 1, best_peer(lambda case: case in LARGE)),
        ],
        "CPU": [
            Target("1024 tokens", "share 0.7", 0.7, share(by((1024, 2048, 6)))),
            Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph")),
        ],
    }

    def inputs(self, size):
        tokens, columns, k = size
        return case(tokens * k, columns, tokens, k)[0]

    def index_below(self, size):
        return size[0] * size[2]

    def contents(self, name, size):
        return positions_of(size[0], size[2]) if name == "positions" else None

    def cell_dtypes(self, size, dtype):
        return [dtype, "int32", dtype]

    def torch_formula(self, case):
        tokens, columns, k = case.size

        def unpermute(rows, positions, weights):
            of_slots = rows.index_select(0, positions.flatten()).view(tokens, k, columns)
            return (weights[:, :, None] * of_slots).sum(1)

        return unpermute

    def prepared_peers(self, case, like):
        """TransformerEngine has its positions by choices, not by tokens."""
        import importlib.util

        if case.direction == "backward" or not like.is_cuda or not importlib.util.find_spec("transformer_engine"):
            return {}

        def prepare(rows, positions, weights):
            import transformer_engine.pytorch as engine

            theirs, probabilities = positions.T.contiguous().flatten(), weights.float()
            return lambda: engine.moe_unpermute(rows, theirs, probabilities, map_type="index")

        return {"TransformerEngine": prepare}

    def networks(self, size, dtype, device):
        tokens, columns, k = size

        def composed(rows, positions, weights):
            of_slots = ops.gather(rows, positions.reshape(-1), 0).reshape(tokens, k, columns)
            return (ops.expand_dims(weights, 2) * of_slots).sum(1)

        return {"msops": OfFunction(msops.moe_unpermute), "MindSpore": OfFunction(composed)}
