"""Computes in float64, by MindSpore's own operators, what the Cells of msops do, for test_random_networks.py."""

import functools
import itertools
from types import SimpleNamespace

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from clouds import nearest
from msops.testing.checks import as_tuple
from test_ball_query import ball_query
from test_furthest_point_sample import furthest_point_sample
from test_hash_encoding import PRIMES, levels_of
from test_march_rays import march_rays
from test_ray_aabb import ray_aabb

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


def take(features, idx):
    """Takes points (B, ...) of features (B, C, N)."""
    chosen = np.eye(features.shape[2])[idx.asnumpy().reshape(idx.shape[0], -1)]  # ones and zeros
    return ops.matmul(features, Tensor(chosen.swapaxes(1, 2))).reshape(*features.shape[:2], *idx.shape[1:])


def interpolate(corners, points):
    weights = []
    for corner in range(8):
        # The bits of a corner's number say at which end of each axis, -1 or 1, it is.
        ends = [1 if corner >> (2 - axis) & 1 else -1 for axis in range(3)]
        x, y, z = ((1 + end * points[:, axis]) / 2 for axis, end in enumerate(ends))
        weights.append(x * y * z)
    return (corners * ops.stack(weights, 1).expand_dims(2)).sum(1)


def encode(net, points, grids):
    """Encodes points by smoothstep. Which entries they have is no matter of gradients."""
    outs, numbers = (), points.asnumpy()
    for scale, first, size, resolution in grids:
        cells = np.floor(np.clip(numbers, 0, 1) * scale + 0.5)
        t = points * scale + 0.5 - Tensor(cells)
        far, out = t * t * (3 - 2 * t), 0
        for corner in itertools.product((0, 1), repeat=points.shape[1]):
            place = cells.astype(np.int64) + corner
            if resolution:
                entry = (place * resolution ** np.arange(len(corner))).sum(1)
            else:
                entry = np.bitwise_xor.reduce(place * PRIMES[: len(corner)] % 2**32, axis=1)
            share = 1
            for axis, is_far in enumerate(corner):
                share = share * (far[:, axis] if is_far else 1 - far[:, axis])
            out = out + ops.gather(net.table, Tensor(first + entry % size), 0) * share.expand_dims(1)
        outs += (out,)
    return ops.concat(outs, 1)


def encoding(dim, levels, features, log2_size, base_resolution, growth, interpolation):
    grids = tuple(levels_of(dim, levels, base_resolution, growth, log2_size))
    shape = (sum(size for _, _, size, _ in grids), features)
    return Formula(lambda net, points: encode(net, points, grids), table=shape)


def harmonics(x, y, z):
    """Returns the first nine of spherical harmonics."""
    linear = [0.4886025119029199 * each for each in (-y, z, -x)]
    mixed = [1.0925484305920792 * each for each in (x * y, -y * z)]
    last = [-1.0925484305920792 * x * z, 0.5462742152960396 * (x * x - y * y)]
    middle = 0.9461746957575601 * z * z - 0.3153915652525201
    return ops.stack([x * 0 + 0.28209479177387814, *linear, *mixed, middle, *last], 1)


def march(inputs, settings):
    """Returns samples, which are constants to the gradient."""
    return tuple(map(Tensor, march_rays(*(x.asnumpy() for x in inputs), **settings)))


def composite(sigmas, rgbs, dts, ts, offsets):
    """Multiplies by matrices of ones that tell which samples are before which, and of which ray."""
    n, begins = sigmas.shape[0], offsets.asnumpy()
    of_ray = np.array([(begins[r] <= np.arange(n)) & (np.arange(n) < begins[r + 1]) for r in range(len(begins) - 1)])
    before = (of_ray.T.astype(float) @ of_ray) * np.tril(np.ones((n, n)), -1)
    depth = sigmas * dts
    through = ops.exp(-ops.matmul(Tensor(before), depth.expand_dims(1)).squeeze(1))
    weights = through * (1 - ops.exp(-depth)) * Tensor(of_ray.any(0).astype(float))
    seen = ops.concat((rgbs, ts.expand_dims(1), ops.ones_like(rgbs[:, :1])), 1)
    rays = ops.matmul(Tensor(of_ray.astype(float)), weights.expand_dims(1) * seen)
    return rays[:, :3], rays[:, 3], rays[:, 4], weights


def deform(net, query, references, x, levels, heads, points):
    """Samples one level. A pixel's share falls linearly with the distance, to 0 at the next pixel."""
    ((height, width),), (n, queries, features) = levels, query.shape

    def project(name, x):
        return dense(x, getattr(net, f"{name}_weight"), getattr(net, f"{name}_bias"))

    def shares(places, length):
        """Returns the shares of the pixels of an axis, in another axis."""
        near = 1 - ops.abs(places.expand_dims(-1) * length - 0.5 - Tensor(np.arange(length, dtype=np.float64)))
        return ops.where(near > 0, near, ops.zeros_like(near))

    value = project("value", x).reshape(n, height * width, heads, -1).transpose(0, 2, 1, 3).expand_dims(1)
    offsets = project("offsets", query).reshape(n, queries, heads, points, 2)
    weights = ops.softmax(project("weights", query).reshape(n, queries, heads, points), -1)
    locations = references.expand_dims(2) + offsets / Tensor(np.array([width, height], np.float64))
    of_rows, of_columns = shares(locations[..., 1], height), shares(locations[..., 0], width)
    of_pixels = (of_rows.expand_dims(-1) * of_columns.expand_dims(-2)).reshape(n, queries, heads, points, -1)
    read = ops.matmul(of_pixels, value)
    return project("output", (read * weights.expand_dims(-1)).sum(3).reshape(n, queries, features))


def parameters_of_deform(features, samples):
    given = dict(offsets=2 * samples, weights=samples, value=features, output=features)
    shapes = {}
    for name, size in given.items():
        shapes.update({f"{name}_weight": (size, features), f"{name}_bias": size})
    return shapes


def indices(function, *clouds, **settings):
    """Returns the indices that a NumPy function of points finds, which are constants to the gradient."""
    return Tensor(function(*(cloud.asnumpy() for cloud in clouds), **settings)[0])


def three_nn(net, unknown, known):
    idx, squares = nearest(known.asnumpy(), unknown.asnumpy(), 3)
    return Tensor(np.sqrt(squares)), Tensor(idx)


def query(radius, nsample):
    return functools.partial(indices, ball_query, radius=radius, nsample=nsample)


def query_and_group(net, xyz, new_xyz, features, idx):
    relative = take(xyz.swapaxes(1, 2), idx) - new_xyz.swapaxes(1, 2).expand_dims(3)
    return ops.concat((relative, take(features, idx)), 1)


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
    MSDeformAttn=lambda features, levels, heads, points: Formula(
        functools.partial(deform, heads=heads, points=points), **parameters_of_deform(features, heads * points)
    ),
    HashEncoding=encoding,
    Embedding=lambda rows, width: Formula(lambda net, ids: ops.gather(net.weight, ids, 0), weight=(rows, width)),
    SphericalHarmonics=lambda degree: Formula(lambda net, x: harmonics(x[:, 0], x[:, 1], x[:, 2])),
    RayAABB=lambda low, high: Formula(
        lambda net, *rays: tuple(map(Tensor, ray_aabb(*(x.asnumpy() for x in rays), low=low, high=high)))
    ),
    MarchRays=lambda **settings: Formula(lambda net, *inputs: march(inputs, settings)),
    CompositeRays=lambda threshold: Formula(lambda net, *samples: composite(*samples)),
    TrilinearInterpolation=lambda: Formula(lambda net, corners, points: interpolate(corners, points)),
    FurthestPointSample=lambda n: Formula(lambda net, xyz: indices(furthest_point_sample, xyz, npoint=n)),
    KNN=lambda k: Formula(lambda net, xyz, new_xyz: indices(nearest, xyz, new_xyz, k=k)),
    BallQuery=lambda *ball: Formula(lambda net, xyz, new_xyz: query(*ball)(xyz, new_xyz)),
    ThreeNN=lambda: Formula(three_nn),
    GatherPoints=lambda: Formula(lambda net, features, idx: take(features, idx)),
    GroupPoints=lambda: Formula(lambda net, features, idx: take(features, idx)),
    ThreeInterpolate=lambda: Formula(
        lambda net, features, idx, weight: (take(features, idx) * weight.expand_dims(1)).sum(3)
    ),
    QueryAndGroup=lambda *ball: Formula(
        lambda net, xyz, new_xyz, features: query_and_group(net, xyz, new_xyz, features, query(*ball)(xyz, new_xyz))
    ),
    GroupAll=lambda: Formula(
        lambda net, xyz, _, features: ops.concat((xyz.swapaxes(1, 2), features), 1).expand_dims(2)
    ),
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
