"""Computes in float64, by MindSpore's own operators, what the Cells of msops do, for test_random_networks.py."""

import functools
from types import SimpleNamespace

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from msops.testing.checks import as_tuple

CLASSES = 11


class Noise:
    """Multiplies each number by 1 + unit or 1 - unit, by chance, as rounding may; without a unit, keeps it."""

    unit, random = 0, None

    @classmethod
    def add(cls, x):
        if not cls.unit or not isinstance(x, Tensor) or x.dtype != mindspore.float64:
            return x
        return x * Tensor(1 + cls.unit * cls.random.choice((-1, 1), x.shape))


class Formula(nn.Cell):
    """Computes a Cell's formula with Parameters of the Cell's names, in float64. Noise of an input, or of an output, is
    also noise of its gradient."""

    def __init__(self, formula, **shapes):
        super().__init__()
        self.formula = formula
        for name, shape in shapes.items():
            setattr(self, name, Parameter(Tensor(np.zeros(shape)), name=name))

    def construct(self, *inputs):
        outs = tuple(map(Noise.add, as_tuple(self.formula(self, *map(Noise.add, inputs)))))
        return outs[0] if len(outs) == 1 else outs


def sigmoid(x):
    return 1 / (1 + ops.exp(-x))


def scaled(x, eps):
    return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + eps)


def dense(x, weight, bias):
    rows = x.reshape(-1, x.shape[-1])  # MindSpore's gradient of a matmul fails for the transposed view of one sample
    return (ops.matmul(rows, weight.T) + bias).reshape(*x.shape[:-1], -1)


def layer_norm(net, x):
    return scaled(x - x.mean(-1, keep_dims=True), 1e-7) * net.gamma + net.beta


def group_norm(net, x, groups):
    """Normalizes groups of the last axis, for each sample, and computes silu."""
    parts = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    centred = parts - parts.mean((1, 3), keep_dims=True)
    y = centred * ops.rsqrt((centred * centred).mean((1, 3), keep_dims=True) + 1e-5)
    y = y.reshape(x.shape) * net.gamma + net.beta
    return y * sigmoid(y)


def rms_norm(net, x, eps, offset=0.0):
    y = scaled(x, eps) * (net.weight + offset)
    return y + net.bias if hasattr(net, "bias") else y


def gelu(x):
    return x / 2 * (1 + ops.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gated(activation, gate, up=None):
    if up is None:
        gate, up = ops.split(gate, gate.shape[-1] // 2, -1)
    return activation(gate) * up


def convolve(net, x):
    padded = ops.pad(x, (1, 1, 1, 1))
    height, width = x.shape[2:]
    total = net.bias.reshape(-1, 1, 1)
    for i, j in np.ndindex(3, 3):
        total = total + padded[:, :, i : i + height, j : j + width] * net.weight[:, 0, i, j].reshape(-1, 1, 1)
    return total


def advance(gates, c):
    """Returns the next h and c of an LLTM."""
    i, o, g = ops.split(gates, gates.shape[1] // 3, 1)
    c = c + sigmoid(i) * ops.where(g > 0, g, ops.exp(ops.where(g > 0, ops.zeros_like(g), g)) - 1)
    return ops.tanh(c) * sigmoid(o), c


def lltm_step(net, x, state):
    return advance(ops.matmul(ops.concat((state[0], x), 1), net.weight.T) + net.bias, state[1])


def lltm(net, x):
    h = c = ops.zeros((x.shape[0], net.bias_l0.shape[0] // 3), mindspore.float64)
    outputs = []
    for t in range(x.shape[1]):
        gates = ops.matmul(x[:, t], net.weight_ih_l0.T) + ops.matmul(h, net.weight_hh_l0.T) + net.bias_l0
        h, c = advance(gates, c)
        outputs.append(h)
    return ops.stack(outputs, 1), h


def scan(a, b, h, reverse):
    """Computes h = a h + b step by step."""
    outputs = {}
    for t in range(a.shape[1])[:: -1 if reverse else 1]:
        outputs[t] = h = a[:, t] * h + b[:, t]
    return ops.stack([outputs[t] for t in range(a.shape[1])], 1)


def convolve_causally(net, x, state=None):
    """Sums up shifted copies of the steps, silu of which is the result; also returns the last steps."""
    width, steps = net.weight.shape[1], x.shape[2]
    before = ops.zeros_like(x[:, :, :1]).tile((1, 1, width - 1)) if state is None else state
    extended = ops.concat((before, x), 2)
    z = net.bias.expand_dims(1) + sum(net.weight[:, w : w + 1] * extended[:, :, w : w + steps] for w in range(width))
    return z * sigmoid(z), extended[:, :, steps:]


def selective_scan(u, delta, decays, inputs, outputs, skip, z, delta_bias, state):
    """Computes out and the last state step by step, with a softplus."""
    dt, y = ops.log(1 + ops.exp(delta + delta_bias.expand_dims(1))), []
    for t in range(u.shape[2]):
        step = dt[:, :, t].expand_dims(2)
        state = ops.exp(step * decays) * state + step * u[:, :, t].expand_dims(2) * inputs[:, :, t].expand_dims(1)
        y.append((state * outputs[:, :, t].expand_dims(1)).sum(2))
    return (ops.stack(y, 2) + skip.expand_dims(1) * u) * z * sigmoid(z), state


def wkv4(w, u, k, v, state):
    """Computes means with powers of keys, step by step."""
    p, q = (ops.zeros_like(k[:, 0]),) * 2 if state is None else (state[:, i] * ops.exp(state[:, 2]) for i in (0, 1))
    decay, means = ops.exp(-ops.exp(w)), []
    for t in range(k.shape[1]):
        own, now = ops.exp(u + k[:, t]), ops.exp(k[:, t])
        means.append((p + own * v[:, t]) / (q + own))
        p, q = decay * p + now * v[:, t], decay * q + now
    return ops.stack(means, 1), ops.stack((p, q, ops.zeros_like(p)), 1)


def wkv7(r, w, k, v, a, b, state):
    """Computes matrices of (value, key) step by step."""
    state = k[:, 0, :, None] * v[:, 0, :, :, None] * 0 if state is None else state
    decay, outputs = ops.exp(-ops.exp(w)), []
    for t in range(k.shape[1]):
        read = (state * a[:, t, :, None]).sum(-1).expand_dims(-1)
        state = state * decay[:, t, :, None] + read * b[:, t, :, None] + v[:, t].expand_dims(-1) * k[:, t, :, None]
        outputs.append((state * r[:, t, :, None]).sum(-1))
    return ops.stack(outputs, 1), state


def turn(x):
    d, steps = x.shape[3], x.shape[2]
    angles = np.outer(np.arange(steps), 10000.0 ** (-np.arange(0, d, 2) / d))
    cos, sin, a, b = Tensor(np.cos(angles)), Tensor(np.sin(angles)), x[..., : d // 2], x[..., d // 2 :]
    return ops.concat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(net, q, k, v, causal):
    x = ops.matmul(q, k.swapaxes(2, 3)) * q.shape[3] ** -0.5
    if causal:
        x = x - Tensor(np.triu(np.full(x.shape[2:], 1e9), 1))
    return ops.matmul(ops.softmax(x, -1), v)


def cross_entropy(logits, labels):
    """Smooths labels by 0.1."""
    most = ops.stop_gradient(logits.max(-1, keepdims=True))
    lse = ops.log(ops.exp(logits - most).sum(-1)) + most.squeeze(-1)
    right = (logits * Tensor(np.eye(CLASSES)[labels.asnumpy()])).sum(-1)
    return (lse - 0.9 * right - 0.1 * logits.mean(-1)).mean()


def linear_cross_entropy(net, x, labels):
    logits = ops.matmul(x, net.weight.T)
    return cross_entropy(logits + net.bias if hasattr(net, "bias") else logits, labels)


FORMULAS = SimpleNamespace(  # the Formula of each Cell, from the same arguments
    Add=lambda: Formula(lambda net, x, y: x + y),
    Sigmoid=lambda: Formula(lambda net, x: sigmoid(x)),
    SiLU=lambda: Formula(lambda net, x: x * sigmoid(x)),
    Softmax=lambda axis: Formula(lambda net, x: ops.softmax(x, axis)),
    GELU=lambda: Formula(lambda net, x: x * (1 + ops.erf(x / 2**0.5)) / 2),
    GroupNorm=lambda groups, channels, activation, layout: Formula(
        functools.partial(group_norm, groups=groups), gamma=channels, beta=channels
    ),
    SwiGLU=lambda: Formula(lambda net, *x: gated(lambda gate: gate * sigmoid(gate), *x)),
    GeGLU=lambda: Formula(lambda net, *x: gated(gelu, *x)),
    LayerNorm=lambda shape: Formula(layer_norm, gamma=shape, beta=shape),
    RMSNorm=lambda width, eps, offset=0.0, has_bias=False: Formula(
        functools.partial(rms_norm, eps=eps, offset=offset), weight=width, **{"bias": width} if has_bias else {}
    ),
    AddRMSNorm=lambda width, eps: Formula(
        lambda net, x, residual: (scaled(x + residual, eps) * net.weight, x + residual), weight=width
    ),
    DepthwiseConv2d=lambda channels, kernel_size, has_bias: Formula(
        convolve, weight=(channels, 1, kernel_size, kernel_size), bias=channels
    ),
    LLTM=lambda size, hidden, batch_first: Formula(
        lltm, weight_ih_l0=(3 * hidden, size), weight_hh_l0=(3 * hidden, hidden), bias_l0=3 * hidden
    ),
    LLTMCell=lambda size, hidden: Formula(lltm_step, weight=(3 * hidden, hidden + size), bias=3 * hidden),
    CausalConv1d=lambda channels, width, activation, return_final_state: Formula(
        convolve_causally, weight=(channels, width), bias=channels
    ),
    LinearScan=lambda reverse: Formula(lambda net, a, b, h0: scan(a, b, h0, reverse)),
    SelectiveScan=lambda delta_softplus, return_last_state: Formula(lambda net, *x: selective_scan(*x)),
    WKV4=lambda: Formula(lambda net, *inputs: wkv4(*inputs)),
    WKV7=lambda: Formula(lambda net, *inputs: wkv7(*inputs)),
    RotaryEmbedding=lambda dim, steps: Formula(lambda net, x: turn(x)),
    FlashAttention=lambda causal: Formula(functools.partial(attend, causal=causal)),
    Embedding=lambda rows, width: Formula(lambda net, ids: ops.gather(net.weight, ids, 0), weight=(rows, width)),
    CrossEntropyLoss=lambda label_smoothing: Formula(lambda net, logits, labels: cross_entropy(logits, labels)),
    LinearCrossEntropyLoss=lambda width, classes, has_bias, label_smoothing: Formula(
        linear_cross_entropy, weight=(classes, width), **{"bias": classes} if has_bias else {}
    ),
    Dense=lambda taken, given: Formula(
        lambda net, x: dense(x, net.weight, net.bias), weight=(given, taken), bias=given
    ),
    OwnLayerNorm=lambda shape: Formula(layer_norm, gamma=shape, beta=shape),
    ReLU=lambda: Formula(lambda net, x: ops.where(x > 0, x, ops.zeros_like(x))),
)
