"""Tests MindSpore's flash_attention_score by msops' kernels, in all layouts and modes, against NumPy."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import msops
from msops.testing.checks import Gradient, Net, run
from msops.testing.differences import check_finite_differences
from operator_test import wide_in_graph_mode

pytestmark = pytest.mark.skipif(not hasattr(ops, "flash_attention_score"), reason="this MindSpore does not have it")
B, N, N_KV, D = 2, 4, 2, 8
TRIANGLE = np.triu(np.ones((2048, 2048), bool), 1)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def attention(q, k, v, mask, scale):
    """Returns the attention of tensors (B, N, S, D)."""
    q, k, v = (np.float64(np.repeat(x, q.shape[1] // x.shape[1], 1)) for x in (q, k, v))
    x = np.where(mask, -np.inf, q @ k.swapaxes(-1, -2) * scale)
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


class Shifted(nn.Cell):
    def __init__(self, layout):
        super().__init__()
        self.settings = dict(scalar_value=0.3, input_layout=layout, sparse_mode=2)

    def construct(self, q, k, v, shift):
        return ops.flash_attention_score(q, k, v, N, shift, **self.settings)


def to_layout(x, layout):
    _, heads, _, width = x.shape
    x = x if layout == "BNSD" else x.swapaxes(1, 2)
    x = x.swapaxes(0, 1) if layout == "SBH" else x
    return np.ascontiguousarray(x.reshape(*x.shape[:2], heads * width) if layout in ("BSH", "SBH") else x)


def numbers(queries, keys, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, N, queries, D), *[(B, N_KV, keys, D)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(arrays, mask, layout, *masks, **settings):
    """Compares the function with NumPy's attention with a mask."""

    def function(q, k, v, *masks):
        return ops.flash_attention_score(q, k, v, N, None, None, None, *masks, input_layout=layout, **settings)

    inputs = [to_layout(x, layout) for x in arrays]
    (got,) = run(Net(function), *inputs, *masks)
    want = to_layout(attention(*arrays, mask, settings.get("scalar_value", 1.0)), layout)
    assert got.shape == want.shape
    tolerance = 2e-3 if arrays[0].dtype == np.float16 else 1e-5
    np.testing.assert_allclose(got, want, tolerance, tolerance)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND"])
def test_layouts(mode, layout, dtype):
    check(numbers(5, 7, dtype), False, layout, scalar_value=0.3)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND"])
def test_values_of_other_features(mode, layout):
    """Keys of latent attention have more features than values."""
    q, k, v = numbers(5, 7)
    check((q, k, v[..., :5]), False, layout, scalar_value=0.3)


def band(queries, keys, pre, following, later=0):
    i, j = np.arange(queries)[:, None] + later, np.arange(keys)
    return (j < i - pre) | (j > i + following)


MASK = np.random.default_rng(1).random((B, 1, 9, 9)) < 0.3
MASK[..., 0] = False


@pytest.mark.parametrize(
    ("queries", "keys", "attn_mask", "settings", "hidden"),
    [
        (9, 9, MASK, {}, MASK),
        (9, 9, MASK.astype(np.uint8), dict(sparse_mode=1, next_tokens=0), MASK),
        (9, 9, MASK[0, 0], dict(pre_tokens=9, next_tokens=2), MASK[0, 0] | band(9, 9, 9, 2)),
        (9, 9, None, dict(next_tokens=0), False),  # without a mask, tokens do not count
        (9, 6, np.zeros((9, 6), bool), dict(pre_tokens=8, next_tokens=1), band(9, 6, 8, 1)),
        (4, 9, np.zeros((4, 9), bool), dict(next_tokens=1), band(4, 9, 99, 1)),
        (9, 6, None, dict(sparse_mode=2), band(9, 6, 99, 0)),
        (6, 9, TRIANGLE, dict(sparse_mode=2), band(6, 9, 99, 0)),
        (6, 9, TRIANGLE.astype(np.uint8), dict(sparse_mode=3), band(6, 9, 99, 0, 3)),
        (6, 9, TRIANGLE, dict(sparse_mode=4, pre_tokens=2, next_tokens=1), band(6, 9, 2, 1, 3)),
    ],
)
def test_sparse_modes(mode, queries, keys, attn_mask, settings, hidden):
    for layout in ("BSH", "BNSD"):
        check(numbers(queries, keys), hidden, layout, *[] if attn_mask is None else [attn_mask], **settings)


@pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 5)])
def test_prefixes(mode, queries, keys):
    """Each sample sees so many keys besides those before it; lengths count with the layout TND alone."""
    prefix = np.array([keys - 1, max(keys - queries, 1)])
    hidden = band(queries, keys, 99, 0, keys - queries) & (np.arange(keys) >= prefix.reshape(-1, 1, 1, 1))
    arrays, places = numbers(queries, keys), tuple(map(int, prefix))
    settings = dict(input_layout="BNSD", sparse_mode=5, actual_seq_qlen=(2,))
    known = Net(ops.flash_attention_score, head_num=N, prefix=places, **settings)

    def function(q, k, v, prefix, mask):
        return ops.flash_attention_score(q, k, v, N, attn_mask=mask, prefix=prefix, **settings)

    mask = np.broadcast_to(hidden, (B, 1, queries, keys))
    for (got,) in (run(known, *arrays), run(Net(function), *arrays, prefix, mask)):
        np.testing.assert_allclose(got, attention(*arrays, hidden, 1.0), 1e-5, 1e-5)


def packed(arrays, lengths_q, lengths_k):
    """Returns the rows of sequences of these lengths one after another, and where they end."""
    rows = [
        np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])
        for x, lengths in zip(arrays, (lengths_q, lengths_k, lengths_k))
    ]
    return rows, [tuple(map(int, np.cumsum(lengths))) for lengths in (lengths_q, lengths_k)]


@pytest.mark.parametrize(
    ("sparse_mode", "lengths_q", "settings"),
    [(0, (5, 2), {}), (2, (7, 3), {}), (3, (5, 2), {}), (4, (5, 2), dict(pre_tokens=2, next_tokens=1))],
)
def test_packed(mode, sparse_mode, lengths_q, settings):
    (q, k, v), lengths_k = numbers(7, 7), (7, 3)
    arrays = q, k, v[..., : 5 if sparse_mode == 3 else 8]
    rows, ends = packed(arrays, lengths_q, lengths_k)
    pre, following = {0: (99, 99), 4: (2, 1)}.get(sparse_mode, (99, 0))
    want = [
        attention(*(x[b : b + 1, :, :n] for x, n in zip(arrays, (queries, keys, keys))), hide, 1.0)[0].swapaxes(0, 1)
        for b, (queries, keys) in enumerate(zip(lengths_q, lengths_k))
        for hide in [band(queries, keys, pre, following, keys - queries)]
    ]
    settings = dict(head_num=N, input_layout="TND", sparse_mode=sparse_mode, **settings)
    net = Net(ops.flash_attention_score, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **settings)
    np.testing.assert_allclose(run(net, *rows)[0], np.concatenate(want), 1e-5, 1e-5)
    if sparse_mode != 2:

        def function(q, k, v, ends_q, ends_k):
            return ops.flash_attention_score(q, k, v, actual_seq_qlen=ends_q, actual_seq_kvlen=ends_k, **settings)

        (got,) = run(Net(function), *rows, *(np.array(each, np.int64) for each in ends))
        np.testing.assert_allclose(got, np.concatenate(want), 1e-5, 1e-5)


@wide_in_graph_mode
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_features(mode, is_causal):
    """The layout TH has the heads in one axis, lengths in place of ends, and a triangle of any size and dtype."""
    (q, k, v), lengths = numbers(7, 7), (4, 7)
    arrays = q, k, v[..., : 8 if is_causal else 5]
    (q, k, v), _ = packed(arrays, lengths, lengths)
    want = np.concatenate([
        attention(*(x[b : b + 1, :, :n] for x in arrays), band(n, n, 99, 0) & is_causal, 0.3)[0].swapaxes(0, 1)
        for b, n in enumerate(lengths)
    ]).reshape(11, -1)  # fmt: skip
    primitive = ops.auto_generate.FlashAttentionScore(N, scale_value=0.3, input_layout="TH")
    settings = dict(scalar_value=0.3, input_layout="TH", actual_seq_qlen=lengths, actual_seq_kvlen=lengths)

    def function(q, k, v, lengths, *mask):
        mask = mask[0] if is_causal else None
        first = primitive(q[None], k[None], v[None], None, None, None, mask, None, lengths, lengths)
        return first[3], first[0], ops.flash_attention_score(q, k, v, N, attn_mask=mask, **settings)

    mask = [np.triu(np.full((16, 16), -10000, np.float16), 1)] * is_causal
    rows = [x.reshape(11, -1) for x in (q, k, v)]
    with_batch, lse, got = run(Net(function), *rows, np.int32(lengths), *mask)
    assert with_batch.shape == (1, *want.shape)
    assert lse.shape == (11, N, 8)
    for each in (with_batch[0], got):
        np.testing.assert_allclose(each, want, 1e-5, 1e-5)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_rows_of_features_that_are_refused(mode):
    q, k, v = (Tensor(to_layout(x, "BSH")) for x in numbers(5, 5))
    settings = dict(head_num=N, input_layout="TH", actual_seq_qlen=(5, 5), actual_seq_kvlen=(5, 5))
    for own, error, words in (
        (dict(sparse_mode=3), NotImplementedError, "msops has no real_shift, dropout or sparse_mode with input_layout"),
        (dict(actual_seq_kvlen=None), ValueError, "actual_seq_kvlen must be given if input_layout is 'TH'"),
        (dict(head_num=3), ValueError, "query must have head_num = 3 heads"),
        (dict(attn_mask=ops.zeros((16, 16))), NotImplementedError, r"must be np.triu\(np.ones\(\(16, 16\)\), 1\)"),
    ):
        with pytest.raises(error, match=words):
            ops.flash_attention_score(q, k, v, **{**settings, **own})


def test_gradients(mode):
    arrays = [to_layout(x, "SBH") for x in numbers(3, 5, np.float64)]
    net = Net(ops.flash_attention_score, head_num=N, input_layout="SBH", sparse_mode=3)
    douts = [np.random.default_rng(1).standard_normal(arrays[0].shape)]
    check_finite_differences(run(Gradient(net, 3), *arrays, *douts), net, arrays, douts, most=5)


def lse_of(q, k, scale, hidden):
    """Returns the logarithms of the sums of exponentials, (B, N, S)."""
    k = np.repeat(k, N // N_KV, 1)
    return np.log(np.where(hidden, 0, np.exp(np.float64(q) @ np.float64(k).swapaxes(-1, -2) * scale)).sum(-1))


class Attention(mindspore.nn.Cell):
    """Makes the primitive as libraries do, and multiplies its fourth result by a weight."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = ops.operations.nn_ops.FlashAttentionScore(**settings)
        self.weight = mindspore.Parameter(ops.ones(1))

    def construct(self, q, k, v, mask=None, *ends):
        largest, total, ignored, out = self.attention(q, k, v, None, None, None, mask, None, *ends)
        return largest, total, ignored, out * self.weight


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND"])
def test_primitive(mode, layout):
    arrays, hidden = numbers(5, 7), np.random.default_rng(1).random((B, 1, 5, 7)) < 0.3
    net = Attention(head_num=N, scale_value=0.3, input_layout=layout)
    inputs = [to_layout(x, layout) for x in arrays]
    largest, total, ignored, out = run(net, *inputs, hidden.astype(np.uint8))
    np.testing.assert_allclose(out, to_layout(attention(*arrays, hidden, 0.3), layout), 1e-5, 1e-5)
    assert largest.shape == total.shape == (B, N, 5, 8)
    assert ignored.shape == ()
    want = np.broadcast_to(lse_of(*arrays[:2], 0.3, hidden)[..., None], largest.shape)
    np.testing.assert_allclose(largest + np.log(total), want, 1e-5, 1e-5)


def test_primitive_of_packed_sequences(mode):
    arrays, lengths = numbers(7, 7), (7, 3)
    rows, (ends, _) = packed(arrays, lengths, lengths)
    primitive = ops.auto_generate.FlashAttentionScore(N, 1.0, 0.3, input_layout="TND", sparse_mode=3)

    def function(q, k, v):
        return primitive(q, k, v, actual_seq_qlen=ends, actual_seq_kvlen=ends)

    largest, total, _, out = run(Net(function), *rows)
    assert largest.shape == total.shape == (10, N, 8)
    for b, (end, n) in enumerate(zip(ends, lengths)):
        q, k, v = (x[b : b + 1, :, :n] for x in arrays)
        hide = band(n, n, 99, 0)
        np.testing.assert_allclose(out[end - n : end].swapaxes(0, 1), attention(q, k, v, hide, 0.3)[0], 1e-5, 1e-5)
        want = lse_of(q, k, 0.3, hide)[0].T
        np.testing.assert_allclose((largest + np.log(total))[end - n : end, :, 3], want, 1e-5, 1e-5)


@wide_in_graph_mode
def test_gradients_of_the_primitive(mode):
    arrays = numbers(3, 5, np.float64)
    primitive = ops.operations.nn_ops.FlashAttentionScore(N, scale_value=0.5, input_layout="BNSD", sparse_mode=3)

    def attended(q, k, v):
        return primitive(q, k, v)[3]

    def largest(q, k, v):
        return primitive(q, k, v)[0]

    net = Net(attended)
    douts = [np.random.default_rng(1).standard_normal(arrays[0].shape)]
    check_finite_differences(run(Gradient(net, 3), *arrays, *douts), net, arrays, douts, most=5)
    gradients = run(Gradient(Net(largest), 3), *arrays, np.ones((B, N, 3, 8)))
    assert not any(each.any() for each in gradients)


@pytest.mark.parametrize("samples", [1, B])
@pytest.mark.parametrize(("dtype", "layout"), [(np.float16, "BSH"), (np.float32, "SBH"), (np.float64, "BNSD")])
def test_real_shift(mode, dtype, layout, samples):
    """It is added before the scale, and has a gradient. sparse_mode 2 sees the first keys alone."""
    arrays, hidden = numbers(5, 7, dtype), band(5, 7, 99, 0)
    shift = np.random.default_rng(3).standard_normal((samples, N, 5, 7)).astype(dtype)
    net = Shifted(layout)
    (got,) = run(net, *(to_layout(x, layout) for x in arrays), shift)
    q, k, _ = (np.float64(np.repeat(x, N // x.shape[1], 1)) for x in arrays)
    x = np.where(hidden, -np.inf, (q @ k.swapaxes(-1, -2) + shift) * 0.3)
    weights = np.exp(x - x.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ np.repeat(arrays[2], N // N_KV, 1)
    tolerance = 2e-3 if dtype == np.float16 else 1e-5
    np.testing.assert_allclose(got, to_layout(want, layout), tolerance, tolerance)
    if dtype == np.float64:
        inputs = [*(to_layout(x, layout) for x in arrays), shift]
        douts = [np.random.default_rng(1).standard_normal(got.shape)]
        check_finite_differences(run(Gradient(net, 4), *inputs, *douts), net, inputs, douts, most=5)


class Alone(nn.Cell):
    """Attends to sequences of equal lengths one after another, as packed ones are computed."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = msops.FlashAttention(scale=0.3, layout="BTHD", dropout_p=0.25, **settings).set_train()

    def construct(self, q, k, v):
        outs = [self.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(2)]
        return ops.concat(outs, 0)


def drawn(net, *inputs):
    """Returns the results of a net for one seed, and the gradients for another."""
    mindspore.manual_seed(3)
    outs = run(net, *inputs)
    mindspore.manual_seed(4)
    return outs, run(Gradient(net, len(inputs)), *inputs, np.ones_like(outs[0]))


def check_dropout(net, inputs, alone, arrays, layout):
    """Compares a net with a Cell of msops, which draws its seed likewise."""
    outs, gradients = drawn(net, *inputs)
    (want,), wanted = drawn(alone, *arrays)
    np.testing.assert_array_equal(outs[0].reshape(-1), to_layout(want, layout).reshape(-1))
    for got, gradient in zip(gradients, wanted):
        np.testing.assert_allclose(got.reshape(-1), to_layout(gradient, layout).reshape(-1), 1e-6, 1e-6)
    again, _ = drawn(net, *inputs)
    np.testing.assert_array_equal(again[0], outs[0])
    assert not np.array_equal(run(net, *inputs)[0], outs[0])


@wide_in_graph_mode
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD"])
def test_dropout(mode, layout):
    arrays = numbers(5, 7)
    settings = dict(head_num=N, keep_prob=0.75, scalar_value=0.3, input_layout=layout, sparse_mode=3)
    net = Net(ops.flash_attention_score, **settings)
    alone = msops.FlashAttention(causal=True, scale=0.3, dropout_p=0.25).set_train()
    check_dropout(net, [to_layout(x, layout) for x in arrays], alone, arrays, layout)


@wide_in_graph_mode
def test_dropout_of_the_primitive(mode):
    arrays = numbers(5, 5)
    primitive = ops.operations.nn_ops.FlashAttentionScore(N, 0.75, 0.3, input_layout="BNSD")

    def function(q, k, v):
        return primitive(q, k, v)[3]

    alone = msops.FlashAttention(scale=0.3, dropout_p=0.25).set_train()
    check_dropout(Net(function), arrays, alone, arrays, "BNSD")


@wide_in_graph_mode
def test_dropout_of_packed_sequences(mode):
    rows = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in numbers(6, 6)]
    settings = dict(keep_prob=0.75, scalar_value=0.3, input_layout="TND", sparse_mode=3)
    ends = dict(actual_seq_qlen=(6, 12), actual_seq_kvlen=(6, 12))
    net = Net(ops.flash_attention_score, head_num=N, **settings, **ends)
    check_dropout(net, [x.reshape(-1, *x.shape[2:]) for x in rows], Alone(causal=True), rows, "BNSD")


def shifted(q, k, v, shift, hidden):
    """Returns the attention of one sample, (N, S, D): MindSpore adds the shift before the scale."""
    k, v = (np.repeat(np.float64(x), N // N_KV, 0) for x in (k, v))
    x = np.where(hidden, -np.inf, (q @ k.swapaxes(-1, -2) + shift) * 0.3)
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@wide_in_graph_mode
@pytest.mark.parametrize("samples", [1, B])
def test_real_shift_of_packed_sequences(mode, samples):
    arrays, lengths_q, lengths_k = numbers(7, 7, np.float64), (5, 2), (7, 3)
    rows, ends = packed(arrays, lengths_q, lengths_k)
    shift = np.random.default_rng(3).standard_normal((samples, N, 7, 7))
    settings = dict(scalar_value=0.3, input_layout="TND", sparse_mode=3)

    def function(q, k, v, shift):
        return ops.flash_attention_score(
            q, k, v, N, shift, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **settings
        )

    net = Net(function)
    (got,) = run(net, *rows, shift)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k)):
        q, k, v = (x[b, :, :count] for x, count in zip(arrays, (n, m, m)))
        want = shifted(q, k, v, shift[b % samples, :, :n, :m], band(n, m, 99, 0, m - n))
        np.testing.assert_allclose(got[ends[0][b] - n : ends[0][b]].swapaxes(0, 1), want, 1e-9, 1e-9)
    douts = [np.random.default_rng(1).standard_normal(got.shape)]
    check_finite_differences(run(Gradient(net, 4), *rows, shift, *douts), net, [*rows, shift], douts, most=5)


@wide_in_graph_mode
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_last_rows_of_alibi(mode, layout):
    """MindSpore gives the last 1024 rows of longer sequences; the shift of the others follows from ALiBi's slopes."""
    n = 1030
    arrays = [x[:1] for x in numbers(n, n)]
    i, j = np.ogrid[:n, :n]
    shift = (np.array([0.5, 0.25, 0.125, 2**-8])[:, None, None] * (j - i)).astype(np.float32)
    inputs = arrays if layout == "BNSD" else packed(arrays, (n,), (n,))[0]
    ends = dict(actual_seq_qlen=(n,), actual_seq_kvlen=(n,)) if layout == "TND" else {}
    settings = dict(scalar_value=0.3, input_layout=layout, sparse_mode=2, **ends)

    def function(q, k, v, end):
        return ops.flash_attention_score(q, k, v, N, end, **settings)

    (got,) = run(Net(function), *inputs, shift[None, :, -1024:])
    want = shifted(*(x[0] for x in arrays), shift, band(n, n, n, 0))
    np.testing.assert_allclose(got[0] if layout == "BNSD" else got.swapaxes(0, 1), want, 1e-4, 1e-4)


Q = np.zeros((2, 3, 8), np.float32)
MISTAKES = [
    (dict(keep_prob=0.0), ValueError, "keep_prob must be above 0 and at most 1, got 0.0"),
    (
        dict(input_layout="TND", head_num=3, keep_prob=0.9, actual_seq_qlen=np.array([2]), actual_seq_kvlen=(2,)),
        NotImplementedError,
        "actual_seq_qlen and actual_seq_kvlen must be tuples",
    ),
    (
        dict(input_layout="TND", head_num=3, keep_prob=0.9, actual_seq_qlen=(2, 2), actual_seq_kvlen=(1, 2)),
        ValueError,
        "each of which has a query and a key, got the lengths (2, 0) and (1, 1)",
    ),
    (dict(real_shift=Q), NotImplementedError, "real_shift must have shape (B, N1, S1, S2) or (1, N1, S1, S2), with S1"),
    (dict(real_shift=1.0), TypeError, "real_shift must be a Tensor, got float"),
    (dict(padding_mask=Q), NotImplementedError, "padding_mask must be None"),
    (dict(drop_mask=Q), NotImplementedError, "drop_mask must be None: msops draws its own mask"),
    (dict(sparse_mode=5), ValueError, "prefix must be given if sparse_mode is 5"),
    (dict(sparse_mode=5, prefix=3), TypeError, "prefix must be a Tensor or a tuple of ints, got 3"),
    (dict(sparse_mode=6), NotImplementedError, "sparse_mode must be one of 0, 1, 2, 3, 4, 5 here, got 6"),
    (dict(sparse_mode=1), ValueError, "attn_mask must be given if sparse_mode is 1"),
    (dict(sparse_mode=4, pre_tokens=-1), NotImplementedError, "pre_tokens and next_tokens must be at least 0"),
    (dict(sparse_mode=3, attn_mask=np.zeros((3, 3), bool)), ValueError, "attn_mask must have shape (2048, 2048)"),
    (dict(attn_mask=np.zeros((3, 3), np.int32)), TypeError, "attn_mask must be bool or uint8, got int32"),
    (dict(head_num=0), ValueError, "head_num must be at least 1, got 0"),
    (dict(head_num=3), ValueError, "query must have a multiple of head_num = 3 features"),
    (dict(input_layout="BNSD"), ValueError, "query must have the axes B, N, S, D, got (2, 3, 8)"),
    (dict(key=Q[..., :6], value=Q[..., :6]), ValueError, "key must have heads of 4 features as query has"),
    (
        dict(value=Q[:, :2]),
        ValueError,
        "value must have the shape of key, (2, 3, 8), except for its features, got (2, 2",
    ),
    (dict(value=Q[..., :5]), ValueError, "value must have 2 heads as key has, got (2, 3, 5)"),
    (dict(value=Q[:, None]), ValueError, "value must have the axes B, S, H, got (2, 1, 3, 8)"),
    (
        dict(
            input_layout="TND",
            head_num=3,
            actual_seq_qlen=(2,),
            actual_seq_kvlen=(2,),
            key=Q[..., :4],
            value=Q[..., :4],
        ),
        ValueError,
        "key must have 8 features as query has, got (2, 3, 4)",
    ),
    (dict(input_layout="TND", head_num=3, actual_seq_qlen=6), TypeError, "actual_seq_qlen must be a Tensor or a tuple"),
    (
        dict(input_layout="TND", head_num=3, actual_seq_qlen=(2,), actual_seq_kvlen=[0, 1]),
        ValueError,
        "actual_seq_kvlen must end with the 2 rows of key, got [0, 1]",
    ),
    (
        dict(sparse_mode=3, attn_mask=TRIANGLE.T),
        NotImplementedError,
        "attn_mask must be np.triu(np.ones((2048, 2048)), 1)",
    ),
    (dict(inner_precise="x"), TypeError, "inner_precise must be an int, got str"),
    (dict(scalar_value=None), TypeError, "scalar_value must be a number, got NoneType"),
    (dict(input_layout="BHTD"), ValueError, "input_layout must be one of BSH, SBH, BNSD, BSND, TND, TH, got 'BHTD'"),
    (dict(input_layout="TND", head_num=3), ValueError, "actual_seq_qlen must be given if input_layout is 'TND'"),
    (dict(scalar_value="1"), TypeError, "scalar_value must be a number, got str"),
    (dict(next_tokens=1.0), TypeError, "next_tokens must be an int, got float"),
]


@pytest.mark.parametrize(("settings", "error", "words"), MISTAKES, ids=lambda each: each if type(each) is str else "")
def test_mistakes(settings, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    settings = {name: Tensor(x) if isinstance(x, np.ndarray) else x for name, x in settings.items()}
    with pytest.raises(error) as caught:
        ops.flash_attention_score(Tensor(Q), **{"key": Tensor(Q), "value": Tensor(Q), "head_num": 2, **settings})
    assert str(caught.value).startswith("flash_attention")
    assert words in str(caught.value)
