"""Tests that gates and activations which model libraries write out are computed by msops while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import gates, models
from msops.patch.formula import NoFormulaError

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
TEXT = """
import functools, math
import mindspore as ms
from mindspore import Tensor, mint, nn

class SiLUActivation(nn.Cell):
    def construct(self, input: Tensor) -> Tensor:
        return mint.nn.functional.silu(input)

class GELUTanh(nn.Cell):
    def __init__(self, tanh=True):
        super().__init__()
        own = mint.nn.functional.gelu
        self.act = functools.partial(own, approximate="tanh") if tanh else own

    def construct(self, input: Tensor) -> Tensor:
        return self.act(input)

class NewGELUActivation(nn.Cell):
    def construct(self, input: Tensor) -> Tensor:
        return (
            0.5 * input
            * (1.0 + mint.tanh(mint.sqrt(Tensor(2.0 / math.pi)) * (input + 0.044715 * mint.pow(input, 3.0))))
        ).to(input.dtype)

class FastGELUActivation(nn.Cell):
    def construct(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + mint.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))

class QuickGELUActivation(nn.Cell):
    def construct(self, input: Tensor) -> Tensor:
        return input * mint.sigmoid(1.702 * input)

class LlamaMLP(nn.Cell):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Dense(6, 8), nn.Dense(6, 8), nn.Dense(8, 6)
        self.act_fn = act

    def construct(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

class Halves(nn.Cell):
    def __init__(self, act=None):
        super().__init__()
        self.proj, self.activation = nn.Dense(6, 16), act

class GEGLU(Halves):
    def gelu(self, gate):
        return mint.nn.functional.gelu(gate).to(gate.dtype)

    def construct(self, hidden_states):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)

class SwiGLU(Halves):
    def construct(self, hidden_states):
        hidden_states = self.proj(hidden_states)
        hidden_states, gate = hidden_states.chunk(2, dim=-1)
        return hidden_states * self.activation(gate)
"""
NETS = {  # how a net is made, and the operator that computes it
    "silu": ("LlamaMLP(module.SiLUActivation())", "swiglu"),
    "MindSpore's silu": ("LlamaMLP(module.mint.nn.SiLU())", "swiglu"),
    "gelu": ("LlamaMLP(module.GELUTanh(False))", "geglu"),
    "gelu by tanh": ("LlamaMLP(module.GELUTanh())", "geglu"),
    "gelu written out": ("LlamaMLP(module.NewGELUActivation())", "geglu"),
    "geglu": ("GEGLU()", "geglu"),
    "swiglu": ("SwiGLU(module.SiLUActivation())", "swiglu"),
    "new": ("NewGELUActivation()", "gelu"),
    "fast": ("FastGELUActivation()", "gelu"),
    "quick": ("QuickGELUActivation()", "gelu"),
}


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Notes the operators that the patch calls, in PyNative mode."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    calls = []

    def note(name):
        own = getattr(gates, name)
        monkeypatch.setattr(gates, name, lambda *given: calls.append(name) or own(*given))

    for name in ("swiglu", "geglu", "gelu"):
        note(name)
    return calls


def made(module, name):
    mindspore.set_seed(1)
    return eval("module." + NETS[name][0])  # noqa: S307 (the text is of this file)


def results(net, x):
    def total(x):
        y = net(x)
        return (y * y).sum()

    weights = net.trainable_params()
    gradients = mindspore.grad(total, 0, weights or None)(x)
    return net(x), *((gradients[0], *gradients[1]) if weights else (gradients,))


def by_the_library(net, x, construct):
    """Returns the results by the class's own `construct`; the patch stays, since MindSpore lacks gelu on the CPU."""
    cls, now = type(net), type(net).construct
    assert now is not construct
    cls.construct = construct
    found = results(net, x)
    cls.construct = now
    return found


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.wide), "float32"])
@pytest.mark.parametrize("name", NETS)
def test_gates(load, computed, name, dtype):
    module = load(TEXT)
    x = Tensor(RNG.standard_normal((2, 3, 6)).astype(dtype))
    own = getattr(module, NETS[name][0].partition("(")[0]).construct
    with msops.patch_mindspore():
        net = made(module, name).to_float(getattr(mindspore, dtype)) if dtype == "float16" else made(module, name)
        want = by_the_library(net, x, own)
        computed.clear()
        got = results(net, x)
    assert computed == [NETS[name][1]] * 2
    for each, wanted in zip(got, want):
        assert each.dtype == wanted.dtype
        most = (4e-3 if dtype == "float16" else 2e-6) * max(1, np.abs(wanted.asnumpy()).max())
        np.testing.assert_allclose(each.asnumpy(), wanted.asnumpy(), 0, most)


def changed(old, new, name="silu"):
    assert old in TEXT
    return TEXT.replace(old, new), name


OTHERS = {
    "another gate": changed("self.act_fn(self.gate_proj(x))", "self.act_fn(self.gate_proj(x) * 2)"),
    "up twice": changed("self.act_fn(self.gate_proj(x))", "self.act_fn(self.up_proj(x))"),
    "a sum": changed("self.gate_proj(x)) * self", "self.gate_proj(x)) + self"),
    "relu": changed("mint.nn.functional.silu(input)", "mint.nn.functional.relu(input)"),
    "twice the silu": changed("mint.nn.functional.silu(input)", "mint.nn.functional.silu(input) * 2"),
    "another sigmoid": changed("mint.nn.functional.silu(input)", "input * mint.sigmoid(1.7 * input)"),
    "another slope": changed("1.702 * input", "1.7 * input", "quick"),
    "another gelu": changed("return self.act(input)", "return self.act(input) * 0.5", "gelu"),
    "halves swapped": changed("hidden_states, gate = self.proj", "gate, hidden_states = self.proj", "geglu"),
    "three parts": changed(
        "hidden_states, gate = hidden_states.chunk(2, dim=-1)",
        "hidden_states, gate, _ = mint.cat([hidden_states, hidden_states[..., :8]], dim=-1).chunk(3, dim=-1)",
        "swiglu",
    ),
    "another cube": changed("mint.pow(input, 3.0)", "mint.pow(input, 2.0)", "new"),
    "another constant": changed("0.044715 * input * input", "0.04 * input * input", "fast"),
    "another root": changed("2.0 / math.pi", "3.0 / math.pi", "new"),
    "a hook": (TEXT, "silu"),
    "another precision": (TEXT, "silu"),
    "an instance's": (TEXT, "silu"),
    "an instance's function": (TEXT, "gelu"),
    "a class's later": (TEXT, "silu"),
    "a class's later, written out": (TEXT, "gelu written out"),
}


def of_variants(load, computed):
    x = Tensor(np.random.default_rng(1).standard_normal((2, 6)).astype(np.float32))
    found = {}
    for name, (text, which) in OTHERS.items():
        net = made(load(text), which)
        if name == "a hook":
            net.act_fn.register_forward_hook(lambda cell, given, out: out * 2)
        if name == "another precision":
            net.act_fn.to_float(mindspore.float16)
        if name == "an instance's":
            object.__setattr__(net.act_fn, "construct", mindspore.ops.tanh)
        if name == "an instance's function":
            net.act_fn.act = mindspore.ops.tanh
        if name.startswith("a class's later"):
            assert not computed
            net(x)
            computed.clear()
            type(net.act_fn).construct = lambda self, x: x * 3
        found[name] = net(x).asnumpy()
    return found


def none(own, owner):
    raise NoFormulaError("no")


def test_other_formulas_compute_as_by_the_library(load, computed, monkeypatch):
    with msops.patch_mindspore():
        monkeypatch.setattr(models, "gating", none)
        monkeypatch.setattr(models, "activating", none)
        want = of_variants(load, computed)
        monkeypatch.setattr(models, "gating", gates.gating)
        monkeypatch.setattr(models, "activating", gates.activating)
        got = of_variants(load, computed)
    assert not computed
    for name, wanted in want.items():
        np.testing.assert_allclose(got[name], wanted, 1e-5, 1e-5, err_msg=name)


def test_shapes_that_stay(load, computed):
    """A gate of one number a row is broadcast by the library's own product."""
    module = load(TEXT)
    with msops.patch_mindspore():
        net = module.LlamaMLP(module.SiLUActivation())
        net.gate_proj = mindspore.nn.Dense(6, 1)
        assert net(Tensor(np.ones((2, 6), np.float32))).shape == (2, 6)
    assert not computed


def test_a_gate_of_quick_gelu(load, computed):
    """The activation is one operator; its product is the library's own."""
    module = load(TEXT)
    x = Tensor(RNG.standard_normal((2, 6)).astype(np.float32))
    with msops.patch_mindspore():
        net = module.LlamaMLP(module.QuickGELUActivation())
        got = net(x)
        gate = net.gate_proj(x)
        want = net.down_proj(gate * mindspore.ops.sigmoid(1.702 * gate) * net.up_proj(x))
    assert computed == ["gelu"]
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), 1e-5, 1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["silu", "gelu by tanh", "new"])
def test_graph_mode(load, monkeypatch, name):
    monkeypatch.undo()  # graph mode compiles the operators' own source
    module = load(TEXT)
    x = Tensor(RNG.standard_normal((2, 6)).astype(np.float32))
    own = getattr(module, NETS[name][0].partition("(")[0]).construct
    with msops.patch_mindspore():
        net = made(module, name)
        want = by_the_library(net, x, own)
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        net(x)  # the gradient of a function finds what this compiled

        def total(x):
            return net(x).sum()

        assert mindspore.grad(total)(x).shape == x.shape
        got = results(net, x)
    for each, wanted in zip(got, want):
        np.testing.assert_allclose(each.asnumpy(), wanted.asnumpy(), 1e-5, 1e-5)


def test_gradients_that_an_activation_defines(load, computed):
    """A kernel would have silu's own gradient."""
    own = "        return mint.nn.functional.silu(input)\n"
    text = TEXT.replace(own, f"{own}\n    def bprop(self, input, out, dout):\n        return (dout * 2.0,)\n", 1)
    x = Tensor(RNG.standard_normal((2, 6)).astype(np.float32))
    want = results(made(load(text), "silu"), x)
    with msops.patch_mindspore():
        got = results(made(load(text), "silu"), x)
    assert not computed
    for each, wanted in zip(got, want):
        np.testing.assert_allclose(each.asnumpy(), wanted.asnumpy(), 1e-5, 1e-5)
