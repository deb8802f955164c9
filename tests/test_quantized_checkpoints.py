"""Tests that converted checkpoints mean what their packages say, by the formula of weight_quant_matmul in NumPy."""

import re

import numpy as np
import pytest

import msops
from blocks import KINDS, dequantized, random_blocks


def numbers_of(weight, scale, zero_point, bits, group, codebook=None, order=None):
    """Returns the numbers (M, K) that weight_quant_matmul multiplies by, in float32. K is even, or bits are 8."""
    if bits == 4:
        halves = np.stack([weight.view(np.uint8) & 15, weight.view(np.uint8) >> 4], -1).reshape(
            len(weight), 2 * weight.shape[1]
        )
        weight = (halves.astype(np.int8) ^ 8) - 8 if weight.dtype == np.int8 else halves
    columns = weight.shape[1]
    scale = scale.astype(np.float32).repeat(group, 1)[:, :columns]
    if codebook is not None:
        return codebook[weight] * scale
    zero = 0 if zero_point is None else zero_point.astype(np.float32).repeat(group, 1)[:, :columns]
    found = (weight.astype(np.float32) - zero) * scale
    if order is None:
        return found
    restored = np.empty_like(found)
    restored[:, order] = found  # x[..., order] times `found` is x times this
    return restored


def random_weight(seed, deep, columns, group, bits=4):
    """Returns codes (K, M), zeros and scales (G, M), and what they mean, (M, K)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (deep, columns), dtype=np.uint8)
    zeros = rng.integers(0, 2**bits, (deep // group, columns), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    return codes, zeros, scales


def meaning(codes, zeros, scales, groups):
    """Returns (M, K), where `groups` has the group of each row."""
    return ((codes.astype(np.float32) - zeros[groups]) * scales[groups].astype(np.float32)).T


def packed(numbers, bits, order=None):
    """Packs neighbours along the last axis into int32: of each, the one at order[i] becomes part i."""
    each = 32 // bits
    order, words = order or range(each), np.zeros((*numbers.shape[:-1], numbers.shape[-1] // each), np.uint32)
    for part, at in enumerate(order):
        words |= numbers[..., at::each].astype(np.uint32) << np.uint32(bits * part)
    return words.view(np.int32)


@pytest.mark.parametrize(("deep", "columns", "group"), [(256, 24, 128), (96, 8, 32), (7, 16, 7), (64, 40, 64)])
def test_awq(deep, columns, group):
    codes, zeros, scales = random_weight(0, deep, columns, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    found = msops.convert_awq(packed(codes, 4, order), packed(zeros, 4, order), scales)
    assert found["weight"].shape == (columns, -(-deep // 2))
    assert found["scale"].dtype == np.float16
    assert (found["bits"], found["group"], found["zero_point"].dtype) == (4, group, np.uint8)
    want = meaning(codes, zeros, scales, np.arange(deep) // group)
    np.testing.assert_array_equal(numbers_of(**found)[:, :deep] if deep % 2 == 0 else odd(found, deep), want)


def odd(found, deep):
    """Returns the numbers of an odd number of columns, of which the last byte has one."""
    weight, group = found["weight"], found["group"]
    halves = np.stack([weight & 15, weight >> 4], -1).reshape(len(weight), -1)[:, :deep]
    scale, zero = (found[each].astype(np.float32).repeat(group, 1)[:, :deep] for each in ("scale", "zero_point"))
    return (halves - zero) * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("minus_one", [True, False])
def test_gptq(bits, minus_one):
    codes, zeros, scales = random_weight(1, 128, 24, 32, bits)
    zeros[0, :2] = 0, 2**bits - 1  # 0 is stored as 15 if 1 is subtracted
    stored = (zeros - minus_one) % 2**bits if minus_one else zeros
    arrays = packed(codes.T, bits).T, packed(stored.astype(np.uint8), bits), scales
    found = msops.convert_gptq(*arrays, bits=bits, zeros_minus_one=minus_one)
    assert "order" not in found
    assert (found["bits"], found["group"]) == (bits, 32)
    groups = np.arange(128) // 32
    np.testing.assert_array_equal(numbers_of(**found), meaning(codes, zeros, scales, groups))
    same = msops.convert_gptq(*arrays, groups.astype(np.int32), bits, minus_one)
    assert "order" not in same
    np.testing.assert_array_equal(numbers_of(**same), numbers_of(**found))


@pytest.mark.parametrize("deep", [128, 104])
def test_gptq_whose_groups_are_not_neighbours(deep):
    """Rows of a group may be anywhere, and the last group may be short."""
    rng = np.random.default_rng(2)
    groups = rng.permutation(np.arange(deep) // 32)
    codes, zeros, scales = random_weight(3, 128, 16, 32)
    codes = codes[:deep]
    stored = ((zeros.astype(int) - 1) % 16).astype(np.uint8)
    found = msops.convert_gptq(packed(codes.T, 4).T, packed(stored, 4), scales, groups)
    want = meaning(codes, zeros, scales, groups)
    np.testing.assert_array_equal(numbers_of(**found), want)
    x = rng.standard_normal((3, deep))
    order = found.pop("order")
    assert order.dtype == np.int32
    np.testing.assert_allclose(x[:, order] @ numbers_of(**found).T, x @ want.T, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf(kind):
    """Numbers of kinds without minima are exact; the others are rounded as float32 is."""
    blocks = random_blocks(4, kind, 5, 1024)
    found, want = msops.convert_gguf(blocks, kind), dequantized(blocks, kind)
    assert (found["bits"], found["group"]) == (
        8 if kind in ("Q8_0", "Q5_K", "Q6_K") else 4,
        16 if kind == "Q6_K" else 32,
    )
    assert found["scale"].dtype == np.float32
    if kind in ("Q4_0", "Q8_0", "Q6_K"):
        assert (found["weight"].dtype, found["zero_point"]) == (np.int8, None)
        np.testing.assert_array_equal(numbers_of(**found), want)
        return
    minima = np.abs(found["zero_point"] * found["scale"]).repeat(32, 1)
    assert (np.abs(numbers_of(**found) - want) <= 2**-23 * (np.abs(want) + minima)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_outputs(kind):
    """A weight of no rows has the sizes of its columns."""
    assert msops.convert_gguf(random_blocks(4, kind, 0, 512), kind)["weight"].shape == (0, 256 if "4_" in kind else 512)
    words, scales = np.zeros((8, 0), np.int32), np.ones((2, 0), np.float16)
    assert msops.convert_awq(words, words[:2], scales)["weight"].shape == (0, 4)
    assert msops.convert_gptq(words, words[:2], scales)["weight"].shape == (0, 32)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_K"])
def test_gguf_of_scale_0(kind):
    """Groups whose scale is 0 are constant: all of their numbers are the offset."""
    blocks = random_blocks(5, kind, 3, 512)
    size = KINDS[kind][0]
    blocks[1].reshape(-1, size)[:, :2] = 0
    want = dequantized(blocks, kind)
    assert np.abs(want[1]).max() > 0
    np.testing.assert_allclose(numbers_of(**msops.convert_gguf(blocks, kind)), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "block"), [((4, 128), 64), ((3, 96), 64), ((4, 16), 64), ((5, 30), 64), ((1, 64), 128), ((0, 8), 64)]
)
def test_nf4(shape, block):
    """Blocks may go on in the next row, and the last one may be short."""
    rng, count = np.random.default_rng(6), shape[0] * shape[1]
    codes = rng.integers(0, 16, count, dtype=np.uint8)
    absmax = rng.uniform(0.5, 2, -(-count // block)).astype(np.float32)
    stored = (codes[::2] << 4 | codes[1::2]).reshape(-1, 1)  # the first is the upper half
    found = msops.convert_nf4(stored, absmax, shape, block)
    assert (found["bits"], found["zero_point"], found["codebook"].dtype) == (4, None, np.float32)
    assert found["codebook"].tolist() == sorted(found["codebook"])
    assert found["codebook"][[0, 7, 15]].tolist() == [-1, 0, 1]
    want = (found["codebook"][codes] * absmax.repeat(block)[:count]).reshape(shape)
    np.testing.assert_array_equal(numbers_of(**found), want)


def test_nf4_of_odd_rows():
    """A byte may have the last number of a row and the first of the next."""
    codes, absmax = np.arange(15, dtype=np.uint8), np.ones(1, np.float32)
    stored = np.append(codes, np.uint8(0))
    found = msops.convert_nf4((stored[::2] << 4 | stored[1::2]), absmax, (3, 5))
    halves = np.stack([found["weight"] & 15, found["weight"] >> 4], -1).reshape(3, -1)[:, :5]
    np.testing.assert_array_equal(halves, codes.reshape(3, 5))
    assert found["scale"].shape == (3, 5)
    assert found["group"] == 1


INTS, SCALES = np.zeros((8, 2), np.int32), np.ones((1, 16), np.float16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: msops.convert_awq(INTS.astype(np.int64), INTS[:1], SCALES), TypeError,
         "convert_awq: qweight must be int32, got int64"),
        (lambda: msops.convert_awq([1], INTS[:1], SCALES), TypeError,
         "convert_awq: qweight must be a numpy.ndarray, got list"),
        (lambda: msops.convert_awq(INTS, INTS[:2], SCALES), ValueError,
         "convert_awq: qzeros must have shape (1, 2), got (2, 2)"),
        (lambda: msops.convert_awq(INTS, INTS[:1], SCALES[:, :8]), ValueError,
         "convert_awq: scales must have shape (any, 16), got (1, 8)"),
        (lambda: msops.convert_awq(INTS, INTS[:3], np.ones((3, 16), np.float16)), ValueError,
         "convert_awq: scales must have a number of groups that divides 8 rows, got 3"),
        (lambda: msops.convert_awq(INTS, INTS[:0], SCALES[:0]), ValueError,
         "convert_awq: scales must have a number of groups that divides 8 rows, got 0"),
        (lambda: msops.convert_gptq(INTS, INTS[:1, :1], SCALES, bits=3), ValueError,
         "convert_gptq: bits must be 4 or 8, got 3"),
        (lambda: msops.convert_gptq(INTS, INTS[:1, :1], SCALES, bits=True), TypeError,
         "convert_gptq: bits must be an int, got bool"),
        (lambda: msops.convert_gptq(INTS, INTS[:1, :1], SCALES, zeros_minus_one=1), TypeError,
         "convert_gptq: zeros_minus_one must be a bool, got int"),
        (lambda: msops.convert_gptq(INTS, INTS[:1, :1], SCALES[:, :2]), ValueError,
         "convert_gptq: qweight must have a multiple of 8 columns, got 2"),
        (lambda: msops.convert_gptq(np.zeros((1, 8), np.int32), np.zeros((2, 1), np.int32), np.ones((2, 8), np.float32),
                                    np.array([0, 0, 0, 1, 1, 1, 1, 1])), ValueError,
         "convert_gptq: g_idx must give each of 2 groups equally many rows, got [0 0 0 1 1 1 1 1]"),
        (lambda: msops.convert_gguf(np.zeros((2, 19), np.uint8), "Q4_0"), ValueError,
         "convert_gguf: blocks must have rows of a multiple of 18 bytes for Q4_0, got 19"),
        (lambda: msops.convert_gguf(np.zeros((2, 18), np.uint8), "Q5_0"), ValueError,
         "convert_gguf: kind must be one of Q4_0, Q4_1"),
        (lambda: msops.convert_gguf(np.zeros((2, 18), np.int8), "Q4_0"), TypeError,
         "convert_gguf: blocks must be uint8, got int8"),
        (lambda: msops.convert_nf4(np.zeros(3, np.uint8), np.ones(1, np.float32), (2, 4)), ValueError,
         "convert_nf4: codes must have 4 elements for 8 numbers, got 3"),
        (lambda: msops.convert_nf4(np.zeros(4, np.uint8), np.ones(2, np.float32), (2, 4)), ValueError,
         "convert_nf4: absmax must have 1 elements for 8 numbers, got 2"),
        (lambda: msops.convert_nf4(np.zeros(4, np.uint8), np.ones(1, np.uint8), (2, 4)), TypeError,
         "convert_nf4: absmax must be float, got uint8"),
        (lambda: msops.convert_nf4(np.zeros(4, np.uint8), np.ones(1, np.float32), 8), TypeError,
         "convert_nf4: shape must be a tuple of two ints, got 8"),
        (lambda: msops.convert_nf4(np.zeros(4, np.uint8), np.ones(1, np.float32), (2, 4.0)), TypeError,
         "convert_nf4: shape must be an int, got float"),
        (lambda: msops.convert_nf4(np.zeros(4, np.uint8), np.ones(1, np.float32), (2, 4), 0), ValueError,
         "convert_nf4: block must be at least 1, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()
