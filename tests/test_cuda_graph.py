"""Tests `cuda_graph` without a GPU: what it decides in Python, with a recorder that runs the function again.

What a GPU records is tested by test_graph_recorder.py, and on GPUs by test_cuda_graph_on_gpus.py."""

import collections
import gc
import operator
import types
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from msops.compat import VERSION
from msops.graphs import cuda_graph as module, draws, recorder as recorders
from msops.graphs.nested import key_of, tensors_of, with_tensors
from msops.graphs.state import Memory, reachable, watch

pytestmark = pytest.mark.skipif(VERSION != (2, 10), reason="cuda_graph is for MindSpore 2.10")


class FakeRecorder:
    """Records nothing: the graph's outputs are those of the recorded call."""

    def __init__(self):
        self.failure, self.active, self.alive, self.differing = "", False, {}, set()
        self.begun = self.abandoned = self.memories = 0
        self.released = []

    def copy(self, x):
        return Tensor(x.asnumpy())

    def new_memory(self):
        self.memories += 1
        return self.memories

    def held(self, memory):
        return 100 * memory * len(self.alive)

    def release(self, memory):
        self.released.append(memory)

    def noted(self):
        return draws.noted()

    def begin(self, memory, variables, notes):
        self.active, self.variables = True, variables
        self.begun += 1
        self.failure = ""

    def is_on_device(self, x):
        return bool(self.active and not getattr(x, "of_host", False))

    def copy_to(self, address, x):
        self.copied = address, x

    def end(self, inputs, outputs):
        self.active = False
        number = self.begun
        self.alive[number] = list(inputs), list(outputs)
        return number

    def abandon(self):
        self.active = False
        self.abandoned += 1

    def destroy(self, number):
        del self.alive[number]

    def differs(self, number, all_replays=False):
        return number in self.differing


class FakeGraph(recorders.Graph):
    def __init__(self, recorder, number, inputs, outputs):
        self.inputs, self._recorder, self._number = list(inputs), recorder, number
        self._outputs = recorder.alive[number][1]
        assert len(self._outputs) == len(outputs)  # a replay copies as many as the operator has
        self._close = lambda: recorder.alive.pop(number, None)
        self.given = []

    def __call__(self, inputs):
        if self._recorder.differs(self._number):
            self._refuse()
        self.given.append(list(inputs))
        return [Tensor(x) for x in self._outputs]

    def check(self):
        if self._recorder.differs(self._number, True):
            self._refuse()


@pytest.fixture
def recorder(monkeypatch):
    made = FakeRecorder()
    monkeypatch.setattr(module, "shared_recorder", lambda: made)
    monkeypatch.setattr(module, "is_on_gpu", lambda: True)
    monkeypatch.setattr(module, "Graph", FakeGraph)
    monkeypatch.setattr(ms.runtime, "synchronize", lambda: None)
    return made


@pytest.fixture(autouse=True)
def pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)


X = Tensor([1.0, 2.0])


def counted(function):
    def counting(*args, **kwargs):
        counting.calls += 1
        return function(*args, **kwargs)

    counting.calls = 0
    return counting


def test_calls(recorder):
    """The first calls run as usual, the next is recorded, later ones run no Python."""
    f = counted(lambda x: x + 1)
    g = msops.cuda_graph(f, warmup=3)
    results = [g(X) for _ in range(6)]
    assert f.calls == 4
    assert recorder.begun == g.graphs == 1
    assert all(np.array_equal(each.asnumpy(), [2, 3]) for each in results)
    assert results[4] is not results[5]
    assert g.memory == 100


def test_keys(recorder):
    """Shapes, dtypes and constants have graphs of their own, of which `limit` are kept."""
    f = counted(lambda x, k=1, **named: x * k)
    g = msops.cuda_graph(f, warmup=1, limit=3)
    calls = [
        *((X, 1), (X, 1.0), (X, True), (X, 0.0), (X, -0.0), (X, float("nan")), (X, "s")),
        *((Tensor([1, 2]), 1), (Tensor([[1.0]]), 1)),
    ]
    for i, args in enumerate(calls[:6]):
        for _ in range(3):
            g(*args)
        assert f.calls == 2 * (i + 1)
        assert g.graphs == min(i + 1, 3)
    assert len(recorder.alive) == 3
    g(*calls[5])
    assert f.calls == 12
    g(*calls[0])  # its graph is gone
    assert f.calls == 13
    numbers = [kind(each) for kind in (np.float32, np.complex64, complex) for each in ("0", "-0", "nan")]
    again = [type(each)(each) for each in numbers]  # NaN does not equal itself
    keys = {key_of(args, [], "args") for args in (*calls, *zip(numbers), *zip(again))}
    assert len(keys) == len(calls) + len(numbers)


def test_least_recently_used_graph_goes_first(recorder):
    f = counted(lambda x, k: x * k)
    g = msops.cuda_graph(f, warmup=1, limit=2)
    for k in (1, 1, 2, 2, 1, 3):  # the last one takes the place of 2
        g(X, k)
    before = f.calls
    g(X, 1)
    assert f.calls == before
    g(X, 2)
    assert f.calls == before + 1


def test_nested_arguments_and_results(recorder):
    class Pair(NamedTuple):
        a: object
        b: object

    class Output(collections.OrderedDict):
        pass

    parameter = Parameter(Tensor([5.0]), name="p")

    def f(batch, *, pair):
        return Output(sum=batch["x"] + pair.b[0], rest=[None, 3, (batch["x"],), parameter], pair=Pair(1, pair.b[0]))

    g = msops.cuda_graph(f, warmup=1)
    for _ in range(3):
        found = g({"x": X}, pair=Pair("name", [Tensor([1.0, 1.0])]))
        assert type(found) is Output
        assert np.array_equal(found["sum"].asnumpy(), [2, 3])
        assert found["rest"][:2] == [None, 3]
        assert found["rest"][3] is parameter
        assert found["pair"].a == 1
        assert np.array_equal(found["pair"].b.asnumpy(), [1, 1])


def test_results_without_copies(recorder):
    g = msops.cuda_graph(lambda x: (x + 1, 2), warmup=1, copy_outputs=False)
    g(X)
    first, second = g(X), g(X)
    assert first[0] is second[0]
    assert first[1] == 2


def test_results_without_copies_that_are_arguments(recorder, monkeypatch):
    """They may be the next call's arguments, before whose copies others are written."""
    monkeypatch.setattr(recorder, "copy", lambda x: x + 0)
    g = msops.cuda_graph(lambda new, old: (new + old, new, old[1:]), warmup=1, copy_outputs=False)
    g(X, X)
    _, *results = g(X, X)
    statics, _ = recorder.alive[1]
    for x in results:
        assert not any(0 <= x._data_ptr() - each._data_ptr() < each.nbytes for each in statics)
        assert x.asnumpy()[-1] == 2


def test_results_of_the_host(recorder):
    constant = Tensor([7.0])
    constant.of_host = True
    g = msops.cuda_graph(lambda x: (constant, x * 2, constant), warmup=1)
    for _ in range(3):
        found = g(X)
        assert [float(each.asnumpy()[0]) for each in found] == [7, 2, 7]


def test_methods_and_attributes(recorder):
    class Model:
        scale = 2.0

        @msops.cuda_graph(warmup=1)
        def forward(self, x):
            """Scales x."""
            return x * self.scale

    a, b = Model(), Model()
    for _ in range(3):
        assert np.array_equal(a.forward(X).asnumpy(), [2, 4])
    assert Model.forward.graphs == 1
    b.forward(X)
    b.forward(X)
    assert Model.forward.graphs == 2
    assert Model.forward.__doc__ == "Scales x."
    Model.forward.clear()
    assert Model.forward.graphs == 0
    assert not recorder.alive
    assert recorder.released == [1]


def test_end_of_the_last_reference(recorder):
    g = msops.cuda_graph(lambda x: x + 1, warmup=1)
    for _ in range(3):
        g(X)
    del g
    gc.collect()
    assert not recorder.alive
    assert recorder.released == [1]


@pytest.mark.parametrize("owner", [types.SimpleNamespace, nn.Cell])
def test_end_of_an_owner(recorder, owner):
    """The function leads to what `cuda_graph` returned, as a method does whose object has both."""
    trainer = owner()
    trainer.step = msops.cuda_graph(lambda x, trainer=trainer: (x + 1, trainer)[0], warmup=1)
    for _ in range(3):
        trainer.step(X)
    del trainer
    gc.collect()
    assert not recorder.alive
    assert recorder.released == [1]


def test_on_the_cpu():
    f = counted(lambda x: x + 1)
    g = msops.cuda_graph(f)
    for _ in range(5):
        g(X)
    assert f.calls == 5
    assert g.graphs == g.memory == 0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: msops.cuda_graph(lambda x: x, warmup=0), ValueError, "warmup must be at least 1, got 0"),
        (lambda: msops.cuda_graph(lambda x: x, limit=True), TypeError, "limit must be an int, got bool"),
        (lambda: msops.cuda_graph(3), TypeError, "function must be callable, got int"),
    ],
)
def test_wrong_settings(make, error, words):
    with pytest.raises(error, match=words):
        make()


def refusing(recorder, f, *args, match):
    """Calls until it is recorded, and requires that nothing is left of the recording."""
    g = msops.cuda_graph(f, warmup=1)
    g(*args)
    with pytest.raises(RuntimeError, match=match):
        g(*args)
    assert not recorder.active
    assert not recorder.alive
    assert msops.cuda_graph(lambda x: x + 1, warmup=1)(X).asnumpy().tolist() == [2, 3]


@pytest.mark.parametrize(
    "read",
    [
        *map(operator.methodcaller, ("asnumpy", "item", "tolist", "numpy")),
        *(bool, int, float, str, repr, np.asarray),
    ],
)
def test_reads_are_refused(recorder, read):
    """A value that is read would stay what it was; the error names the line."""

    def f(x):
        read(x[0])  # this line
        return x

    line = f.__code__.co_firstlineno + 1
    refusing(recorder, f, X, match=rf"cuda_graph: .* reads a value of the GPU .*{__file__}:{line}")
    assert recorder.abandoned == 1
    assert X.asnumpy().tolist() == [1, 2]


def test_constants_may_be_read(recorder):
    constant = Tensor([3.0])
    constant.of_host = True
    g = msops.cuda_graph(lambda x: x * float(constant.asnumpy()[0]), warmup=1)
    for _ in range(3):
        assert g(X).asnumpy().tolist() == [3, 6]


def test_parameters_may_not_be_read(recorder):
    """Also where they are the host's, since ops.assign may change them."""
    scale = Parameter(Tensor(2.0), name="scale")
    scale.of_host = True
    refusing(recorder, lambda x: x * float(scale), X, match="cuda_graph: __float__ reads a Parameter while")


def test_errors_of_the_function(recorder):
    def f(x):
        if recorder.active:
            raise KeyError("mine")
        return x

    g = msops.cuda_graph(f, warmup=1)
    g(X)
    with pytest.raises(KeyError, match="mine"):
        g(X)
    assert recorder.abandoned == 1


def test_failures_of_the_recorder(recorder):
    def f(x):
        if recorder.active:
            recorder.failure = "the data decides"
            raise RuntimeError("a message of MindSpore")
        return x

    refusing(recorder, f, X, match=rf"cuda_graph: the data decides \({__file__}:\d+\)$")


def test_writes_into_arguments_are_refused(recorder):
    refusing(recorder, lambda x: ops.assign_add(x, x), Parameter(X, name="x").value(), match="writes into an argument")


def test_results_in_other_objects_are_refused(recorder):
    """Each call would return the same one, with what the last replay computed. Others may have Tensors that last."""
    for f in (lambda x: {"y": types.SimpleNamespace(y=x + 1)}, lambda x: [types.SimpleNamespace(y=x)]):
        refusing(recorder, f, X, match="returns a Tensor in an object of type SimpleNamespace")
    net = nn.BatchNorm2d(2)
    net.constant = Tensor([1.0])
    g = msops.cuda_graph(lambda x: (x + 1, net), warmup=1)
    assert [g(X)[1] for _ in range(3)] == [net] * 3


def test_calls_within_a_recording_are_refused(recorder):
    inner = msops.cuda_graph(lambda x: x + 1)
    refusing(recorder, lambda x: inner(x) * 2, X, match="cuda_graph: a call inside of another recording")


def test_differentiated_calls_are_refused(recorder):
    g = msops.cuda_graph(lambda x: (x * x).sum())
    with pytest.raises(RuntimeError, match="MindSpore differentiates the call"):
        ms.grad(g)(X)


def test_arguments_that_are_no_constants_are_refused(recorder):
    with pytest.raises(TypeError, match=r"kwargs\['a'\]\[1\] must be a Tensor, .* got ndarray"):
        msops.cuda_graph(lambda a: a)(a=[1, np.ones(2)])


def test_new_memory_of_parameters(recorder):
    """After set_data one call runs as usual, and the next is recorded again."""
    net = nn.Dense(2, 2)
    f = counted(net)
    g = msops.cuda_graph(f, warmup=1)
    x = Tensor([[1.0, 2.0]])
    for _ in range(4):
        g(x)
    assert (f.calls, recorder.begun) == (2, 1)
    assert {id(each) for each in net.trainable_params()} <= {id(each) for each in recorder.variables}
    ops.assign(net.bias, Tensor([1.0, 1.0]))  # in place
    g(x)
    assert f.calls == 2
    for change in (
        lambda: net.bias.set_data(Tensor([3.0, 4.0])),
        lambda: ms.load_param_into_net(net, {"weight": Parameter(Tensor([[1.0, 0.0], [0.0, 1.0]]), name="weight")}),
    ):
        before = f.calls
        change()
        for _ in range(3):
            found = g(x)
        assert f.calls == before + 2
        assert len(recorder.alive) == 1
    assert found.asnumpy().tolist() == [[4, 6]]
    for _ in range(4):  # new data of the host is not recorded before a usual call has used it
        net.bias.set_data(Tensor([5.0, 6.0]))
        begun = recorder.begun
        g(x)
        assert (recorder.begun, g.graphs) == (begun, 0)


def test_cells_that_are_set_to_train(recorder):
    """It is as after set_data, also where the Cell is within another, or in a list."""

    class Net(nn.Cell):
        def construct(self, x):
            return x + 1 if self.training else x

    inner = Net()
    for cell, cells in ((nn.SequentialCell(inner), [inner]), (inner, [inner])):
        f = counted(lambda x, cells=cells: cells[0](x))
        g = msops.cuda_graph(f, warmup=1)
        for training in (False, True, True, False):
            cell.set_train(training)
            for _ in range(3):
                assert g(X).asnumpy()[0] == 1 + training
        assert f.calls == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net[0], "bias", Parameter(Tensor([3.0, 3.0]), name="b")),
        lambda net: setattr(net[1], "inner", nn.ReLU()),
        lambda net: net.__setitem__(1, nn.ReLU()),
        lambda net: net.append(nn.ReLU()),
    ],
)
def test_cells_that_get_others(recorder, change):
    """It is as after set_data. What is made elsewhere is another matter."""

    class Negative(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def construct(self, x):
            return self.inner(x)

    net = nn.SequentialCell(nn.Dense(2, 2, "zeros", bias_init="ones"), Negative())
    net[0].bias.set_data(Tensor([-1.0, 1.0]))
    g = msops.cuda_graph(net, warmup=1)
    x = Tensor([[1.0, 2.0]])
    for _ in range(3):
        assert g(x).asnumpy().tolist() == [[-1, 1]]
        Negative()
    assert recorder.begun == 1
    change(net)
    for _ in range(3):
        assert g(x).asnumpy().tolist() == net(x).asnumpy().tolist() != [[-1, 1]]
    assert recorder.begun == 2


class Calling:
    """Calls a Cell that only another method names."""

    def forward(self, x):
        return NAMED(x)

    def step(self, x):
        return self.forward(x)


class CallingCell(nn.Cell):
    def forward(self, x):
        return NAMED(x)

    def construct(self, x):
        return self.forward(x)


NAMED = nn.Dense(2, 2)


@pytest.mark.parametrize("function", [Calling().step, CallingCell()], ids=["method", "construct"])
def test_new_memory_of_what_other_methods_name(recorder, function):
    g = msops.cuda_graph(function, warmup=1)
    for _ in range(2):
        g(Tensor([[1.0, 2.0]]))
    assert {id(each) for each in NAMED.trainable_params()} <= {id(each) for each in recorder.variables}


def test_new_memory_of_arguments(recorder):
    """The graph has copies of them, so that it stays, and keeps none of the caller's tensors."""
    g = msops.cuda_graph(lambda x: x + 1, warmup=1)
    x = Tensor([1.0, 2.0])
    for i in range(4):
        g(x)
        x.assign_value(Tensor([float(i), 2.0]))
    assert recorder.begun == 1
    assert not any(each is x for each in recorder.variables)


def test_parameters_that_the_function_gives_new_memory(recorder):
    """They go back to where the next replay reads them."""

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.p = Parameter(Tensor(2.0), name="p")

        def construct(self, x):
            self.p = self.p * 2
            return x * self.p

    step = Step()
    g = msops.cuda_graph(step, warmup=1)
    g(X)
    place = step.p._data_ptr()
    g(X)
    assert step.p._data_ptr() == place == recorder.copied[0]
    assert recorder.begun == g.graphs == 1
    g(X)
    assert recorder.begun == 1


def test_parameters_after_a_recording_that_failed(recorder):
    """Nothing computes what the function gave them."""

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.p = Parameter(Tensor(2.0), name="p")

        def construct(self, x):
            self.p = self.p * 2
            return x * float(x.sum()) if recorder.active else x

    step = Step()
    refusing(recorder, step, X, match="reads a value of the GPU")
    assert step.p.asnumpy() == 4


def test_replays_that_compute_other_values(recorder):
    g = msops.cuda_graph(lambda x: x + 1, warmup=1)
    g(X)
    g(X)
    recorder.differing.add(1)
    with pytest.raises(RuntimeError, match="a replay computed another value"):
        g(X)
    assert not recorder.alive
    assert g.graphs == 0
    assert g(X).asnumpy().tolist() == [2, 3]  # of a new recording
    assert recorder.begun == 2


def test_loss_scale_of_mindspore_is_refused(recorder):
    """Its Cell asks for an overflow inside of MindSpore, where no line of Python can be named."""
    net = nn.WithLossCell(nn.Dense(2, 2), nn.MSELoss())
    scale = nn.FixedLossScaleUpdateCell(2.0)
    cell = nn.TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params()), scale)
    refusing(recorder, lambda x: (x, cell)[0], X, match="nn.TrainOneStepWithLossScaleCell asks on the host")


def test_reachable():
    """All that a function names is found."""
    closure, default, named, attribute = (Tensor([float(i)]) for i in range(4))

    class Holder:
        def __init__(self):
            self.inside = {"x": [attribute]}

        def method(self, x, other=default):
            return x + closure + other + GLOBAL

    holder = Holder()
    found = reachable(Tensor, holder.method, [named])
    assert {id(each) for each in found} == {id(each) for each in (closure, default, named, attribute, GLOBAL)}
    optimizer = nn.Adam(nn.Dense(2, 2).trainable_params())
    layer = nn.Dense(3, 3)
    step = ms.value_and_grad(lambda x: layer(x).sum(), None, layer.trainable_params())
    holder.recorded = msops.cuda_graph(holder.method)
    holder.recorded.kept = Tensor([5.0])
    assert len(reachable(Tensor, holder.method)) == len(found) - 1  # all but `named`
    names = {each.name for each in reachable(Parameter, lambda x: (optimizer(x), step))}
    assert {"moment1.weight", "learning_rate", "beta1_power", "weight"} <= names


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ms.grad(lambda y: y + GLOBAL)(x),
        lambda x: sum(y + GLOBAL for y in x),
        lambda x: x + models.weight,
        lambda x: x + Weights.weight,
        type("Step", (), {"__call__": lambda self, x: x + GLOBAL})(),
        type("Net", (nn.Cell,), {"construct": lambda self, x: x + GLOBAL})(),
        types.FunctionType((lambda x: x + GLOBAL).__code__, {"GLOBAL": Tensor([9.0])}),  # its module has no name
    ],
)
def test_reachable_by_names(function):
    """What functions within the function name is found, and what it names of modules and classes."""
    (found,) = reachable(Tensor, function)
    assert found.asnumpy().tolist() == [9]


GLOBAL = Tensor([9.0])
models = types.ModuleType("models")
models.weight, models.other = GLOBAL, Tensor([8.0])


class Weights:
    weight, other = GLOBAL, Tensor([8.0])


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: x.set_data(y),
        lambda x, y: x.assign_value(y),
        lambda x, y: x.set_(y),
        lambda x, y: setattr(x, "data", y),
        lambda x, y: x.__setstate__(y.__getstate__()),
    ],
)
def test_memory(change):
    watch()
    x, y = Parameter(Tensor([1.0, 2.0]), name="x"), Tensor([3.0, 4.0])
    memory = Memory([x])
    assert not memory.changed()
    assert x.data.asnumpy().tolist() == [1, 2]
    change(x, y)
    assert memory.changed()
    assert x.asnumpy().tolist() == [3, 4]
    assert not Memory([x]).changed()


def test_with_tensors():
    value = {"a": (X, [1, None]), "b": X}
    tensors = list(tensors_of(value))
    assert len(tensors) == 2
    assert with_tensors(value, iter([1, 2])) == {"a": (1, [1, None]), "b": 2}


def test_draws():
    """The n-th replay draws what the n-th usual call draws."""

    def f(x):
        return ms.mint.nn.functional.dropout(x, 0.5) + ms.mint.nn.functional.dropout(x, 0.25)

    with msops.patch_mindspore():
        x = ops.ones((64,))
        ms.manual_seed(3)
        with draws.noted() as noted:
            f(x)
        expected = [f(x).asnumpy() for _ in range(3)]
        assert len({each.tobytes() for each in expected}) == 3
        ms.manual_seed(3)
        f(x)
        for want in expected:
            source = draws.Source(noted, lambda t: Tensor(t.asnumpy()))
            with source.recorded():  # it notes by how much the draws move on
                f(x)
            given = source.advance()
            again = draws.Source(noted, lambda t, given=given: given.pop(0))
            with again.recorded():
                assert np.array_equal(f(x).asnumpy(), want)
