"""For each operator, a Cell of msops and the same of MindSpore's own operators."""

import mindspore
from mindspore import Parameter, nn, ops

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


def networks(case, dtype):
    """(ours, MindSpore's, shapes of the inputs) for a CellCase."""
    dtype = getattr(mindspore, dtype)
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
