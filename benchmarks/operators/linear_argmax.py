"""Benchmarks the scores of tokens and the choice of the best. A size is (rows, vocabulary, features): those of
SmolLM2-135M and Llama-3.2-1B."""

from mindspore import ops

import msops
from test_linear_argmax import TestLinearArgmax, case

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, times_faster

SMOLLM2, LLAMA = (49152, 576), (128256, 2048)
ONE_TEXT = (1, *SMOLLM2)
ODD = {(1, 49151, 576): ONE_TEXT}


class LinearArgmax(Benchmark):
    card = TestLinearArgmax()
    trains = False
    sizes = {
        "GPU": [Sizes(named=(ONE_TEXT, (8, *SMOLLM2), (64, *SMOLLM2), (1, *LLAMA)), ragged=ODD)],
        "CPU": [Sizes(named=(ONE_TEXT, (8, *SMOLLM2), (64, *SMOLLM2)), ragged=ODD)],
    }
    cell_sizes = {"GPU": (ONE_TEXT, (64, *SMOLLM2)), "CPU": (ONE_TEXT, (8, *SMOLLM2))}
    targets = {
        "CPU": [
            Target("whole Cells, one text", "1.3 times faster than MindSpore", 1.3,
                   times_faster("MindSpore", "graph", case=by(ONE_TEXT))),
        ],
    }  # fmt: skip

    def inputs(self, size):
        return case(*size)[0]

    def settings(self, size):
        return case(*size)[1]

    def torch_formula(self, case):
        def formula(x, weight):
            y = x @ weight.T
            return y, y.argmax(-1).int()

        return formula

    def networks(self, size, dtype, device):
        multiply = ops.MatMul(transpose_b=True)

        def find(x, weight):
            y = multiply(x, weight)
            return y, ops.argmax(y, -1)

        return {"msops": OfFunction(msops.linear_argmax), "MindSpore": OfFunction(find)}
