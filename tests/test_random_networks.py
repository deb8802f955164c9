"""Trains random networks of msops' Cells between MindSpore's own, and compares the gradients of all Parameters and of
the input with those of the same network in float64, where MindSpore's operators compute the Cells' formulas.

A number is one network: `pytest tests/test_random_networks.py -k "network[7]"`. RANDOM_NETWORKS=500 trains 500 of them.
"""

import copy
import functools
import os
from types import SimpleNamespace

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import msops
from formulas import CLASSES, FORMULAS, Noise
from msops.compat import VERSION
from msops.testing.checks import assert_near, largest

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(VERSION < (2, 7), reason="docs/versions.md says what older versions lack"),
]

STEPS, RATE = 2, 0.004  # a larger rate can double weights in one step, and deep networks overflow float16 then
FLOAT16 = "float16"


CELLS = SimpleNamespace(
    **{name: getattr(msops, name) for name in msops.__all__},
    Dense=nn.Dense,
    OwnLayerNorm=nn.LayerNorm,
    ReLU=nn.ReLU,
)


# The blocks of a network map (B, T, C) to (B, T, C). They take their Cells from CELLS or from FORMULAS.


class Residual(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.inner, self.add = cells.Dense(sizes.width, sizes.width), cells.Add()

    def construct(self, x):
        return self.add(x, self.inner(x))


class AddNorm(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.inner, self.norm = cells.Dense(sizes.width, sizes.width), cells.AddRMSNorm(sizes.width, 0.01)

    def construct(self, x):
        y, total = self.norm(x, self.inner(x))
        return y + total


class Gated(nn.Cell):
    def __init__(self, cells, sizes, kind):
        super().__init__()
        self.gate, self.up = (cells.Dense(sizes.width, sizes.width) for _ in range(2))
        self.glu = getattr(cells, kind)()

    def construct(self, x):
        return self.glu(self.gate(x), self.up(x))


class Packed(nn.Cell):
    def __init__(self, cells, sizes, kind):
        super().__init__()
        self.both, self.glu = cells.Dense(sizes.width, 2 * sizes.width), getattr(cells, kind)()

    def construct(self, x):
        return self.glu(self.both(x))


class HeadNorm(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.shape = sizes.batch, sizes.steps, 2, sizes.width // 2
        self.norm = cells.RMSNorm(self.shape[2:], 0.01, has_bias=True)

    def construct(self, x):
        return self.norm(x.reshape(self.shape)).reshape(x.shape)


class Attention(nn.Cell):
    def __init__(self, cells, sizes, causal):
        super().__init__()
        self.shape, self.width = (sizes.batch, sizes.steps, 2, sizes.width // 2), sizes.width
        self.q, self.k, self.v = (cells.Dense(sizes.width, sizes.width) for _ in range(3))
        self.turn, self.attend = cells.RotaryEmbedding(sizes.width // 2, 20), cells.FlashAttention(causal)

    def construct(self, x):
        q, k, v = [each(x).reshape(self.shape).swapaxes(1, 2) for each in (self.q, self.k, self.v)]
        out = self.attend(self.turn(q), self.turn(k), v)
        return out.swapaxes(1, 2).reshape(x.shape)


class Convolution(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.depthwise = cells.DepthwiseConv2d(sizes.width, 3, has_bias=True)

    def construct(self, x):
        return self.depthwise(x.swapaxes(1, 2).expand_dims(3)).squeeze(3).swapaxes(1, 2)


class Recurrence(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.lltm = cells.LLTM(sizes.width, sizes.width, batch_first=True)

    def construct(self, x):
        output, _ = self.lltm(x)
        return output


class Step(nn.Cell):
    def __init__(self, cells, sizes):
        super().__init__()
        self.cell = cells.LLTMCell(sizes.width, sizes.width)

    def construct(self, x):
        h, c = self.cell(x[:, 0], (x[:, 1], x[:, 2]))
        return x + (h + c).expand_dims(1)


class Scan(nn.Cell):
    def __init__(self, cells, sizes, reverse):
        super().__init__()
        self.factors, self.sigmoid = cells.Dense(sizes.width, sizes.width), cells.Sigmoid()
        self.scan = cells.LinearScan(reverse)

    def construct(self, x):
        return self.scan(self.sigmoid(self.factors(x)), x, x[:, 0])


class ShortConvolution(nn.Cell):
    """Goes on with the last steps as the state before the first."""

    def __init__(self, cells, sizes):
        super().__init__()
        self.convolve = cells.CausalConv1d(sizes.width, 3, activation="silu", return_final_state=True)

    def construct(self, x):
        first, state = self.convolve(x.transpose(0, 2, 1))
        out, _ = self.convolve(first, state)
        return out.transpose(0, 2, 1)


class Selective(nn.Cell):
    """Scans x by steps, decays, weights and a gate that are computed from x, and bounded."""

    def __init__(self, cells, sizes):
        super().__init__()
        self.delta, self.of_states = cells.Dense(sizes.width, sizes.width), cells.Dense(sizes.width, 6)
        self.sigmoid, self.scan = cells.Sigmoid(), cells.SelectiveScan(delta_softplus=True, return_last_state=True)

    def construct(self, x):
        bounded = self.sigmoid(x)
        u, z = x.swapaxes(1, 2), bounded.swapaxes(1, 2)
        delta = self.sigmoid(self.delta(bounded)).swapaxes(1, 2)
        of_states = self.sigmoid(self.of_states(bounded)).swapaxes(1, 2)
        decays, state, skip, delta_bias = -z[0, :, :3], u[:, :, :3], bounded[0, 0], bounded[0, 1]
        y, last = self.scan(u, delta, decays, of_states[:, :3], of_states[:, 3:], skip, z, delta_bias, state)
        return y.swapaxes(1, 2) + ops.cast(last.mean(2), x.dtype).expand_dims(1)


class TimeMix(nn.Cell):
    """Cuts the steps in two, and carries the state over."""

    def __init__(self, cells, sizes):
        super().__init__()
        self.keys, self.mix = cells.Dense(sizes.width, sizes.width), cells.WKV4()

    def construct(self, x):
        k, w, u = self.keys(x), x[0, 0], x[0, 1]
        first, state = self.mix(w, u, k[:, :2], x[:, :2], None)
        rest, _ = self.mix(w, u, k[:, 2:], x[:, 2:], state)
        return ops.concat((first, rest), 1)


class HeadMemory(nn.Cell):
    """Takes the channels for two heads. Cuts the steps in two, and carries the state over."""

    def __init__(self, cells, sizes):
        super().__init__()
        self.shape = (sizes.batch, sizes.steps, 2, sizes.width // 2)
        self.keys, self.decays = (cells.Dense(sizes.width, sizes.width) for _ in range(2))
        self.sigmoid, self.mix = cells.Sigmoid(), cells.WKV7()

    def construct(self, x):
        v, k = x.reshape(self.shape), self.sigmoid(self.keys(x)).reshape(self.shape) / 4
        w = -self.sigmoid(self.decays(x)).reshape(self.shape)
        first, state = self.mix(v[:, :2], w[:, :2], k[:, :2], v[:, :2], -k[:, :2], k[:, :2], None)
        rest, _ = self.mix(v[:, 2:], w[:, 2:], k[:, 2:], v[:, 2:], -k[:, 2:], k[:, 2:], state)
        return ops.concat((first, rest), 1).reshape(x.shape)


class Placed(nn.Cell):
    """Adds a vector for each step, of which some are equal."""

    def __init__(self, cells, sizes):
        super().__init__()
        self.places = Tensor(np.arange(sizes.steps) // 2)
        self.table = cells.Embedding(sizes.steps, sizes.width)

    def construct(self, x):
        return x + self.table(self.places)


BLOCKS = {
    "Dense": lambda cells, sizes: cells.Dense(sizes.width, sizes.width),
    "nn.LayerNorm": lambda cells, sizes: cells.OwnLayerNorm((sizes.width,)),
    "ReLU": lambda cells, sizes: cells.ReLU(),
    "Sigmoid": lambda cells, sizes: cells.Sigmoid(),
    "SiLU": lambda cells, sizes: cells.SiLU(),
    "GELU": lambda cells, sizes: cells.GELU(),
    "GroupNorm": lambda cells, sizes: cells.GroupNorm(2, sizes.width, activation="silu", layout="NHWC"),
    "Softmax": lambda cells, sizes: cells.Softmax(1),
    "RMSNorm": lambda cells, sizes: cells.RMSNorm(sizes.width, 0.01, 0.5),
    "RMSNorm of heads": HeadNorm,
    "LayerNorm": lambda cells, sizes: cells.LayerNorm((sizes.width,)),
    "Add": Residual,
    "AddRMSNorm": AddNorm,
    "SwiGLU": functools.partial(Gated, kind="SwiGLU"),
    "GeGLU": functools.partial(Gated, kind="GeGLU"),
    "packed SwiGLU": functools.partial(Packed, kind="SwiGLU"),
    "packed GeGLU": functools.partial(Packed, kind="GeGLU"),
    "attention": functools.partial(Attention, causal=False),
    "causal attention": functools.partial(Attention, causal=True),
    "DepthwiseConv2d": Convolution,
    "LLTM": Recurrence,
    "LLTMCell": Step,
    "CausalConv1d": ShortConvolution,
    "LinearScan": functools.partial(Scan, reverse=False),
    "LinearScan, reversed": functools.partial(Scan, reverse=True),
    "SelectiveScan": Selective,
    "WKV4": TimeMix,
    "WKV7": HeadMemory,
    "Embedding": Placed,
}
WITHOUT_GRADIENT = {"DecoderStack", "LinearArgmax", "PagedAttention"}
OF_BLOCKS = {"GGUFMatmul"}  # whose weights are not trained
# The examples train these together: their inputs are places, which a network does not hand from block to block.
OF_FIELDS_AND_CLOUDS = {
    *("BallQuery", "CompositeRays", "FurthestPointSample", "GatherPoints", "GroupAll", "GroupPoints", "HashEncoding"),
    *("KNN", "MSDeformAttn", "MarchRays", "QueryAndGroup", "RayAABB", "SphericalHarmonics", "ThreeInterpolate"),
    *("ThreeNN", "TrilinearInterpolation"),
}
OF_EXPERTS = {
    "GroupedMatmul",
    "MixtureOfExperts",
    "MoEPermute",
    "MoEUnpermute",
    "TopKGating",
}  # rounding moves a choice
OF_CODES = {"WeightQuantMatmul"}  # whose weights no optimizer changes
OWN = ("Dense", "nn.LayerNorm", "ReLU")  # MindSpore's
KINKED = ("ReLU",)  # rounding to float16 may cross its kink


class Loss(nn.Cell):
    """Ends a network by a loss of random labels."""

    def __init__(self, cells, sizes, kind):
        super().__init__()
        rows = sizes.batch * sizes.steps
        self.labels = Tensor(np.random.default_rng(sizes.seed).integers(0, CLASSES, rows).astype(np.int32))
        self.is_linear, self.width = kind != "CrossEntropyLoss", sizes.width
        if self.is_linear:
            has_bias = kind == "LinearCrossEntropyLoss with bias"
            self.loss = cells.LinearCrossEntropyLoss(sizes.width, CLASSES, has_bias=has_bias, label_smoothing=0.1)
        else:
            self.dense, self.loss = cells.Dense(sizes.width, CLASSES), cells.CrossEntropyLoss(label_smoothing=0.1)

    def construct(self, x):
        if self.is_linear:
            return self.loss(x.reshape(-1, self.width), self.labels)
        return self.loss(self.dense(x).reshape(-1, CLASSES), self.labels)


LOSSES = ("CrossEntropyLoss", "LinearCrossEntropyLoss", "LinearCrossEntropyLoss with bias")


class Network:
    """Describes a network that a seed chooses, and makes it of Cells or of Formulas."""

    def __init__(self, seed):
        rng = self.random = np.random.default_rng(seed)
        self.seed = seed
        self.batch, self.steps, self.width = int(rng.integers(1, 4)), int(rng.integers(4, 9)), int(rng.choice((8, 12)))
        self.mode = str(rng.choice(("graph", "pynative")))
        self.level = str(rng.choice(("O0", "O0", "O1", "O2", "O3", "auto")))
        self.dtype = str(rng.choice(("float32", FLOAT16))) if self.level == "O0" else "float32"
        self.rounds = FLOAT16 if self.level != "O0" else self.dtype
        self.is_copied = bool(rng.random() < 0.5)
        self.recomputes, self.is_vmapped = bool(rng.random() < 0.3), bool(rng.random() < 0.4) and self.level == "O0"
        smooth = [name for name in BLOCKS if self.rounds != FLOAT16 or name not in KINKED]
        of_msops, own = [name for name in smooth if name not in OWN], [name for name in smooth if name in OWN]
        self.blocks = []
        for name in rng.choice(of_msops, rng.integers(1, 5)):
            self.blocks += [str(name), *map(str, rng.choice(own, rng.integers(0, 2)))]
        self.loss = str(rng.choice(("", *LOSSES)))
        if not self.loss and "Dense" not in self.blocks:
            self.blocks.append("Dense")  # the other blocks may have no Parameters

    def __str__(self):
        words = [self.mode, self.level, self.dtype, f"{self.batch} x {self.steps} x {self.width}"]
        flags = dict(deepcopy=self.is_copied, recompute=self.recomputes, vmap=self.is_vmapped)
        words += [word for word, has in flags.items() if has]
        return f"{', '.join(words)}: {' > '.join([*self.blocks, *[self.loss] * bool(self.loss)])}"

    def make(self, cells):
        blocks = [BLOCKS[name](cells, self) for name in self.blocks]
        return nn.SequentialCell(blocks + [Loss(cells, self, self.loss)] * bool(self.loss))

    def trained(self):
        """Returns the network of Cells with random Parameters, changed as its description says."""
        net = self.make(CELLS)
        for parameter in net.trainable_params():
            value = self.random.standard_normal(parameter.shape)
            value = value / parameter.shape[-1] ** 0.5 if len(parameter.shape) > 1 else 0.5 + 0.2 * value
            parameter.set_data(Tensor(value, getattr(mindspore, self.dtype)))
            parameter.set_dtype(getattr(mindspore, self.dtype))
        if self.is_copied:
            net = copy.deepcopy(net)
        if self.recomputes:
            for block in net:
                # MindSpore cannot order the graph of a loss that is recomputed with the Cell before it.
                if not isinstance(block, (Step, Loss)):
                    block.recompute()
        net.set_train()
        return net if self.level == "O0" else amp.auto_mixed_precision(net, self.level)

    def input(self):
        shape = (*[2] * self.is_vmapped, self.batch, self.steps, self.width)
        return self.random.standard_normal(shape).astype(np.float16).astype(self.dtype)


class Weighted(nn.Cell):
    """Computes the sum of a network's outputs, each multiplied by a number."""

    def __init__(self, net, is_vmapped, dtype):
        super().__init__(auto_prefix=False)
        self.net, self.dtype, self.is_vmapped = net, dtype, is_vmapped

    def construct(self, x, weights):
        out = ops.vmap(self.net)(x) if self.is_vmapped else self.net(x)
        return (ops.cast(out, self.dtype) * weights).sum()


def exact_gradients(net, x, weights, unit=0, seed=0):
    """Returns the loss and the gradients of a network of Formulas, rounded by chance if there is a unit."""

    def loss(x):
        parts = [Noise.add(x)] if x.ndim == 3 else [Noise.add(part) for part in x]
        each = zip(parts, [weights] if x.ndim == 3 else weights)
        return sum((net(part) * Tensor(weight)).sum() for part, weight in each)

    Noise.unit, Noise.random = unit, np.random.default_rng(seed)
    value, gradients = ops.value_and_grad(loss, 0, net.trainable_params())(Tensor(x.astype(np.float64)))
    return [out.asnumpy() for out in (value, gradients[0], *gradients[1])]


def optimizer_of(parameters):
    """Returns MindSpore's gradient descent, whose kernel for GPUs takes float32 alone, or assignments."""
    if all(parameter.dtype == mindspore.float32 for parameter in parameters):
        return nn.SGD(parameters, RATE)
    return lambda gradients: [ops.assign(p, p - RATE * gradient) for p, gradient in zip(parameters, gradients)]


def check(network):
    mindspore.set_context(mode=mindspore.GRAPH_MODE if network.mode == "graph" else mindspore.PYNATIVE_MODE)
    net, x = network.trained(), network.input()
    shape = x.shape if not network.loss else x.shape[:1] if network.is_vmapped else ()
    weights = np.asarray(network.random.standard_normal(shape), np.float32)
    parameters = net.trainable_params()
    step = ops.value_and_grad(Weighted(net, network.is_vmapped, mindspore.float32), 0, parameters)
    optimizer, taken = optimizer_of(parameters), []
    for _ in range(STEPS):
        before = [parameter.asnumpy().copy() for parameter in parameters]
        value, (dx, gradients) = step(Tensor(x), Tensor(weights))
        assert [gradient.dtype for gradient in gradients] == [parameter.dtype for parameter in parameters]
        taken.append((before, [out.asnumpy() for out in (value, dx, *gradients)]))
        optimizer(gradients)
        unit = np.finfo(network.dtype).eps
        for parameter, old, gradient in zip(parameters, before, gradients):
            moved = old.astype(np.float64) - RATE * gradient.asnumpy()
            np.testing.assert_allclose(parameter.asnumpy(), moved, 4 * unit, 4 * unit * largest(old))
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    reference = network.make(FORMULAS)
    unit = np.finfo(network.rounds).eps / 2
    names = ["loss", "dx", *(f"gradient of {parameter.name}" for parameter in parameters)]
    for before, results in taken:
        for parameter, value in zip(reference.trainable_params(), before):
            assert parameter.shape == value.shape
            parameter.set_data(Tensor(value.astype(np.float64)))
        exact = exact_gradients(reference, x, weights)
        others = [exact_gradients(reference, x, weights, unit, seed) for seed in range(3)]
        for name, got, want, *rounded in zip(names, results, exact, *others):
            # A Cell rounds several times where its Formula is rounded once.
            allowed = 8 * max(largest(each - want) for each in rounded) + 8 * unit * largest(want)
            assert_near(got, want, np.full(want.shape, allowed), name)


def test_each_cell_has_a_formula():
    cells = {name for name in msops.__all__ if isinstance(getattr(msops, name), type)}
    cells = {name for name in cells if issubclass(getattr(msops, name), nn.Cell)}
    cells -= WITHOUT_GRADIENT | OF_BLOCKS | OF_FIELDS_AND_CLOUDS | OF_EXPERTS | OF_CODES
    assert cells <= set(vars(FORMULAS))


@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_NETWORKS", "12"))))
def test_network(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore writes the networks of level O1 into a folder
    network = Network(seed)
    try:
        check(network)
    except Exception as error:
        raise AssertionError(f"{network}: {error}") from error
