"""Tests that MindSpore's names of operators of codes work by msops' kernels while they are patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

import msops
from test_patched_operators import call

generated = getattr(ops, "auto_generate", None)
pytestmark = pytest.mark.skipif(not hasattr(generated, "DynamicQuantExt"), reason="this MindSpore has no such names")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 10)).astype(np.float16)
CODES = RNG.integers(-128, 128, (10, 6), np.int8)
SCALE, OFFSET = (RNG.random(6).astype(np.float16) / 64, RNG.integers(-9, 9, 6).astype(np.float16))
OF_GROUPS = [RNG.random((3, 6)).astype(np.float16) / 64, RNG.integers(-9, 9, (3, 6)).astype(np.float16)]
BIAS = RNG.standard_normal(6).astype(np.float16)
TOLERANCE = dict(rtol=2e-3, atol=2e-2)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def packed(codes):
    """Puts two codes along the last axis into a byte, the first into its lower half."""
    halves = codes.view(np.uint8) & 15
    return (halves[:, ::2] | halves[:, 1::2] << 4).view(np.int8)


def products(x, codes, codes_t, scale, offset, bias, groups, offsets):
    matmul = generated.WeightQuantBatchMatmul
    one = ops.full((1,), 0.25, dtype=mindspore.float16)
    return (
        matmul()(x, codes, scale, offset),
        matmul(False, True)(x, codes_t, scale.reshape((1, 6)), offset.reshape((1, 6)), None, None, bias),
        matmul(True)(x.T, codes, scale),
        matmul()(x, codes, one),
        matmul(False, False, 4)(x, codes, groups, offsets),
        matmul(False, True, 4)(x, codes_t, groups, offsets),
        matmul(False, True, 4)(x, codes_t, groups.T, offsets.T),
        generated.weight_quant_batch_matmul(x, codes, scale, offset),
    )


def test_products_with_codes(mode):
    got = call(products, X, CODES, CODES.T.copy(), SCALE, OFFSET, BIAS, *OF_GROUPS)
    x, codes, scale, offset, bias = (each.astype(np.float64) for each in (X, CODES, SCALE, OFFSET, BIAS))
    groups, offsets = (each.astype(np.float64)[np.arange(10) // 4] for each in OF_GROUPS)
    plain, grouped = x @ ((codes + offset) * scale), x @ ((codes + offsets) * groups)
    wanted = plain, plain + bias, x @ (codes * scale), x @ codes / 4, grouped, grouped, grouped, plain
    for each, want in zip(got, wanted):
        assert each.dtype == np.float16
        np.testing.assert_allclose(each, want, **TOLERANCE)


def products_of_four_bits(x, codes, codes_t, scale, offset):
    matmul = generated.WeightQuantBatchMatmul
    return matmul()(x, codes, scale, offset), matmul(False, True)(x, codes_t, scale, offset)


def test_products_with_codes_of_four_bits(mode):
    codes = CODES >> 4
    got = call(products_of_four_bits, X, packed(codes), packed(codes.T.copy()), SCALE, OFFSET)
    x, scale, offset = (each.astype(np.float64) for each in (X, SCALE, OFFSET))
    for each in got:
        np.testing.assert_allclose(each, x @ ((codes + offset) * scale), **TOLERANCE)


@pytest.mark.skipif(not hasattr(mindspore, "qint4x2"), reason="this MindSpore has no such type")
def test_products_with_pairs_of_codes():
    """MindSpore has a type of two codes. Graph mode refuses Parameters of it on the CPU."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    codes = CODES >> 4
    weight = Parameter(Tensor(packed(codes), dtype=mindspore.qint4x2))
    got = generated.WeightQuantBatchMatmul()(Tensor(X), weight, Tensor(SCALE)).asnumpy()
    np.testing.assert_allclose(got, X.astype(np.float64) @ (codes * SCALE.astype(np.float64)), **TOLERANCE)
    got = generated.WeightQuantBatchMatmul()(Tensor(X), weight, Tensor(SCALE[:1])).asnumpy()
    np.testing.assert_allclose(got, X.astype(np.float64) @ (codes * SCALE[0].astype(np.float64)), **TOLERANCE)


def products_of_int8(x, codes, codes_t, scale, coded, bias, of_rows):
    matmul = generated.QuantBatchMatmul
    return (
        matmul()(x, codes, scale),
        matmul(False, True)(x, codes_t, coded, None, bias),
        matmul(False, False, mindspore.float32)(x, codes, scale, None, bias, of_rows),
        matmul(True)(x.T, codes, scale),
        generated.quant_batch_matmul(x, codes, scale, None, bias),
    )


def test_products_of_int8(mode):
    x, scale = RNG.integers(-128, 128, (3, 10), np.int8), np.float32([1e-3, -2e-3, 3e-3, 1e-40, 5e-3, 2.0**-10])
    bias, of_rows = RNG.integers(-99, 99, 6, np.int32), RNG.random(3).astype(np.float32)
    coded = scale.view(np.uint32).astype(np.int64) + (7 << 40)
    got = call(products_of_int8, x, CODES, CODES.T.copy(), scale, coded, bias, of_rows)
    sums, of_rows = x.astype(int) @ CODES.astype(int), of_rows[:, None]
    plain, whole = sums * scale, (sums + bias) * scale
    for each, want in zip(got, (plain, whole, whole * of_rows, plain, whole)):
        np.testing.assert_allclose(each, want, rtol=1e-3, atol=1e-6)
    assert [each.dtype for each in got] == [np.float16, np.float16, np.float32, np.float16, np.float16]


def codes_of(x, scale, offset, smooth, zero):
    return (
        generated.QuantV2()(x, 1 / scale, zero),
        generated.QuantV2()(x, scale, offset),
        generated.quant_v2_op(x, scale, offset, False, "Round"),
        *generated.DynamicQuantExt()(x, smooth),
        *generated.dynamic_quant_ext_op(x),
    )


def test_codes(mode):
    scale, offset, smooth = np.full(10, 50, np.float16), np.full(10, 0.5, np.float16), BIAS[[0] * 10]
    zero = np.arange(-5, 5).astype(np.int8)
    divided, first, second, *others = call(codes_of, X, scale, offset, smooth, zero)
    want = np.clip(np.rint(X.astype(np.float32) * 50 + np.float32(0.5)), -128, 127)
    np.testing.assert_array_equal(first, want)
    np.testing.assert_array_equal(second, want)
    quotients = X.astype(np.float32) / np.float16(1 / 50).astype(np.float32)
    np.testing.assert_array_equal(divided, np.clip(np.rint(quotients + zero), -128, 127))
    for codes, scales, y in ((*others[:2], X.astype(np.float32) * smooth), (*others[2:], X.astype(np.float32))):
        assert (codes.dtype, scales.dtype) == (np.int8, np.float32)
        np.testing.assert_allclose(scales, np.abs(y).max(-1) / 127, rtol=1e-6)
        np.testing.assert_allclose(codes * scales[:, None], y, atol=scales.max())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x, w, s: generated.WeightQuantBatchMatmul()(x, w, s, None, s), "msops has no quant_scale"),
        (lambda x, w, s: generated.WeightQuantBatchMatmul()(x, w, s, None, None, s), "msops has no quant_offset"),
        (lambda x, w, s: generated.WeightQuantBatchMatmul()(x, w[None], s), "msops has no batched weights"),
        (
            lambda x, w, s: generated.WeightQuantBatchMatmul()(x, w, s.astype(mindspore.int64)),
            "antiquant_scale must be of floats, got Int64",
        ),
        (lambda x, w, s: generated.QuantBatchMatmul()(w, w, s, s), "QuantBatchMatmul: msops has no offset"),
        (lambda x, w, s: generated.QuantBatchMatmul(dtype=mindspore.bfloat16)(w, w, s), "got bfloat16"),
        (lambda x, w, s: generated.QuantV2()(x, s, s, True), "QuantV2: msops has no sqrt_mode"),
        (lambda x, w, s: generated.QuantV2()(x, s, s, False, "FLOOR"), "rounding_mode must be 'ROUND', got 'FLOOR'"),
    ],
)
def test_refused(make, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(NotImplementedError, match=words):
        make(Tensor(X), Tensor(CODES), Tensor(SCALE))


def test_wrong_scales():
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(
        ValueError, match=r"WeightQuantBatchMatmul: antiquant_scale must have shape \(3, 6\), got \(2, 6\)"
    ):
        generated.WeightQuantBatchMatmul(False, False, 4)(Tensor(X), Tensor(CODES), Tensor(np.ones((2, 6), np.float16)))
