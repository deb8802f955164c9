"""Tests that MindSpore's names of caches in blocks work by msops' kernels while they are patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import msops
from numpy_paged_attention import paged
from test_patched_operators import call

generated = getattr(ops, "auto_generate", None)
pytestmark = pytest.mark.skipif(not hasattr(generated, "PagedAttentionMask"), reason="this MindSpore has no such names")
RNG = np.random.default_rng(0)
HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
KEYS, VALUES = (RNG.standard_normal((9, 4, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
TABLES, LENGTHS = np.int32([[3, 0, 5], [1, 7, -1]]), np.int32([10, 7])
QUERY = RNG.standard_normal((2, HEADS, WIDTH)).astype(np.float32)
CHUNK = RNG.standard_normal((5, HEADS, WIDTH)).astype(np.float32)  # three tokens of the first text, two of the second
COUNTS, STARTS = np.int32([3, 2]), np.int32([0, 3, 5])
TOLERANCE = dict(rtol=5e-6, atol=5e-6)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def reference(q, keys, values, optional=(), *more, **settings):
    """Computes in float64."""
    names = ("value_cache", *optional)
    inputs = [q, keys, values, TABLES, LENGTHS, *more]
    inputs = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    return paged(*inputs, optional=names, **{"causal": False, "scale": SCALE, **settings})[0]


def attend(*inputs, **settings):
    return ops.operations.PagedAttention(HEADS, SCALE, KV_HEADS, **settings)(*inputs)


def of_forms(q, keys, values, tables, lengths):
    prim = generated.PagedAttention(HEADS, SCALE, KV_HEADS, "DEFAULT", "MASK_DEFAULT", 0)
    return (
        prim(q.reshape(2, -1), keys, values, tables, lengths),
        prim(q.reshape(2, 1, -1), keys, values, tables, lengths),
        prim(q, keys, values, tables, lengths),
        prim(q.reshape(1, 2, -1), keys, values, tables, lengths, None, None, None, None, None),
    )


def test_forms_of_queries(mode):
    got, want = call(of_forms, QUERY, KEYS, VALUES, TABLES, LENGTHS), reference(QUERY, KEYS, VALUES)
    assert [x.shape for x in got] == [(2, 32), (2, 1, 32), (2, 4, 8), (1, 2, 32)]
    for each in got:
        np.testing.assert_allclose(each.reshape(want.shape), want, **TOLERANCE)


def of_chunks(q, keys, values, tables, lengths, counts):
    causal = generated.PagedAttention(HEADS, SCALE, KV_HEADS, mask_mode="TRAPEZOIDAL")
    full = generated.PagedAttention(HEADS, SCALE, KV_HEADS)
    return (
        causal(q, keys, values, tables, lengths, None, None, None, counts),
        full(q.reshape(1, 5, -1), keys, values, tables, lengths, q_seq_lens=counts),
    )


def test_chunks(mode):
    causal, full = call(of_chunks, CHUNK, KEYS, VALUES, TABLES, LENGTHS, COUNTS)
    for got, is_causal in ((causal, True), (full, False)):
        want = reference(CHUNK, KEYS, VALUES, ("cu_seqlens_q",), STARTS, causal=is_causal)
        np.testing.assert_allclose(got.reshape(want.shape), want, **TOLERANCE)


def of_masks(q, keys, values, tables, lengths, counts, mask, alibi):
    prim = generated.PagedAttention(HEADS, SCALE, KV_HEADS)
    with_mask = generated.PagedAttentionMask(HEADS, SCALE, KV_HEADS)
    return (
        prim(q, keys, values, tables, lengths, attn_mask=mask, q_seq_lens=counts),
        prim(q, keys, values, tables, lengths, None, None, mask, counts, mask),
        with_mask(q[:2], keys, values, tables, lengths, None, None, alibi),
        prim(q[:2], keys, values, tables, lengths, attn_mask=mask[:1]),
        prim(q[:2], keys, values, tables, lengths, attn_mask=mask[:2].reshape(2, 1, -1)),
        prim(q[:4], keys, values, tables, lengths, attn_mask=mask[:2], q_seq_lens=ops.full_like(counts, 2)),
    )


def test_masks_are_added(mode):
    mask = np.where(RNG.random((5, 12)) < 0.4, -10000, RNG.standard_normal((5, 12))).astype(np.float32)
    alibi = RNG.standard_normal((2, HEADS, 1, 12)).astype(np.float32)
    got = call(of_masks, CHUNK, KEYS, VALUES, TABLES, LENGTHS, COUNTS, mask, alibi)
    for each, times in zip(got[:2], (1, 2)):
        want = reference(CHUNK, KEYS, VALUES, ("cu_seqlens_q", "bias"), STARTS, times * mask[:, None])
        np.testing.assert_allclose(each, want, **TOLERANCE)
    starts, bias = np.int32([0, 2, 4]), mask[[0, 1, 0, 1], None]
    want = reference(CHUNK[:4], KEYS, VALUES, ("cu_seqlens_q", "bias"), starts, bias)
    np.testing.assert_allclose(got[-1], want, **TOLERANCE)
    for each, bias in zip(got[2:], (alibi[:, :, 0], mask[:1, None], mask[:2, None])):
        np.testing.assert_allclose(each, reference(CHUNK[:2], KEYS, VALUES, ("bias",), bias), **TOLERANCE)


CODES = [RNG.integers(-128, 128, KEYS.shape).astype(np.int8) for _ in range(2)]
CODE_SCALE = (0.01 + 0.02 * RNG.random((2, KV_HEADS * WIDTH))).astype(np.float32)
OFFSET = RNG.integers(-9, 10, (2, KV_HEADS * WIDTH)).astype(np.int32)


def numbers_of(codes, i, offset):
    return (codes + offset[i].reshape(KV_HEADS, -1)) * CODE_SCALE[i].reshape(KV_HEADS, -1)


def test_offsets_are_added_to_codes(mode):
    for offset in (OFFSET, OFFSET.astype(np.float16), None):
        inputs = [QUERY, *CODES, TABLES, LENGTHS, CODE_SCALE, *([] if offset is None else [offset])]
        got = call(attend, *inputs)
        numbers = [numbers_of(codes.astype(np.float64), i, OFFSET if offset is not None else 0 * OFFSET)
                   for i, codes in enumerate(CODES)]  # fmt: skip
        np.testing.assert_allclose(got, reference(QUERY, *numbers), **TOLERANCE)


def of_latent(q, keys, tables, lengths):
    return generated.PagedAttention(HEADS, SCALE, KV_HEADS, mla_v_dim=5)(q.reshape(2, -1), keys, keys, tables, lengths)


def test_latent(mode):
    got, want = call(of_latent, QUERY, KEYS, TABLES, LENGTHS), reference(QUERY, KEYS, KEYS[..., :5])
    np.testing.assert_allclose(got, want.reshape(2, -1), **TOLERANCE)


class Caches(nn.Cell):
    """Writes keys and values, or keys alone, and attends to them."""

    def __init__(self, form):
        super().__init__()
        self.keys, self.values = (
            Parameter(Tensor(x), requires_grad=False, name=name) for x, name in ((KEYS, "keys"), (VALUES, "values"))
        )
        self.write = ops.operations.ReshapeAndCache()
        self.attend = ops.operations.PagedAttention(HEADS, SCALE, KV_HEADS)
        self.form = form

    def construct(self, q, k, v, slots, tables, lengths):
        k, v = k.reshape(self.form), v.reshape(self.form)
        same = self.write(k, v, self.keys, self.values, slots)
        return self.attend(q, self.keys, self.values, tables, lengths), same


@pytest.mark.parametrize("form", [(2, 16), (2, 1, 16), (2, 2, 8), (1, 2, 16)], ids=str)
def test_caches_are_written(mode, form):
    k, v = (RNG.standard_normal((2, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    slots = np.int32([5 * 4 + 1, -1])  # key 9 of the first text, which has written no key of the second
    net = Caches(form)
    out, same = (x.asnumpy() for x in net(*map(Tensor, (QUERY, k, v, slots, TABLES, LENGTHS))))
    keys, values = KEYS.copy(), VALUES.copy()
    keys[5, 1], values[5, 1] = k[0], v[0]
    np.testing.assert_array_equal(same, k.reshape(form))
    np.testing.assert_array_equal(net.keys.asnumpy(), keys)
    np.testing.assert_array_equal(net.values.asnumpy(), values)
    np.testing.assert_allclose(out, reference(QUERY, keys, values), **TOLERANCE)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_keys_alone(mode):
    """A cache may also be a Tensor in PyNative mode."""
    cache, k = Tensor(KEYS), Tensor(np.ones((1, KV_HEADS * WIDTH), np.float32))
    generated.reshape_and_cache(k, None, cache, None, Tensor(np.int32([6])))
    assert (cache.asnumpy()[1, 2] == 1).all()


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_is_refused(mode):
    q, keys, tables, lengths = map(Tensor, (QUERY, KEYS, TABLES, LENGTHS))
    six, three = ops.tile(q, (3, 1, 1)), Tensor(np.int32([3, 3]))
    prim = generated.PagedAttention(HEADS, SCALE, KV_HEADS)
    for make, error, words in (
        (lambda: generated.PagedAttention(4, 1.0, 2, "PERTOKEN"), NotImplementedError, "must be 'DEFAULT'"),
        (lambda: generated.PagedAttention(4, 1.0, 2, mask_mode="X"), NotImplementedError, "mask_mode must"),
        (lambda: prim(q, keys.reshape(9, 4, -1), keys, tables, lengths), NotImplementedError, "caches must have shape"),
        (lambda: prim(q.reshape(2, 2, 16), keys, keys, tables, lengths), ValueError, "query must have"),
        (lambda: prim(q, keys[:, :, :1], keys, tables, lengths), ValueError, "kv_head_num = 2 heads"),
        (lambda: prim(q, keys, keys, tables, lengths, attn_mask=ops.zeros((3, 5))), ValueError, "attn_mask must have"),
        (lambda: prim(six, keys, keys, tables, lengths, attn_mask=ops.zeros((2, 1, 5)), q_seq_lens=three), ValueError,
         "attn_mask must have"),
        (lambda: prim(six, keys, keys, tables, lengths, attn_mask=ops.zeros((2, 5)), q_seq_lens=three), ValueError,
         "attn_mask must have"),
        (lambda: prim(q, keys, keys, tables, lengths, ops.zeros((2, 16), mindspore.int64)), NotImplementedError,
         "antiquant_scale must be of floats"),
        (lambda: generated.ReshapeAndCache()(q, None, keys.reshape(36, 2, 8), None, lengths), NotImplementedError,
         "ReshapeAndCache: caches must have shape"),
        (lambda: generated.ReshapeAndCache()(ops.zeros((3, 5)), None, keys, None, lengths), ValueError,
         "ReshapeAndCache: key and value must have rows of"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            make()
