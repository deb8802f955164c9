"""Tests `cuda_graph` on a GPU: replays have the bits of usual calls, and what cannot be right is refused."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import msops
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION != (2, 10), reason="cuda_graph is for MindSpore 2.10")


@pytest.fixture(autouse=True)
def _on_gpu(device_target):
    if device_target != "GPU":
        pytest.skip("there are no CUDA graphs on the CPU")


def values(rng, *shape):
    return Tensor(rng.standard_normal(shape).astype(np.float32))


def bits(x):
    return x.asnumpy().tobytes()


LAYERS = (
    *(lambda n: nn.Dense(n, n), lambda n: nn.LayerNorm((n,)), lambda n: msops.RMSNorm(n), lambda n: msops.GELU()),
    *(lambda n: msops.SiLU(), lambda n: msops.LayerNorm((n,)), lambda n: Arithmetic(), lambda n: Attention(n)),
)


class Arithmetic(nn.Cell):
    """Numbers of the host, reductions, and memory that serves several times."""

    def construct(self, x):
        y = x * 1.25 + 0.5
        y = y / (1 + ops.abs(y).max()) - y.mean(-1, keep_dims=True)
        return ops.cat([y[:, ::2], y[:, 1::2]], -1)


class Attention(nn.Cell):
    def __init__(self, n):
        super().__init__()
        self.heads, self.project = n // 16, nn.Dense(n, n)
        self.attention = msops.FlashAttention(causal=True, layout="BTHD")

    def construct(self, x):
        rows, n = x.shape
        q = x.reshape(1, rows, self.heads, n // self.heads)
        return self.project(self.attention(q, q, q).reshape(rows, n))


class Network(nn.Cell):
    """Residual layers of random kinds. Equal seeds make equal networks."""

    def __init__(self, seed, n=64):
        super().__init__()
        rng = np.random.default_rng(seed)
        made = [LAYERS[i](n) for i in rng.integers(0, len(LAYERS), 6)]
        self.layers = nn.CellList([nn.Dense(n, n), *made])
        for p in self.get_parameters():
            p.set_data(Tensor(0.1 * rng.standard_normal(p.shape), ms.float32))

    def construct(self, x):
        for layer in self.layers:
            x = x + 0.5 * layer(x)
        return x


class Loss(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x):
        return (self.net(x) ** 2).mean()


OPTIMIZERS = {
    "Adam": lambda p: nn.Adam(p, 1e-3),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 1e-3),
    "Momentum": lambda p: nn.Momentum(p, 0.01, 0.9),
    "schedule": lambda p: nn.Adam(p, nn.cosine_decay_lr(0.0, 1e-3, 100, 10, 10)),
}


def training_step(net, optimizer):
    """Returns a step that suits the mode."""
    if ms.get_context("mode") == ms.GRAPH_MODE:
        return nn.TrainOneStepCell(Loss(net), optimizer)
    value_and_grad = ms.value_and_grad(Loss(net), None, net.trainable_params())

    def step(x):
        loss, gradients = value_and_grad(x)
        optimizer(gradients)
        return loss

    return step


def both(seed, optimizer, level="O0"):
    """Returns a usual step and a recorded one, each with the Parameters of its network and optimizer."""
    made = []
    for wrap in (lambda f: f, msops.cuda_graph):
        net = ms.amp.auto_mixed_precision(Network(seed), level)
        state = optimizer(net.trainable_params())
        made += [wrap(training_step(net, state)), [*net.get_parameters(), *state.get_parameters()]]
    return made


def test_forward(mode):
    rng = np.random.default_rng(0)
    net = Network(0)
    g = msops.cuda_graph(net)
    for x in [values(rng, 32, 64) for _ in range(6)]:
        assert bits(g(x)) == bits(net(x))
    for x in [values(rng, 48, 64) for _ in range(4)]:
        assert bits(g(x)) == bits(net(x))
    assert g.graphs == 2
    assert g.memory > 0
    g.clear()
    assert g.graphs == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training(mode, optimizer):
    rng = np.random.default_rng(1)
    step, states, recorded, recorded_states = both(1, OPTIMIZERS[optimizer])
    for i in range(10):
        x = values(rng, 32, 64)
        assert bits(recorded(x)) == bits(step(x)), i
    for p, q in zip(states, recorded_states):
        assert bits(p) == bits(q), p.name
    assert recorded.graphs == 1


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.wide) for i in range(1, 20))])
def test_random_networks(mode, part):
    """Ten networks, with ten replays each."""
    for seed in range(10 * part, 10 * part + 10):
        optimizer = OPTIMIZERS[list(OPTIMIZERS)[seed % len(OPTIMIZERS)]]
        step, states, recorded, recorded_states = both(seed, optimizer, ("O0", "O2", "auto")[seed % 3])
        rng = np.random.default_rng(seed)
        for _ in range(12):
            x = values(rng, 1 + seed % 7, 64)
            assert bits(recorded(x)) == bits(step(x)), seed
        assert all(bits(p) == bits(q) for p, q in zip(states, recorded_states)), seed
        recorded.clear()


def test_random_numbers():
    attention = msops.FlashAttention(dropout_p=0.2, layout="BTHD").set_train()

    def f(x):
        y = attention(*[x.reshape(1, 32, 4, 16)] * 3).reshape(32, 64)
        return mint.nn.functional.dropout(x, 0.3) + mint.nn.functional.dropout(y, 0.5)

    rng = np.random.default_rng(2)
    xs = [values(rng, 32, 64) for _ in range(8)]
    with msops.patch_mindspore():
        ms.manual_seed(3)
        expected = [bits(f(x)) for x in xs]
        g = msops.cuda_graph(f)
        for _ in range(2):
            ms.manual_seed(3)
            assert [bits(g(x)) for x in xs] == expected


def test_new_data_of_parameters():
    rng = np.random.default_rng(4)
    step, states, recorded, recorded_states = both(4, OPTIMIZERS["AdamWeightDecay"])
    for _ in range(2):
        for _ in range(5):
            x = values(rng, 8, 64)
            assert bits(recorded(x)) == bits(step(x))
        for p, q in zip(states, recorded_states):
            new = Tensor(p.asnumpy() * 0.5, p.dtype)
            p.set_data(new)
            q.set_data(Tensor(new.asnumpy()))


def test_parameters_that_a_cell_replaces():
    class Counter(nn.Cell):
        def __init__(self):
            super().__init__()
            self.state = Parameter(Tensor(np.ones(2048, np.float32)), name="state")

        def construct(self, x):
            self.state = self.state * 2
            return x + self.state

    counter = Counter()
    g = msops.cuda_graph(counter)
    x = Tensor(np.zeros(2048, np.float32))
    assert [float(g(x).asnumpy()[0]) for _ in range(7)] == [2.0**i for i in range(1, 8)]
    assert float(counter.state.asnumpy()[-1]) == 128
    assert g.graphs == 1


def test_loss_scale():
    """The recipe of docs/cuda_graphs.md: two recordings, between which the host asks for an overflow."""
    rng = np.random.default_rng(8)
    xs = [10.0 ** (3 * (i == 5)) * rng.standard_normal((8, 64)) for i in range(12)]
    found = []
    for wrap in (lambda f, **_: f, msops.cuda_graph):
        net = ms.amp.auto_mixed_precision(Network(8), "O2")
        optimizer, scaler = OPTIMIZERS["AdamWeightDecay"](net.trainable_params()), ms.amp.DynamicLossScaler(2**10, 2, 4)
        loss = Loss(net)
        scaled = ms.value_and_grad(lambda x, scale, f=loss: f(x) * scale, None, net.trainable_params())

        def gradients(x, scale, f=scaled):
            value, found = f(x, scale)
            return value / scale, tuple(g / scale for g in found), ms.amp.all_finite(found)

        compute, update = wrap(gradients, copy_outputs=False), wrap(optimizer)
        said = []
        for x in xs:
            value, each, finite = compute(Tensor(x, ms.float32), scaler.scale_value)
            if finite:
                update(each)
            scaler.adjust(finite)
            said.append((bits(value), bool(finite), float(scaler.scale_value.asnumpy())))
        found.append((said, [bits(p) for p in [*net.get_parameters(), *optimizer.get_parameters()]]))
    assert found[0] == found[1]
    assert {finite for _, finite, _ in found[0][0]} == {True, False}


def test_fixed_loss_scale(mode):
    """MindSpore's training step can be recorded if its loss scale is fixed."""
    rng, found = np.random.default_rng(9), []
    xs = [rng.standard_normal((8, 64)).astype(np.float32) for _ in range(6)]
    for wrap in (lambda f: f, msops.cuda_graph):
        net = Network(9)
        optimizer = OPTIMIZERS["Momentum"](net.trainable_params())
        scale = ms.amp.FixedLossScaleManager(2**10, drop_overflow_update=False)
        options = {"level": "O2", "loss_scale_manager": scale}
        step = wrap(ms.amp.build_train_network(net, optimizer, nn.MSELoss(), **options).set_train())
        found.append([bits(step(Tensor(x), Tensor(0.5 * x))) for x in xs] + [bits(p) for p in net.get_parameters()])
    assert found[0] == found[1]


def test_dynamic_loss_scale_is_refused(mode):
    net, scale = Network(10), nn.DynamicLossScaleUpdateCell(2**10, 2, 4)
    step = nn.TrainOneStepWithLossScaleCell(Loss(net), OPTIMIZERS["Momentum"](net.trainable_params()), scale)
    g = msops.cuda_graph(step.set_train())
    x = values(np.random.default_rng(10), 8, 64)
    for _ in range(2):
        g(x)
    with pytest.raises(RuntimeError, match=r"cuda_graph: .*TrainOneStepWithLossScaleCell"):
        g(x)


def branch(x):
    return x if x.sum() > 0 else -x


dropout = nn.Dropout(p=0.5)
REFUSED = {
    "asnumpy": (lambda x: Tensor(x.asnumpy()), "asnumpy reads a value"),
    "float": (lambda x: x * float(x.max()), "__float__ reads a value"),
    "branch": (branch, "__bool__ reads a value"),
    "nonzero": (lambda x: ops.nonzero(x > 0), "nonzero"),
    "unique": (lambda x: ops.unique(x.reshape(-1))[0], "unique"),
    "masked_select": (lambda x: ops.masked_select(x, x > 0), "masked_select"),
    "dropout": (lambda x: dropout.set_train()(x), "random numbers"),
    "normal": (lambda x: x + ops.standard_normal((8, 64)), "random numbers"),
    "argument": (lambda x: ops.assign_add(x, x), "writes into an argument"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    function, words = REFUSED[case]
    x = values(np.random.default_rng(5), 8, 64)
    g = msops.cuda_graph(function)
    for _ in range(2):
        g(Tensor(x.asnumpy()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"cuda_graph: .*{words}"):
            g(Tensor(x.asnumpy()))
    expected = x.asnumpy() * 2 + 1
    assert np.array_equal((x * 2 + 1).asnumpy(), expected)
    sound = msops.cuda_graph(lambda x: x * 2 + 1)
    for _ in range(4):
        assert np.array_equal(sound(x).asnumpy(), expected)


def test_errors_of_the_function_leave_nothing():
    counts = itertools.count()

    def f(x):
        y = x + 1
        if next(counts) >= 2:
            raise KeyError("mine")
        return y

    x = values(np.random.default_rng(6), 8, 64)
    g = msops.cuda_graph(f)
    for _ in range(2):
        g(x)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            g(x)
    g.clear()
    assert g.memory == 0


@pytest.mark.wide
def test_replays_leak_nothing():
    net = Network(7)
    g = msops.cuda_graph(net)
    x = values(np.random.default_rng(7), 32, 64)
    for _ in range(100):
        g(x)
    ms.runtime.synchronize()
    before = ms.runtime.memory_allocated()
    for _ in range(10_000):
        g(x)
    ms.runtime.synchronize()
    assert ms.runtime.memory_allocated() <= before
