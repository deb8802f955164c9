"""Tests what attention adds to its logits, and dropout, beyond what the cards test."""

import ctypes
import functools

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from card import DTYPES, check_formula, random
from gpu import compare_with_cpu
from msops.compat import VERSION
from msops.shared.attention import operators
from msops.testing.checks import assert_accurate, largest
from numpy_attention import (
    DEFAULTS,
    Attend,
    attention,
    attention_backward,
    attention_bias_backward,
    case,
    distances,
)
from operator_test import PLAIN, run, run_gradient, wide_in_graph_mode
from test_flash_attention import KV, Q, TestFlashAttention as FlashAttentionCard


@pytest.mark.parametrize("dtype", DTYPES)
@wide_in_graph_mode
def test_bias_of_minus_infinity_hides_as_a_mask_does(mode, dtype, device_target):
    """Results and gradients are equal, also of queries that see nothing, and the bias's own is 0 there. On a CPU they
    are equal bit for bit; on a GPU other kernels compute them, which sum in other orders."""
    units = 0 if device_target == "CPU" else 4 * np.finfo(dtype).eps
    q, k, v = random(1, dtype, (2, 4, 7, 8), (2, 2, 70, 8), (2, 2, 70, 8))
    mask = np.random.default_rng(2).random((2, 1, 7, 70)) < 0.4
    mask[1, 0, 3] = True
    bias = np.where(mask, -np.inf, 0).astype(dtype)
    nets = [Attend(return_lse=True, causal=True, optional=(name,)) for name in ("mask", "bias")]
    results = [run(net, q, k, v, x) for net, x in zip(nets, (mask, bias))]
    for by_mask, by_bias in zip(*results):
        np.testing.assert_allclose(by_bias, by_mask, units, units)
    douts = [np.ones_like(x) for x in results[0]]
    (*hidden_by_mask, _), (*hidden_by_bias, dbias) = (
        run_gradient(net, [q, k, v, x], douts) for net, x in zip(nets, (mask, bias))
    )
    for by_mask, by_bias in zip(hidden_by_mask, hidden_by_bias):
        np.testing.assert_allclose(by_bias, by_mask, units, units * largest(by_mask))
    assert not dbias[mask].any()


@wide_in_graph_mode
@pytest.mark.parametrize("far", [-65504, -1e6, -1e9, np.finfo(np.float32).min, 1e9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_far_from_0(mode, dtype, far):
    """Rows of padding have a large finite bias on all keys, beside which lse loses the sum of their weights. Products
    of q and k have few digits here, so that it is known what the bias leaves of them."""
    whole, wide = np.random.default_rng(1).integers, np.promote_types(dtype, np.float32).type
    q, k, v = (whole(-4, 5, shape).astype(dtype) / 4 for shape in ((2, 4, 9, 4), (2, 4, 70, 4), (2, 4, 70, 4)))
    bias = np.zeros((2, 1, 9, 70), np.float32)
    bias[0, 0, 2:5] = bias[1, 0, ::3] = far
    out, lse = run(Attend(scale=0.5, return_lse=True, optional=("bias",)), q, k, v, bias)
    douts = [*random(2, dtype, out.shape), np.zeros_like(lse)]
    *got, dbias = run_gradient(Attend(scale=0.5, return_lse=True, optional=("bias",)), [q, k, v, bias], douts)

    arrays = [x.astype(np.float64) for x in (q, k, v)]
    products = 0.5 * arrays[0] @ arrays[1].swapaxes(-1, -2)
    left = (products + bias).astype(wide) - products
    settings = dict(scale=0.5, optional=("bias",))
    known = [*arrays, left, *attention(*arrays, left, **settings), *douts]
    want = [
        *attention_backward(*known, **settings),
        attention_bias_backward(*known, **settings)[0].sum(1, keepdims=True),
    ]
    tolerances = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-13}
    for dx, wanted in zip([*got, dbias], want):
        tolerance = max(tolerances[dtype], tolerances[dx.dtype.name])
        np.testing.assert_allclose(dx, wanted, tolerance, tolerance * largest(wanted))


def test_alibi_is_a_bias(mode):
    """Slopes of heads, or of samples and heads, are this bias, whatever is not seen."""
    shapes, _ = case((4, 2, 30, 50), lengths=True)
    settings = dict(causal=True, return_lse=True)
    q, k, v, lengths = FlashAttentionCard().inputs(shapes, np.float64, optional=("kv_lengths",))
    for slopes in (np.float32([0.5, 0.25, 0.125, 0]), random(3, np.float32, (2, 4))[0]):
        bias = -slopes[..., None, None].astype(np.float64) * distances((2, 4, 30, 50), lengths)
        with_slopes, with_bias = (
            Attend(optional=("kv_lengths", name), **settings) for name in ("alibi_slopes", "bias")
        )
        want = run(with_bias, q, k, v, lengths, bias)
        for got, wanted in zip(run(with_slopes, q, k, v, lengths, slopes), want):
            np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-13)
        got = run_gradient(with_slopes, [q, k, v, lengths, slopes], want)
        for dx, wanted in zip(got[:3], run_gradient(with_bias, [q, k, v, lengths, bias], want)):
            np.testing.assert_allclose(dx, wanted, rtol=1e-12, atol=1e-12)
        assert not got[4].any()


COUNTED = """
#include "common/call.h"
extern "C" __attribute__((visibility("default"))) int calls;
int calls = 0;
MSOPS_ENTRY(Counted) {
  for (const char* name : {"q", "k", "v", "bias", "out", "lse", "dout", "dlse", "dbias"}) call.tensor(name);
  return call.run([&](auto) { ++calls; });
}
"""


def test_gradient_of_bias_is_computed_on_request(mode):
    """It is left out where nobody asks for it: by graph mode, and in PyNative mode where the bias tells."""
    library = msops.load("counted_attention", COUNTED, cxx_flags=PLAIN)
    calls = ctypes.c_int.in_dll(library.handle, "calls")
    # No other test has an operator of this scale.
    gradients = operators(**{**DEFAULTS, "scale": 0.123}, bias_gradient=True).gradient.__self__
    absent = (f"{name}?" for name in ("kv_lengths", "mask", "alibi_slopes", "seed"))
    counted = "q, k, v, {}, {}, bias, {}, {}, out, lse, dout, dlse -> dbias".format(*absent)
    gradients.of_bias = msops.custom_op(library.Counted, counted, infer=lambda *inputs: inputs[5])
    q, k, v, bias = map(Tensor, random(1, np.float32, Q, KV, KV, (3, 5)))

    def attend(q, bias):
        return msops.flash_attention(q, k, v, scale=0.123, bias=bias)

    def without(q, bias):
        return attend(q, ops.stop_gradient(bias))

    def count(function, positions):
        before = calls.value
        mindspore.grad(function, positions)(q, bias).asnumpy()
        return calls.value - before

    assert count(attend, 1) == 1
    assert count(without, 0) == 0
    if mode == "graph":
        assert count(attend, 0) == 0


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean(mode, dropout_p):
    """The share of weights that are kept is 1 - p, and those are divided by it, so that sums stay on average."""
    rows, keys = 64, 4000
    q, k = np.zeros((1, 2, rows, 4), np.float32), np.zeros((1, 2, keys, 4), np.float32)
    v = np.ones((1, 2, keys, 1), np.float32)
    out, lse = run(Attend(dropout_p=dropout_p, seed=5, return_lse=True), q, k, v)
    share, n = out.mean() * (1 - dropout_p), out.size * keys
    assert abs(share - (1 - dropout_p)) < 5 * (dropout_p * (1 - dropout_p) / n) ** 0.5
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-6)
    kept_keys = np.rint(out[..., 0] * (1 - dropout_p) * keys)  # of each query
    spread = kept_keys.std() / (keys * dropout_p * (1 - dropout_p)) ** 0.5
    assert 0.7 < spread < 1.3  # as of independent draws: over 128 rows, 6 standard deviations off


@wide_in_graph_mode
def test_seeds_of_dropout(mode):
    """Equal seeds, as ints or Tensors, drop equal weights; others drop others, in each sample and head."""
    q, k, v = random(1, np.float32, (2, 2, 5, 8), (2, 2, 40, 8), (2, 2, 40, 8))
    q[:], k[:], v[:] = q[:1, :1], k[:1, :1], v[:1, :1]
    by_int, by_tensor = Attend(dropout_p=0.5, seed=7), Attend(dropout_p=0.5, optional=("seed",))
    (want,) = run(by_int, q, k, v)
    np.testing.assert_array_equal(run(by_tensor, q, k, v, np.array(7))[0], want)
    assert (run(by_tensor, q, k, v, np.array(7 + 2**32))[0] != want).any((2, 3)).all()
    assert len(np.unique(want.reshape(4, -1), axis=0)) == 4
    np.testing.assert_array_equal(run(Attend(seed=7), q, k, v)[0], run(Attend(), q, k, v)[0])


def test_cell_drops_in_training_alone(mode):
    if VERSION < (2, 3):
        pytest.skip("MindSpore before 2.3 has no generator")
    q, k, v = random(1, np.float32, (1, 2, 5, 8), (1, 2, 40, 8), (1, 2, 40, 8))
    cell = msops.FlashAttention(dropout_p=0.5)
    (want,) = run(Attend(), q, k, v)
    np.testing.assert_array_equal(run(cell, q, k, v)[0], want)
    cell = msops.FlashAttention(dropout_p=0.5).set_train()  # graph mode does not compile the other again
    first, second = (run(cell, q, k, v)[0] for _ in range(2))
    assert (first != want).mean() > 0.9
    assert (first != second).mean() > 0.9
    mindspore.manual_seed(3)
    (again,) = run(cell, q, k, v)
    mindspore.manual_seed(3)
    np.testing.assert_array_equal(run(cell, q, k, v)[0], again)
    cell.set_train(False)
    np.testing.assert_array_equal(run(cell, q, k, v)[0], want)
    assert "dropout_p=0.5" in repr(cell)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and less than 1, got -0"):
        msops.FlashAttention(dropout_p=-0.1)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradient_drops_the_same_weights(mode, recompute):
    """out is linear in v, so that the sums of out and of dv v are equal if both passes drop the same weights. So it is
    where MindSpore computes the forward pass again for the gradient."""
    if VERSION < (2, 7):
        pytest.skip("PyNative mode of MindSpore before 2.7 cannot recompute")
    cell = msops.FlashAttention(dropout_p=0.5).set_train()
    if recompute:
        cell.recompute()
    inputs = [Tensor(x) for x in random(1, np.float32, (1, 2, 5, 8), (1, 2, 40, 8), (1, 2, 40, 8))]

    def loss(q, k, v):
        return cell(q, k, v).sum()

    value, dv = mindspore.value_and_grad(loss, 2)(*inputs)
    np.testing.assert_allclose((dv * inputs[2]).sum().asnumpy(), value.asnumpy(), rtol=1e-4, atol=1e-4)


# FlashAttention's own tests of ALiBi, dropout and wide heads go over these lengths and features.
GRID = pytest.mark.parametrize(
    ("queries", "keys", "width", "settings"),
    [
        (256, 512, 32, dict(slopes=(6,), dropout_p=0.17)),
        (255, 120, 40, dict(causal=True, slopes=(2, 6), softcap=10.0, dropout_p=0.17)),
        (113, 203, 59, dict(causal=True, slopes=(2, 6))),
        (65, 97, 64, dict(causal=True, slopes=(2, 6), dropout_p=0.17)),
        (512, 256, 96, dict(causal=True, dropout_p=0.17)),
        (128, 217, 111, dict(slopes=(6,), dropout_p=0.17)),
        (128, 217, 128, dict(window=(60, -1), slopes=(2, 6), dropout_p=0.17)),
        (108, 256, 160, dict(window=(40, 20), slopes=(2, 6), dropout_p=0.17)),
        (113, 203, 192, dict(causal=True, slopes=(6,), dropout_p=0.17)),
        (1, 239, 224, dict(slopes=(2, 6), causal=True, lengths=True)),
        (113, 211, 256, dict(causal=True, dropout_p=0.17)),
    ],
)


@pytest.mark.wide
@GRID
def test_grid_of_flash_attention(queries, keys, width, settings):
    card, dtype = FlashAttentionCard(), "float16" if keys % 2 else "float32"  # the card's own cases take both
    shapes, settings = case((6, 2, queries, keys), width, **settings)
    for call, formula in zip(card.entry_calls(shapes, settings, dtype), card.formulas):
        check_formula(call, functools.partial(formula, **settings), card.roundings, card.units(**settings))


@GRID
def test_grid_of_flash_attention_on_a_gpu(gpu, queries, keys, width, settings):
    card = FlashAttentionCard()
    shapes, settings = case((6, 2, queries, keys), width, **settings)
    for call in card.entry_calls(shapes, settings, "float16"):
        compare_with_cpu(gpu, call, "float16", shift=0)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@wide_in_graph_mode
def test_float16_with_bias_and_slopes_of_float32(mode, kind):
    """Both may be float32 beside float16, and stay so; mixed precision casts them."""
    shapes, settings = case((2, 1, 20, 30), bias=(2, 1, 30), slopes=(2,))
    q, k, v, bias, slopes = FlashAttentionCard().inputs(shapes, np.float16, **settings)
    bias = np.asarray(bias * np.float32(1.0001), kind)
    inputs = [q, k, v, bias, slopes.astype(kind)]
    net = Attend(**settings)
    (out,) = run(net, *inputs)
    assert_accurate([out], lambda *x: attention(*x, **settings)[:1], inputs, half_in_float32=False, units=4)
    gradients = run_gradient(net, inputs, [np.ones_like(out)])
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
    reference = functools.partial(FlashAttentionCard().reference_gradient, **settings)
    assert_accurate(gradients, reference, [*inputs, np.ones_like(out)], half_in_float32=False, units=4)
    if kind == np.float16:
        mixed = Attend(**settings).to_float(mindspore.float16)
        np.testing.assert_array_equal(run(mixed, *(x.astype(np.float32) for x in inputs))[0], out)
