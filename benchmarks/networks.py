"""For each operator, a Cell of msops and the same of MindSpore's own operators."""

import math

import mindspore
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Uniform, initializer

import msops


class Add(nn.Cell):
    def construct(self, x, y):
        return ops.add(x, y)


class Sigmoid(nn.Cell):
    def construct(self, x):
        return ops.sigmoid(x)


class Trilinear(nn.Cell):
    def construct(self, feats, points):
        far = (points + 1) / 2
        near = 1 - far
        u, v, w = far[:, 0], far[:, 1], far[:, 2]
        ru, rv, rw = near[:, 0], near[:, 1], near[:, 2]
        weights = (ru * rv * rw, ru * rv * w, ru * v * rw, ru * v * w, u * rv * rw, u * rv * w, u * v * rw, u * v * w)
        return (feats * ops.stack(weights, 1).expand_dims(2)).sum(1)


class LLTM(nn.Cell):
    """With the parameters of an msops.LLTMCell."""

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
    """An msops.LLTMCell whose inputs are Tensors alone, so that all have gradients."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h, c):
        return self.cell(x, (h, c))


class Sequence(nn.Cell):
    """msops.lltm with parameters."""

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


class LSTM(nn.Cell):
    """A layer of MindSpore's LSTM, which takes states with an axis for layers."""

    def __init__(self, inputs, hidden, dtype):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, dtype=dtype)

    def construct(self, x, h, c):
        output, (last_h, last_c) = self.lstm(x, (h.expand_dims(0), c.expand_dims(0)))
        return output, last_h[0], last_c[0]


def networks(case, dtype, device):
    """({"msops": ours, "MindSpore": MindSpore's, perhaps others}, shapes of the inputs) for a CellCase."""
    dtype = getattr(mindspore, dtype)
    if case.op == "lltm_sequence":
        return _sequence_networks(case, dtype, device)
    ours, theirs, shapes = _networks(case, dtype)
    return {"msops": ours, "MindSpore": theirs}, shapes


def _sequence_networks(case, dtype, device):
    steps, batch, inputs, hidden = case.size
    cell = msops.LLTMCell(inputs, hidden, dtype)
    nets = {
        "msops": Sequence(inputs, hidden, dtype),
        "MindSpore": Stepped(LLTM(cell)),
        "stepped LLTMCell": Stepped(FlatState(cell)),
    }
    if device == "CPU":  # MindSpore's does not run with cuDNN 9
        nets["nn.LSTM x 3/4"] = LSTM(inputs, hidden, dtype)
    return nets, [(steps, batch, inputs), (batch, hidden), (batch, hidden)]


def _networks(case, dtype):
    if case.op == "add":
        return msops.Add(), Add(), [case.size, case.size[-1:]]
    if case.op == "sigmoid":
        return msops.Sigmoid(), Sigmoid(), [case.size]
    if case.op == "trilinear":
        points, features = case.size
        return msops.TrilinearInterpolation(), Trilinear(), [(points, 8, features), (points, 3)]
    if case.op == "depthwise":
        n, channels, height, width, kernel, stride = case.size
        settings = dict(stride=stride, pad_mode="pad", padding=kernel // 2, has_bias=True, dtype=dtype)
        ours = msops.DepthwiseConv2d(channels, kernel, **settings)
        theirs = nn.Conv2d(channels, channels, kernel, group=channels, **settings)
        return ours, theirs, [(n, channels, height, width)]
    batch, inputs, hidden = case.size
    cell = msops.LLTMCell(inputs, hidden, dtype)
    return FlatState(cell), LLTM(cell), [(batch, inputs), (batch, hidden), (batch, hidden)]
