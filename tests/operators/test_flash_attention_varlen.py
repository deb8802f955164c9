import numpy as np
import pytest

import msops
from card import chain, random, zeros
from guarded_call import GuardedCall
from msops.shared.attention import packed_operators
from msops.testing.checks import Net, assert_accurate
from msops.testing.entry import Status
from numpy_attention import attention, attention_backward
from operator_test import OperatorTest, run, run_gradient

LONGEST = dict(max_seqlen_q=150, max_seqlen_k=150)
DEFAULTS = dict(causal=False, scale=None, window=None, softcap=0.0)


def begins(rows, sequences):
    """Returns where sequences of several lengths begin, of which one is empty."""
    weights = np.array([0 if s == 1 else 1 + s % 3 for s in range(sequences)], np.int64)
    return np.append(0, rows * np.cumsum(weights) // max(1, weights.sum())).astype(np.int32)


def spans(starts_q, starts_k):
    """Yields the rows of the queries and those of the keys of each sequence."""
    rows = ((slice(*pair) for pair in zip(starts, starts[1:])) for starts in (starts_q, starts_k))
    return zip(*rows)


def packed(q, k, v, starts_q, starts_k, **settings):
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = np.full(q.shape[1::-1], -np.inf, q.dtype)
    for i, j in spans(starts_q, starts_k):
        of_sequence = attention(q[None, i], k[None, j], v[None, j], **of_samples(settings))
        out[i], lse[:, i] = (x[0] for x in of_sequence)
    return out, lse


def packed_backward(q, k, v, starts_q, starts_k, out, lse, dout, dlse, **settings):
    gradients = [np.zeros_like(x) for x in (q, k, v)]
    for i, j in spans(starts_q, starts_k):
        inputs = (q[None, i], k[None, j], v[None, j], out[None, i], lse[None, :, i], dout[None, i], dlse[None, :, i])
        parts = attention_backward(*inputs, **of_samples(settings))
        for gradient, rows, part in zip(gradients, (i, j, j), parts):
            gradient[rows] = part[0]
    return tuple(gradients)


def of_samples(settings):
    return {name: value for name, value in settings.items() if name not in LONGEST} | {"layout": "BTHD"}


def case(sizes, sequences, width, value_width=None, **settings):
    """Returns shapes and settings for sizes (heads, heads of keys, rows of q, rows of k)."""
    heads, kv_heads, queries, keys = sizes
    starts = (sequences + 1,)
    shapes = [(queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width or width), starts, starts]
    return shapes, {**LONGEST, **settings}


class TestFlashAttentionVarlen(OperatorTest):
    function = msops.flash_attention_varlen
    formulas = (packed, packed_backward)
    cases = {
        "small": case((2, 1, 9, 11), 3, 4, 3, softcap=2.0),
        "causal": case((4, 2, 120, 200), 5, 16, causal=True),
        "large": case((2, 2, 300, 400), 7, 32, window=(20, 3)),
    }
    further = {
        "one sequence": case((4, 1, 40, 130), 1, 64, 40, scale=0.3),
        "rows that are no packs": case((2, 1, 330, 350), 2, 18, 9, causal=True, max_seqlen_q=330, max_seqlen_k=350),
    }
    small = "small"
    hostile = ("small",)
    right_numbers = {"left": (-1,), "right": (-1,)}
    roundings = 60
    units_of_largest = 4  # as for flash_attention
    half_in_float32 = half_gradient_in_float32 = False
    constants = (3, 4)
    wrong = (
        (zeros((1, 2, 4), *[(5, 1, 4)] * 2, (2,), (2,)), {}, TypeError,
         "flash_attention_varlen: cu_seqlens_q must be int32, got float32"),
        (zeros((2, 3, 4), *[(5, 2, 4)] * 2) + zeros((2,), (2,), dtype=np.int32), {}, ValueError,
         "flash_attention_varlen: q must have a multiple of the 2 heads of k and v, got 3"),
        (zeros((2, 1, 4), *[(5, 1, 4)] * 2) + zeros((0,), (0,), dtype=np.int32), {}, ValueError,
         "flash_attention_varlen: cu_seqlens_q must have at least one number"),
        (zeros((2, 1, 4), *[(5, 1, 4)] * 2) + zeros((2,), (2,), dtype=np.int32), dict(max_seqlen_k=-1), ValueError,
         "flash_attention_varlen: max_seqlen_k must be at least 0 and less than 2^31, got -1"),
        (zeros((2, 1, 4), *[(5, 1, 4)] * 2) + zeros((2,), (2,), dtype=np.int32), dict(max_seqlen_q=1.0), TypeError,
         "flash_attention_varlen: max_seqlen_q must be an int, got float"),
        (zeros((2, 1, 4), *[(5, 1, 4)] * 2) + zeros((2,), (2,), dtype=np.int32), dict(return_lse=1), TypeError,
         "flash_attention_varlen: return_lse must be a bool, got int"),
    )  # fmt: skip

    def net(self, **settings):
        return Net(msops.flash_attention_varlen, **{**LONGEST, **settings})

    def operators(self, shapes=(), **settings):
        return chain(packed_operators(*{**LONGEST, **DEFAULTS, **settings}.values()))

    def inputs(self, shapes, dtype, seed=1, **settings):
        starts = [begins(rows, shape[0] - 1) for (rows, *_), shape in zip(shapes, shapes[3:])]
        return [*random(seed, dtype, *shapes[:3]), *starts]

    def reference(self, *inputs, **settings):
        return packed(*inputs, **settings)[:1]

    def reference_gradient(self, *arguments, **settings):
        *inputs, dout = arguments
        out, lse = packed(*inputs, **settings)
        gradients = packed_backward(*inputs, out, lse, dout, np.zeros_like(lse), **settings)
        return *gradients, *map(np.zeros_like, inputs[3:])

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        group, kv_heads = 1 + random.randrange(3), 1 + random.randrange(3)
        queries, keys, sequences = random.randrange(60), random.randrange(60), random.randrange(1, 6)
        settings = dict(softcap=random.choice((0.0, 2.0)), causal=random.random() < 0.5)
        return case((group * kv_heads, kv_heads, queries, keys), sequences, 1 + random.randrange(20), **settings)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_lse(mode, dtype):
    """lse is returned beside out, and has a gradient; its rows in an empty sequence are -inf."""
    shapes, settings = case((4, 2, 20, 30), 3, 8, 5, causal=True, softcap=2.0)
    card, net = TestFlashAttentionVarlen(), TestFlashAttentionVarlen().net(**settings, return_lse=True)
    inputs = card.inputs(shapes, dtype)
    results = run(net, *inputs)
    accumulator = np.float64 if dtype == "float64" else np.float32
    assert [x.dtype for x in results] == [np.dtype(dtype), accumulator]
    assert results[1].shape == (4, 20)
    assert_accurate(results, lambda *arrays: packed(*arrays, **settings), inputs, half_in_float32=False, units=4)
    douts = [x.astype(kind) for x, kind in zip(random(2, np.float64, (20, 4, 5), (4, 20)), (dtype, accumulator))]

    def reference(*arrays):
        *arrays, dout, dlse = arrays
        gradients = packed_backward(*arrays, *packed(*arrays, **settings), dout, dlse, **settings)
        return *gradients, *map(np.zeros_like, arrays[3:])

    gradients = run_gradient(net, inputs, douts)
    assert_accurate(gradients, reference, [*inputs, *douts], half_in_float32=False, units=4)


def test_rows_in_no_sequence(mode):
    """They get 0, and neither they nor what stands there has a gradient."""
    q, k, v = random(1, np.float32, (9, 2, 4), (11, 1, 4), (11, 1, 4))
    starts = np.array([2, 4, 4], np.int32), np.array([0, 5, 9], np.int32)
    for x, rows in ((q, [0, 1, 4, 8]), (k, [9, 10]), (v, [9, 10])):
        x[rows] = np.nan
    net = Net(msops.flash_attention_varlen, max_seqlen_q=2, max_seqlen_k=5)
    (out,) = run(net, q, k, v, *starts)
    np.testing.assert_array_equal((out != 0).any((1, 2)), np.isin(np.arange(9), (2, 3)))
    dq, dk, dv, *_ = run_gradient(net, [q, k, v, *starts], [np.ones_like(out)])
    np.testing.assert_array_equal((dq != 0).any((1, 2)), np.isin(np.arange(9), (2, 3)))
    for gradient in (dk, dv):  # the second sequence has keys, but no queries
        np.testing.assert_array_equal((gradient != 0).any((1, 2)), np.arange(11) < 5)


@pytest.mark.parametrize(
    ("starts_q", "starts_k", "words"),
    [
        ((0, 3, 2), (0, 2, 4), "cu_seqlens_q has 3 before 2, expected numbers that grow from 0 to at most 5"),
        ((-1, 3, 4), (0, 2, 4), "cu_seqlens_q has -1 before 3"),
        ((0, 3, 4), (0, 2, 7), "cu_seqlens_k has 2 before 7, expected numbers that grow from 0 to at most 6"),
        ((0, 4, 5), (0, 2, 6), "cu_seqlens_q has a sequence of 4, longer than the longest of 3"),
    ],
)
def test_wrong_sequences_on_the_cpu(capfd, starts_q, starts_k, words):
    shapes, settings = case((1, 1, 5, 6), 2, 4, max_seqlen_q=3, max_seqlen_k=4)
    card = TestFlashAttentionVarlen()
    card.inputs = lambda *_, **__: [
        *random(1, np.float32, *shapes[:3]),
        *(np.array(s, np.int32) for s in ((0, 3, 5), (0, 2, 6))),
    ]
    for call in card.entry_calls(shapes, settings, "float32"):
        call.inputs[3][:], call.inputs[4][:] = starts_q, starts_k
        status, lines = GuardedCall(call, capfd).call()
        assert status == Status.BAD_VALUE
        assert words in lines[0]
