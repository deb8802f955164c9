"""Tests that MindSpore's names of experts' operators work by msops' kernels while they are patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from msops.testing.checks import Net, run_gradient
from operator_test import wide_in_graph_mode
from test_patched_operators import call

generated = getattr(ops, "auto_generate", None)
pytestmark = pytest.mark.skipif(not hasattr(generated, "GroupedMatmulV4"), reason="this MindSpore has no such names")
RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (3, 5, 4), (3, 4)))
SIZES = np.array([2, 0, 4])
EXPERTS = np.array([[2, 0], [0, 1], [2, 1], [1, 2], [0, 2], [2, 0], [1, 0]], np.int32)  # of the rows of X
ORDER = np.argsort(EXPERTS.ravel(), kind="stable")  # of the slots, by expert
PLACES = np.argsort(ORDER)
TOLERANCE = dict(rtol=2e-6, atol=2e-6)


@pytest.fixture(scope="module", autouse=True)
def _patched():
    with msops.patch_mindspore():
        yield


def products():
    groups = np.repeat(np.arange(3), SIZES)
    out = np.zeros((7, 4))
    out[:6] = np.einsum("nk,nkm->nm", X[:6], WEIGHT[groups]) + BIAS[groups]
    return out


def of_groups(x, weight, bias, ends, counts):
    turned = weight.swapaxes(1, 2)
    return (
        generated.grouped_matmul([x], [weight], [bias], group_list=ends, split_item=3, group_type=0),
        generated.GroupedMatmul(3, 0, False, True)([x], [turned], [bias], None, None, None, None, ends),
        generated.grouped_matmul_v2([x], [weight], [bias], group_list=ends, split_item=3, group_type=0),
        generated.GroupedMatmulV2()((x,), (weight,), (bias,), group_list=[2, 2, 6], split_item=3, group_type=0),
        generated.grouped_matmul_v4([x], [weight], [bias], group_list=ends, split_item=3, group_type=0),
        generated.GroupedMatmulV4()(
            [x], [weight], [bias], group_list=counts, split_item=3, group_type=0, group_list_type=1
        ),
    )


def test_products_of_groups(mode):
    got = call(of_groups, X, WEIGHT, BIAS, np.cumsum(SIZES), SIZES)
    assert [len(each) for each in got] == [1] * 6
    for (each,) in got:
        np.testing.assert_allclose(each, products(), **TOLERANCE)


def of_pairs(x, y, weight, bias):
    return generated.GroupedMatmul()([x, y], [weight[0], weight[2]], [bias[0], bias[2]])


def test_products_of_pairs(mode):
    got = call(of_pairs, X, X[None, :3], WEIGHT, BIAS)
    np.testing.assert_allclose(got[0], X @ WEIGHT[0] + BIAS[0], **TOLERANCE)
    np.testing.assert_allclose(got[1], X[None, :3] @ WEIGHT[2] + BIAS[2], **TOLERANCE)


def of_one(x, weight, ends):
    return generated.grouped_matmul([x], [weight], group_list=ends, split_item=3, group_type=0)[0]


def test_gradient_of_products(mode):
    dout = RNG.standard_normal((7, 4)).astype(np.float32)
    inputs = X, WEIGHT, np.cumsum(SIZES)
    dx, dweight, _ = run_gradient(Net(of_one), inputs, [dout])
    groups = np.repeat(np.arange(3), SIZES)
    np.testing.assert_allclose(dx[:6], np.einsum("nm,nkm->nk", dout[:6], WEIGHT[groups]), **TOLERANCE)
    assert not dx[6].any()
    np.testing.assert_allclose(dweight[2], X[2:6].T @ dout[2:6], **TOLERANCE)
    assert not dweight[1].any()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(split_item=2, group_type=0), NotImplementedError, "GroupedMatmulV4: split_item and group_type must be"),
        (dict(split_item=3, group_type=0, act_type=1), NotImplementedError, "GroupedMatmulV4: msops has no act_type"),
        (dict(offset=[1]), NotImplementedError, "GroupedMatmulV4: msops has no offset"),
        (dict(group_list_type=2), ValueError, r"GroupedMatmulV4: group_list_type must be 0 \(ends\) or 1"),
        (dict(), ValueError, "GroupedMatmulV4: group_list must be given with group_type 0, and with that alone"),
    ],
)
def test_refusals(settings, error, words):
    with pytest.raises(error, match=words):
        generated.grouped_matmul_v4([Tensor(X)], [Tensor(WEIGHT)], group_list=Tensor(SIZES), **settings)


ONE = Tensor(EXPERTS[:, :1])
SHORT = Tensor(EXPERTS[:5])


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        (
            "grouped_matmul_v2",
            [[Tensor(X)], [Tensor(WEIGHT)], *[None] * 5, [1.5, 2, 3]],
            TypeError,
            "group_list must be an",
        ),
        ("moe_init_routing", [Tensor(X), ONE, ONE, -1], ValueError, "active_num must be at least 0, got -1"),
        ("moe_init_routing", [Tensor(X), SHORT, SHORT, 5], ValueError, r"expert_idx must have shape \(7, k\) or"),
        ("moe_init_routing_v2", [Tensor(X), SHORT, 0, 0, 0, 0, 0, False], ValueError, "expert_idx must have shape"),
        (
            "moe_init_routing_v2",
            [Tensor(X), ONE, 0, 2, 3, 2, 0, False],
            ValueError,
            "drop_pad_mode must be 0 or 1, got 2",
        ),
        ("moe_init_routing_v2", [Tensor(X), ONE, 0, 0, 3, 0, 3, False], ValueError, "flag must be 0, 1 or 2, got 3"),
        ("moe_token_permute", [Tensor(X), SHORT], ValueError, "moe_token_permute: indices must have shape"),
        ("moe_token_permute", [Tensor(X), Tensor(EXPERTS[..., None])], ValueError, "indices must have shape"),
    ],
)
def test_refusals_of_routing(name, arguments, error, words):
    function = getattr(generated, name, None) or getattr(ops, name)
    settings = dict(split_item=3, group_type=0) if name.startswith("grouped") else {}
    with pytest.raises(error, match=words):
        function(*arguments, **settings)


CODES = RNG.integers(-128, 128, (3, 6, 4), np.int8)
SCALE, OFFSET = (RNG.random((3, 4)) / 64).astype(np.float16), RNG.integers(-9, 9, (3, 4)).astype(np.float16)
OF_GROUPS = (RNG.random((3, 2, 4)) / 64).astype(np.float16), RNG.integers(-9, 9, (3, 2, 4)).astype(np.float16)
WIDE_X = RNG.standard_normal((7, 6)).astype(np.float16)
GROUPS = np.repeat(np.arange(3), SIZES)  # of the first six rows


def packed(codes):
    """Puts two codes along the last axis into a byte, the first into its lower half."""
    halves = codes.view(np.uint8) & 15
    return (halves[..., ::2] | halves[..., 1::2] << 4).view(np.int8)


def of_codes(x, codes, turned, pairs, turned_pairs, scale, offset, bias, scales, offsets, ends, counts):
    settings = dict(split_item=3, group_type=0)
    return (
        generated.grouped_matmul(
            [x], [codes], [bias], antiquant_scale=[scale], antiquant_offset=[offset], group_list=ends, **settings
        ),
        generated.GroupedMatmul(3, 0, False, True)([x], [turned], None, None, None, [scale], [offset], ends),
        generated.GroupedMatmulV2()([x], [codes], None, None, None, [scales], [offsets], ends, 3, 0),
        generated.GroupedMatmulV4()(
            [x], [pairs], [bias], antiquant_scale=[scale], group_list=counts, group_list_type=1, **settings
        ),
        generated.GroupedMatmul(3, 0, False, True)([x], [turned_pairs], None, None, None, [scales], [offsets], ends),
        generated.GroupedMatmulV4()(
            [x, x[:2]], [codes[0], codes[2]], None, None, None, [scale[0], scale[2]], [offset[0], offset[2]]
        ),
    )


@wide_in_graph_mode
def test_products_with_codes(mode):
    small = CODES >> 4
    weights = CODES, CODES.swapaxes(1, 2).copy(), packed(small), packed(small.swapaxes(1, 2).copy())
    terms = SCALE, OFFSET, BIAS.astype(np.float16), *OF_GROUPS
    *got, of_lists = call(of_codes, WIDE_X, *weights, *terms, np.cumsum(SIZES), SIZES)
    scale, offset, bias, scales, offsets = (each.astype(np.float64) for each in terms)
    by_term, added = (np.repeat(each, 3, 1)[GROUPS] for each in (scales, offsets))
    scale_, offset_, bias_, codes, small = (
        each[GROUPS] for each in (scale[:, None], offset[:, None], bias, CODES, small)
    )
    matrices = (codes + offset_) * scale_, (codes + added) * by_term, small * scale_, (small + added) * by_term
    plain, of_groups, of_pairs, both = (np.einsum("nk,nkm->nm", WIDE_X[:6], each) for each in matrices)
    for (each,), want in zip(got, (plain + bias_, plain, of_groups, of_pairs + bias_, both)):
        assert each.dtype == np.float16
        np.testing.assert_allclose(each[:6], want, rtol=2e-3, atol=2e-2)
        assert not each[6].any()
    for each, x, e in zip(of_lists, (WIDE_X, WIDE_X[:2]), (0, 2)):
        np.testing.assert_allclose(each, x @ ((CODES[e] + offset[e]) * scale[e]), rtol=2e-3, atol=2e-2)


def of_int8(x, codes, turned, scale, coded, bias, of_rows, ends):
    settings = dict(split_item=3, group_type=0)
    v4, dtype = generated.GroupedMatmulV4(), mindspore.float32
    return (
        v4([x], [codes], [bias], [scale], None, None, None, [of_rows], ends, output_dtype=dtype, **settings),
        v4([x], [codes], None, [coded], None, None, None, [of_rows.reshape((-1, 1))], ends, **settings),
        generated.GroupedMatmul(3, 0, False, True)([x], [turned], None, [scale], None, None, None, ends),
        v4([x], [codes[1]], [bias[1]], [scale[1]], pre_token_scale=[of_rows]),
    )


@wide_in_graph_mode
def test_products_of_int8(mode):
    """Sums are exact beyond 2^24, up to which float32 has all integers: the first bias leaves 3 of such a sum."""
    x, codes = RNG.integers(-128, 128, (7, 3000), np.int8), RNG.integers(-128, 128, (3, 3000, 4), np.int8)
    x[0], codes[0, :, 0] = -128, -128
    x[0, 9], codes[0, 9, 0] = 1, 1
    scale, of_rows = (
        np.float32([[1, -2e-3, 1e-3, 2], [3, 1, 1, 1], [2.0**-9, 1, 3e-3, 1]]),
        np.float32([1, 2, 3, 4] * 2)[:7],
    )
    bias, coded = RNG.integers(-99, 99, (3, 4), np.int32), scale.view(np.uint32).astype(np.int64)
    bias[0, 0] = 2 - 2999 * 2**14
    first, second, third, fourth = call(
        of_int8, x, codes, codes.swapaxes(1, 2).copy(), scale / 99, coded, bias, of_rows, np.cumsum(SIZES)
    )
    sums = np.einsum("nk,nkm->nm", x[:6].astype(np.int64), codes[GROUPS].astype(np.int64))
    assert sums.dtype == np.int64
    scales = (scale / 99)[GROUPS].astype(np.float64)
    want = (sums + bias[GROUPS]) * scales * of_rows[:6, None]
    np.testing.assert_allclose(first[0][:6], want, rtol=2e-7)
    assert round(first[0][0, 0] * 99) == 3
    coded_want = sums * scale[GROUPS].astype(np.float64) * of_rows[:6, None]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(second[0][:6], coded_want.astype(np.float16))
        np.testing.assert_allclose(third[0][:6], (sums * scales).astype(np.float16), rtol=2e-3)
        of_one = (x.astype(np.int64) @ codes[1].astype(np.int64) + bias[1]) * (scale[1] / 99) * of_rows[:, None]
        np.testing.assert_allclose(fourth[0], of_one.astype(np.float16), rtol=2e-3)
    assert not first[0][6].any()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (dict(scale=[SCALE]), NotImplementedError, "with scale, x and weight must be int8, got Float16"),
        (dict(scale=[SCALE], x=[CODES[0].T], weight=[packed(CODES)]), NotImplementedError,
         "msops multiplies int8 by int8, not by codes of 4 bits"),
        (dict(scale=[SCALE], x=[CODES[0].T], output_dtype=mindspore.bfloat16), NotImplementedError,
         "output_dtype must be float16 or float32, got bfloat16"),
        (dict(antiquant_scale=[SCALE], x=[CODES[0].T]), NotImplementedError, "x must be float16, float32 or float64"),
        (dict(antiquant_scale=[SCALE], weight=[CODES.astype(np.float16)]), NotImplementedError, "weight must be int8"),
        (dict(antiquant_scale=[SCALE[:, :3]]), ValueError, r"weight must have shape \(3, 6, 3\), or half of"),
        (dict(antiquant_scale=[np.ones((3, 4, 4), np.float16)]), ValueError, "where G divides 6, got"),
        (dict(antiquant_scale=[SCALE, SCALE]), ValueError, "antiquant_scale must have 1 tensors, got 2"),
        (dict(antiquant_scale=[SCALE.astype(np.int64)]), NotImplementedError, "antiquant_scale must be of floats, got"),
        (dict(antiquant_scale=[SCALE], output_dtype=mindspore.float32), NotImplementedError,
         "output_dtype must be None or the dtype of x without scale, got Float32"),
        (dict(weight=[CODES.astype(np.float16)], output_dtype=mindspore.float32), NotImplementedError,
         "output_dtype must be None or the dtype of x"),
        (dict(scale=[SCALE], x=[np.zeros((7, 6), np.int8)], bias=[SCALE]), NotImplementedError,
         "bias must be int32 with scale, which multiplies it, got Float16"),
        (dict(antiquant_offset=[OFFSET]), ValueError, "antiquant_offset needs antiquant_scale"),
        (dict(pre_token_scale=[OFFSET]), ValueError, "pre_token_scale needs scale"),
    ],
)  # fmt: skip
def test_refusals_of_codes(settings, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    given = {"x": [WIDE_X], "weight": [CODES], "group_list": np.cumsum(SIZES), "split_item": 3, "group_type": 0}
    own = {
        name: [Tensor(x) for x in value] if isinstance(value, list) else value
        for name, value in {**given, **settings, "group_list": Tensor(given["group_list"])}.items()
    }
    with pytest.raises(error, match=words):
        generated.grouped_matmul_v4(**own)


def softmax(x):
    shares = np.exp(np.float64(x) - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def gate(x, finished):
    return generated.MoeGatingTopKSoftmax()(x, None, 2), generated.MoeGatingTopKSoftmax()(x, finished, k=3)


def test_gating(mode):
    finished = np.arange(7) % 3 == 1
    first, second = call(gate, X, finished)
    order = np.argsort(-X, 1, kind="stable")
    np.testing.assert_array_equal(first[1], order[:, :2])
    np.testing.assert_allclose(first[0], np.take_along_axis(softmax(X), order[:, :2], 1), **TOLERANCE)
    np.testing.assert_array_equal(first[2], np.arange(14).reshape(2, 7).T)
    np.testing.assert_array_equal(second[1], np.where(finished[:, None], 5, order[:, :3]))


def choose(x, bias):
    return generated.FusedAddTopKDiv()(x, bias, 2, 1, 2, 2), generated.fused_add_topk_div(
        x, bias, 2, 1, 2, 2, is_norm=False
    )


def test_gating_by_groups(mode):
    logits = RNG.standard_normal((9, 6)).astype(np.float32)
    bias = RNG.standard_normal(6).astype(np.float32)
    scores = 1 / (1 + np.exp(-np.float64(logits)))
    worth = np.sort((scores + bias).reshape(9, 2, 3), -1)[..., -2:].sum(-1)
    allowed = np.repeat(worth == worth.max(1, keepdims=True), 3, 1)
    experts = np.argsort(-np.where(allowed, scores + bias, -np.inf), 1)[:, :2]
    chosen = np.take_along_axis(scores, experts, 1)
    normed, plain = call(choose, logits, bias)
    np.testing.assert_array_equal(normed[1], experts)
    np.testing.assert_allclose(normed[0], 2.5 * chosen / chosen.sum(1, keepdims=True), **TOLERANCE)
    np.testing.assert_allclose(plain[0], chosen, **TOLERANCE)


def route(x, rows, experts):
    return generated.MoeInitRouting()(x, rows, experts, 5), generated.moe_init_routing(x, rows, experts, 100)


def test_routing(mode):
    columns = np.arange(14).reshape(2, 7).T.astype(np.int32)
    part, whole = call(route, X, columns, EXPERTS)
    for rows, places, experts in part, whole:
        np.testing.assert_array_equal(rows, X[ORDER // 2][: len(rows)])
        np.testing.assert_array_equal(places[columns], PLACES.reshape(7, 2))
        np.testing.assert_array_equal(experts, np.sort(EXPERTS.ravel()))
    assert (len(part[0]), len(whole[0])) == (10, 14)


def route_again(x, experts):
    return (
        ops.moe_init_routing_v2(x, experts, 0, 0, 3, 0, 2, False),
        ops.moe_init_routing_v2(x, experts, 9, 0, 3, 0, 1, False),
        ops.moe_init_routing_v2(x, experts, 0, 0, 0, 0, 0, False),
        ops.moe_init_routing_v2(x, experts, 0, 3, 3, 1, 0, True),
    )


def test_routing_with_counts(mode):
    counted, added, sorted_, padded = call(route_again, X, EXPERTS)
    counts = np.bincount(EXPERTS.ravel())
    for rows, places, *_ in counted, added, sorted_:
        np.testing.assert_array_equal(rows, X[ORDER // 2][: len(rows)])
        np.testing.assert_array_equal(places, PLACES)
    assert (len(counted[0]), len(added[0]), len(sorted_)) == (14, 9, 2)
    np.testing.assert_array_equal(counted[2], counts)
    np.testing.assert_array_equal(added[2], np.cumsum(counts))
    rows, places, before = padded
    np.testing.assert_array_equal(before, counts)
    for slot, (place, expert) in enumerate(zip(places, EXPERTS.ravel())):
        rank = PLACES[slot] - np.cumsum(counts)[expert] + counts[expert]
        assert place == (3 * expert + rank if rank < 3 else -1)
        if rank < 3:
            np.testing.assert_array_equal(rows[expert, rank], X[slot // 2])


def finish(rows, x, bias, scales, places, experts):
    return (
        generated.MoeFinalizeRouting()(rows, x, None, None, scales, places, experts),
        generated.moe_finalize_routing(rows, x, x, bias, scales, places, experts),
        generated.moe_finalize_routing(rows, x, None, bias, None, places, experts),
    )


def test_end_of_routing(mode):
    rows, bias = RNG.standard_normal((14, 5)).astype(np.float32), RNG.standard_normal((3, 5)).astype(np.float32)
    scales = RNG.random((7, 2)).astype(np.float32)
    places = RNG.permutation(14).astype(np.int32)
    taken = rows[places.reshape(2, 7).T]
    got = call(finish, rows, X, bias, scales, places, EXPERTS)
    biased = taken + bias[EXPERTS]
    np.testing.assert_allclose(got[0], X + (scales[..., None] * taken).sum(1), **TOLERANCE)
    np.testing.assert_allclose(got[1], 2 * X + (scales[..., None] * biased).sum(1), **TOLERANCE)
    np.testing.assert_allclose(got[2], X + biased.sum(1), **TOLERANCE)


def test_end_of_routing_needs_places():
    with pytest.raises(TypeError, match="MoeFinalizeRouting: expanded_row_idx must be a Tensor, got None"):
        generated.MoeFinalizeRouting()(Tensor(X), Tensor(X))


def with_wider_terms(x, weight, rows, bias, scales, places, experts):
    (product,) = generated.grouped_matmul([x], [weight], [bias[0]])
    return product, generated.MoeFinalizeRouting()(rows, rows, None, bias, scales, places, experts)


def test_results_have_the_dtype_of_x(mode):
    """As those of `grouped_matmul` and `moe_unpermute` have, beside a bias or scales of float32."""
    x, weight, rows = X.astype(np.float16), WEIGHT[0].astype(np.float16), np.ones((7, 4), np.float16)
    places, experts = np.arange(7, dtype=np.int32), EXPERTS[:, :1].copy()
    scales = RNG.random((7, 1)).astype(np.float32)
    product, y = call(with_wider_terms, x, weight, rows, BIAS, scales, places, experts)
    assert product.dtype == y.dtype == np.float16
    np.testing.assert_allclose(product, np.float64(x) @ weight + BIAS[0], 3e-3, 3e-3)
    np.testing.assert_allclose(y, 1 + scales * (1 + BIAS[experts[:, 0]]), 3e-3, 3e-3)


def count(experts):
    return generated.MoeComputeExpertTokens()(experts, 5)


def test_ends_of_experts(mode):
    np.testing.assert_array_equal(call(count, np.array([0, 0, 1, 3, 3], np.int32)), [2, 3, 3, 5, 5])


def permute(x, experts):
    return ops.moe_token_permute(x, experts), ops.moe_token_permute(x, experts, 9)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tokens_are_sorted(mode, dtype):
    """Any integers are indices, also negative and great ones."""
    indices = EXPERTS.astype(dtype)
    indices[indices == 0], indices[indices == 2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    (rows, places), (first, _) = call(permute, X, indices)
    np.testing.assert_array_equal(rows, X[ORDER // 2])
    np.testing.assert_array_equal(places, PLACES)
    np.testing.assert_array_equal(first, X[ORDER // 2][:9])


def test_rows_that_are_none():
    with msops.patch_mindspore():
        for rows in (0, -1):
            with pytest.raises(NotImplementedError, match=f"num_out_tokens must be at least 1 here, got {rows}"):
                ops.moe_token_permute(Tensor(X), Tensor(EXPERTS), rows)


def there_and_back(x, probs, experts):
    rows, places = ops.moe_token_permute(x, experts, 10)
    return ops.moe_token_unpermute(rows, places, probs)


def test_tokens_come_back(mode):
    probs, dout = RNG.random((7, 2)).astype(np.float32), RNG.standard_normal((7, 5)).astype(np.float32)
    kept = np.where(PLACES.reshape(7, 2) < 10, probs, 0)
    np.testing.assert_allclose(call(there_and_back, X, probs, EXPERTS), X * kept.sum(1, keepdims=True), **TOLERANCE)
    dx, dprobs, _ = run_gradient(Net(there_and_back), (X, probs, EXPERTS), [dout])
    np.testing.assert_allclose(dx, dout * kept.sum(1, keepdims=True), **TOLERANCE)
    np.testing.assert_allclose(dprobs, (kept > 0) * (dout * X).sum(1, keepdims=True), **TOLERANCE)
