import numpy as np
import pytest
from numpy import inf, nan

import msops
from card import DTYPES, chain, lengths, results_of, zeros
from guarded_call import GuardedCall
from msops.operators.topk_gating import operators
from msops.testing.checks import Net, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, wide_in_graph_mode


def scores_of(x, score):
    if score == "sigmoid":
        return 1 / (1 + np.exp(-x))
    largest = x.max(-1, keepdims=True, initial=-inf)
    e = np.exp(x - np.where(np.isinf(largest), 0, largest))
    total = e.sum(-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total != 0)


def descending(keys, out=None):
    """Returns the indices of keys in falling order, with equal ones in theirs, and those that are `out` at the end."""
    keys = np.where(np.isnan(keys), -inf, keys)
    order = np.argsort(-keys, axis=-1, kind="stable")
    if out is None:
        return order
    return np.take_along_axis(order, np.argsort(np.take_along_axis(out, order, -1), -1, kind="stable"), -1)


def keys_of(logits, bias, score, group_top):
    """Returns what the order of experts, and the worth of groups, come from."""
    if bias is None and group_top == 1:
        return logits
    return scores_of(logits, score) + (0 if bias is None else bias)


def worths_of(keys, groups, group_top):
    """Returns the worth of each group."""
    of_groups = keys.reshape(*keys.shape[:-1], groups, keys.shape[-1] // groups)
    return -np.sort(-of_groups, -1)[..., :group_top].sum(-1)


def weights_of(logits, experts, score, renormalize):
    """Returns the weights, before scaling."""
    chosen = np.take_along_axis(logits, experts, -1)
    if score == "softmax" and renormalize:
        return scores_of(chosen, score)
    weights = np.take_along_axis(scores_of(logits, score), experts, -1)
    if not renormalize:
        return weights
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)


def gate(logits, bias=None, k=1, score="softmax", renormalize=False, groups=1, top_groups=None, group_top=1, scale=1.0):
    keys = keys_of(logits, bias, score, group_top)
    out = None
    if top_groups is not None:
        stay = descending(worths_of(keys, groups, group_top))[..., :top_groups]
        out = np.ones((*keys.shape[:-1], groups), bool)
        np.put_along_axis(out, stay, False, -1)
        out = np.repeat(out, keys.shape[-1] // groups, -1)
    experts = descending(keys, out)[..., :k]
    weights = weights_of(logits, experts, score, renormalize) * scale
    return weights.astype(logits.dtype), experts.astype(np.int32)


def gate_backward(logits, experts, dweights, score="softmax", renormalize=False, scale=1.0, **_):
    """Differentiates weights that were divided by a sum as those of the chosen, and others as those of all."""
    d = dweights * scale
    weights = weights_of(logits, experts, score, renormalize)
    rest = (weights * d).sum(-1, keepdims=True) if renormalize or score == "softmax" else 0
    chosen = weights * (d - rest)
    if score == "sigmoid":
        chosen = chosen * scores_of(-np.take_along_axis(logits, experts, -1), score)
    dlogits = np.zeros_like(logits) if renormalize or score == "sigmoid" else -rest * scores_of(logits, score)
    np.put_along_axis(dlogits, experts, chosen, -1)
    return (dlogits.astype(logits.dtype),)


def call_gate(
    logits, bias=None, k=1, score="softmax", renormalize=False, groups=1, top_groups=None, group_top=1, scale=1.0
):
    return msops.topk_gating(logits, k, score, renormalize, bias, groups, top_groups, group_top, scale)


def case(*shape, k, bias=False, **settings):
    return [shape, *[shape[-1:]] * bias], dict(k=k, **settings)


def too_close(values, magnitudes):
    """Tells which rows have values that differ, but by less than a few roundings."""
    order = np.argsort(values, -1)
    values, magnitudes = (np.take_along_axis(each, order, -1) for each in (values, magnitudes))
    gaps = np.diff(values, axis=-1)
    return ((gaps > 0) & (gaps < 4e-6 * np.maximum(magnitudes[..., 1:], magnitudes[..., :-1]))).any(-1)


DEEPSEEK = dict(
    k=8, score="sigmoid", bias=True, groups=8, top_groups=4, group_top=2, renormalize=True, scale=2.5
)  # as DeepSeek-V3 chooses


class TestTopKGating(OperatorTest):
    function, cell = msops.topk_gating, msops.TopKGating
    formulas = (gate, gate_backward)
    constants = (1,)
    cases = {
        "small": case(5, 7, k=3),
        "one": case(1, 1, k=1),
        "no rows": case(0, 4, k=2),
        "all of a row": case(9, k=9),
        "renormalized": case(2, 3, 8, k=2, renormalize=True),
        "sigmoid": case(6, 16, k=4, score="sigmoid", scale=2.5),
        "sigmoid, renormalized": case(6, 11, k=4, score="sigmoid", renormalize=True),
        "bias": case(6, 16, k=4, bias=True),
        "groups": case(9, 32, k=4, groups=8, top_groups=3),
        "groups, all": case(9, 12, k=4, groups=3, scale=-1.0),
        "DeepSeek": case(33, 256, **DEEPSEEK),
        "large": case(3000, 64, k=6),
    }
    further = {
        **{f"{k} of {n}": case(5, n, k=k, renormalize=n % 2 == 0)
           for n, k in ((2, 2), (8, 2), (31, 31), (33, 3), (63, 8), (65, 1), (128, 40), (255, 9), (257, 33), (512, 10),
                        (1000, 8), (1024, 6), (1025, 5), (2500, 70))},
        "bias of many": case(3, 1101, k=4, bias=True, score="sigmoid"),
        "softmax of groups": case(7, 60, k=6, groups=12, top_groups=5, group_top=2),
        "groups of 5": case(7, 45, k=6, bias=True, score="sigmoid", groups=9, top_groups=4, group_top=3),
        "many groups": case(4, 1024, k=8, groups=256, top_groups=7, group_top=2),
        "groups of one": case(4, 96, k=8, groups=96, top_groups=8),
        "groups of 20": case(9, 160, k=6, groups=8, top_groups=3),
        "groups of several lanes": case(5, 216, k=5, bias=True, score="sigmoid", groups=3, top_groups=2, group_top=4),
        "rows of several blocks": case(131, 21, k=5),
        "groups of many": case(4, 1120, k=8, groups=40, top_groups=3, group_top=2),
    }  # fmt: skip
    ties = {
        "2 of 5": case(40, 5, k=2),
        "6 of 64": case(700, 64, k=6, renormalize=True),
        "4 of 100": case(9, 100, k=4, score="sigmoid"),
        "8 of 300": case(500, 300, k=8),
        "9 of 40": case(9, 40, k=9),
        "bias": case(20, 48, k=8, bias=True, score="sigmoid"),
        "groups": case(20, 40, k=7, groups=8, top_groups=3),
        "worths": case(20, 256, k=8, score="sigmoid", groups=8, top_groups=4, group_top=2),
    }
    small = "small"
    hostile = ("small", "bias", "groups")
    roundings = 32  # of shares of a sum
    right_numbers = {"scale": (-1, 2**40)}
    wrong = (
        ([np.zeros((3, 4), np.int32)], dict(k=2), TypeError,
         "topk_gating: logits must be float16, float32 or float64, got int32"),
        (zeros(()), dict(k=1), ValueError, "topk_gating: logits must have shape (*B, E), got ()"),
        (zeros((3, 4), (3,)), dict(k=2), ValueError, "topk_gating: bias must have shape (E,) = (4,), got (3,)"),
        ([*zeros((3, 4)), *zeros((4,), dtype=np.float64)], dict(k=2), TypeError,
         "topk_gating: bias must be float32, got float64"),
        (zeros((3, 4)), dict(k=0), ValueError, "topk_gating: k must be at least 1, got 0"),
        (zeros((3, 4)), dict(k=5), ValueError, "topk_gating: k must be at most E = 4, got 5"),
        (zeros((3, 4)), dict(k=True), TypeError, "topk_gating: k must be an int, got bool"),
        (zeros((3, 4)), dict(k=1.0), TypeError, "topk_gating: k must be an int, got float"),
        (zeros((3, 4)), dict(k=2, score="relu"), ValueError,
         "topk_gating: score must be one of softmax, sigmoid, got 'relu'"),
        (zeros((3, 4)), dict(k=2, renormalize=1), TypeError, "topk_gating: renormalize must be a bool, got int"),
        (zeros((3, 4)), dict(k=2, groups=3), ValueError, "topk_gating: groups must divide E = 4, got 3"),
        (zeros((3, 4)), dict(k=1, groups=2, top_groups=3), ValueError,
         "topk_gating: top_groups must be at most groups = 2, got 3"),
        (zeros((3, 4)), dict(k=1, groups=2, top_groups=0), ValueError,
         "topk_gating: top_groups must be at least 1, got 0"),
        (zeros((3, 4)), dict(k=3, groups=2, top_groups=1), ValueError,
         "topk_gating: k must be at most the 2 experts of 1 groups, got 3"),
        (zeros((3, 4)), dict(k=1, groups=2, group_top=3), ValueError,
         "topk_gating: group_top must be at most E / groups = 2, got 3"),
        (zeros((3, 4)), dict(k=1, scale="2"), TypeError, "topk_gating: scale must be a number, got str"),
        (zeros((3, 4)), dict(k=1, scale=inf), ValueError, "topk_gating: scale must be finite, got inf"),
    )  # fmt: skip
    huge = ((2**25 + 3, 65, 2), (2**22 + 3, 520, 3))

    def operators(self, shapes=(), k=1, **settings):
        return chain(operators(k, **settings) if len(shapes) != 1 else operators(k, **settings).without("bias"))

    def net(self, **settings):
        return Net(call_gate, **settings)

    def inputs(self, shapes, dtype, seed=1, score="softmax", groups=1, group_top=1, **_):
        """Draws rows again where scores, or groups, differ by so little that roundings could decide."""
        rng = np.random.default_rng(seed)
        bias = [rng.standard_normal(shape).astype(dtype if shape[0] % 2 else np.float32) for shape in shapes[1:]]
        logits = np.asarray(2 * rng.standard_normal(shapes[0]), dtype)
        if not bias and group_top == 1:
            return [logits]
        rows = logits.reshape(-1, logits.shape[-1])
        redrawn = np.ones(len(rows), bool)
        for _ in range(100):
            if not redrawn.any():
                break
            rows[redrawn] = 2 * rng.standard_normal((redrawn.sum(), rows.shape[1]))
            exact = rows.astype(np.float64)
            keys = keys_of(exact, bias[0].astype(np.float64) if bias else None, score, group_top)
            sizes = scores_of(exact, score) + (np.abs(bias[0]) if bias else 0)
            redrawn = too_close(keys, sizes) | too_close(
                worths_of(keys, groups, group_top), worths_of(sizes, groups, group_top)
            )
        assert not redrawn.any()
        return [logits, *bias]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        """Leaves scores that decide as `inputs` has drawn them."""
        by_logits = len(shapes) == 1 and settings.get("group_top", 1) == 1
        return super().entry_calls(shapes, settings, dtype, seed, scale if by_logits else 1, parts)

    def tied(self, name, dtype):
        """Returns (inputs, gradients of the results, settings). The logits are few numbers, or NaN, in two rows of
        three; in others, neighbours are the best."""
        shapes, settings = self.ties[name]
        rng = np.random.default_rng(0)
        inputs = [rng.choice([-inf, -1, -0.0, 0, 1], shape).astype(dtype) for shape in shapes]
        inputs[0][::3][rng.random(inputs[0][::3].shape) < 0.3] = nan
        for row in inputs[0][1::3]:
            first = rng.integers(len(row))
            row[:] = rng.permutation(len(row)) / 256
            row[first : first + 8] += 4
        dweights = rng.standard_normal((shapes[0][0], settings["k"])).astype(dtype)
        return inputs, [dweights, None], settings

    def result_dtype(self, dtype):
        return dtype, "int32"

    def reference_gradient(self, logits, *rest, **settings):
        *bias, dweights, _ = rest
        experts = gate(logits, *bias, **settings)[1]
        return *gate_backward(logits, experts, dweights, **settings), *map(np.zeros_like, bias)

    def random_case(self, random):
        groups = random.choice((1, 1, 2, 3, 8))
        of_group = random.choice((1, 2, 5, 40))
        top_groups = random.randrange(1, groups + 1)
        return case(
            *lengths(random)[:2],
            groups * of_group,
            k=random.randrange(1, min(top_groups * of_group, 12) + 1),
            bias=random.random() < 0.3,
            score=random.choice(("softmax", "sigmoid")),
            renormalize=random.random() < 0.5,
            groups=groups,
            top_groups=top_groups,
            group_top=random.choice((1, of_group)),
        )

    def check_huge(self, gpu, rows, experts, k):
        forward, backward = self.operators([()], k)
        logits = gpu.random(rows, experts)
        weights, chosen = gpu.run(forward, logits)[:2]
        dlogits = gpu.run(backward, logits, chosen, weights)[0]
        for part in (slice(0, 100), slice(rows - 100, rows)):
            best, of_all = logits[part].topk(k).values, logits[part].float().softmax(-1)
            gpu.assert_equal(logits[part].gather(1, chosen[part].long()), best)
            shares = of_all.gather(1, chosen[part].long())
            gpu.assert_close(weights[part], shares)
            products = shares * weights[part].float()
            want = (-products.sum(1, keepdim=True) * of_all).scatter_add(1, chosen[part].long(), products)
            gpu.assert_close(dlogits[part], want)


def choose(logits, bias=None, **settings):
    """Returns the results of the entry, which must equal the reference."""
    inputs = [logits] if bias is None else [logits, bias]
    got = results_of(TestTopKGating().operators([x.shape for x in inputs], **settings)[0], *inputs)
    with np.errstate(all="ignore"):
        exact = [x.astype(np.float64) for x in inputs]
        want = gate(*exact, **settings)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3 if logits.dtype == np.float16 else 1e-6, atol=1e-30)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_index(dtype):
    """Logits of few different numbers have many ties, of experts and of groups."""
    logits = np.random.default_rng(0).integers(-1, 2, (200, 40)).astype(dtype)
    choose(logits, k=7)
    choose(logits, k=7, score="sigmoid", groups=8, top_groups=3)
    choose(logits, k=6, score="sigmoid", groups=8, top_groups=3, group_top=2)
    choose(logits, np.zeros(40, dtype), k=7, score="sigmoid")


def test_logits_decide_where_scores_are_equal():
    """Scores that underflow, or are 1, are no ties."""
    logits = np.array([[-400, 0, -300, -200], [40, 50, 60, 30]], np.float32)
    assert choose(logits, k=4)[1].tolist() == [[1, 3, 2, 0], [2, 1, 0, 3]]
    assert choose(logits, k=4, score="sigmoid")[1].tolist() == [[1, 3, 2, 0], [2, 1, 0, 3]]
    weights = choose(logits[:1] - 1000, k=3, renormalize=True)[0]
    np.testing.assert_array_equal(weights, [[1, 0, 0]])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_score_left(score, renormalize):
    """Logits of -infinity are chosen last, with weight 0; if there are no others, all weights and gradients are 0."""
    logits = np.array([[-inf, 2, -inf, 1], [-inf] * 4], np.float32)
    settings = dict(k=3, score=score, renormalize=renormalize)
    weights, experts = choose(logits, **settings)
    assert experts.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert weights[0, :2].all()
    assert not weights[0, 2:].any()
    assert not weights[1].any()
    backward = TestTopKGating().operators([logits.shape], **settings)[1]
    (dlogits,) = results_of(backward, logits, experts, np.ones_like(weights))
    assert np.isfinite(dlogits).all()
    assert not dlogits[np.isinf(logits)].any()
    (dlogits,) = results_of(backward, np.full_like(logits, -1e4), experts, np.ones_like(weights))
    assert np.isfinite(dlogits).all()


@pytest.mark.parametrize(
    "settings", [dict(k=4), dict(k=6, score="sigmoid"), dict(k=3, groups=3, top_groups=2), DEEPSEEK]
)
def test_any_logits_give_different_experts(settings):
    """NaN and infinity among the logits and the bias leave the experts k different numbers."""
    settings = dict(settings)
    experts = 256 if settings["k"] == 8 else 6
    rng = np.random.default_rng(0)
    for has_bias in (settings.pop("bias", False), False):
        shapes = [(300, experts), *[(experts,)] * has_bias]
        inputs = [rng.choice([nan, inf, -inf, 0, 1], shape).astype(np.float32) for shape in shapes]
        chosen = results_of(TestTopKGating().operators(shapes, **settings)[0], *inputs)[1]
        assert chosen.min() >= 0
        assert chosen.max() < experts
        assert (np.diff(np.sort(chosen)) > 0).all()


def test_nan_is_chosen_last():
    logits = np.array([[nan, 1, -5, nan, 2]], np.float32)
    operator = TestTopKGating().operators([()], k=5, score="sigmoid")[0]
    assert results_of(operator, logits)[1].tolist() == [[4, 1, 2, 0, 3]]


def test_bias_is_no_part_of_weights():
    """It decides alone, also where all sums are negative: no expert of another group is chosen."""
    logits = np.array([[1, 2, 3, 4, 5, 6]], np.float32)
    bias = np.array([-3, -3, -2.9, -9, -9, -9], np.float32)
    weights, experts = choose(logits, bias, k=2, score="sigmoid", groups=2, top_groups=1, group_top=2)
    assert experts.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(-logits[0, experts])), rtol=1e-6)


@wide_in_graph_mode
def test_gradient_of_bias_is_0(mode):
    inputs, settings = TestTopKGating().case_inputs("bias", np.float32)
    douts = TestTopKGating().douts(inputs, settings)
    assert not run_gradient(TestTopKGating().net(**settings), inputs, douts)[1].any()


def test_settings_are_shown():
    cell = msops.TopKGating(2, "sigmoid", True, 4, 2, 2, 0.5)
    words = "k=2, score=sigmoid, renormalize=True, groups=4, top_groups=2, group_top=2, scale=0.5"
    assert words in str(cell)


def test_expert_out_of_range(capfd):
    """A gradient refuses an expert that the forward operator cannot have given."""
    card = TestTopKGating()
    call = card.entry_calls(*card.cases["small"], "float32")[1]
    call.inputs[1][1, 1] = 7
    status, [line] = GuardedCall(call, capfd).call()
    assert status == Status.BAD_VALUE
    assert "experts[1, 1] is 7, but logits has 7 experts" in line


def test_large_rows(mode):
    """A row of more experts than registers hold, in the middle of others."""
    logits = np.random.default_rng(2).standard_normal((2, 3, 4000)).astype(np.float32)
    for got, want in zip(run(TestTopKGating().net(k=3), logits), gate(logits, k=3)):
        np.testing.assert_allclose(got, want, rtol=1e-5)
