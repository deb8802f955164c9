"""Tests what `mindspore.mint` writes while MindSpore is patched: optimizers, running statistics, updates in place."""

import sys

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import msops
from msops.compat import VERSION

RNG = np.random.default_rng(0)
START = [RNG.standard_normal(shape) for shape in ((3, 4), (5,))]
GRADIENTS = [[RNG.standard_normal(x.shape) for x in START] for _ in range(5)]


@pytest.fixture(scope="module", autouse=True)
def patched():
    with msops.patch_mindspore():
        yield


def adam(decay=0.0, apart=False, amsgrad=False, lr=0.1, betas=(0.9, 0.99), eps=1e-3, sign=1):
    state = [np.zeros((3, *x.shape)) for x in START]

    def step(i, t, x, gradient):
        m, v, most = state[i]
        gradient = sign * gradient + (0 if apart else decay * x)
        m[:] = betas[0] * m + (1 - betas[0]) * gradient
        v[:] = betas[1] * v + (1 - betas[1]) * gradient**2
        most[:] = np.maximum(most, v)
        root = np.sqrt((most if amsgrad else v) / (1 - betas[1] ** t)) + eps
        x = x * (1 - lr * decay) if apart else x
        return x - lr * m / (1 - betas[0] ** t) / root

    return step


def descent(lr=0.1, momentum=0.0, dampening=0.0, decay=0.0, nesterov=False, sign=1):
    buffers = [np.zeros_like(x) for x in START]

    def step(i, t, x, gradient):
        gradient = sign * gradient + decay * x
        buffers[i] = gradient if t == 1 else momentum * buffers[i] + (1 - dampening) * gradient
        if momentum:
            gradient = gradient + momentum * buffers[i] if nesterov else buffers[i]
        return x - lr * gradient

    return step


ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3}
OPTIMIZERS = {
    "Adam": [
        (ADAM, adam),
        ({**ADAM, "weight_decay": 0.1, "maximize": True}, lambda: adam(0.1, sign=-1)),
        ({**ADAM, "amsgrad": True}, lambda: adam(amsgrad=True)),
    ],
    "AdamW": [
        ({**ADAM, "weight_decay": 0.1}, lambda: adam(0.1, True)),
        ({**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": True}, lambda: adam(0.1, True, True, sign=-1)),
    ],
    "FusedAdamW": [
        ({**ADAM, "weight_decay": 0.1}, lambda: adam(0.1, True)),
        ({**ADAM, "weight_decay": 0.1, "amsgrad": True}, lambda: adam(0.1, True, True)),
    ],
    "SGD": [
        ({"lr": 0.1, "weight_decay": 0.1}, lambda: descent(decay=0.1)),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, lambda: descent(momentum=0.9, nesterov=True)),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}, lambda: descent(0.1, 0.9, 0.5, sign=-1)),
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "make"),
    [
        pytest.param(name, settings, make, id=f"{name} {' '.join(sorted(settings))}")
        for name, choices in OPTIMIZERS.items()
        for settings, make in choices
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_optimizer_follows_its_formula(mode, name, settings, make, dtype):
    parameters = [Parameter(Tensor(x.astype(dtype)), name=f"x{i}") for i, x in enumerate(START)]
    optimizer, formula = getattr(mint.optim, name)(parameters, **settings), make()
    want = [np.float64(x.astype(dtype)) for x in START]
    for t, gradients in enumerate(GRADIENTS, 1):
        optimizer(tuple([Tensor(gradient.astype(dtype)) for gradient in gradients]))
        want = [formula(i, t, x, np.float64(gradients[i].astype(dtype))) for i, x in enumerate(want)]
    for parameter, expected in zip(parameters, want):
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(parameter.asnumpy(), expected, tolerance, tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.skipif(VERSION < (2, 7), reason="older versions do not tell views")
def test_views_are_refused(name, device_target):
    """MindSpore hands over a copy of a view, so that a step would change nothing."""
    if device_target == "GPU":
        pytest.skip("kernels move views there")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = START[0].astype(np.float32)
    parameter = Parameter(Tensor(x), name="x")
    parameter.set_data(Tensor(x.ravel()).reshape(x.shape))
    with pytest.raises(ValueError, match=r"mint\.optim: x must have memory of its own, but is a view"):
        getattr(mint.optim, name)([parameter], lr=0.1)((Tensor(x),))


def test_class_that_is_extended_keeps_its_name_at_home():
    """MindSpore 2.9 calls `super(SGD, self)` there."""
    own, original = mint.optim.SGD.__mro__[:2]
    assert own.__module__.startswith("msops.")
    assert sys.modules[original.__module__].SGD is original


def test_optimizer_has_rates_of_groups_that_may_change(mode):
    parameters = [Parameter(Tensor(x.astype(np.float32)), name=f"x{i}") for i, x in enumerate(START)]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "momentum": 0.9}]
    optimizer = mint.optim.SGD(groups, lr=0.1)
    ones = tuple([mint.ones_like(x) for x in parameters])
    optimizer(ones)
    mindspore.ops.assign(optimizer.param_groups[0]["lr"], Tensor(0.25, mindspore.float32))
    optimizer(ones)
    for parameter, start, moved in zip(parameters, START, (0.75, 0.29)):
        np.testing.assert_allclose(parameter.asnumpy(), start - moved, 1e-5, 1e-6)


# Once a graph has counted the batches of a BatchNorm, MindSpore fails to compile some graphs of the same process
# ("ValueProblem(DeadNode) can't be converted to abstract").
@pytest.mark.parametrize("mode", [pytest.param("graph", marks=pytest.mark.alone), "pynative"], indirect=True)
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_follows_running_statistics(mode, momentum):
    net, mean, variance = mint.nn.BatchNorm1d(3, momentum=momentum), np.zeros(3), np.ones(3)
    net.set_train()
    if mode == "graph" and momentum is None:
        with pytest.raises(NotImplementedError, match="momentum must be known when MindSpore compiles"):
            net(mint.ones((4, 3, 5)))
        return
    for t in range(1, 4):
        x = RNG.standard_normal((4, 3, 5)).astype(np.float32) * t
        net(Tensor(x))
        share = momentum or 1 / t
        mean = (1 - share) * mean + share * x.mean((0, 2))
        variance = (1 - share) * variance + share * x.var((0, 2), ddof=1)
    np.testing.assert_allclose(net.running_mean.asnumpy(), mean, 1e-5, 1e-6)
    np.testing.assert_allclose(net.running_var.asnumpy(), variance, 1e-5, 1e-6)
    assert net.num_batches_tracked.asnumpy() == 3
    net.set_train(False)
    want = (x - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
    np.testing.assert_allclose(net(Tensor(x)).asnumpy(), want, 1e-5, 1e-5)
    np.testing.assert_allclose(net.running_mean.asnumpy(), mean, 1e-5, 1e-6)


def test_batch_norm_without_running_statistics(mode):
    net, x = mint.nn.BatchNorm2d(3, affine=False, track_running_stats=False), RNG.standard_normal((4, 3, 5, 2))
    want = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(net(Tensor(x.astype(np.float32))).asnumpy(), want, 1e-5, 1e-5)


class Joined(nn.Cell):
    """Joins the statistics of two devices."""

    def __init__(self):
        super().__init__()
        self.mean = Parameter(Tensor(np.zeros(3, np.float32)), name="mean", requires_grad=False)
        self.variance = Parameter(Tensor(np.ones(3, np.float32)), name="variance", requires_grad=False)

    def construct(self, x, means, deviations, counts):
        join = mint.batch_norm_gather_stats_with_counts
        return join(x, means, deviations, self.mean, self.variance, 0.3, 1e-5, counts)


def test_batch_norm_joins_statistics(mode):
    """They are as if the batch were on one device."""
    x, net, parts = RNG.standard_normal((10, 3, 5)).astype(np.float32), Joined(), (slice(4), slice(4, 10))
    rows = [mint.batch_norm_stats(Tensor(x[part]), 1e-5) for part in parts]
    means, deviations = (mint.stack(each) for each in zip(*rows))
    mean, deviation = net(Tensor(x), means, deviations, Tensor(np.float32([20, 30])))
    variance = x.var((0, 2))
    np.testing.assert_allclose(mean.asnumpy(), x.mean((0, 2)), 1e-5, 1e-6)
    np.testing.assert_allclose(deviation.asnumpy(), 1 / np.sqrt(variance + 1e-5), 1e-5)
    np.testing.assert_allclose(net.mean.asnumpy(), 0.3 * x.mean((0, 2)), 1e-5, 1e-6)
    np.testing.assert_allclose(net.variance.asnumpy(), 0.7 + 0.3 * x.var((0, 2), ddof=1), 1e-5)


@pytest.mark.wide
@pytest.mark.alone
def test_sync_batch_norm_of_one_process(mode):
    net, own = mint.nn.SyncBatchNorm(3), mint.nn.BatchNorm2d(3)
    x = Tensor(RNG.standard_normal((4, 3, 5, 2)).astype(np.float32))
    net.set_train(), own.set_train()
    np.testing.assert_array_equal(net(x).asnumpy(), own(x).asnumpy())
    np.testing.assert_array_equal(net.running_var.asnumpy(), own.running_var.asnumpy())


class Rows(nn.Cell):
    """Takes rows of a table whose rows are shortened first."""

    def __init__(self, table):
        super().__init__()
        self.table = Parameter(Tensor(table.astype(np.float32)), name="table")

    def construct(self, ids):
        return mint.nn.functional.embedding(ids, self.table, None, 1.0, 2.0)


def test_embedding_shortens_the_rows_that_it_takes(mode):
    table = RNG.standard_normal((5, 4)) * np.array([0.1, 2, 2, 2, 2])[:, None]
    net, ids = Rows(table), np.array([0, 2, 2, 4])
    want = table.copy()
    for i in (2, 4):
        want[i] /= np.sqrt((want[i] ** 2).sum())
    np.testing.assert_allclose(net(Tensor(ids)).asnumpy(), want[ids], 1e-5, 1e-6)
    np.testing.assert_allclose(net.table.asnumpy(), want, 1e-5, 1e-6)


F = mint.nn.functional


def relu_in_place(x):
    return F.relu_(x)


def elu_in_place(x):
    return F.elu_(x)


def hardtanh_in_place(x):
    return F.hardtanh_(x)


def sigmoid_in_place(x):
    return F.sigmoid_(x)


def relu6_in_place(x):
    return F.relu6(x, True)


def threshold_in_place(x):
    return F.threshold_(x, 0.1, 9.0)


def silu_in_place(x):
    return F.silu(x, True)


LEFT, RIGHT = RNG.standard_normal(3), RNG.standard_normal(4)


def addr_in_place(x):
    return mint.addr_(x, Tensor(np.float32(LEFT)), Tensor(np.float32(RIGHT)), beta=0.5, alpha=2)


IN_PLACE = {
    "addr_": (addr_in_place, lambda x: 0.5 * x + 2 * np.outer(LEFT, RIGHT)),
    "relu_": (relu_in_place, lambda x: np.maximum(x, 0)),
    "elu_": (elu_in_place, lambda x: np.where(x > 0, x, np.expm1(x))),
    "hardtanh_": (hardtanh_in_place, lambda x: np.clip(x, -1, 1)),
    "relu6": (relu6_in_place, lambda x: np.clip(x, 0, 6)),
    "threshold_": (threshold_in_place, lambda x: np.where(x > 0.1, x, 9)),
    "sigmoid_": (sigmoid_in_place, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (silu_in_place, lambda x: x / (1 + np.exp(-x))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(mode, name):
    function, formula = IN_PLACE[name]
    values = RNG.standard_normal((3, 4)) * 2

    def program(x):
        x = x * 1  # so that the input itself stays
        y = function(x)
        return x, y

    def total(x):
        return program(x)[1].sum()

    x = Tensor(values.astype(np.float32))
    results = (mindspore.jit(program) if mode == "graph" else program)(x)
    for result in results:
        np.testing.assert_allclose(result.asnumpy(), formula(values), 1e-5, 1e-5)
    step = 1e-6
    slopes = (formula(values + step) - formula(values - step)) / (2 * step)
    gradient = mindspore.grad(total)(x)
    np.testing.assert_allclose(gradient.asnumpy(), slopes, 1e-4, 1e-4)
