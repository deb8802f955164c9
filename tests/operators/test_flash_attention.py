import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import DTYPES, length, random, results_of, zeros
from child import run_python
from gpu import BIG
from msops.compat import VERSION
from msops.shared.attention import operators
from msops.testing.differences import check_finite_differences
from numpy_attention import (
    DEFAULTS,
    OPTIONAL,
    Attend,
    Weights,
    attention,
    attention_backward,
    attention_bias_backward,
    case,
)
from operator_test import OperatorTest, run, run_gradient, wide_in_graph_mode

STEPS, WINDOW = dict(layout="BTHD"), dict(window=(5, 3))
Q, KV = (1, 2, 3, 4), (1, 1, 5, 4)


class TestFlashAttention(OperatorTest):
    function = msops.flash_attention
    formulas = (attention, attention_backward, attention_bias_backward)
    cases = {
        "small": case((4, 2, 3, 5), 4, 3, (2, 1, 3, 5), lengths=True, softcap=1.5, bias=(4, 1, 5)),
        "bias, dropout": case((2, 1, 9, 33), 8, bias=(2, 1, 9, 33), dropout_p=0.25),
        "ALiBi": case((4, 2, 20, 40), 8, slopes=(4,), causal=True),
        "one": case((1, 1, 1, 1), 1),
        "no queries": case((2, 2, 0, 3), 4),
        "no samples": case((2, 1, 3, 4), 4, batch=0),
        "causal, groups": case((6, 2, 70, 70), 16, causal=True),
        "BTHD": case((4, 2, 9, 33), 12, causal=True, scale=0.5, **STEPS),
        "window, lengths": case((2, 2, 30, 200), 8, 20, lengths=True, **WINDOW),
        "mask of keys": case((3, 1, 20, 65), 7, 5, (65,)),
        "step": case((8, 2, 1, 600), 32, lengths=True, causal=True),
        "large": case((2, 1, 150, 130), 64, 40, causal=False, softcap=20.0, **STEPS),
    }
    # Each two of these features meet in one of the cases.
    further = {
        "causal, window, BTHD": case((4, 1, 65, 129), 64, causal=True, window=(20, -1), **STEPS),
        "causal, mask, softcap": case((2, 1, 63, 64), 24, 16, (2, 1, 1, 64), causal=True, softcap=3.0),
        "window, mask, scale": case((2, 2, 64, 65), 16, 32, (2, 64, 1), window=(-1, 30), scale=2.0),
        "window, softcap, groups": case((6, 3, 40, 40), 9, window=(0, 0), softcap=5.0),
        "lengths, mask, BTHD": case((3, 3, 7, 130), 10, 3, (2, 3, 7, 130), lengths=True, **STEPS),
        "lengths, causal, scale": case((4, 4, 7, 260), 17, 8, lengths=True, causal=True, scale=0.1),
        "lengths, softcap, groups": case((12, 1, 2, 700), 8, batch=1, lengths=True, softcap=9.0),
        "few heads, many keys": case((1, 1, 20, 1300), 8, batch=1),
        "wide": case((1, 1, 33, 40), 256, 256, batch=1),
        "512 features": case((2, 1, 40, 70), 512, 512, batch=1, causal=True),
        "rows that are no packs": case((2, 1, 260, 270), 20, 13, causal=True, lengths=True, **STEPS),
        "words, mask": case((2, 2, 130, 270), 70, 66, (270,), batch=1),
        "words of values alone": case((1, 1, 256, 300), 16, 36, batch=1, window=(90, 20)),
        "words of keys alone, dropout": case((2, 1, 300, 256), 36, 24, batch=1, dropout_p=0.2, bias=(2, 1, 256)),
        "more features of v": case((1, 1, 9, 600), 40, 300, batch=1),
        "more features of k": case((1, 1, 33, 40), 300, 16, batch=1),
        "1 query, 127 keys": case((2, 1, 1, 127), 96, batch=1),
        "3 queries, 4097 keys": case((2, 1, 3, 4097), 4, batch=1, causal=True),
        "1 query, 1100 keys, scale": case((16, 1, 1, 1100), 16, lengths=True, scale=1.0),
        "long rows of queries": case((2, 1, 600, 40), 128),
        "long rows of keys": case((1, 1, 40, 1100), 128, batch=1, causal=True),
        "1 key": case((2, 2, 100, 1), 40, batch=1),
        "queries before all keys": case((2, 1, 900, 40), 16, batch=1, causal=True),
        "1000": case((1, 1, 1000, 1000), 8, batch=1, causal=True),
        "bias of each pair": case((4, 2, 70, 130), 16, bias=(2, 4, 70, 130), causal=True),
        "bias of pairs of heads": case((2, 2, 65, 64), 40, bias=(2, 65, 64), softcap=3.0, wide_bias=True, **STEPS),
        "bias of keys": case((2, 1, 100, 70), 8, 24, bias=(2, 1, 1, 70), mask=(1, 70), lengths=True),
        "bias of queries": case((2, 2, 70, 130), 8, bias=(70, 1), wide_bias=True),
        "bias of heads": case((3, 1, 40, 66), 8, bias=(3, 1, 1), batch=3, window=(10, 3)),
        "bias of samples, step": case((8, 2, 1, 600), 8, bias=(2, 1, 1, 1), slopes=(2, 8), wide_bias=True),
        "ALiBi of samples, lengths": case((4, 2, 33, 140), 8, slopes=(2, 4), lengths=True, causal=True, **STEPS),
        "dropout, window": case((2, 1, 70, 135), 8, dropout_p=0.5, window=(30, 5), softcap=2.0),
        "dropout, step": case((4, 1, 2, 700), 16, batch=1, dropout_p=0.1, slopes=(4,)),
        "all": case((4, 2, 66, 67), 128, 72, (67,), True, bias=(4, 66, 67), slopes=(4,), dropout_p=0.9, causal=True),
        "all, more features": case((2, 1, 40, 72), 200, 136, batch=1, bias=(40, 72), slopes=(2,), dropout_p=0.2),
        "mask of 16 keys": case((4, 2, 70, 144), 16, mask=(2, 1, 70, 144), lengths=True, causal=True),
        "mask of 16 keys, more features": case((2, 1, 40, 160), 128, batch=1, mask=(40, 160), window=(-1, 130)),
        "mask, window to the left": case((4, 2, 200, 330), 64, mask=(4, 200, 330), window=(70, 20), softcap=2.0),
        "mask of queries": case((2, 1, 260, 150), 16, mask=(2, 1, 260, 1), window=(100, -1)),
        "mask of queries of heads, more features": case((4, 2, 140, 270), 128, 72, mask=(4, 140, 1), batch=1),
        "mask of samples and keys": case((2, 2, 130, 300), 40, mask=(2, 1, 1, 300), causal=True, lengths=True),
        "mask of each pair, 256 features": case((2, 1, 70, 140), 200, 256, mask=(2, 2, 70, 140)),
        "mask of 16 keys, step": case((8, 2, 1, 640), 32, mask=(2, 1, 1, 640)),
        "step, more features": case((3, 1, 2, 300), 256, 136, batch=1, lengths=True),
        "bias of keys alone": case((4, 2, 200, 330), 64, bias=(2, 1, 1, 330), causal=True),
        "bias of keys of heads": case(
            (4, 1, 130, 200), 128, 80, bias=(4, 1, 200), lengths=True, causal=True, wide_bias=True, **STEPS
        ),
        "words, bias of keys": case((2, 1, 260, 270), 70, 66, bias=(270,), window=(90, 20), batch=1),
        "512 features, bias": case((1, 1, 20, 70), 300, 512, batch=1, bias=(20, 70), dropout_p=0.3),
    }
    small = "small"
    hostile = ("small", "BTHD", "dropout, step")
    half_in_float32 = False  # tensor cores take the weights rounded to float16
    half_gradient_in_float32 = False  # and the gradient takes out, which is rounded, too
    right_numbers = {"left": (-1,), "right": (-1,)}
    huge = (  # samples; and one long sequence
        (BIG // (8 * 128 * 128) + 1, 8, 128, 128, None),
        (1, 1, BIG // 128 + 1, 128, (100, 0)),
        (1, 1, BIG // 64 + 1, 64, (100, 0)),
    )
    roundings = 60
    units_of_largest = 4  # logits are rounded before e^x multiplies their errors: how far NumPy's are off is luck
    wrong = (
        (zeros(Q, KV, KV, dtype=np.int32), {}, TypeError,
         "flash_attention: q must be float16, float32 or float64, got int32"),
        ([*zeros(Q, KV), 1.0], {}, TypeError, "flash_attention: v must be a Tensor, got float"),
        (zeros((1, 3, 3, 4), *[(1, 2, 5, 4)] * 2), {}, ValueError,
         "q must have a multiple of the 2 heads of k and v, got 3"),
        (zeros((1, 1, 2, 513), *[(1, 1, 2, 513)] * 2), {}, ValueError, "q must have at most 512 features, got 513"),
        (zeros(Q, KV, (1, 1, 5, 513)), {}, ValueError, "v must have at most 512 features, got 513"),
        (zeros(Q, KV, KV), dict(causal=1), TypeError, "flash_attention: causal must be a bool, got int"),
        (zeros(Q, KV, KV), dict(scale="1"), TypeError, "scale must be a number, got str"),
        (zeros(Q, KV, KV), dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
        (zeros(Q, KV, KV), dict(softcap=-1.0), ValueError, "softcap must be finite and at least 0, got -1.0"),
        (zeros(Q, KV, KV), dict(window=(0, -2)), ValueError,
         "window must be at least -1 and less than 2^31, got (0, -2)"),
        (zeros(Q, KV, KV), dict(window=(1,)), ValueError, "window must have 2 numbers, got (1,)"),
        (zeros(Q, KV, KV), dict(layout="BSH"), ValueError, "layout must be one of BHTD, BTHD, got 'BSH'"),
        (zeros(Q, KV, KV), dict(layout=1), TypeError, "layout must be a str, got int"),
        (zeros(Q, KV, KV), dict(return_lse=1), TypeError, "return_lse must be a bool, got int"),
        (zeros(Q, KV, KV, (1,)), dict(optional=("kv_lengths",)), TypeError, "kv_lengths must be int32, got float32"),
        (zeros(Q, KV, KV, (5,)), dict(optional=("mask",)), TypeError, "mask must be bool, got float32"),
        (zeros(Q, KV, KV) + zeros((3, 4), dtype=bool), dict(optional=("mask",)), ValueError,
         "mask must broadcast to (B, Hq, Tq, Tk) = (1, 2, 3, 5), got (3, 4)"),
        (zeros(Q, KV, KV, (2, 3, 4)), dict(optional=("bias",)), ValueError,
         "flash_attention: bias must broadcast to (B, Hq, Tq, Tk) = (1, 2, 3, 5), got (2, 3, 4)"),
        (zeros(Q, KV, KV, (1,) * 5), dict(optional=("bias",)), ValueError, "bias must broadcast to (B, Hq, Tq, Tk)"),
        (zeros(Q, KV, KV, (3,)), dict(optional=("alibi_slopes",)), ValueError,
         "flash_attention: alibi_slopes must have shape (Hq,) or (B, Hq) = (1, 2), got (3,)"),
        (zeros(Q, KV, KV) + zeros((2,), dtype=np.float64), dict(optional=("alibi_slopes",)), TypeError,
         "alibi_slopes must be float32, got float64"),
        (zeros(Q, KV, KV), dict(dropout_p=0.5), ValueError,
         "flash_attention: seed must be given if dropout_p is above 0"),
        (zeros(Q, KV, KV) + zeros((1,), dtype=np.int64), dict(dropout_p=0.5, optional=("seed",)), ValueError,
         "flash_attention: seed must have shape (), got (1,)"),
        (zeros(Q, KV, KV) + zeros((), dtype=np.int32), dict(dropout_p=0.5, optional=("seed",)), TypeError,
         "flash_attention: seed must be int64, got int32"),
        (zeros(Q, KV, KV), dict(dropout_p=1.0), ValueError,
         "flash_attention: dropout_p must be at least 0 and less than 1, got 1.0"),
        (zeros(Q, KV, KV), dict(dropout_p="1"), TypeError, "flash_attention: dropout_p must be a number, got str"),
    )  # fmt: skip

    def net(self, **settings):
        return Attend(**settings)

    def operators(self, shapes=(), optional=(), return_lse=False, wide_bias=False, **settings):
        optional = optional if shapes else OPTIONAL
        forward = operators(**{**DEFAULTS, **settings}, bias_gradient=True)
        gradients = forward.gradient.__self__
        found = [forward, gradients.backward, *[gradients.of_bias] * ("bias" in optional)]
        return [operator.without(*set(operator.full.optional).difference(optional)) for operator in found]

    def inputs(self, shapes, dtype, seed=1, optional=(), wide_bias=False, **settings):
        """Returns inputs with which each query sees a key."""
        arrays, rng = random(seed, dtype, *shapes), np.random.default_rng(seed)
        queries, keys = (shape[1 if settings.get("layout") == "BTHD" else 2] for shape in shapes[:2])
        if "kv_lengths" in optional:
            arrays[3] = rng.integers(min(queries, keys), keys + 1, shapes[3]).astype(np.int32)
        at = {name: 3 + i for i, name in enumerate(optional)}
        if "mask" in optional:
            arrays[at["mask"]] = rng.random(shapes[at["mask"]]) < 0.3
            arrays[at["mask"]][..., :1] = False
        if wide_bias:
            arrays[at["bias"]] = arrays[at["bias"]].astype(np.float32)
        if "alibi_slopes" in optional:
            arrays[at["alibi_slopes"]] = rng.random(shapes[at["alibi_slopes"]], np.float32) / 8
        if "seed" in optional:
            arrays[at["seed"]] = np.array(rng.integers(-(2**63), 2**63))
        return arrays

    def reference(self, *inputs, return_lse=False, **settings):
        return attention(*inputs, **settings)[: 2 if return_lse else 1]

    def reference_gradient(self, *arguments, optional=(), return_lse=False, **settings):
        n = 3 + len(optional)
        inputs, dout = arguments[:n], arguments[n]
        out, lse = attention(*inputs, optional=optional, **settings)
        dlse = arguments[n + 1] if return_lse else np.zeros_like(lse)
        known = (*inputs, out, lse, dout, dlse)
        found = [*attention_backward(*known, optional=optional, **settings), *map(np.zeros_like, inputs[3:])]
        if "bias" in optional:
            (found[3 + optional.index("bias")],) = attention_bias_backward(*known, optional=optional, **settings)
        return tuple(found)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def check_huge(self, gpu, batch, heads, rows, width, window):
        inputs = [gpu.random(batch, heads, rows, width) for _ in range(4)]
        results = run_both(gpu, inputs, window=window)
        if batch > 1:
            parts, first = [slice(0, 2), slice(batch - 2, batch)], 0
        else:  # the last rows, of which the first queries see further keys
            parts, first = [(slice(None), slice(None), slice(rows - 400, rows))], window[0]
        for part in parts:
            alone = run_both(gpu, [x[part].contiguous() for x in inputs], window=window)
            for big, small in zip(results, alone):
                gpu.assert_close(big[part][..., first:, :], small[..., first:, :])

    def random_case(self, random):
        group, kv_heads = 1 + length(random) % 4, 1 + length(random) % 3
        queries, keys = length(random), length(random)
        full = [length(random) % 4, group * kv_heads, queries, keys]
        mask = (
            tuple(random.choice((1, size)) for size in full)[random.randrange(4) :] if random.random() < 0.3 else None
        )
        bias = (
            tuple(random.choice((1, size)) for size in full)[random.randrange(4) :] if random.random() < 0.4 else None
        )
        settings = dict(
            bias=bias,
            slopes=random.choice((None, full[1:2], full[:2])),
            dropout_p=random.choice((0.0, 0.0, 0.2)),
            causal=random.random() < 0.3,
            softcap=random.choice((0.0, 0.0, 2.0)),
            window=random.choice((None, None, (random.randrange(20), -1), (3, random.randrange(9)))),
            layout=random.choice(("BHTD", "BTHD")),
        )
        widths, lengths = (1 + length(random), 1 + length(random)), random.random() < 0.3
        return case((group * kv_heads, kv_heads, queries, keys), *widths, mask, lengths, full[0], **settings)


def run_both(gpu, inputs, **settings):
    """Returns out, dq, dk and dv on torch's GPU."""
    *tensors, dout = inputs
    forward, backward = TestFlashAttention().operators([0], **settings)
    out, lse, *_ = gpu.run(forward, *tensors)
    return [out, *gpu.run(backward, *tensors, out, lse, dout, gpu.torch.zeros_like(lse))[:3]]


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_100_runs_give_equal_bits(gpu, width, kv_heads):
    """The blocks of a launch that fills the GPU add in the same order each time."""
    inputs = [gpu.random(2, heads, 2048, width) for heads in (16, kv_heads, kv_heads, 16)]
    first = run_both(gpu, inputs, causal=True)
    for _ in range(100):
        again = run_both(gpu, inputs, causal=True)
        differ = [name for name, x, y in zip(("out", "dq", "dk", "dv"), again, first) if not gpu.torch.equal(x, y)]
        assert not differ


@pytest.mark.parametrize("dtype", DTYPES)
@wide_in_graph_mode
def test_queries_that_see_nothing(mode, dtype):
    """They give 0 and -inf, and have no gradient: rows before the first key, hidden by the mask, or without keys."""
    settings = dict(causal=True, return_lse=True, optional=("kv_lengths", "mask"))
    q, k, v = random(1, dtype, (3, 2, 5, 8), (3, 1, 3, 8), (3, 1, 3, 8))
    lengths, mask = np.array([3, 0, -7], np.int32), np.zeros((5, 3), bool)
    mask[3] = True
    inputs = [q, k, v, lengths, mask]
    net = Attend(**settings)
    out, lse = run(net, *inputs)
    seen = np.isin(np.arange(5), (2, 4)) & np.array([True, False, False])[:, None, None] & np.ones((3, 2, 5), bool)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_array_equal((out != 0).any(-1), seen)
    dq, dk, dv, *_ = run_gradient(net, inputs, [np.ones_like(out), np.ones_like(lse)])
    np.testing.assert_array_equal((dq != 0).any(-1), seen)
    for gradient in (dk, dv):
        np.testing.assert_array_equal((gradient != 0).any((1, 2, 3)), [True, False, False])
        assert np.isfinite(gradient).all()


@wide_in_graph_mode
def test_no_keys(mode):
    if VERSION < (2, 7):
        pytest.skip("MindSpore before 2.7 has no empty tensors in all places")
    q, k, v = random(1, np.float32, (1, 2, 3, 4), (1, 1, 0, 4), (1, 1, 0, 5))
    net = Attend(return_lse=True)
    out, lse = run(net, q, k, v)
    np.testing.assert_array_equal(out, np.zeros((1, 2, 3, 5)))
    np.testing.assert_array_equal(lse, np.full((1, 2, 3), -np.inf))
    dq, *_ = run_gradient(net, [q, k, v], [out, np.ones_like(lse)])
    np.testing.assert_array_equal(dq, np.zeros_like(q))


@pytest.mark.parametrize("dtype", DTYPES)
@wide_in_graph_mode
def test_keys_after_the_length_are_not_read(mode, dtype):
    """Whatever stands there changes neither results nor gradients, whose own elements there are 0."""
    lengths, results = np.array([70, 1], np.int32), []
    for rest in (0, np.nan):
        q, k, v = random(1, dtype, (2, 2, 5, 8), (2, 2, 150, 8), (2, 2, 150, 8))
        for x in (k, v):
            x[0, :, 70:] = x[1, :, 1:] = rest
        net = Attend(optional=("kv_lengths",))
        (out,) = run(net, q, k, v, lengths)
        *gradients, _ = run_gradient(net, [q, k, v, lengths], [np.ones_like(out)])
        assert not gradients[1][0, :, 70:].any()
        assert not gradients[2][1, :, 1:].any()
        results.append([out, *gradients])
    for zeros_there, nan_there in zip(*results):
        np.testing.assert_array_equal(zeros_there, nan_there)


@pytest.mark.parametrize("dtype", DTYPES)
@wide_in_graph_mode
def test_large_logits(mode, dtype):
    """Logits of 10^4 neither overflow nor lose the largest key."""
    q = np.full((1, 1, 4, 4), 50, dtype)
    k = np.array([-50, -20, 50, 20], dtype)[None, None, :, None] * np.ones((1, 1, 4, 4), dtype)
    (v,) = random(1, dtype, (1, 1, 4, 4))
    net = Attend(scale=1.0, return_lse=True)
    out, lse = run(net, q, k, v)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, :, 2:3], v.shape))
    np.testing.assert_array_equal(lse, np.full((1, 1, 4), 1e4))
    gradients = run_gradient(net, [q, k, v], [np.ones_like(out), np.ones_like(lse)])
    np.testing.assert_allclose(gradients[0], k[:, :, 2:3] * np.ones_like(q), rtol=1e-3)
    assert not gradients[2][:, :, [0, 1, 3]].any()


@pytest.mark.parametrize("mean", [0, 1, 8])
def test_error_of_float16_comes_from_rounded_out(mean):
    """delta takes `out` as it was rounded, which float16 shows in dq as the docstring of flash_attention says: where
    keys and values have means. Without that error, which dlse can take away, dq is as exact as it is stored."""
    q, k, v, dout = random(9, np.float64, (1, 2, 40, 16), (1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 40, 16))
    halves = [x.astype(np.float16) for x in (q, k + mean, v + mean, dout)]
    q, k, v, dout = (x.astype(np.float64) for x in halves)
    weights = Weights(q, k, v, *[None] * 5, **DEFAULTS)
    exact, lse = attention(q, k, v)
    want = attention_backward(q, k, v, exact, lse, dout, np.zeros_like(lse))[0]
    forward, backward = TestFlashAttention().operators([q.shape, k.shape, v.shape])
    out, lse = results_of(forward, *halves[:3])
    error = (dout * (out - exact)).sum(-1)
    rounding = np.abs(want) * 2**-11 + 3e-5
    for dlse, bound in ((error, 0), (np.zeros_like(error), 0.25 * np.abs(error[..., None] * (weights.p @ k)))):
        dq = results_of(backward, *halves[:3], out, lse, halves[3], dlse.astype(np.float32))[0]
        assert (np.abs(dq - want) <= bound + rounding).all()


def test_gradient_of_lse(mode):
    inputs = random(1, np.float64, (1, 4, 5, 6), (1, 2, 7, 6), (1, 2, 7, 3))
    net = Attend(causal=True, softcap=2.0, return_lse=True)
    douts = random(2, np.float64, (1, 4, 5, 3), (1, 4, 5))
    check_finite_differences(run_gradient(net, inputs, douts), net, inputs, douts)


@pytest.mark.parametrize("name", TestFlashAttention().entry_cases())
def test_gradients_say_how_results_change(name):
    """Requires that, in float64, the entries' results change along a direction of all inputs as their gradients say."""
    card, step = TestFlashAttention(), 1e-5
    shapes, settings = card.entry_cases()[name]
    forward, backward, *of_bias = card.operators(shapes, **settings)
    inputs = card.inputs(shapes, np.float64, **{**settings, "wide_bias": False})
    out, lse = results_of(forward, *inputs)
    moving = [0, 1, 2, *[3 + settings["optional"].index("bias") for _ in of_bias]]
    *directions, dout, dlse = random(2, np.float64, *(shapes[i] for i in moving), out.shape, lse.shape)

    def sum_at(step):
        moved = list(inputs)
        for i, direction in zip(moving, directions):
            moved[i] = inputs[i] + step * direction
        out, lse = results_of(forward, *moved)
        return (out * dout).sum() + (lse * dlse).sum(where=np.isfinite(lse))

    gradients = [dx for each in (backward, *of_bias) for dx in results_of(each, *inputs, out, lse, dout, dlse)]
    terms = [gradient * direction for gradient, direction in zip(gradients, directions)]
    size = 1 + sum(np.abs(term).sum() for term in terms)
    assert abs(sum(map(np.sum, terms)) - (sum_at(step) - sum_at(-step)) / (2 * step)) < 1e-8 * size


@pytest.mark.wide
def test_memory_of_long_sequences(tmp_path):
    """Neither pass takes memory for the weights of all pairs, here 256 MiB. A process of its own has its own peak."""
    program = tmp_path / "program.py"
    program.write_text(
        "import resource\n"
        "import mindspore, numpy as np\n"
        "import msops\n"
        "mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target='CPU')\n"
        "def peak():\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB\n"
        "gradient = mindspore.ops.grad(msops.FlashAttention(causal=True), (0, 1, 2))\n"
        "def run(length):\n"
        "    x = mindspore.Tensor(np.ones((1, 4, length, 16), np.float32))\n"
        "    [dx.asnumpy() for dx in gradient(x, x, x)]\n"
        "run(64)\n"
        "before = peak()\n"
        "run(4096)\n"
        "print(peak() - before)\n"
    )
    done = run_python(program, cwd=tmp_path)
    assert float(done.stdout) < 64, done.stderr


@wide_in_graph_mode
def test_cell_takes_what_the_function_does(mode):
    """The Cell has the settings, and takes kv_lengths and mask by position or by name."""
    shapes, _ = case((4, 2, 5, 9), mask=(5, 9), lengths=True)
    inputs = TestFlashAttention().inputs(shapes, np.float32, optional=("kv_lengths", "mask"))
    settings = dict(causal=True, scale=0.3, window=(4, -1), softcap=2.0, return_lse=True)
    cell, (q, k, v, lengths, mask) = msops.FlashAttention(**settings), map(Tensor, inputs)
    (want, _), (both, _) = run(Attend(optional=("kv_lengths", "mask"), **settings), *inputs), run(cell, *inputs)
    np.testing.assert_array_equal(both, want)
    want, _ = msops.flash_attention(q, k, v, kv_lengths=lengths, **settings)
    np.testing.assert_array_equal(cell(q, k, v, lengths)[0].asnumpy(), want.asnumpy())
    want, _ = msops.flash_attention(q, k, v, mask=mask, **settings)
    np.testing.assert_array_equal(cell(q, k, v, None, mask)[0].asnumpy(), want.asnumpy())
    with pytest.raises(TypeError, match="flash_attention: causal must be a bool, got int"):
        msops.FlashAttention(causal=1)
