"""Compares optimizers of MindSpore, while it is patched, with MindSpore's own, in PyNative mode.

MindSpore's own take steps beside them, from equal Parameters and by equal gradients, before the patch begins.
"""

import contextlib
import hashlib
import importlib
import sys

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from msops.compat import VERSION
from msops.operators import optimizer as kernels
from msops.patch import optimizers

pytestmark = pytest.mark.skipif(VERSION < (2, 7), reason="older versions keep MindSpore's steps")
SHAPES = (3, 4), (5,), (1,), (2, 3, 5), (16385,)
STEPS = 5
PAYS = optimizers.pays
RNG = np.random.default_rng(0)
START = [RNG.standard_normal(shape).astype(np.float32) for shape in SHAPES]
GRADIENTS = [[np.asarray(RNG.standard_normal(shape), np.float32) for shape in SHAPES] for _ in range(STEPS)]


class Falling(nn.learning_rate_schedule.LearningRateSchedule):
    def construct(self, step):
        return 0.1 / (1 + ops.cast(step, mindspore.float32))


class Rising(nn.Cell):
    def construct(self, step):
        return 0.01 * (1 + ops.cast(step, mindspore.float32))


def plain(parameters):
    return parameters


def grouped(**settings):
    """Makes groups of which the first has these settings, and whose order is that of the Parameters."""

    def make(parameters):
        return [
            {"params": parameters[1::2], **settings},
            {"params": parameters[::2]},
            {"order_params": parameters},
        ]

    return make


CASES = {
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1, 0.8, 0.9, 1e-2, 0.1),
    "AdamWeightDecay without decay": lambda p: nn.AdamWeightDecay(p),
    "AdamWeightDecay, groups": lambda p: nn.AdamWeightDecay(grouped(weight_decay=0.2)(p), 0.1),
    "AdamWeightDecay, rates of groups": lambda p: nn.AdamWeightDecay(grouped(lr=0.2)(p), 0.1, weight_decay=0.1),
    "AdamWeightDecay, a schedule": lambda p: nn.AdamWeightDecay(p, Falling(), weight_decay=0.1),
    "AdamWeightDecay, schedules of groups": lambda p: nn.AdamWeightDecay(
        grouped(lr=Falling(), weight_decay=Rising())(p), 0.1, weight_decay=0.1
    ),
    "AdamWeightDecay, a list of rates": lambda p: nn.AdamWeightDecay(
        p, [0.1, 0.2, 0.1, 0.05, 0.01, 0.01], weight_decay=0.1
    ),
    "Adam": lambda p: nn.Adam(p, 0.1, 0.8, 0.9, 1e-2, weight_decay=0.1),
    "Adam, loss scale": lambda p: nn.Adam(p, 0.1, 0.8, 0.9, weight_decay=0.1, loss_scale=8.0),
    "Adam, nesterov": lambda p: nn.Adam(p, 0.1, use_nesterov=True),
    "Adam, amsgrad": lambda p: nn.Adam(p, 0.1, use_amsgrad=True),
    "Adam, amsgrad without its nesterov": lambda p: nn.Adam(p, 0.1, use_amsgrad=True, use_nesterov=True),
    "Adam, groups": lambda p: nn.Adam(grouped(lr=0.2, weight_decay=0.2)(p), Falling()),
    "Adam, a decay that rises": lambda p: nn.Adam(p, 0.1, weight_decay=Rising(), loss_scale=4.0),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "Momentum, loss scale": lambda p: nn.Momentum(p, 0.1, 0.9, 0.1, 4.0),
    "Momentum, groups": lambda p: nn.Momentum(grouped(lr=Falling(), weight_decay=0.2)(p), 0.1, 0.9),
    "Momentum, a list of rates": lambda p: nn.Momentum(p, [0.1, 0.2, 0.1, 0.05, 0.01, 0.01], 0.9),
}


@pytest.fixture(autouse=True)
def pynative(monkeypatch):
    monkeypatch.setattr(optimizers, "pays", lambda cell: True)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def test_steps_that_stay_on_the_cpu(device_target):
    """MindSpore's own kernels are faster there than a launch for all Parameters. mint's optimizers have none."""
    if device_target == "GPU":
        pytest.skip("it is about the CPU")
    parameters = [Parameter(Tensor([1.0]))]
    own = nn.Adam(parameters), nn.AdamWeightDecay(parameters), nn.Momentum(parameters, 0.1, 0.9)
    assert not any(map(PAYS, own))
    assert PAYS(mindspore.mint.optim.AdamW(parameters))


@pytest.fixture
def launches(monkeypatch):
    """Lists how many tensors each launch moves."""
    found, call = [], kernels.call_if_prepared

    def counted(primitive, inputs):
        found.append(primitive.operator.attributes["tensors"])
        return call(primitive, inputs)

    monkeypatch.setattr(kernels, "call_if_prepared", counted)
    return found


def parameters_of(dtype=np.float32):
    # Decay leaves Parameters with "gamma" in their names alone.
    names = [f"{'gamma' if i == 1 else 'weight'}{i}" for i in range(len(START))]
    return [Parameter(Tensor(x.astype(dtype)), name=name) for x, name in zip(START, names)]


def steps(optimizer, rounded=np.float32, number=STEPS, dtype=None):
    for gradients in GRADIENTS[:number]:
        result = optimizer(tuple([Tensor(x.astype(rounded).astype(dtype or rounded)) for x in gradients]))
    return result


def states(optimizer):
    return {parameter.name: parameter.asnumpy() for parameter in optimizer.get_parameters()}


def compare(got, want, tolerance=4e-6):
    assert [*got] == [*want]
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_steps_are_those_of_mindspore(make, dtype, launches):
    own = make(parameters_of())
    result = steps(own, dtype, dtype=np.float32)  # of float16, MindSpore's own take no decay
    with msops.patch_mindspore():
        ours = make(parameters_of())
        assert steps(ours, dtype) == result
    assert sum(launches) == STEPS * len(SHAPES)
    assert len(launches) <= 3 * STEPS
    compare(states(ours), states(own))
    before = len(launches)
    steps(ours, number=1)
    assert len(launches) == before  # MindSpore's own steps are back


def test_nesterov(launches):
    """MindSpore's kernel for the CPU leaves `use_nesterov` out, so that this is what MindSpore documents."""
    with msops.patch_mindspore():
        optimizer = nn.Momentum(parameters_of(), 0.1, 0.9, use_nesterov=True)
        steps(optimizer)
    moved, total = START[0].astype(np.float64), 0
    for gradient, *_ in GRADIENTS:
        total = 0.9 * total + gradient
        moved = moved - 0.1 * (gradient + 0.9 * total)
    np.testing.assert_allclose(optimizer.parameters[0].asnumpy(), moved, 1e-5, 1e-6)
    assert launches == [len(SHAPES)] * STEPS


def test_checkpoint_goes_on(tmp_path):
    """A step of MindSpore's own follows those of the kernels, and the other way round."""
    make = CASES["Adam, groups"]
    own, ours = make(parameters_of()), make(parameters_of())
    steps(own, number=3)
    with msops.patch_mindspore():
        steps(ours, number=3)
        mindspore.save_checkpoint(ours, str(tmp_path / "ours.ckpt"))
        mindspore.load_param_into_net(ours, mindspore.load_checkpoint(str(tmp_path / "ours.ckpt")))
        steps(ours, number=1)
    steps(own, number=1)
    for optimizer in (own, ours):
        steps(optimizer, number=2)
    compare(states(ours), states(own))


def test_many_parameters(launches):
    n = 2 * kernels.MOST + 3
    gradients = tuple([Tensor(np.full(i % 5 + 1, 0.5, np.float32)) for i in range(n)])
    found = []
    for patch in (False, True):
        optimizer = nn.AdamWeightDecay(
            [Parameter(Tensor(np.ones(i % 5 + 1, np.float32)), f"p{i}") for i in range(n)], 0.1
        )
        if patch:
            with msops.patch_mindspore():
                optimizer(gradients)
        else:
            optimizer(gradients)
        found.append(states(optimizer))
    assert launches == [72, 72, 3]
    compare(found[1], found[0])


class OfItsOwn(nn.AdamWeightDecay):
    def construct(self, gradients):
        return len(gradients)


class Halved(nn.Momentum):
    def get_lr(self):
        return super().get_lr() / 2


def test_own_construct_runs(launches, device_target):
    ones = tuple([Tensor(np.ones_like(x)) for x in START])
    with msops.patch_mindspore():
        assert OfItsOwn(parameters_of())(ones) == len(SHAPES)
        halved = Halved(parameters_of(), 0.2, 0.9)
        halved(ones)
        np.testing.assert_allclose(halved.parameters[1].asnumpy(), START[1] - 0.1, 1e-6, 1e-6)
        own = (nn.AdamWeightDecay,) if device_target == "GPU" else (nn.AdamWeightDecay, nn.Adam)  # GPUs lack one
        for make in own:
            half = make(parameters_of(np.float16)[:2], 0.1)
            half(tuple([Tensor(np.ones(x.shape, np.float16)) for x in START[:2]]))
        lazy = nn.Adam(parameters_of()[:2], 0.1, use_lazy=True)
        lazy(ones[:2])
        hooked, seen = nn.Momentum(parameters_of(), 0.1, 0.9), []
        hooked.register_forward_hook(lambda cell, given, result: seen.append(cell))
        hooked(ones)
        assert seen == [hooked]
    assert not launches


@pytest.mark.parametrize("name", ["AdamWeightDecay", "Adam", "Momentum"])
def test_parameters_that_are_views(name):
    """MindSpore hands over a copy of a view to a custom operator, but not to its own operators."""
    found = []
    for patch in (contextlib.nullcontext, msops.patch_mindspore):
        parameters = parameters_of()
        for parameter, x in zip(parameters, START):
            parameter.set_data(Tensor(x.ravel()).reshape(x.shape))
        with patch():
            optimizer = CASES[name](parameters)
            steps(optimizer)
            found.append(states(optimizer))
    compare(found[1], found[0])


@pytest.mark.parametrize("name", ["AdamWeightDecay, groups", "Adam", "Momentum"])
def test_graph_mode_compiles_mindspores_own(name, launches):
    own = CASES[name](parameters_of())
    steps(own)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with msops.patch_mindspore():
        ours = CASES[name](parameters_of())
        steps(ours)
    assert not launches
    compare(states(ours), states(own))


@pytest.mark.parametrize("name", ["AdamWeightDecay, groups", "Adam"])
def test_jit_compiles_mindspores_own(name, launches):
    with msops.patch_mindspore():
        ours = CASES[name](parameters_of())

        @mindspore.jit
        def step(*gradients):
            return ours(gradients)

        step(*map(Tensor, GRADIENTS[0]))
    assert not launches
    assert ours.global_step == 1


def test_training_step(launches):
    """`nn.TrainOneStepCell` calls the optimizer in PyNative mode; a loss falls as with MindSpore's own."""
    x, losses = Tensor(RNG.standard_normal((4, 3)).astype(np.float32)), []
    for patch in (False, True):
        mindspore.set_seed(3)
        net = nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 1))
        for parameter in net.get_parameters():
            parameter.set_data(Tensor(np.full(parameter.shape, 0.5, np.float32)))
        step = nn.TrainOneStepCell(net, nn.Adam(net.trainable_params(), 0.05), sens=1.0)
        step.set_train()
        if patch:
            with msops.patch_mindspore():
                losses.append([step(x).asnumpy().sum() for _ in range(STEPS)])
        else:
            losses.append([step(x).asnumpy().sum() for _ in range(STEPS)])
    assert launches == [4] * STEPS
    np.testing.assert_allclose(losses[1], losses[0], 1e-5)


LIBRARY = """
from mindspore import nn

class AdamWeightDecay(nn.AdamWeightDecay):
    def construct(self, gradients):
        return super().construct(gradients)
"""


@pytest.mark.parametrize(
    "name", ["AdamWeightDecay, schedules of groups", "Adam, groups", "Adam, amsgrad", "Momentum, a list of rates"]
)
def test_recorded_steps(name):
    """On a GPU, a CUDA graph takes the steps from the third one on, with equal bits. On the CPU all calls are usual."""
    found = []
    with msops.patch_mindspore():
        for wrap in (lambda step: step, msops.cuda_graph):
            optimizer = CASES[name](parameters_of())
            step = wrap(optimizer)
            for gradients in GRADIENTS:
                step(tuple(map(Tensor, gradients)))
            found.append(states(optimizer))
    for parameter, expected in found[0].items():
        np.testing.assert_array_equal(found[1][parameter], expected, err_msg=parameter)


@pytest.mark.parametrize("is_known", [True, False])
def test_optimizers_of_libraries(is_known, launches, monkeypatch, tmp_path):
    """A library's optimizer is known by the source of its module."""
    (tmp_path / "adamw_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    if is_known:
        monkeypatch.setattr(optimizers, "LIBRARIES", {hashlib.sha256(LIBRARY.encode()).hexdigest()})
    with msops.patch_mindspore() as patch:
        cls = importlib.import_module("adamw_of_a_library").AdamWeightDecay
        monkeypatch.delitem(sys.modules, "adamw_of_a_library")
        optimizer = cls(parameters_of(), 0.1)
        if is_known:
            steps(optimizer, number=1)
        names = [each.name for each in patch.recognized]
        assert ("adamw_of_a_library.AdamWeightDecay" in names) == is_known == bool(launches)
    assert "__call__" not in vars(cls)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", [tuple, list])
def test_clip_by_global_norm(clip_norm, dtype, kind):
    x = kind(Tensor(each.astype(dtype)) for each in GRADIENTS[0])
    want = ops.clip_by_global_norm(x, clip_norm)
    with msops.patch_mindspore():
        got = ops.clip_by_global_norm(x, clip_norm)
    assert type(got) is type(want)
    for one, other in zip(got, want):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        tolerance = 2e-6 if dtype == "float32" else 1e-3
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), tolerance, tolerance)


def test_clip_of_two_dtypes():
    """Networks of mixed precision have such gradients."""
    x = [Tensor(np.array([3.0], np.float32)), Tensor(np.array([4.0], np.float16))]
    with msops.patch_mindspore():
        got = ops.clip_by_global_norm(x)
    assert [each.dtype for each in got] == [each.dtype for each in x]
    np.testing.assert_allclose([float(each[0].asnumpy()) for each in got], [0.6, 0.8], 1e-3)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_clip_of_gradients_that_are_not_finite(wrong):
    x = [Tensor(np.array(values, np.float32)) for values in ([1, wrong, 2], [3.0])]
    want = ops.clip_by_global_norm(x)
    with msops.patch_mindspore():
        got = ops.clip_by_global_norm(x)
    for one, other in zip(got, want):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_clip_in_graphs_and_gradients(mode):
    x = Tensor(np.array([3.0, 4.0], np.float32))

    def second(x):
        return ops.clip_by_global_norm((x, 2 * x))[1]

    def total(x):
        return ops.clip_by_global_norm((x,), 10.0)[0].sum()

    with msops.patch_mindspore():
        clipped = (mindspore.jit(second) if mode == "graph" else second)(x)
        gradient = mindspore.grad(total)(x)
        with pytest.raises(ValueError, match="clip_norm"):
            ops.clip_by_global_norm((x,), -1.0)
    np.testing.assert_allclose(clipped.asnumpy(), np.array([6.0, 8.0]) / np.sqrt(125), 1e-6)
    np.testing.assert_array_equal(gradient.asnumpy(), [1, 1])
