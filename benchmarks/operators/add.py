"""Benchmarks addition with broadcasting. Its gradient is a sum over the axes along which an input was broadcast."""

from mindspore import ops

import msops
from test_add import TestAdd

from ..benchmark import ELEMENTS, Benchmark, Sizes
from ..figures import of_elements


class Add(Benchmark):
    card = TestAdd()
    sizes = {  # numbers of elements, or (rows, columns) of a matrix to which a row is added
        "GPU": [
            *ELEMENTS["GPU"],
            Sizes(named=((2**18, 1000),), sweep=((64, 1000),), ragged={(2**18, 1001): (2**18, 1000)}),
        ],
        "CPU": [
            *ELEMENTS["CPU"],
            Sizes(named=((2**12, 1000),), sweep=((64, 1000),), ragged={(2**12, 1001): (2**12, 1000)}),
        ],
    }
    cells = (msops.Add, ops.add)
    line = "equal shapes"
    targets = of_elements()

    def inputs(self, size):
        return [size, size[-1:]] if isinstance(size, tuple) else [(size,), (size,)]

    def cases(self, size):
        add, sum_to = self.card.operators()
        inputs = self.inputs(size)
        forward = self.case("forward", size, add, inputs, inputs[:1])
        if not isinstance(size, tuple):
            yield forward._replace(naive=(size, size))
            return
        rows, columns = size
        yield forward._replace(name=f"{forward.name} + row", naive=(rows * columns, columns))
        for what, shape, (outer, kept, inner) in (
            ("row", (columns,), (rows, columns, 1)),
            ("column", (rows, 1), (1, rows, columns)),
            ("scalar", (), (1, 1, rows * columns)),
        ):
            case = self.case("backward", size, sum_to, [size, shape], [shape], unread=1, serial=outer * inner)
            yield case._replace(name=f"{case.name} to {what}", naive=(outer, kept, inner))

    def torch_formula(self, case):
        import torch

        return torch.add if case.direction == "forward" else lambda dout, x: dout.sum_to_size(x.shape)

    def on_line(self, case):
        return " x " not in case

    def describe_cell(self, size):
        return f"{self.describe(size)} + row" if isinstance(size, tuple) else self.describe(size)

    def cell_inputs(self, size):
        return self.inputs(size if isinstance(size, tuple) else (size,))
