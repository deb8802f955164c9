"""Tests that MindSpore's names of attention for inference work by msops' kernels while they are patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from operator_test import wide_in_graph_mode
from test_patched_attention import N_KV as HEADS_K, TRIANGLE, B, D, N, band, to_layout
from test_patched_operators import call

generated = getattr(ops, "auto_generate", None)
pytestmark = pytest.mark.skipif(
    not hasattr(generated, "FusedInferAttentionScore"), reason="this MindSpore has no such names"
)
RNG = np.random.default_rng(0)
SCALE, QUERIES, KEYS = 0.3, 5, 7
Q, K, V = (RNG.standard_normal((B, *shape, D)).astype(np.float32) for shape in ((N, QUERIES), *[(HEADS_K, KEYS)] * 2))
MASK, SHIFT = RNG.random((B, 1, QUERIES, KEYS)) < 0.3, RNG.standard_normal((B, N, QUERIES, KEYS)).astype(np.float32)
LENGTHS_Q, LENGTHS_K = np.array([4, 2]), np.array([6, 3])
TOLERANCE = dict(rtol=5e-6, atol=5e-6)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def attention(q, k, v, hidden=False, shift=0):
    """Returns the attention of tensors (B, N, S, D), and lse (B, N, S), in float64. What sees no key is 0 and -inf."""
    k, v = (np.repeat(np.float64(x), q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = np.where(hidden, -np.inf, q @ k.swapaxes(-1, -2) * SCALE + shift)
    weights = np.exp(x - x.max(-1, keepdims=True, initial=-1e9))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = x.max(-1, initial=-1e9) + np.log(total[..., 0])
    return weights / np.where(total, total, 1) @ v, lse


def close(got, want):
    np.testing.assert_allclose(got, want, **TOLERANCE)


def beyond(lengths_q=None, lengths_k=None):
    """Returns what is hidden since a sample has fewer queries or keys."""
    rows, columns = np.arange(QUERIES)[:, None], np.arange(KEYS)
    hidden = np.zeros((B, 1, QUERIES, KEYS), bool)
    if lengths_q is not None:
        hidden = hidden | (rows >= lengths_q.reshape(-1, 1, 1, 1))
    return hidden if lengths_k is None else hidden | (columns >= lengths_k.reshape(-1, 1, 1, 1))


def of_layouts(bsh, bnsd, bsnd):
    prompt = dict(num_heads=N, num_key_value_heads=HEADS_K, scale_value=SCALE)
    fused = dict(num_heads=N, num_key_value_heads=HEADS_K, scale=SCALE)
    outs = (
        ops.prompt_flash_attention(*bsh, **prompt),
        ops.prompt_flash_attention(bnsd[0], [bnsd[1]], [bnsd[2]], input_layout="BNSD", **prompt),
        generated.PromptFlashAttention(N, SCALE, num_key_value_heads=HEADS_K)(*bsh),
        generated.prompt_flash_attention_impl(*bsh, *[None] * 9, N, SCALE, 9, 0, "BSH", HEADS_K, 0, 1),
    )
    lses = ()
    for layout, inputs in (("BSH", bsh), ("BNSD", bnsd), ("BSND", bsnd)):
        out, lse = ops.fused_infer_attention_score(*inputs, input_layout=layout, softmax_lse_flag=True, **fused)
        outs, lses = (*outs, out), (*lses, lse)
    primitive = generated.FusedInferAttentionScore(N, SCALE, num_key_value_heads=HEADS_K, input_layout="BSND")
    out, lse = primitive(bsnd[0], [bsnd[1]], (bsnd[2],))
    rest = (*[None] * 21, N, SCALE, 9, 9, "BSND", HEADS_K, 0, 1, 0, 0, False, 0, 0)
    impl, _ = generated.fused_infer_attention_score_impl(*bsnd, *rest)
    return (*outs, out, impl), lses, lse


class Layouts(mindspore.nn.Cell):
    def construct(self, *inputs):
        return of_layouts(inputs[:3], inputs[3:6], inputs[6:])


@wide_in_graph_mode
def test_layouts(mode):
    names = ("BSH", "BNSD", "BSND")
    inputs = [Tensor(to_layout(x, name)) for name in names for x in (Q, K, V)]
    outs, lses, zero = Layouts()(*inputs)
    want, want_lse = attention(Q, K, V)
    for got, layout in zip(outs, ("BSH", "BNSD", "BSH", "BSH", *names, "BSND", "BSND")):
        close(got.asnumpy(), to_layout(want, layout))
    for lse in lses:
        close(lse.asnumpy(), want_lse[..., None])
    assert zero.shape == (1,)
    assert zero.asnumpy() == 0


def later(lengths_q, lengths_k, pre, following):
    """Returns bands that end with the lengths of each sample."""
    return np.stack([band(QUERIES, KEYS, pre, following, k - q)[None] for q, k in zip(lengths_q, lengths_k)])


# Settings, the mask, lengths of queries and of keys, and what is hidden besides what is beyond these lengths.
FULL = np.full(B, QUERIES), np.full(B, KEYS)
CASES = {
    "lengths": ({}, None, LENGTHS_Q, LENGTHS_K, False),
    "lengths of queries": ({}, None, LENGTHS_Q, None, False),
    "a mask": ({}, MASK, None, LENGTHS_K, MASK),
    "a mask for all": (dict(sparse_mode=1, next_tokens=0), MASK[0, 0].astype(np.int8), None, None, MASK[0, 0]),
    "a mask and a band": (dict(pre_tokens=3, next_tokens=1), MASK[:, 0].astype(np.float16), None, None,
                          MASK | band(QUERIES, KEYS, 3, 1)),
    "a mask, a band and lengths": (dict(pre_tokens=3, next_tokens=2), MASK.astype(np.uint8), LENGTHS_Q, LENGTHS_K,
                                   MASK | band(QUERIES, KEYS, 3, 2)),
    "mode 2": (dict(sparse_mode=2), TRIANGLE, None, None, band(QUERIES, KEYS, 99, 0)),
    "mode 2 and lengths": (dict(sparse_mode=2), None, LENGTHS_Q, LENGTHS_K, band(QUERIES, KEYS, 99, 0)),
    "mode 3": (dict(sparse_mode=3), TRIANGLE[None, None], None, None, later(*FULL, 99, 0)),
    "mode 3 and lengths of keys": (dict(sparse_mode=3), None, None, LENGTHS_K, later(FULL[0], LENGTHS_K, 99, 0)),
    "mode 3 and lengths": (dict(sparse_mode=3), TRIANGLE[None], LENGTHS_Q, LENGTHS_K,
                           later(LENGTHS_Q, LENGTHS_K, 99, 0)),
    "mode 4 and lengths of queries": (dict(sparse_mode=4, pre_tokens=2, next_tokens=1), None, LENGTHS_Q, None,
                                      later(LENGTHS_Q, FULL[1], 2, 1)),
    "mode 4 and lengths": (dict(sparse_mode=4, pre_tokens=2, next_tokens=2**31 - 1), None, LENGTHS_Q, LENGTHS_K,
                           later(LENGTHS_Q, LENGTHS_K, 2, 99)),
}  # fmt: skip


@pytest.mark.parametrize("label", CASES)
def test_modes_and_lengths(mode, label):
    """Lengths are Tensors of int64 for one function, and tuples or lists for the other."""
    settings, mask, lengths_q, lengths_k, hidden = CASES[label]
    known = [None if x is None else tuple(map(int, x)) for x in (lengths_q, lengths_k)]
    are_given = tuple(x is not None for x in (mask, lengths_q, lengths_k))
    given = [x for x in (mask, lengths_q, lengths_k) if x is not None]
    own = dict(num_heads=N, num_key_value_heads=HEADS_K, input_layout="BNSD")
    of_prompt = dict(scale_value=SCALE, **{"next_tokens": 2**31 - 1, **own, **settings})
    of_fused = dict(scale=SCALE, softmax_lse_flag=True, **own, **settings)

    def function(q, k, v, shift, *given):
        found = in_places(given, are_given)
        fused = ops.fused_infer_attention_score(
            *(q, k, v), atten_mask=found[0], actual_seq_lengths=found[1], actual_seq_lengths_kv=found[2], **of_fused
        )
        return ops.prompt_flash_attention(q, k, v, found[0], *known, shift, **of_prompt), fused

    first, (second, lse) = call(function, Q, K, V, SHIFT, *given)
    hidden = hidden | beyond(lengths_q, lengths_k)
    close(first, attention(Q, K, V, hidden, SHIFT)[0])
    want, want_lse = attention(Q, K, V, hidden)
    close(second, want)
    close(lse[..., 0], want_lse)


def in_places(given, are_given):
    """Returns each tensor that is given, and None for each other."""
    found, place = (), 0
    for is_given in are_given:
        found += (given[place] if is_given else None,)
        place += 1 if is_given else 0
    return found


ONE, SHIFT_OF_ONE = Q[:, :, :1], np.pad(SHIFT[:1, :, :1], ((0, 0),) * 3 + ((0, 2),))
MASK_OF_ONE = MASK[:, 0, 0]  # (B, S)


def of_one(q, k, v, bsh_q, bsh_k, bsh_v, mask, shift, lengths):
    own = dict(num_heads=N, scale_value=SCALE, num_key_value_heads=HEADS_K)
    keys, values, bnsd = [bsh_k], (bsh_v,), generated.IncreFlashAttention(N, "BNSD", SCALE, HEADS_K)
    return (
        ops.incre_flash_attention(bsh_q, keys, values, **own),
        ops.incre_flash_attention(bsh_q, keys, values, mask, lengths, shift, **own),
        ops.incre_flash_attention(q, k, v, mask.reshape((B, 1, KEYS)), [6, 3], input_layout="BNSD", **own),
        bnsd(q, [k], [v], mask.reshape((B, 1, 1, KEYS)), actual_seq_lengths=lengths[:1]),
        generated.incre_flash_attention_impl(bsh_q, bsh_k, bsh_v, *[None] * 12, N, "BSH", SCALE, HEADS_K, 0, 1),
        ops.fused_infer_attention_score(
            *(q, k, v), atten_mask=mask, actual_seq_lengths=lengths, actual_seq_lengths_kv=lengths, num_heads=N,
            scale=SCALE, pre_tokens=1, sparse_mode=3, input_layout="BNSD", num_key_value_heads=HEADS_K,
        )[0],
    )  # fmt: skip


@wide_in_graph_mode
def test_one_query(mode):
    """Modes and lengths of queries do not count there, and the shift may have more columns than keys."""
    bsh = [to_layout(x, "BSH") for x in (ONE, K, V)]
    got = call(of_one, ONE, K, V, *bsh, MASK_OF_ONE, SHIFT_OF_ONE, LENGTHS_K)
    hidden = MASK_OF_ONE[:, None, None]
    with_lengths = hidden | beyond(None, LENGTHS_K)[:, :, :1]
    plain = attention(ONE, K, V)[0]
    for each, want in zip(got, (
        *(plain, attention(ONE, K, V, with_lengths, SHIFT_OF_ONE[..., :KEYS])[0]),
        *(attention(ONE, K, V, with_lengths)[0], attention(ONE, K, V, hidden | (np.arange(KEYS) >= 6))[0]),
        *(plain, attention(ONE, K, V, with_lengths)[0]),
    )):  # fmt: skip
        close(each.reshape(want.shape), want)


ROWS, BLOCKS = 3, np.int32([[4, 0, 2], [1, -9, -1]])  # of the second text, one block counts


def cached(x):
    """Returns a cache of 5 blocks (5, heads, ROWS, D) that holds the keys; what is no key is NaN."""
    cache = np.full((5, HEADS_K, ROWS, D), np.nan, np.float32)
    for b, length in enumerate(LENGTHS_K):
        for j in range(length):
            cache[BLOCKS[b, j // ROWS], :, j % ROWS] = x[b, :, j]
    return cache


def of_blocks(q, k, v, bsh_k, bsh_v, tables, lengths, mask, shift):
    own, bsh_q = dict(num_heads=N, num_key_value_heads=HEADS_K), q.reshape((B, 1, N * D))
    incre, fused = generated.IncreFlashAttention(N, "BNSD", SCALE, HEADS_K, ROWS), ops.fused_infer_attention_score
    nothing = (None,) * 7
    first = ops.incre_flash_attention(bsh_q, bsh_k, bsh_v, None, lengths, block_table=tables, scale_value=SCALE, **own)
    out, lse = fused(
        *(bsh_q, bsh_k, bsh_v), atten_mask=mask, actual_seq_lengths_kv=lengths, block_table=tables, scale=SCALE,
        softmax_lse_flag=True, **own,
    )  # fmt: skip
    out_apart, lse_apart = fused(
        *(q, k, v), pse_shift=shift, actual_seq_lengths_kv=lengths, block_table=tables, scale=SCALE,
        softmax_lse_flag=True, input_layout="BNSD", block_size=ROWS, **own,
    )  # fmt: skip
    second = incre(q, [k], [v], mask, lengths, shift, *nothing, tables)
    third = incre(q, bsh_k, bsh_v, mask, (6, 3), shift, *nothing, tables)
    return first, second, third, out, lse, out_apart, lse_apart


@wide_in_graph_mode
def test_blocks(mode):
    k, v = cached(K), cached(V)
    bsh = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(5, ROWS, -1) for x in (k, v)]
    inputs = (ONE, k, v, *bsh, BLOCKS, LENGTHS_K, MASK_OF_ONE, SHIFT_OF_ONE)
    got = call(of_blocks, *inputs)
    unseen, shift = beyond(None, LENGTHS_K)[:, :, :1], SHIFT_OF_ONE[..., :KEYS]
    hidden = unseen | MASK_OF_ONE[:, None, None]
    both, masked, shifted = (attention(ONE, K, V, *terms) for terms in ((hidden, shift), (hidden,), (unseen, shift)))
    wants = attention(ONE, K, V, unseen)[0], both[0], both[0], *masked, *shifted
    for each, want in zip(got, wants):
        close(each.reshape(want.shape), want)
    assert [x.shape for x in got[2:]] == [(B, N, 1, D), (B, 1, N * D), (B, N, 1, 1), (B, N, 1, D), (B, N, 1, 1)]


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_dtypes_and_empty_sizes(mode):
    """The shift may be of another dtype than the rest."""
    for dtype, rtol in ((np.float16, 3e-3), (np.float64, 1e-3)):
        shift = SHIFT.astype(np.float32 if dtype == np.float16 else np.float16)
        inputs = [Tensor(x.astype(dtype)) for x in (Q, K, V)]
        settings = dict(num_heads=N, num_key_value_heads=HEADS_K, input_layout="BNSD", scale_value=SCALE)
        got = ops.prompt_flash_attention(*inputs, pse_shift=Tensor(shift), **settings).asnumpy()
        np.testing.assert_allclose(got, attention(Q, K, V, False, shift)[0], rtol, rtol)
        assert got.dtype == dtype
    none = [x[:0] for x in inputs]
    assert ops.prompt_flash_attention(*none, **settings).shape == (0, N, QUERIES, D)
    lengths, tables = Tensor(np.zeros(0, np.int32)), Tensor(np.zeros((0, 2), np.int32))
    caches = [ops.zeros((3, HEADS_K, ROWS, D), mindspore.float64)] * 2
    out = ops.incre_flash_attention(none[0][:, :, :1], *caches, None, lengths, block_table=tables, **settings)
    assert out.shape == (0, N, 1, D)


def refusals():
    q, k = Tensor(to_layout(Q, "BSH")), Tensor(to_layout(K, "BSH"))
    one, blocks, tables = q[:, :1], ops.zeros((5, 3, 16)), Tensor(BLOCKS)
    own = dict(num_heads=N, num_key_value_heads=HEADS_K)

    def prompt(*inputs, **settings):
        return lambda: ops.prompt_flash_attention(q, k, k, *inputs, **{**own, **settings})

    def incre(query=one, key=k, *inputs, **settings):
        return lambda: ops.incre_flash_attention(query, key, key, *inputs, **{**own, **settings})

    def fused(query=q, key=k, **settings):
        return lambda: ops.fused_infer_attention_score(query, key, key, **{**own, **settings})

    return (
        (prompt(quant_scale2=q), NotImplementedError, "prompt_flash_attention: quant_scale2 must be None"),
        (incre(antiquant_scale=q), NotImplementedError, "incre_flash_attention: antiquant_scale must be None"),
        (incre(kv_padding_size=q), NotImplementedError, "incre_flash_attention: kv_padding_size must be None"),
        (fused(key_shared_prefix=q), NotImplementedError, "score: key_shared_prefix must be None"),
        (fused(query_padding_size=q), NotImplementedError, "score: query_padding_size must be None"),
        (prompt(pre_tokens=-1), NotImplementedError, "prompt_flash_attention: pre_tokens must be at least 0 here"),
        (fused(next_tokens=-1), NotImplementedError, "score: next_tokens must be at least 0 here, got -1"),
        (fused(sparse_mode=5), NotImplementedError, "score: sparse_mode must be one of 0, 1, 2, 3, 4, got 5"),
        (fused(sparse_mode=1), ValueError, "score: attn_mask must be given if sparse_mode is 1"),
        (fused(input_layout="TND"), ValueError, "score: input_layout must be one of BSH, BNSD, BSND, got 'TND'"),
        (fused(q.astype(mindspore.int8)), NotImplementedError, "score: query must be float16, float32 or float64"),
        (fused(num_heads=3), ValueError, "score: num_key_value_heads must be 0 or divide num_heads = 3, got 2"),
        (fused(num_key_value_heads=0), ValueError, "score: key must have heads as wide as those of query"),
        (fused(key=[k, k]), ValueError, "score: key must have 1 elements, got 2"),
        (fused(key=k[:1]), ValueError, "score: key must have 2 samples as query has"),
        (fused(actual_seq_lengths=(6, 1)), ValueError, "score: actual_seq_lengths must be from 0 to 5, got"),
        (fused(actual_seq_lengths_kv=(6, 1, 1)), ValueError, "score: actual_seq_lengths_kv must have 2 elements"),
        (incre(one, k, None, (8, 1)), ValueError, "incre_flash_attention: actual_seq_lengths must be from 0 to 7"),
        (prompt(q), TypeError, "prompt_flash_attention: attn_mask must be bool, int8, uint8 or float16, got Float32"),
        (prompt(q > 0), ValueError, r"prompt_flash_attention: attn_mask must have shape \(B, 1, 5, 7\), with B = 2"),
        (prompt(q > 0, sparse_mode=3), ValueError, r"prompt_flash_attention: attn_mask must have shape \(2048, 2048\)"),
        (prompt(ops.zeros((2048, 2048), mindspore.bool_), sparse_mode=3), NotImplementedError,
         "prompt_flash_attention: attn_mask must be np.triu"),
        (prompt(pse_shift=q), ValueError, r"prompt_flash_attention: pse_shift must have shape \(B, 4, S1, S2\)"),
        (incre(q), ValueError, "incre_flash_attention: query needs one query of each sample"),
        (incre(one, blocks, block_table=tables), ValueError, "the lengths of the keys must be given with block_table"),
        (incre(one, blocks, None, (1, 1), block_table=tables, block_size=4), ValueError, "block_size must be the rows"),
        (incre(one, k, None, (1, 1), block_table=tables[:1]), ValueError, r"block_table must have shape \(2, blocks"),
        (incre(one, blocks[..., 1:], None, (1, 1), block_table=tables), ValueError, "key and value must have shape"),
        (fused(key=blocks, block_table=tables), ValueError, "score: query with block_table needs one query"),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_is_refused(mode):
    for make, error, words in refusals():
        with pytest.raises(error, match=words):
            make()
