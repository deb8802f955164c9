"""Tests that loops over experts, as mindone's models write them, are computed by grouped_matmul while MindSpore is
patched."""

import types

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import expert_loops

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
import mindspore
from mindspore import mint, nn

class MLP(nn.Cell):
    def __init__(self, width=6, inner=4, bias=False, activation=mint.nn.SiLU):
        super().__init__()
        self.gate_proj = mint.nn.Linear(width, inner, bias=bias)
        self.up_proj = mint.nn.Linear(width, inner, bias=bias)
        self.down_proj = mint.nn.Linear(inner, width, bias=bias)
        self.act_fn = activation()

    def construct(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

class Top2MLP(nn.Cell):
    def __init__(self, width=6, inner=4):
        super().__init__()
        self.w1, self.w3 = (mint.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2, self.act_fn = mint.nn.Linear(inner, width, bias=False), mint.nn.SiLU()

    def construct(self, hidden_states):
        current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        current_hidden_states = self.w2(current_hidden_states)
        return current_hidden_states

class OtherMLP(MLP):
    def construct(self, x):
        return super().construct(x) * 2

class Block(nn.Cell):
    def __init__(self, experts, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = len(experts), top_k
        self.gate = mint.nn.Linear(6, self.num_experts, bias=False)
        self.experts = nn.CellList(experts)

    def construct(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = mint.nn.functional.softmax(router_logits, dim=1, dtype=mindspore.float32)
        routing_weights, selected_experts = mint.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        # The experts
        final_hidden_states = mint.zeros((batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype)
        expert_mask = mint.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = mint.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits
"""
WHERE = "idx, top_x = mint.where(expert_mask[expert_idx])\n"
SKIPS = TEXT.replace(WHERE, WHERE + "            if top_x.shape[0] == 0:\n                continue\n")
LIKENESSES = {"a loop": TEXT, "it skips experts": SKIPS, "mindspore.mint": TEXT.replace("= mint.", "= mindspore.mint.")}
OTHERS = {
    name: TEXT.replace(*texts)
    for name, texts in {
        "twice the result": ("expert_layer(current_state) *", "expert_layer(current_state) * 2 *"),
        "weights of other slots": ("[top_x, idx, None]", "[top_x, 1 - idx, None]"),
        "a mask of something else": ("(selected_experts, num", "(selected_experts * 1, num"),
        "the result begins at one": ("mint.zeros(", "mint.ones("),
        "a statement between": ("        for exp", "        hidden_states = hidden_states * 2\n        for exp"),
        "the mask is read later": ("return final_", "router_logits += expert_mask.sum()\n        return final_"),
        "some experts": ("in range(self.num_experts)", "in range(self.num_experts - 1)"),
    }.items()
}


@pytest.fixture
def computed(noted):
    """Counts the calls of grouped_matmul by the patch."""
    return noted(expert_loops, "grouped_matmul")


def filled(net):
    rng = np.random.default_rng(3)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(rng.standard_normal(parameter.shape).astype(np.float32)))
    return net


def tokens(dtype=np.float32, texts=2):
    return Tensor(np.random.default_rng(1).standard_normal((texts, 5, 6)).astype(dtype))


def results(net, x):
    """Returns the results and the gradients of tokens and all weights."""
    gradients = mindspore.grad(lambda x: (net(x)[0] ** 2).sum(), 0, net.trainable_params())(x)
    return [*net(x), gradients[0], *gradients[1]]


def by_its_own_code(net, x, monkeypatch):
    """Returns what the library's statements compute, some of which MindSpore has on the CPU by the patch alone."""
    with monkeypatch.context() as patched:
        patched.setattr(expert_loops, "_layers_of", lambda cell: [])
        return results(net, x)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a loop", "MLP"),
        *(pytest.param(*each, marks=pytest.mark.wide) for each in (("a loop", "Top2MLP"), ("mindspore.mint", "MLP"))),
        ("it skips experts", "Top2MLP"),
    ],
)
def test_loops(load, computed, monkeypatch, name, kind):
    with msops.patch_mindspore() as patch:
        module = load(LIKENESSES[name])
        net, skips = (filled(each.Block([getattr(each, kind)() for _ in range(7)])) for each in (module, load(SKIPS)))
        # Where it does not skip an expert without tokens, MindSpore leaves the gradient of its weights unwritten.
        want = by_its_own_code(skips, tokens(), monkeypatch)
        assert not computed
        got = results(net, tokens())
        assert len(computed) == 6  # the gradient computes the experts again
        assert (f"{module.__name__}.Block.construct", "msops.grouped_matmul") in patch.recognized
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 1e-5, 2e-5 * max(1, np.abs(y.asnumpy()).max()))


def test_frozen_experts(load, computed, monkeypatch):
    """Experts whose weights are frozen give the gradient of tokens, and compute none of their own."""
    with msops.patch_mindspore():
        net = filled((module := load(LIKENESSES["a loop"])).Block([module.MLP() for _ in range(7)]))
        want = results(net, tokens())
        for parameter in net.experts.get_parameters():
            parameter.requires_grad = False
        again, own = [], expert_loops._again_frozen
        monkeypatch.setattr(expert_loops, "_again_frozen", lambda *inputs: again.append(0) or own(*inputs))
        got = results(net, tokens())
        assert len(again) == 1
    assert len(got) == len(want) - 7 * 3  # the gradients of the experts' matrices come last
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 1e-5, 1e-5 * max(1, np.abs(y.asnumpy()).max()))


def test_other_meanings(load, computed, monkeypatch):
    """What a program puts in place of MindSpore's own later is what computes."""
    with msops.patch_mindspore():
        module = load(SKIPS)
        net = filled(module.Block([module.MLP() for _ in range(3)]))
        want = net(tokens())[0].asnumpy()
        assert len(computed) == 2
        own = mindspore.mint.nn.Linear.construct
        with monkeypatch.context() as patched:
            patched.setattr(mindspore.mint.nn.Linear, "construct", lambda self, x: own(self, x) * 2)
            assert np.abs(net(tokens())[0].asnumpy() - want).max() > 1
        with monkeypatch.context() as patched:
            patched.setattr(module, "mint", types.SimpleNamespace(**vars(mindspore.mint)))
            np.testing.assert_allclose(net(tokens())[0].asnumpy(), want, 1e-5, 1e-5)
    assert len(computed) == 2


def test_float16_and_no_tokens(load, computed, monkeypatch):
    with msops.patch_mindspore():
        module = load(TEXT)
        net = filled(module.Block([module.MLP() for _ in range(3)])).to(mindspore.float16)
        want = by_its_own_code(net, tokens(np.float16), monkeypatch)
        for x, y in zip(results(net, tokens(np.float16)), want):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 4e-3, 4e-3 * max(1, np.abs(y.asnumpy()).max()))
        assert len(computed) == 6
        assert net(tokens(np.float16, 0))[0].shape == (0, 5, 6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_stay(load, computed, name):
    with msops.patch_mindspore() as patch:
        module = load(OTHERS[name])
        net = filled(module.Block([module.MLP() for _ in range(3)]))
        net(tokens())
        assert any(each.name.endswith("Block.construct") for each in patch.explain(net))
    assert not computed


def hooked(module):
    expert = module.MLP()
    expert.register_forward_hook(lambda cell, inputs, output: output * 2)
    return expert


EXPERTS = {
    "a bias": lambda module: module.MLP(bias=True),
    "another activation": lambda module: module.MLP(activation=mindspore.mint.nn.ReLU),
    "a subclass": lambda module: module.OtherMLP(),
    "other sizes": lambda module: module.MLP(inner=8),
    "a hook": hooked,
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.wide) if i % 2 else each for i, each in enumerate(EXPERTS)]
)
def test_other_experts_stay(load, computed, monkeypatch, name):
    """One expert of others computes what it does."""
    with msops.patch_mindspore() as patch:
        module = load(TEXT)
        net = filled(module.Block([module.MLP(), EXPERTS[name](module), module.MLP()]))
        got = net(tokens())[0].asnumpy()
        assert any(each.name.endswith("Block.construct") for each in patch.explain(net))
        with monkeypatch.context() as patched:
            patched.setattr(expert_loops, "_layers_of", lambda cell: [])
            np.testing.assert_array_equal(got, net(tokens())[0].asnumpy())
    assert not computed
