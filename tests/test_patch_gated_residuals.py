"""Tests that sums with a product by a gate are one operator while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import gated_residuals
from patched import assert_equal, results

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
TEXT = """
from mindspore import mint, nn

class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer = mint.nn.Tanh()

    def construct(self, x, gate):
        {lines}
        return x
"""
LINES = {
    "one expression": "x = x + gate.unsqueeze(1) * self.layer(x)",
    "factors swapped": "x = x + self.layer(x) * gate[:, None]",
    "terms swapped": "y = self.layer(gate)[:, None] * x + x\n        x = gate[:, None] * y + x",
    "two statements": "y = self.layer(x)\n        y = gate.unsqueeze(1) * y\n        x = x + y",
    "two, swapped": "y = self.layer(x) * gate.unsqueeze(1)\n        x = y + x",
    "of itself": "residual = x\n        x = gate[:, None] * self.layer(x)\n        x = residual + x",
    "in branches": """if x is gate:
            y = x
        elif x.shape[0] == 3:
            y = gate[:, None] * self.layer(x)
        x = y + x""",
    "written again": "y = gate[:, None] * self.layer(x)\n        x = x + y\n        y = 3\n        x = x * 3",
    "in a loop": "for _ in range(2):\n            x = x + gate[:, None] * self.layer(x)",
    "a gate of rows": "gate = gate[:, None].mean(-1, keep_dims=True)\n        x = x + x * gate",
}
COUNTS = {"terms swapped": 1, "in a loop": 2}
OTHERS = {
    "no gate": "y = gate\n        x = x + y[:, None] * self.layer(x)".replace("gate[", "y["),
    "a difference": "x = x - gate[:, None] * self.layer(x)",
    "a quotient": "x = x + gate[:, None] / (2 + self.layer(x))",
    "read later": "y = gate[:, None] * self.layer(x)\n        x = x + y\n        x = x * y",
    "changed later": "y = gate[:, None] * self.layer(x)\n        x = x + y\n        y *= 2\n        x = x * x.shape[0]",
    "something between": "y = gate[:, None] * self.layer(x)\n        x = self.layer(x)\n        x = x + y",
    "read by a function": "y = gate[:, None] * x\n        f = lambda: y\n        x = x + y\n        x += f()",
    "a loop reads it": """y = x
        for _ in range(2):
            x = x * y
            y = gate[:, None] * self.layer(x)
            x = x + y""",
    "twice itself": "x = gate[:, None] * self.layer(x)\n        x = x + x",
    "another one": "y = gate[:, None] * self.layer(x)\n        z = x\n        x = x + z",
}


@pytest.fixture
def computed(noted):
    """Counts the calls of the operator by the patch."""
    return noted(gated_residuals, "addcmul")


def inputs(dtype=np.float32, samples=3):
    rng = np.random.default_rng(0)
    return [Tensor(rng.standard_normal(shape).astype(dtype)) for shape in ((samples, 4, 6), (samples, 6))]


@pytest.fixture
def by_the_library(without):
    return without(gated_residuals)


@pytest.mark.parametrize("name", LINES)
def test_sums_with_gates(load, computed, by_the_library, name):
    net, tensors = load(TEXT.format(lines=LINES[name])).Block(), inputs()
    want = by_the_library(results, net, *tensors)
    with msops.patch_mindspore() as patch:
        got = results(net, *tensors)
        assert len(computed) == 2 * COUNTS.get(name, 1)
        assert any(each.operator == "addcmul" for each in patch.recognized)
    assert_equal(got, want, 1e-5)


def test_halves(load, computed, by_the_library):
    net, tensors = load(TEXT.format(lines=LINES["two statements"])).Block(), inputs(np.float16)
    want = by_the_library(results, net, *(each.astype(mindspore.float32) for each in tensors))
    with msops.patch_mindspore():
        got = results(net, *tensors)
    assert len(computed) == 2
    assert_equal(got, [each.astype(mindspore.float16) for each in want], 1e-2)


@pytest.mark.parametrize("name", OTHERS)
def test_other_statements(load, computed, by_the_library, name):
    net, tensors = load(TEXT.format(lines=OTHERS[name])).Block(), inputs()
    want = by_the_library(results, net, *tensors)
    with msops.patch_mindspore():
        assert_equal(results(net, *tensors), want, 1e-5)
    assert not computed


def test_what_stays(load, computed, by_the_library):
    """A sum that is larger than its first term, other dtypes, and numbers stay the library's."""
    net = load(TEXT.format(lines="x = x + gate * self.layer(x)")).Block()
    x, gate = inputs()
    calls = [
        (x, gate[:, None].astype(mindspore.float16)),
        (x[:, :1], mindspore.mint.cat([gate[:, None]] * 4, 1)),
        (x, 2.0),
    ]
    want = by_the_library(lambda: [net(*tensors) for tensors in calls])
    with msops.patch_mindspore():
        assert_equal([net(*tensors) for tensors in calls], want, 1e-5)
    assert not computed


@pytest.mark.wide
def test_graph_mode(load, computed, by_the_library):
    """Graph mode compiles the library's own code."""
    net, tensors = load(TEXT.format(lines=LINES["two statements"])).Block(), inputs()
    want = by_the_library(net, *tensors)
    with msops.patch_mindspore():
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        assert_equal([net(*tensors)], [want], 1e-5)
    assert not computed


def test_with_a_norm_of_samples(load, computed, by_the_library):
    """A method may have both."""
    text = TEXT.replace(
        "self.layer =", "self.norm = mint.nn.LayerNorm(6, elementwise_affine=False)\n        self.layer ="
    )
    lines = """y = self.norm(x)
        y = y * (1 + gate[:, None]) + gate[:, None]
        y = gate[:, None] * self.layer(y)
        x = x + y"""
    net, tensors = load(text.format(lines=lines)).Block(), inputs()
    want = by_the_library(results, net, *tensors)
    with msops.patch_mindspore() as patch:
        got = results(net, *tensors)
        assert "addcmul and msops.layer_norm" in [each.operator for each in patch.recognized]
    assert len(computed) == 2
    assert_equal(got, want, 1e-4)
