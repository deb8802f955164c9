"""Benchmarks the LLTM over whole sequences. A size is (steps, batch, inputs, hidden units).

Forward is one product for the inputs of all steps, and the time loop LLTMForward. Backward is the time loop
LLTMBackward, and the products and the sum that compute the other gradients from the gates' gradients.
msops.lltm does the same. The products are torch's, which on the GPU calls the cuBLAS that MindSpore calls, or NumPy's.
"""

import math

import mindspore
import numpy as np
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Uniform, initializer

import msops
from msops.testing.entry import outputs_of, prepare_operator
from test_lltm import Recurrence, TestLLTM

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, ends, times_faster
from .lltm_cell import FlatState, OfMindSpore, torch_lltm

ROWS = (8, 64, 8, 128)  # the size in examples/rows.py
LSTM = "cuDNN LSTM x 3/4"
STEPPED = "stepped cell, CUDA graph"


def torch_lstm(inputs, douts):
    """Calls a layer of torch's LSTM, which is cuDNN's on the GPU. The LSTM has four gates, and the LLTM three."""
    import torch

    x, h, c, *_ = inputs
    module = torch.nn.LSTM(x.shape[2], h.shape[1], device=x.device, dtype=x.dtype)

    def network(x):
        output, (last_h, last_c) = module(x, (h[None], c[None]))
        return output, last_h[0], last_c[0]

    name = LSTM if x.is_cuda else "torch LSTM x 3/4"
    return name, 3 / 4, _torch_calls(network, x, list(module.parameters()), douts)


def torch_stepped(inputs, douts):
    """Computes the LLTM's formula step by step. One product serves the inputs of all steps, as in msops."""
    import torch

    x, h, c, *parameters = inputs
    weight_ih, weight_hh, bias = parameters = [p.detach().requires_grad_() for p in parameters]

    def network(x):
        state, outputs = (h, c), []
        for product in torch.nn.functional.linear(x, weight_ih):
            state = torch_lltm(torch.addmm(product, state[0], weight_hh.T), bias, state[1])
            outputs.append(state[0])
        return torch.stack(outputs), *state

    return STEPPED, 1, _torch_calls(network, x, parameters, douts)


def _torch_calls(network, x, parameters, douts):
    import torch

    x = x.detach().requires_grad_()

    def forward():
        with torch.no_grad():
            return network(x)

    def both():
        return torch.autograd.grad(network(x), [x, *parameters], douts)

    return {"forward": forward, "forward+backward": both}


class Ours(nn.Cell):
    """Calls msops.lltm with parameters of its own."""

    def __init__(self, inputs, hidden, dtype):
        super().__init__()
        init = Uniform(1 / math.sqrt(hidden))
        self.weight_ih = Parameter(initializer(init, (3 * hidden, inputs), dtype), name="weight_ih")
        self.weight_hh = Parameter(initializer(init, (3 * hidden, hidden), dtype), name="weight_hh")
        self.bias = Parameter(initializer(init, (3 * hidden,), dtype), name="bias")

    def construct(self, x, h, c):
        return msops.lltm(x, h, c, self.weight_ih, self.weight_hh, self.bias)


class Stepped(nn.Cell):
    """Calls a cell for each step of a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h, c):
        outputs = []
        for t in range(x.shape[0]):
            h, c = self.cell(x[t], h, c)
            outputs.append(h)
        return ops.stack(outputs), h, c


class OfLSTM(nn.Cell):
    """Calls a layer of MindSpore's LSTM, which takes states with an axis for layers."""

    def __init__(self, inputs, hidden, dtype):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, dtype=dtype)

    def construct(self, x, h, c):
        output, (last_h, last_c) = self.lstm(x, (h.expand_dims(0), c.expand_dims(0)))
        return output, last_h[0], last_c[0]


class LLTM(Benchmark):
    sequence_sizes = {
        "GPU": Sizes(
            named=((128, 16, 32, 128), (128, 64, 1024, 1024), (128, 256, 2048, 2048)),
            sweep=(
                *((128, batch, 512, 512) for batch in (1, 8, 64, 512)),
                *((128, 64, hidden, hidden) for hidden in (32, 64, 128, 129, 256, 1025, 1536, 2048)),
                *((4096, 16, hidden, hidden) for hidden in (128, 512)),
            ),
        ),
        "CPU": Sizes(named=((32, 16, 32, 128), (32, 64, 256, 256), (32, 1, 512, 512))),
    }
    sequence_sweeps = {
        "hidden units, of 128 steps of 64 samples": (3, lambda size: size == (128, 64, size[3], size[3])),
        "samples, of 128 steps with 512 hidden units": (1, lambda size: size == (128, size[1], 512, 512)),
    }
    cell_sizes = {
        "GPU": ((32, 16, 32, 128), (32, 64, 1024, 1024), ROWS),
        "CPU": ((32, 16, 32, 128), (32, 64, 256, 256), ROWS),
    }
    targets = {
        "GPU": [
            Target("both directions", "not slower than cuDNN's LSTM x 3/4", 1, times_faster(LSTM, "sequence")),
            Target("16 x 32 x 128", "10 times faster than the stepped cell in a CUDA graph", 10,
                   times_faster(STEPPED, "sequence", case=ends(" 16 x 32 x 128"))),
        ]
    }  # fmt: skip

    def describe(self, size):
        return f"{size[0]} steps of {by(size[1:])}"

    def cell_inputs(self, size):
        steps, batch, inputs, hidden = size
        return [(steps, batch, inputs), (batch, hidden), (batch, hidden)]

    def networks(self, size, dtype, device):
        *_, inputs, hidden = size
        dtype = getattr(mindspore, dtype)
        cell = msops.LLTMCell(inputs, hidden, dtype)
        nets = {
            "msops": Ours(inputs, hidden, dtype),
            "MindSpore": Stepped(OfMindSpore(cell)),
            "stepped LLTMCell": Stepped(FlatState(cell)),
        }
        if device == "CPU":  # MindSpore's LSTM does not run with cuDNN 9
            nets["nn.LSTM x 3/4"] = OfLSTM(inputs, hidden, dtype)
        return nets

    def sequence_operations(self, size, direction):
        """Returns the operations of the products. The gradient has two products for each one of forward."""
        steps, batch, inputs, hidden = size
        if direction.startswith("loop"):
            inputs = 0
        return 2 * steps * batch * 3 * hidden * (inputs + hidden) * (3 if direction == "forward+backward" else 1)

    def sequence_calls(self, size, precision, arrays, stream):
        steps, batch, inputs, hidden = size
        dtype, bound = "float32" if precision == "tf32" else precision, hidden**-0.5
        x, doutput = (arrays.random((steps, batch, width), dtype) for width in (inputs, hidden))
        h, c, dlast_h, dlast_c = (arrays.random((batch, hidden), dtype) for _ in range(4))
        weight_ih, weight_hh = (arrays.uniform((3 * hidden, width), dtype, bound) for width in (inputs, hidden))
        bias = arrays.uniform((3 * hidden,), dtype, bound)
        lengths = arrays.empty((batch,), "int32")
        lengths[:] = steps
        product = arrays.empty((steps, batch, 3 * hidden), dtype)

        def loop(operator, *takes):
            gives = [arrays.empty(*output) for output in outputs_of(operator, takes)]
            run = prepare_operator(operator, [*takes, *gives], stream)

            def call():
                if status := run():
                    raise RuntimeError(f"the entry returned {status}")

            return call, gives

        of_forward, of_backward = Recurrence().operators(allow_tf32=precision == "tf32")
        loop_forward, outputs = loop(of_forward, product, weight_hh, bias, h, c, lengths)
        output, _, _, gates, cells, _ = outputs
        loop_backward, gradients = loop(
            of_backward, weight_hh, gates, cells, output, h, lengths, doutput, dlast_h, dlast_c
        )
        dgates, hidden_before, dh, dc, _ = gradients
        x_rows, product_rows, dgates_rows, hidden_rows = (
            array.reshape(steps * batch, array.shape[2]) for array in (x, product, dgates, hidden_before)
        )

        def forward():
            arrays.multiply(x_rows, weight_ih.T, out=product_rows)
            loop_forward()
            return outputs[:3]

        def both():
            forward()
            loop_backward()
            dx, dweight_ih = arrays.multiply(dgates_rows, weight_ih), arrays.multiply(dgates_rows.T, x_rows)
            dweight_hh = arrays.multiply(dgates_rows.T, hidden_rows)
            return dx.reshape(x.shape), dh, dc, dweight_ih, dweight_hh, dgates_rows.sum(0)

        calls = {
            "forward": forward,
            "forward+backward": both,
            "loop forward": loop_forward,
            "loop backward": loop_backward,
        }
        return (x, h, c, weight_ih, weight_hh, bias), (doutput, dlast_h, dlast_c), calls

    def numpy_sequences(self, inputs, douts):
        """Returns calls that compute in float32 at least, since NumPy has no fast float16 product."""
        inputs, douts = ([np.asarray(x, np.float32) for x in arrays] for arrays in (inputs, douts))
        return {
            "forward": lambda: TestLLTM.reference(*inputs),
            "forward+backward": lambda: TestLLTM.reference_gradient(*inputs, *douts),
        }

    def torch_sequences(self, inputs, douts, named):
        yield torch_lstm(inputs, douts)
        if named and inputs[0].is_cuda:
            yield torch_stepped(inputs, douts)
