import math
import re

import mindspore
import numpy as np
import pytest

import msops
from card import chain, length, random, zeros
from guarded_call import GuardedCall
from msops.operators.moe_permute import operators
from msops.testing.checks import Net, run, run_gradient
from msops.testing.entry import Status
from operator_test import OperatorTest, wide_in_graph_mode
from test_gather_points import far_indices, flat


def permute(x, experts, num_experts, capacity=None, pad=False):
    """Places one slot after the other."""
    chosen = experts.ravel()
    counts = np.array([(chosen == e).sum() for e in range(num_experts)], np.int32)
    sizes = counts if capacity is None else np.minimum(counts, capacity).astype(np.int32)
    begins = np.arange(num_experts) * capacity if pad else np.cumsum(sizes) - sizes
    rows = np.zeros((num_experts * capacity if pad else chosen.size, x.shape[1]), x.dtype)
    positions = np.full(chosen.size, -1, np.int32)
    for e in range(num_experts):
        slots = np.flatnonzero(chosen == e)[: sizes[e]]
        positions[slots] = begins[e] + np.arange(sizes[e])
        rows[positions[slots]] = x[slots // (experts.size // max(1, len(experts)))]
    if pad:
        rows = rows.reshape(num_experts, capacity, x.shape[1])
    return rows, positions.reshape(experts.shape), sizes, counts


def as_matrix(rows):
    """Joins all axes of rows but the last."""
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def add_up(drows, positions):
    """Adds up the rows of each token."""
    drows, slots = as_matrix(drows), flat(positions, 1)
    dx = np.zeros((len(slots), drows.shape[1]), drows.dtype)
    for j in range(slots.shape[1]):
        has_row = slots[:, j] >= 0
        dx[has_row] += drows[slots[has_row, j]]
    return (dx,)


def case(tokens, columns, choices, num_experts, capacity=None, pad=False):
    """Returns the case of so many choices of each token, or of experts without an axis for them if that is None."""
    settings = dict(num_experts=num_experts) | (dict(capacity=capacity, pad=pad) if capacity else {})
    return [(tokens, columns), (tokens,) if choices is None else (tokens, choices)], settings


class TestMoEPermute(OperatorTest):
    function = msops.moe_permute
    formulas = (permute, lambda drows, positions, **_: add_up(drows, positions))
    cases = {
        "small": case(5, 3, 2, 4),
        "one": case(1, 1, 1, 1),
        "one choice": case(7, 5, None, 3),
        "no tokens": case(0, 3, 2, 4),
        "no choices": case(4, 3, 0, 4),
        "no columns": case(4, 0, 2, 3, 2),
        "capacity": case(13, 6, 2, 3, 5),
        "padded": case(13, 6, 2, 3, 7, True),
        "large": case(700, 67, 6, 64, 40, True),
    }
    further = {
        "padded, no tokens": case(0, 8, 2, 3, 2, True),
        "more experts than slots": case(9, 16, 2, 700, 1),
        "many experts": case(300, 8, 3, 5000),
        "one expert": case(1100, 8, 1, 1, 1000),
        "capacity of many slots": case(300, 8, 2, 9, 55),
        "many slots": case(5000, 4, 8, 33),
        "packs": case(70, 64, 3, 8, 20),
        "padded packs": case(33, 72, 5, 8, 30, True),
        "halves of packs": case(40, 36, 2, 6, 100, True),
    }
    small = "small"
    hostile = ("small", "padded")
    wrong = (
        ([np.zeros((3, 4), np.int32), np.zeros((3, 2), np.int32)], dict(num_experts=2), TypeError,
         "moe_permute: x must be float16, float32 or float64, got int32"),
        (zeros((3, 4), (3, 2)), dict(num_experts=2), TypeError,
         "moe_permute: experts must be int32 or int64, got float32"),
        ([*zeros((3,)), np.zeros(3, np.int32)], dict(num_experts=2), ValueError,
         "moe_permute: x must have shape (N, C), got (3,)"),
        ([*zeros((3, 4)), np.zeros((2, 2), np.int32)], dict(num_experts=2), ValueError,
         "moe_permute: experts must have shape (N, *K) = (3, 2), got (2, 2)"),
        ([*zeros((3, 4)), np.zeros((3, 2, 1), np.int32)], dict(num_experts=2), ValueError,
         "moe_permute: experts must have shape (N, k) or (N,), got (3, 2, 1)"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=0), ValueError,
         "moe_permute: num_experts must be at least 1, got 0"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=True), TypeError,
         "moe_permute: num_experts must be an int, got bool"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2, capacity=0), ValueError,
         "moe_permute: capacity must be at least 1, got 0"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2, capacity=1.5), TypeError,
         "moe_permute: capacity must be an int, got float"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2, pad=True), ValueError,
         "moe_permute: capacity must be an int where pad is True, got None"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2, pad=1), TypeError,
         "moe_permute: pad must be a bool, got int"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2**16, capacity=2**15, pad=True), ValueError,
         "moe_permute: num_experts times capacity must be less than 2^31"),
        ([*zeros((3, 4)), np.zeros(3, np.int32)], dict(num_experts=2, return_counts=0), TypeError,
         "moe_permute: return_counts must be a bool, got int"),
    )  # fmt: skip
    huge = ((2**18 + 3, 4100, 2, 60), (2**18 + 3, 2200, 2, 60, 2**14, True))

    def operators(self, shapes=(), num_experts=4, capacity=None, pad=False):
        return chain(operators(num_experts, capacity, pad))

    def net(self, **settings):
        return Net(msops.moe_permute, **{"return_counts": True, **settings})

    def inputs(self, shapes, dtype, seed=1, num_experts=4, **settings):
        """Returns experts of which some have no slots, others most, and some slots without an expert."""
        rng = np.random.default_rng(seed)
        experts = rng.integers(-1, num_experts, shapes[1])
        experts[rng.random(shapes[1]) < 0.3] = rng.integers(num_experts)
        kind = np.int64 if num_experts % 2 else np.int32
        return [np.asarray(rng.standard_normal(shapes[0]), dtype), experts.astype(kind)]

    def result_dtype(self, dtype):
        return dtype, "int32", "int32", "int32"

    def reference_gradient(self, x, experts, drows, *_, **settings):
        return *add_up(drows, permute(x, experts, **settings)[1]), np.zeros_like(experts)

    def random_case(self, random):
        capacity = random.choice((None, None, 1, 3, 20))
        pad = capacity is not None and random.random() < 0.5
        choices = random.choice((None, 0, 1, 2, 5))
        return case(length(random), length(random), choices, random.choice((1, 2, 7, 70)), capacity, pad)

    def check_huge(self, gpu, tokens, columns, choices, num_experts, capacity=None, pad=False):
        torch = gpu.torch
        forward, backward = self.operators((), num_experts, capacity, pad)
        x = gpu.random(tokens, columns)
        experts = torch.randint(-1, num_experts, (tokens, choices), device="cuda", dtype=torch.int32)
        rows, positions, group_sizes, counts = gpu.run(forward, x, experts)[:4]
        flat, of_slots = rows.reshape(-1, columns), positions.reshape(-1)
        for e in (0, num_experts - 1):
            assert counts[e] == (experts == e).sum()
        assert (of_slots >= 0).sum() == group_sizes.sum()
        assert not flat[int(of_slots.max()) + 1 :].any()
        for part in (slice(0, 100), slice(tokens - 100, tokens)):
            for j in range(choices):
                kept = positions[part, j] >= 0
                gpu.assert_equal(flat[positions[part, j][kept].long()], x[part][kept])
        dx = gpu.run(backward, rows, positions)[0]
        kept = (positions >= 0).sum(1)
        for part in (slice(0, 100), slice(tokens - 100, tokens)):
            gpu.assert_close(dx[part], x[part].float() * kept[part, None])

    def test_cell(self, mode):
        inputs, settings = self.case_inputs("padded", np.float32)
        want = permute(*inputs, **settings)
        for cell, results in (
            (msops.MoEPermute(**settings), want[:3]),
            (msops.MoEPermute(**settings, return_counts=True), want),
        ):
            for got, expected in zip(run(cell, *inputs), results):
                np.testing.assert_array_equal(got, expected)
        assert "num_experts=3, capacity=7, pad=True, return_counts=True" in str(cell)


@wide_in_graph_mode
def test_expert_out_of_range(mode, capfd):
    """An expert out of range is the entry's error on the CPU, and counts as -1 on a GPU."""
    (x,) = random(0, np.float32, (2, 3))
    for far in (*far_indices(mode), -2):
        if far == -1:
            continue
        experts, net = np.array([[0, 4], [far, 1]]), Net(msops.moe_permute, num_experts=5)
        if mindspore.get_context("device_target") == "GPU":
            for got, want in zip(run(net, x, experts), permute(x, np.where(experts == far, -1, experts), 5)):
                np.testing.assert_array_equal(got, want)
            continue
        with pytest.raises(RuntimeError, match=re.escape(f"moe_permute: experts[1, 0] is {far}, but num_experts is 5")):
            run(net, x, experts)
    card = TestMoEPermute()
    call = card.entry_calls(*card.cases["small"], "float32")[0]
    call.inputs[1][1, 1] = 4
    assert GuardedCall(call, capfd).call()[0] == Status.BAD_VALUE


@wide_in_graph_mode
def test_gradient_ignores_the_rest(mode):
    """What comes back for rows without a slot is never read."""
    inputs, settings = TestMoEPermute().case_inputs("padded", np.float32)
    rows, positions, *_ = permute(*inputs, **settings)
    (drows,) = random(3, np.float32, rows.shape)
    has_slot = np.isin(np.arange(drows[..., 0].size), positions).reshape(drows.shape[:2])
    drows[~has_slot] = np.nan
    douts = [drows, *(np.zeros_like(each) for each in permute(*inputs, **settings)[1:])]
    got = run_gradient(TestMoEPermute().net(**settings), inputs, douts)[0]
    np.testing.assert_allclose(got, *add_up(drows, positions), rtol=1e-6, atol=1e-6)


def test_entry_refuses_rows_without_numbers(capfd):
    """Positions are int32, which hold no more than 2^31 rows, also where a row has no columns."""
    [call, _] = TestMoEPermute().entry_calls(*case(3, 0, 2, 4, 2, True), "float32")
    guarded, capacity = GuardedCall(call, capfd), 2**30
    arrays = [guarded.params[name] for name in guarded.params]
    arrays[2] = arrays[2]._replace(shape=(4, capacity, 0))
    guarded.refused(Status.BAD_SHAPE, arrays=arrays, attributes={**call.operator.attributes, "capacity": capacity})
