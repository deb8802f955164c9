import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from blocks import KINDS, dequantized, random_blocks, row_bytes
from card import chain, length, lengths, random, zeros
from gpu import BIG
from msops.operators.gguf_matmul import operators
from msops.testing.checks import run, run_gradient
from operator_test import OperatorTest, check_training


def gguf_matmul(x, blocks, bias=None, kind="Q4_0", **_):
    out = x @ dequantized(blocks, kind).astype(x.dtype).T
    return (out if bias is None else out + bias.astype(x.dtype),)


def gguf_matmul_backward(dout, blocks, *bias, kind="Q4_0", **_):
    dx = dout @ dequantized(blocks, kind).astype(dout.dtype)
    return dx, *(dout.sum(tuple(range(dout.ndim - 1))) for _ in bias)


def case(tokens, columns, rows, kind, has_bias=False):
    """Returns a case of a weight of so many rows and columns."""
    tokens = tokens if isinstance(tokens, tuple) else (tokens,)
    shapes = [(*tokens, columns), (rows, row_bytes(kind, columns)), *[(rows,)] * has_bias]
    return shapes, dict(kind=kind, has_bias=has_bias)


class Layer(nn.Cell):
    def __init__(self, kind="Q4_0", **_):
        super().__init__()
        self.kind = kind

    def construct(self, x, blocks, bias=None):
        return msops.gguf_matmul(x, blocks, self.kind, bias)


class TestGgufMatmul(OperatorTest):
    function = msops.gguf_matmul
    formulas = gguf_matmul, gguf_matmul_backward
    cases = {
        "small": case(2, 64, 3, "Q4_1", True),
        "Q4_0": case(3, 96, 7, "Q4_0"),
        "Q4_1": case(1, 576, 20, "Q4_1"),
        "Q8_0": case(4, 576, 20, "Q8_0", True),
        "Q4_K": case((2, 3), 512, 17, "Q4_K", True),
        "Q5_K": case(2, 768, 16, "Q5_K"),
        "Q6_K": case(5, 512, 33, "Q6_K", True),
        "a vector": case((), 64, 5, "Q4_0", True),
        "no tokens": case((0, 2), 64, 5, "Q4_0"),
        "no rows": case(3, 64, 0, "Q8_0", True),
        "no columns": case(3, 0, 4, "Q4_K", True),
        "large": case(70, 1024, 150, "Q6_K", True),
    }
    further = {
        # Chunks of 256 numbers are more than the warps have stages for, and the last one is not whole.
        "long rows, Q4_0": case(1, 8256, 18, "Q4_0", True),
        "long rows, Q4_1": case(8, 7296, 16, "Q4_1"),
        "long rows, Q8_0": case(7, 6400, 33, "Q8_0", True),
        "long rows, Q4_K": case(1, 7168, 16, "Q4_K"),
        "long rows, Q5_K": case(2, 4608, 17, "Q5_K", True),
        "long rows, Q6_K": case(3, 6400, 31, "Q6_K"),
        "16 tokens": case(16, 2048, 17, "Q6_K", True),
        "chunks at odd places": case(70, 2048, 130, "Q6_K"),
        "9 tokens": case(9, 320, 16, "Q8_0"),
        "33 tokens": case(33, 512, 40, "Q4_K", True),
        "64 tokens": case(64, 416, 17, "Q4_0"),
        **{f"a tile, {kind}": case(65 + 8 * i, 256 + 256 * (i % 2), 130, kind, i % 2 == 0)
           for i, kind in enumerate(KINDS)},
        "many tokens": case(261, 288, 40, "Q8_0", True),
        "a wide tile": case(80, 32, 300, "Q4_1"),
        "tiles of 256 tokens": case(1030, 256, 250, "Q4_K"),
        "4 of 8 tokens at a time": case(8, 16384, 17, "Q4_0", True),
    }  # fmt: skip
    small = "small"
    hostile = ("small", "Q4_K")
    roundings = 16
    half_gradient_in_float32 = False  # tensor cores take numbers of the weight that are rounded to float16
    huge = ((3, 16384, 262_400, "Q8_0"), (70, 16384, 262_400, "Q8_0"))
    wrong = (
        ([*zeros((2, 64)), np.zeros((3, 18), np.uint8)], {}, ValueError,
         "gguf_matmul: x must have rows of 32 numbers, as many as the 18 bytes of blocks' rows have, got 64"),
        ([*zeros((2, 32)), np.zeros((3, 20), np.uint8)], {}, ValueError,
         "gguf_matmul: blocks must have rows of a multiple of 18 bytes for Q4_0, got 20"),
        ([*zeros((2, 32)), np.zeros((3, 18), np.uint8), *zeros((4,))], {}, ValueError,
         "gguf_matmul: bias must have shape (M,) = (3,), got (4,)"),
        ([*zeros((2, 32)), np.zeros((3, 18), np.int8)], {}, TypeError, "gguf_matmul: blocks must be uint8, got int8"),
        ([np.zeros((2, 32), np.int32), np.zeros((3, 18), np.uint8)], {}, TypeError,
         "gguf_matmul: x must be float16, float32 or float64, got int32"),
        ([*zeros((2, 32)), np.zeros((3, 18), np.uint8)], dict(kind="Q5_0"), ValueError,
         "gguf_matmul: kind must be one of Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, got 'Q5_0'"),
        ([*zeros((2, 32)), np.zeros((3, 18), np.uint8)], dict(kind=None), TypeError,
         "gguf_matmul: kind must be a str, got NoneType"),
    )  # fmt: skip

    def net(self, **settings):
        return Layer(**settings)

    def operators(self, shapes=(), kind="Q4_0", has_bias=True):
        return chain(operators(kind).without(*["bias"] * (not has_bias)))

    def inputs(self, shapes, dtype, seed=1, kind="Q4_0", **_):
        x, *bias = random(seed, dtype, shapes[0], *shapes[2:])
        rows, size = shapes[1]
        return [x, random_blocks(seed, kind, rows, size // KINDS[kind][0] * KINDS[kind][1]), *bias]

    def reference_gradient(self, x, blocks, *rest, **settings):
        *bias, dout = rest
        dx, *dbias = gguf_matmul_backward(dout, blocks, *bias, **settings)
        return dx, np.zeros_like(blocks), *dbias

    def random_case(self, random):
        kind = random.choice([*KINDS])
        return case(lengths(random)[:3], KINDS[kind][1] * (length(random) % 4), length(random), kind,
                    random.random() < 0.5)  # fmt: skip

    def check_huge(self, gpu, tokens, columns, rows, kind):
        """Compares the last rows of a weight of more than 2^32 numbers, and of its gradient, with float64. Tensor cores
        take numbers of the weight that are rounded to float16, but codes for few tokens."""
        torch = gpu.torch
        assert rows * row_bytes(kind, columns) > BIG
        forward, backward = self.operators(kind=kind, has_bias=False)
        few = random_blocks(1, kind, 64, columns)
        blocks = torch.from_numpy(few).cuda().repeat(rows // 64, 1)
        weight = torch.from_numpy(dequantized(few, kind)).cuda().double()
        x = gpu.random(tokens, columns)
        (out,) = gpu.run(forward, x, blocks)
        rounded = weight.half().double()
        gpu.assert_sums(out[:, -64:], x.double() @ (weight if tokens <= 8 else rounded).T)
        dout = torch.zeros_like(out)
        dout[:, -64:] = gpu.random(tokens, 64)
        gpu.assert_sums(gpu.run(backward, dout, blocks)[0], dout[:, -64:].double() @ rounded)


CARD = TestGgufMatmul()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("tokens", [1, 3, 7, 40, 100])
def test_equal_rows_give_equal_bits(tokens, dtype):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    [x] = random(0, dtype, (1, 512))
    blocks = random_blocks(0, "Q4_K", 37, 512)
    (out,) = run(Layer("Q4_K"), np.repeat(x, tokens, 0), blocks)
    np.testing.assert_array_equal(out, out[:1].repeat(tokens, 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_errors_are_those_of_the_unpacked_weight(tokens, kind, device_target):
    """The error is at most twice that of a product with the same numbers: x is not rounded to 8 bits. Tensor cores of a
    GPU, which take 20 tokens, round towards 0 where they add."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    [x], blocks = random(3, np.float32, (tokens, 2048)), random_blocks(3, kind, 64, 2048)
    weight = dequantized(blocks, kind)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    usual = np.abs(mindspore.ops.matmul(Tensor(x), Tensor(weight.T)).asnumpy() - exact)
    errors = np.abs(run(Layer(kind), x, blocks)[0] - exact)
    most = 4 if device_target == "GPU" and tokens > 8 else 2
    assert errors.max() <= most * usual.max()
    assert np.sqrt(np.mean(errors**2)) <= most * np.sqrt(np.mean(usual**2))


def test_bias_of_float32(mode):
    """A bias may be float32 beside float16, and is added before the sum is rounded."""
    x, blocks = np.ones((1, 32), np.float16), random_blocks(0, "Q8_0", 2, 32)
    blocks[:, :2], blocks[:, 2:] = np.array([1], np.float16).view(np.uint8), 64
    bias = np.float32([0.5, 1.25])
    np.testing.assert_array_equal(run(Layer("Q8_0"), x, blocks, bias)[0], [[2048, 2050]])
    gradient = run_gradient(Layer("Q8_0"), [x, blocks, bias], [np.full((1, 2), 3, np.float16)])[2]
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [3, 3])


@pytest.mark.parametrize("has_bias", [False, True])
def test_cell(mode, has_bias):
    net = msops.GGUFMatmul(64, 5, "Q4_1", has_bias, mindspore.float32)
    assert (net.blocks.shape, net.blocks.dtype, net.blocks.requires_grad) == ((5, 40), mindspore.uint8, False)
    blocks = random_blocks(2, "Q4_1", 5, 64)
    net.blocks.set_data(Tensor(blocks))
    [x] = random(0, np.float32, (7, 64))
    np.testing.assert_allclose(run(net, x)[0], *gguf_matmul(x, blocks, kind="Q4_1"), rtol=1e-5, atol=1e-5)
    assert f"in_channels=64, out_channels=5, kind=Q4_1, has_bias={has_bias}" in str(net)
    assert [p.name for p in net.trainable_params()] == ["bias"] * has_bias
    if has_bias:
        check_training(net, x)
    (half,) = run(net, x.astype(np.float16))
    assert half.dtype == np.float16


def test_wrong_settings_of_cell():
    for settings, error, words in (
        (dict(in_channels=96, kind="Q4_K"), ValueError,
         "GGUFMatmul: in_channels must be a multiple of 256 for Q4_K, got 96"),
        (dict(in_channels=2.0), TypeError, "GGUFMatmul: in_channels must be an int"),
        (dict(out_channels=0), ValueError, "GGUFMatmul: out_channels must be at least 1"),
        (dict(kind="Q4"), ValueError, "GGUFMatmul: kind must be one of"),
        (dict(kind=4), TypeError, "GGUFMatmul: kind must be a str"),
        (dict(has_bias=1), TypeError, "GGUFMatmul: has_bias must be a bool"),
        (dict(has_bias=True, dtype=mindspore.uint8), TypeError, "GGUFMatmul: dtype must be float16"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            msops.GGUFMatmul(**{**dict(in_channels=32, out_channels=5, kind="Q4_0"), **settings})
