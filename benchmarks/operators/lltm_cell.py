"""Benchmarks the recurrent cell LLTM after its matmul. A size is (batch, hidden units); that of a whole Cell is (batch,
inputs, hidden units)."""

import mindspore
from mindspore import Parameter, nn, ops

import msops
from test_lltm_cell import TestPointwise

from ..benchmark import Benchmark, Sizes
from ..figures import Target, above_empty, share


def torch_lltm(product, bias, c):
    import torch

    i, o, g = (product + bias).chunk(3, 1)
    new_c = c + torch.sigmoid(i) * torch.nn.functional.elu(g)
    return torch.tanh(new_c) * torch.sigmoid(o), new_c


class OfMindSpore(nn.Cell):
    """Computes the cell with MindSpore's operators and the parameters of an msops.LLTMCell."""

    def __init__(self, cell):
        super().__init__()
        self.hidden = cell.hidden_size
        self.weight = Parameter(cell.weight.value(), name="weight")
        self.bias = Parameter(cell.bias.value(), name="bias")

    def construct(self, x, h, c):
        gates = ops.matmul(ops.concat((h, x), 1), self.weight.T) + self.bias
        i, o, g = gates[:, : self.hidden], gates[:, self.hidden : 2 * self.hidden], gates[:, 2 * self.hidden :]
        new_c = c + ops.sigmoid(i) * ops.elu(g)
        return ops.tanh(new_c) * ops.sigmoid(o), new_c


class FlatState(nn.Cell):
    """Calls an msops.LLTMCell with inputs that are all Tensors, so that all have gradients."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h, c):
        return self.cell(x, (h, c))


class LLTMCell(Benchmark):
    card = TestPointwise()
    sizes = {
        "GPU": [
            Sizes(
                named=((16, 128), (64, 1024), (2**16, 1024)),
                sweep=((64, 128), (256, 1024), (2**10, 1024), (2**12, 1024), (2**14, 1024)),
                ragged={(2**16 + 1, 1024): (2**16, 1024), (2**16, 1023): (2**16, 1024), (2**10, 1025): (2**10, 1024)},
            )
        ],
        "CPU": [
            Sizes(
                named=((16, 128), (64, 1024), (1024, 1024)),
                sweep=((64, 128), (256, 1024)),
                ragged={(1024, 1023): (1024, 1024)},
            )
        ],
    }
    cell_sizes = {
        "GPU": ((16, 32, 128), (64, 1024, 1024), (4096, 1024, 1024)),
        "CPU": ((16, 32, 128), (64, 256, 256), (256, 1024, 1024)),
    }
    targets = {
        "GPU": [
            Target("2^26 elements", "share 0.95", 0.95, share("2^16 x 2^10")),
            Target("2^11 elements", "within 1 µs of an empty kernel", -1, above_empty("16 x 128"),
                   lambda figure: f"{-figure:.2f} µs"),
        ]
    }  # fmt: skip

    def inputs(self, size):
        batch, hidden = size
        return [(batch, 3 * hidden), (3 * hidden,), (batch, hidden)]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(serial=size[0])]

    def torch_formula(self, case):
        return torch_lltm

    def cell_inputs(self, size):
        batch, inputs, hidden = size
        return [(batch, inputs), (batch, hidden), (batch, hidden)]

    def networks(self, size, dtype, device):
        _, inputs, hidden = size
        cell = msops.LLTMCell(inputs, hidden, getattr(mindspore, dtype))
        return {"msops": FlatState(cell), "MindSpore": OfMindSpore(cell)}
