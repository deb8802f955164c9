"""Tests what makes codes of matrices and matrices of codes."""

import re

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor

import msops


def numpy_codes(weight, bits, group, symmetric):
    """Returns codes, scales and zero points as the definition says, one group after another."""
    rows, columns = weight.shape
    whole, group = group is None, group or max(columns, 1)
    groups = 1 if whole else -(-columns // group)
    codes = np.zeros((rows, columns), int)
    scales, zeros = np.ones((rows, groups), np.float32), np.zeros((rows, groups), int)
    for r in range(rows):
        for g in range(groups):
            part = weight[r, g * group : (g + 1) * group].astype(np.float32)
            low, high = part.min(initial=0), part.max(initial=0)
            most = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
            scale = np.float32((max(-low, high) if symmetric else high - low) / np.float32(most))
            scale = scale if scale > 0 else np.float32(1)
            zero = 0 if symmetric else int(np.rint(-low / scale))
            found = np.rint(part / scale) + zero
            codes[r, g * group : (g + 1) * group] = np.clip(found, -most if symmetric else 0, most)
            scales[r, g], zeros[r, g] = scale, zero
    return codes, scales, zeros


def numbers_of(codes, bits, columns):
    """Returns the codes of bytes one by one."""
    if bits == 8:
        return codes.astype(int)
    found = np.zeros((len(codes), columns), int)
    for column in range(columns):
        half = codes[:, column // 2].view(np.uint8) >> 4 * (column % 2) & 15
        found[:, column] = half.astype(int) - 16 * (half > 7) * (codes.dtype == np.int8)
    return found


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("shape", "group"), [((3, 10), 4), ((4, 7), None), ((2, 9), 100), ((3, 0), 4), ((3, 0), None), ((0, 5), 2)]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_quantize_weight(bits, symmetric, shape, group, dtype):
    weight = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight[:1, :4] = 0  # a group of zeros
    weight[1:2] = np.abs(weight[1:2])  # numbers of one sign
    codes, scale, zero_point = msops.quantize_weight(Tensor(weight), bits, group, symmetric)
    want = numpy_codes(weight, bits, group, symmetric)
    assert codes.dtype == (mindspore.int8 if symmetric else mindspore.uint8)
    assert scale.dtype == mindspore.float32
    np.testing.assert_array_equal(numbers_of(codes.asnumpy(), bits, shape[1]), want[0])
    np.testing.assert_array_equal(scale.asnumpy(), want[1])
    if symmetric:
        assert zero_point is None
    else:
        assert zero_point.dtype == mindspore.uint8
        np.testing.assert_array_equal(zero_point.asnumpy(), want[2])
    matrix = msops.dequantize_weight(codes, scale, zero_point, bits, group).asnumpy()[:, : shape[1]]
    place = np.arange(shape[1]) // (group or max(shape[1], 1))
    np.testing.assert_array_equal(matrix, (want[0] - want[2][:, place]).astype(np.float32) * want[1][:, place])
    assert (np.abs(matrix - weight) <= 0.51 * want[1][:, place] + 1e-3 * (dtype == "float16")).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_leading_axes(symmetric):
    weight = np.random.default_rng(0).standard_normal((2, 3, 4, 6)).astype(np.float32)
    codes, *others = msops.quantize_weight(Parameter(Tensor(weight)), 4, 2, symmetric)
    assert codes.shape == (2, 3, 4, 3)
    assert others[0].shape == (2, 3, 4, 3)
    whole = msops.dequantize_weight(codes, *others, bits=4, group=2).asnumpy()
    one, *of_one = msops.quantize_weight(Tensor(weight[1, 2]), 4, 2, symmetric)
    np.testing.assert_array_equal(whole[1, 2], msops.dequantize_weight(one, *of_one, bits=4, group=2).asnumpy())


def test_groups_longer_than_rows():
    """They are no longer than the rows, so that no memory is taken for what is beyond."""
    weight = Tensor(np.random.default_rng(0).standard_normal((3, 10)), mindspore.float32)
    whole = msops.quantize_weight(weight, group=None)
    for one, other in zip(msops.quantize_weight(weight, group=2**31 - 1), whole):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dequantize_weight(dtype):
    """Codes of the other order of axes, of a codebook, with scales as vectors, and in other dtypes."""
    kind = getattr(mindspore, dtype)
    codes, scale = Tensor(np.uint8([[0x21, 0x43], [0x65, 0x87]])), Tensor(np.float32([[0.5, 1, 2], [4, 8, 16]]))
    got = msops.dequantize_weight(codes, scale, None, 4, 1, False, dtype=kind)
    assert got.dtype == kind
    np.testing.assert_array_equal(got.asnumpy(), [[0.5, 2, 6], [20, 48, 112]])
    table = Tensor(np.arange(16, dtype=np.float32) ** 2)
    got = msops.dequantize_weight(codes, Tensor(np.float32([1, -1])), None, 4, codebook=table, dtype=kind)
    np.testing.assert_array_equal(got.asnumpy(), [[1, 4, 9, 16], [-25, -36, -49, -64]])
    signed = Tensor(np.int8([[-128, 127]]))
    got = msops.dequantize_weight(
        signed, Tensor(np.float32([[2, 1]])), Tensor(np.float32([[0.5, 1]])), 8, 1, dtype=kind
    )
    np.testing.assert_array_equal(got.asnumpy(), [[-257, 126]])
    got = msops.dequantize_weight(Tensor(np.int8([[-8 + 16, 0x7F]])), Tensor(np.float32([[1, 1, 1]])), None, 4, 1)
    np.testing.assert_array_equal(got.asnumpy(), [[-8, 0, -1]])  # the groups tell that there are three columns


MATRIX, CODES, SCALE = Tensor([[1.0, 2.0]]), Tensor(np.uint8([[1, 2]])), Tensor(np.float32([[1]]))


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        ("quantize_weight", ([[1.0]],), TypeError, "weight must be a Tensor, got list"),
        ("quantize_weight", (Tensor([1.0]),), ValueError, "weight must have shape (..., M, K), got (1,)"),
        ("quantize_weight", (Tensor([[1]]),), TypeError, "weight must be float16, float32 or float64, got int64"),
        ("quantize_weight", (Tensor([[1.0, np.nan]]),), ValueError, "weight must be finite, got nan"),
        ("quantize_weight", (Tensor([[3e38, -3e38]]),), ValueError, "weight must have a range that float32 holds"),
        ("quantize_weight", (MATRIX, 2), ValueError, "bits must be 4 or 8, got 2"),
        ("quantize_weight", (MATRIX, 4.0), TypeError, "bits must be an int, got float"),
        ("quantize_weight", (MATRIX, 4, 0), ValueError, "group must be at least 1, got 0"),
        ("quantize_weight", (MATRIX, 4, True), TypeError, "group must be an int, got bool"),
        ("quantize_weight", (MATRIX, 4, 1, 1), TypeError, "symmetric must be a bool, got int"),
        ("dequantize_weight", (MATRIX, SCALE), TypeError, "weight must be uint8 or int8, got float32"),
        ("dequantize_weight", (CODES, None), TypeError, "scale must be a Tensor, got NoneType"),
        ("dequantize_weight", (CODES, SCALE, None, 8, 1), ValueError, "scale must have shape (1, 2), got (1, 1)"),
        ("dequantize_weight", (CODES, SCALE, MATRIX), ValueError, "zero_point must have shape (1, 1), got (1, 2)"),
        ("dequantize_weight", (CODES, SCALE, SCALE, 8, None, True, MATRIX), ValueError, "exclude each other"),
        ("dequantize_weight", (CODES, SCALE, None, 8, None, True, MATRIX), ValueError, "a Tensor of shape (256,), got"),
        ("dequantize_weight", (CODES, SCALE, None, 8, None, 1), TypeError, "transpose_weight must be a bool, got int"),
        ("dequantize_weight", (CODES, SCALE, None, 8, None, True, None, mindspore.int8), TypeError, "dtype must be"),
    ],
)  # fmt: skip
def test_wrong_arguments(function, arguments, error, words):
    with pytest.raises(error, match=f"^{function}: .*{re.escape(words)}"):
        getattr(msops, function)(*arguments)
