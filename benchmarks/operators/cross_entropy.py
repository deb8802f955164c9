"""Benchmarks the mean cross-entropy of rows of logits. A size is (rows, classes), or (rows, classes, PROBABILITIES) for
labels that are probabilities; then the gradient is that of the logits."""

from mindspore import ops

import msops
from test_cross_entropy import TestCrossEntropy

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, best_peer, both_directions, share

PROBABILITIES = "probabilities"


class CrossEntropy(Benchmark):
    card = TestCrossEntropy()
    sizes = {
        "GPU": [
            Sizes(
                named=((8192, 32768), (8192, 131072)),
                sweep=((64, 4096), (8, 131072), (1024, 32000), (65536, 1000), (2**20, 64)),
                ragged={(8192, 32769): (8192, 32768), (8192, 50257): (8192, 32768)},
            ),
            Sizes(named=((8192, 32768, PROBABILITIES), (65536, 1000, PROBABILITIES))),
        ],
        "CPU": [
            Sizes(
                named=((256, 1000), (128, 32768)),
                sweep=((64, 10), (4096, 100), (4, 131072)),
                ragged={(128, 32769): (128, 32768)},
            ),
            Sizes(named=((256, 1000, PROBABILITIES),)),
        ],
    }
    cells = (msops.CrossEntropyLoss, ops.cross_entropy)
    headline = (("2^13 x 2^17", "float16"),)
    targets = {
        "GPU": [
            *(
                target
                for case in ("2^13 x 2^15", "2^13 x 2^17")
                for target in (
                    Target(f"{case}, forward", "share 0.92", 0.92, share(case, direction="forward")),
                    Target(f"{case}, forward and backward", "share 0.92", 0.92, both_directions(case)),
                    Target(case, "not slower than the best peer", 1, best_peer(case)),
                )
            ),
        ]
    }

    def describe(self, size):
        return by(size[:2]) + "".join(f", {what}" for what in size[2:])

    def settings(self, size):
        return {"gives": "logits"} if PROBABILITIES in size else {}

    def inputs(self, size):
        return [size[:2], size[:2] if PROBABILITIES in size else size[:1]]

    def index_below(self, size):
        return size[1]

    def cell_dtypes(self, size, dtype):
        return [dtype, dtype if PROBABILITIES in size else "int32"]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("loss",))]

    def torch_formula(self, case):
        import torch

        # The loss is float32 as ours is.
        if PROBABILITIES in case.size:
            return lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels).float()
        return lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels.long()).float()

    def library_formulas(self, case):
        # Liger is left out: its forward pass waits for the host, and writes the gradient over the logits.
        if PROBABILITIES in case.size:
            return {}
        return {"quack": lambda quack, logits, labels: quack.cross_entropy(logits, labels)}
