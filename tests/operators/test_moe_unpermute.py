import re

import mindspore
import numpy as np
import pytest
from mindspore import nn, ops

import msops
from card import chain, length, random, zeros
from guarded_call import GuardedCall
from msops.compat import VERSION
from msops.operators.moe_unpermute import forward
from msops.testing.checks import Net, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, wide_in_graph_mode
from test_gather_points import far_indices, flat
from test_moe_permute import as_matrix


def unpermute(rows, positions, weights=None):
    """Adds up one choice after the other."""
    rows, slots = as_matrix(rows), flat(positions, 1)
    weights = np.ones(slots.shape) if weights is None else weights.reshape(slots.shape)
    out = np.zeros((len(slots), rows.shape[1]), rows.dtype)
    for j in range(slots.shape[1]):
        has_row = slots[:, j] >= 0
        out[has_row] += (weights[has_row, j, None] * rows[slots[has_row, j]]).astype(rows.dtype)
    return (out,)


def unpermute_backward(rows, positions, *weights_and_dout):
    *weights, dout = weights_and_dout
    matrix, slots = as_matrix(rows), flat(positions, 1)
    drows, dweights = np.zeros_like(matrix), np.zeros(slots.shape, np.result_type(dout, *weights))
    factors = weights[0].reshape(slots.shape) if weights else np.ones(slots.shape)
    for j in range(slots.shape[1]):
        has_row = slots[:, j] >= 0
        of_rows = slots[has_row, j]
        drows[of_rows] = factors[has_row, j, None] * dout[has_row]
        dweights[has_row, j] = (dout[has_row] * matrix[of_rows]).sum(-1)
    return drows.reshape(rows.shape), *(dweights.reshape(w.shape).astype(w.dtype) for w in weights)


def case(rows, columns, tokens, choices, has_weights=True):
    """Returns the case of so many choices of each token, or of positions without an axis for them if that is None.
    `rows` may be two numbers, whose product is that of the rows."""
    slots = (tokens,) if choices is None else (tokens, choices)
    shape = (*rows, columns) if isinstance(rows, tuple) else (rows, columns)
    return [shape, slots, *[slots] * has_weights], {}


class TestMoEUnpermute(OperatorTest):
    function, cell = msops.moe_unpermute, msops.MoEUnpermute
    formulas = (unpermute, unpermute_backward)
    cases = {
        "small": case(9, 3, 4, 2),
        "one": case(1, 1, 1, 1),
        "without weights": case(8, 5, 3, 2, False),
        "one choice": case(7, 5, 6, None),
        "padded": case((3, 5), 6, 4, 3),
        "no tokens": case(4, 3, 0, 2),
        "no choices": case(4, 3, 2, 0),
        "no rows": case(0, 3, 2, 2),
        "no columns": case(4, 0, 2, 2),
        "fewer rows than slots": case(3, 4, 5, 2),
        "large": case(5000, 67, 701, 6),
    }
    further = {
        "more columns than a run": case(40, 1100, 9, 4),
        "packs": case((8, 20), 64, 33, 3),
        "packs, without weights": case(40, 64, 9, 5, False),
        "halves of packs": case(90, 36, 40, 2),
        "many choices": case(300, 8, 9, 31),
        "long rows": case(20, 4104, 5, 3),
        "long rows, many choices": case(90, 1032, 4, 35),
    }
    small = "small"
    hostile = ("small", "without weights", "padded")
    roundings = 64  # of sums of products of both signs
    wrong = (
        ([np.zeros((3, 4), np.int32), np.zeros((3, 2), np.int32)], {}, TypeError,
         "moe_unpermute: rows must be float16, float32 or float64, got int32"),
        (zeros((3, 4), (3, 2)), {}, TypeError, "moe_unpermute: positions must be int32 or int64, got float32"),
        ([*zeros((3,)), np.zeros(3, np.int32)], {}, ValueError,
         "moe_unpermute: rows must have shape (R, C) or (E, c, C), got (3,)"),
        ([*zeros((3, 4)), np.zeros((2, 2, 1), np.int32)], {}, ValueError,
         "moe_unpermute: positions must have shape (N, k) or (N,), got (2, 2, 1)"),
        ([*zeros((3, 4)), np.zeros((2, 2), np.int32), *zeros((2, 3))], {}, ValueError,
         "moe_unpermute: weights must have shape (N, *K) = (2, 2), got (2, 3)"),
        ([*zeros((3, 4)), np.zeros((2, 2), np.int32), *zeros((2, 2), dtype=np.float16)], {}, TypeError,
         "moe_unpermute: weights must be float32, got float16"),
        ([*zeros((3, 4)), np.zeros((2, 2), np.int32), 0.5], {}, TypeError,
         "moe_unpermute: weights must be a Tensor, got float"),
    )  # fmt: skip
    huge = ((2**19 + 3, 4100, 2**18, 2), (2**19 + 3, 4100, 2**18, 2, False))

    def operators(self, shapes=(), **settings):
        return chain(forward if len(shapes) != 2 else forward.without("weights"))

    def inputs(self, shapes, dtype, seed=1, **settings):
        """Returns positions of which some are -1 and no two are equal. Weights of an odd number of choices are
        float32."""
        rng = np.random.default_rng(seed)
        rows, slots = int(np.prod(shapes[0][:-1])), int(np.prod(shapes[1]))
        positions = np.full(slots, -1)
        named = min(rows, slots - slots // 5)
        positions[rng.permutation(slots)[:named]] = rng.permutation(rows)[:named]
        kind = np.int64 if rows % 2 else np.int32
        of_weights = np.float32 if shapes[1][-1] % 2 else dtype
        return [
            np.asarray(rng.standard_normal(shapes[0]), dtype),
            positions.reshape(shapes[1]).astype(kind),
            *(np.asarray(rng.random(shape), of_weights) for shape in shapes[2:]),
        ]

    def reference_gradient(self, rows, positions, *rest, **settings):
        drows, *dweights = unpermute_backward(rows, positions, *rest)
        return drows, np.zeros_like(positions), *dweights

    def random_case(self, random):
        rows = random.choice((length(random), (random.randrange(4), random.randrange(5))))
        choices = random.choice((None, 0, 1, 2, 5))
        return case(rows, length(random), length(random), choices, random.random() < 0.7)

    def check_huge(self, gpu, rows, columns, tokens, choices, has_weights=True):
        torch = gpu.torch
        shapes = case(rows, columns, tokens, choices, has_weights)[0]
        forward, backward = self.operators(shapes)
        of_rows = gpu.random(rows, columns)
        positions = torch.randperm(rows, device="cuda")[: tokens * choices].reshape(tokens, choices).int()
        weights = [torch.rand(tokens, choices, device="cuda").to(of_rows.dtype)] * has_weights
        out = gpu.run(forward, of_rows, positions, *weights)[0]
        drows = gpu.run(backward, of_rows, positions, *weights, out)[0]
        for part in (slice(0, 100), slice(tokens - 100, tokens)):
            factors = weights[0][part].float() if has_weights else torch.ones(100, choices, device="cuda")
            of_part = of_rows[positions[part].long()].float()
            gpu.assert_close(out[part], (factors[:, :, None] * of_part).sum(1))
            gpu.assert_close(drows[positions[part].long()], factors[:, :, None] * out[part].float()[:, None])


@wide_in_graph_mode
def test_position_out_of_range(mode, capfd):
    """A position out of range is the entry's error on the CPU, and adds nothing on a GPU."""
    rows, dout = random(0, np.float32, (5, 3), (2, 3))
    for far in (*far_indices(mode), -2):
        if far == -1:
            continue
        positions, net = np.array([[0, 4], [far, 1]]), Net(msops.moe_unpermute)
        if mindspore.get_context("device_target") == "GPU":
            without = np.where(positions == far, -1, positions)
            np.testing.assert_array_equal(run(net, rows, positions)[0], *unpermute(rows, without))
            got = run_gradient(net, [rows, positions], [dout])[0]
            np.testing.assert_allclose(got, *unpermute_backward(rows, without, dout), rtol=1e-6)
            continue
        words = f"moe_unpermute: positions[1, 0] is {far}, but rows has 5 rows"
        with pytest.raises(RuntimeError, match=re.escape(words)):
            run(net, rows, positions)
    card = TestMoEUnpermute()
    for call in card.entry_calls(*card.cases["small"], "float32"):
        call.inputs[1][1, 1] = 9
        assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


@wide_in_graph_mode
def test_rows_that_no_slot_names(mode):
    """They are never read, and their gradient is 0."""
    rows, weights, dout = random(0, np.float32, (6, 4), (3, 2), (3, 4))
    positions = np.array([[5, -1], [0, 3], [-1, -1]])
    rows[[1, 2, 4]] = np.nan
    net = Net(msops.moe_unpermute)
    np.testing.assert_allclose(run(net, rows, positions, weights)[0], *unpermute(rows, positions, weights), rtol=1e-6)
    drows, _, dweights = run_gradient(net, [rows, positions, weights], [dout])
    want, of_weights = unpermute_backward(rows, positions, weights, dout)
    np.testing.assert_allclose(drows, want, rtol=1e-6)
    np.testing.assert_allclose(dweights, of_weights, rtol=1e-5)
    assert not drows[[1, 2, 4]].any()
    assert not dweights[positions < 0].any()


def round_trip(x, experts, weights, capacity, pad):
    rows, positions, _ = msops.moe_permute(x, experts, 5, capacity, pad)
    return msops.moe_unpermute(rows, positions, weights)


@pytest.mark.parametrize(("capacity", "pad"), [(None, False), (40, True)])
def test_round_trip(mode, capacity, pad):
    """What is permuted comes back: times k without weights, and rounded once with weights whose sum is 1."""
    (x,) = random(0, np.float16, (17, 9))
    experts = np.random.default_rng(1).integers(0, 5, (17, 2))
    weights = np.full((17, 2), [0.25, 0.75], np.float32)
    for of_slots, want in ((None, 2 * x), (weights, x)):
        net = Net(
            round_trip, weights=None if of_slots is None else mindspore.Tensor(of_slots), capacity=capacity, pad=pad
        )
        np.testing.assert_array_equal(run(net, x, experts)[0], want)


class Routed(nn.Cell):
    """Chooses experts, permutes, comes back, and adds up with factors."""

    def __init__(self):
        super().__init__()
        self.gating, self.unpermute = msops.TopKGating(2, renormalize=True), msops.MoEUnpermute()
        self.permute = msops.MoEPermute(4, capacity=40, pad=True)

    def construct(self, x, logits, factors):
        weights, experts = self.gating(logits)
        rows, positions, _ = self.permute(x, experts)
        return (factors * self.unpermute(rows, positions, weights)).sum()


class GradientOfRouted(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net, self.gradient = Routed(), ops.GradOperation(get_all=True)

    def construct(self, *inputs):
        return self.gradient(self.net)(*inputs)


@pytest.mark.wide
@pytest.mark.skipif(VERSION < (2, 7), reason="docs/versions.md says what older versions lack")
def test_open_number_of_tokens():
    """A token comes back as it was, whatever its experts are."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    net = GradientOfRouted()
    net.set_inputs(*(mindspore.Tensor(shape=[None, size], dtype=mindspore.float32) for size in (3, 4, 3)))
    for tokens in (5, 0, 17):
        x, logits, factors = random(tokens, np.float32, (tokens, 3), (tokens, 4), (tokens, 3))
        dx, dlogits, dfactors = run(net, x, logits, factors)
        np.testing.assert_allclose(dx, factors, rtol=1e-6)
        np.testing.assert_allclose(dlogits, 0, atol=1e-6)
        np.testing.assert_allclose(dfactors, x, rtol=1e-6)
