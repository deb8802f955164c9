"""Tests what docs/versions.md says of the installed MindSpore. `make test-matrix` tests the other versions."""

import copy
import doctest
import importlib
import sys
from types import FunctionType

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import features
import msops
from card import cards
from child import run_python
from matrix import FEATURES, TABLE, here, rows_of, working
from msops.compat import VERSION
from msops.testing.checks import assert_equal, assert_near

newer = pytest.mark.skipif(VERSION < (2, 7), reason="docs/versions.md says it of newer versions")


@pytest.mark.wide
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, mode, device_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore leaves files here
    version, python_version, variables = here()
    row = rows_of(TABLE.read_text()).get((version, python_version, device_target, mode))
    if row is None:
        pytest.skip(f"docs/versions.md has no row of MindSpore {version} with Python {python_version}, {device_target}")
    if row[list(FEATURES).index(feature)] == "yes":
        getattr(features, feature)()
    else:  # a process of its own may crash
        assert not working(sys.executable, variables, device_target, mode, [feature])


@pytest.mark.wide
@pytest.mark.parametrize("level", ["O2", "O3", "auto"])
def test_model_in_mixed_precision(level, mode):
    scaled = amp.FixedLossScaleManager(2**10, drop_overflow_update=False)
    features.model(amp_level=level, loss_scale_manager=scaled)


PUBLIC = {name: getattr(msops, name) for name in msops.__all__}
CELLS = [name for name, value in PUBLIC.items() if isinstance(value, type) and issubclass(value, nn.Cell)]
OF_CARDS = {card.cell: card for card in cards() if getattr(card, "cell", None)}


def call_of(cell, monkeypatch):
    """Returns a Cell and its inputs: those of its card or, if it takes what its function does not, of its example."""
    if cell in OF_CARDS:
        inputs, settings = OF_CARDS[cell].case_inputs(OF_CARDS[cell].small, np.float32)
        return cell(**settings), [Tensor(x) for x in inputs]
    calls = []

    def call(net, *inputs, **named):
        calls.append((net, inputs))
        return nn.Cell.__call__(net, *inputs, **named)

    with monkeypatch.context() as patch:
        patch.setattr(cell, "__call__", call, raising=False)
        names = {}
        for example in doctest.DocTestParser().get_examples(cell.__doc__):
            exec(example.source, names)  # noqa: S102
    return calls[0]


def arrays(results):
    if isinstance(results, Tensor):
        return [results.asnumpy()]
    return [array for result in results for array in arrays(result)]


@pytest.mark.wide
@pytest.mark.parametrize("name", CELLS)
def test_cell_in_level_o1(mode, monkeypatch, tmp_path, name):
    """A Cell works in level O1, for which MindSpore rewrites its source. Of its operators, only linear layers are in
    O1's list for float16."""
    monkeypatch.chdir(tmp_path)  # MindSpore writes the new source into a folder here
    net, inputs = call_of(PUBLIC[name], monkeypatch)
    want, has_layers = arrays(net(*inputs)), any(isinstance(cell, nn.Dense) for cell in net.cells())
    got = arrays(amp.auto_mixed_precision(net, "O1")(*inputs))
    assert_near(got[0], want[0], np.full(want[0].shape, 2e-3), "output") if has_layers else assert_equal(got, want)


class Squares(nn.Cell):
    """Computes the sum of the squares of what a Cell returns, without an LLTM's state."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, *inputs):
        outs = self.net(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return sum([ops.square(ops.cast(out, mindspore.float32)).sum() for out in outs if isinstance(out, Tensor)])


@pytest.mark.wide
@newer
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)  # graph mode takes minutes to compile all levels
@pytest.mark.parametrize(
    "name",
    # Six have no gradients. HashEncoding's are subnormal in float16 at first; its own test takes others.
    sorted(
        {*CELLS}
        - {"BallQuery", "DecoderStack", "FurthestPointSample", "HashEncoding", "KNN", "LinearArgmax", "PagedAttention"}
    ),
)
def test_gradients_in_mixed_precision(mode, monkeypatch, tmp_path, name):
    """At every level of amp, the gradients of the first input and of Parameters are those of O0 but for rounding."""
    monkeypatch.chdir(tmp_path)
    net, inputs = call_of(PUBLIC[name], monkeypatch)
    expected = None
    for level in ("O0", "O1", "O2", "O3", "auto", "to_float"):
        each = copy.deepcopy(net)
        parameters = each.trainable_params()
        each = each.to_float(mindspore.float16) if level == "to_float" else amp.auto_mixed_precision(each, level)
        results = arrays(ops.value_and_grad(Squares(each), 0, parameters or None)(*inputs))
        expected = expected or results
        for got, want in zip(results, expected):
            np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max(), err_msg=level)


CALLS = """
import msops
from mindspore import nn
from msops import {name} as imported, {name}


class Call(nn.Cell):
    def construct(self, {names}):
        return msops.{call}, {call}, imported({arguments})
"""
FUNCTIONS = [
    name for name, value in PUBLIC.items() if isinstance(value, FunctionType) and "operators" in value.__module__
]


def write_call(name, monkeypatch):
    """Returns the source of a Cell that calls a function as the function's example does, and the Cell's inputs."""
    calls, function = [], PUBLIC[name]

    def call(*arguments, **named):
        calls.append((arguments, named))
        return function(*arguments, **named)

    inputs = []

    def write(value):
        if isinstance(value, tuple):
            return f"({', '.join(map(write, value))},)"
        if not isinstance(value, Tensor):
            return repr(value)
        inputs.append(value)
        return f"x{len(inputs)}"

    with monkeypatch.context() as patch:
        patch.setattr(msops, name, call)
        names = {}
        for example in doctest.DocTestParser().get_examples(function.__doc__):
            exec(example.source, names)  # noqa: S102
    given, named = calls[0]
    arguments = ", ".join([*map(write, given), *(f"{key}={write(value)}" for key, value in named.items())])
    names = ", ".join(f"x{i + 1}" for i in range(len(inputs)))
    return CALLS.format(name=name, names=names, call=f"{name}({arguments})", arguments=arguments), inputs


@pytest.mark.wide
@newer
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_in_level_o1(mode, monkeypatch, tmp_path, name):
    """A user's Cell in level O1 calls a function, under any name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source, inputs = write_call(name, monkeypatch)
    (tmp_path / f"calls_{name}_{mode}.py").write_text(source)
    net = importlib.import_module(f"calls_{name}_{mode}").Call()
    want, has_layers = arrays(net(*inputs)), any(isinstance(cell, nn.Dense) for cell in net.cells())
    got = arrays(amp.auto_mixed_precision(net, "O1")(*inputs))
    assert_near(got[0], want[0], np.full(want[0].shape, 2e-3), "output") if has_layers else assert_equal(got, want)


class Norms(nn.Cell):
    """Holds several Cells, two of them of one class and with other settings."""

    def __init__(self):
        super().__init__()
        self.first, self.second = msops.AddRMSNorm(8), msops.AddRMSNorm(8, has_weight=False)
        self.last = nn.SequentialCell(msops.RMSNorm(8), msops.LayerNorm((8,)), msops.RMSNorm(8, has_weight=False))

    def construct(self, x):
        y, total = self.first(x, x)
        return self.last(self.second(y, total)[0])


def test_several_cells_in_level_o1(mode, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    x = Tensor(np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32))
    want = arrays(Norms()(x))
    assert_equal(arrays(amp.auto_mixed_precision(Norms(), "O1")(x)), want)


@pytest.mark.wide
@pytest.mark.parametrize("name", CELLS)
def test_deepcopy_of_a_cell(mode, monkeypatch, name):
    """A copy of a Cell, before and after a call, computes the same, also once the original's Parameters change."""
    net, inputs = call_of(PUBLIC[name], monkeypatch)
    before = copy.deepcopy(net)
    want = arrays(net(*inputs))
    after = copy.deepcopy(net)
    for parameter in net.get_parameters():
        parameter.set_data(parameter + 1)
    for each in (before, after):
        assert_equal(arrays(each(*inputs)), want)
        assert [p.name for p in each.trainable_params()] == [p.name for p in net.trainable_params()]


class Slope(nn.Cell):
    """Computes the sum of the squares of a function's gradient."""

    def __init__(self, function):
        super().__init__()
        self.function, self.gradient = function, ops.GradOperation()

    def loss(self, x):
        out = self.function(x)
        return (out * out).sum()

    def construct(self, x):
        dx = self.gradient(self.loss)(x)
        return (dx * dx).sum()


def through_reshape(x):
    return ops.tanh(ops.reshape(ops.tanh(x), (-1,)))


def plain(x):
    return ops.tanh(ops.tanh(x))


@newer
def test_second_order_through_a_reshape(mode):
    """MindSpore's own operators have the fault that docs/versions.md describes."""
    x = Tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3))
    got, want = (ops.GradOperation()(Slope(function))(x).asnumpy() for function in (through_reshape, plain))
    assert np.allclose(got, want, rtol=1e-5) == (mode == "graph")


@newer
def test_forward_mode(mode, device_target):
    """jvp and jacfwd work for operators whose gradient has a gradient, since they differentiate twice."""
    x = np.linspace(-1, 1, 3, dtype=np.float32)
    y = 1 / (1 + np.exp(-x))
    _, dy = ops.jvp(msops.Sigmoid(), Tensor(x), Tensor(x))
    np.testing.assert_allclose(dy.asnumpy(), x * y * (1 - y), rtol=1e-5)
    if device_target == "CPU":  # on a GPU, MindSpore's jacfwd lacks a function of its own
        jacobian = ops.jacfwd(msops.Sigmoid())(Tensor(x))
        np.testing.assert_allclose(jacobian.asnumpy(), np.diag(y * (1 - y)), rtol=1e-5)
    sequence, steps = features.Outputs(msops.LLTM(3, 2)), Tensor(x.reshape(1, 1, 3))
    with pytest.raises(ValueError, match=r"no gradients of their own|has no gradient"):
        ops.jvp(sequence, steps, steps)


class Step(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, x, h):
        return self.cell(x, (h, h))[0].sum()


@newer
def test_recompute_of_an_lltm_cell(mode):
    """PyNative mode refuses recompute for the Cell, whose state is a tuple, but not for a network that holds it."""
    x, h = Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones((2, 4), np.float32))
    cell = msops.LLTMCell(3, 4)
    want = ops.grad(Step(cell), (0, 1))(x, h)
    outer = Step(copy.deepcopy(cell))
    outer.recompute()
    assert_equal(arrays(ops.grad(outer, (0, 1))(x, h)), arrays(want))
    cell.recompute()
    if mode == "pynative":
        with pytest.raises(RuntimeError, match="not put tensors in tuple"):
            ops.grad(Step(cell), (0, 1))(x, h)
    else:
        assert_equal(arrays(ops.grad(Step(cell), (0, 1))(x, h)), arrays(want))


LOAD = """
import mindspore
import numpy as np
from mindspore import Tensor, nn

mindspore.set_context(mode=mindspore.GRAPH_MODE)
print(nn.GraphCell(mindspore.load("net.mindir"))(Tensor(np.zeros((2, 3), np.float32))))
"""


@pytest.mark.wide
@newer
def test_open_sizes_in_another_process(tmp_path, monkeypatch):
    """In another process, a network that was exported with open sizes tells what is missing."""
    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    open_rows = Tensor(shape=(None, 3), dtype=mindspore.float32)
    mindspore.export(msops.Sigmoid(), open_rows, file_name="net", file_format="MINDIR")
    (tmp_path / "load.py").write_text(LOAD)
    done = run_python("load.py", cwd=tmp_path)
    assert done.returncode
    assert "its sizes are known to the process alone that made the operator" in done.stderr
