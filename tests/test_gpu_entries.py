"""Compares every C entry on the GPU with the same entry on the CPU, for all cases of the cards, and at huge sizes.

This file also runs under compute-sanitizer. It has no cases without torch, a GPU, or GPU code in the libraries.
"""

import pytest

from card import DTYPES, cards
from gpu import (
    DECAYS,
    FAR,
    HIDING,
    calls_that_grow,
    calls_with_decay,
    calls_with_far_bias,
    calls_with_hidden_queries,
    calls_with_ties,
    calls_with_unused,
    compare_with_cpu,
    is_there,
)

pytestmark = pytest.mark.wide
CARDS = cards() if is_there() else []
CASES = [
    pytest.param(card, *case, id=f"{card.name()} {name}")
    for card in CARDS
    if card.operators()
    for name, case in card.entry_cases().items()
]
OTHERS = [pytest.param(card, which, id=f"{card.name()} {which}") for card in CARDS for which in card.others]
HUGE = [pytest.param(card, sizes, id=f"{card.name()} {sizes}") for card in CARDS for sizes in card.huge]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("card", "shapes", "settings"), CASES)
def test_gpu_equals_cpu(gpu, card, shapes, settings, dtype):
    """Entries agree at three alignments: that of packs, of single elements, and of pairs."""
    for call in card.entry_calls(shapes, settings, dtype):
        for shift in (0, 1, 2):
            compare_with_cpu(gpu, call, dtype, shift)


@pytest.mark.parametrize(("card", "which"), OTHERS)
def test_other_dtypes(gpu, card, which):
    """Entries agree in dtypes that the cases do not have, and for special numbers."""
    for call in card.other_calls(which):
        for shift in (0, 1):
            compare_with_cpu(gpu, call, call.results[0].dtype.name, shift)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("name", "value"), HIDING.items())
def test_queries_that_see_nothing(gpu, name, value, dtype, monkeypatch):
    """Queries that a mask or a bias hides all keys from give 0 and have no gradient."""
    for call in calls_with_hidden_queries(monkeypatch, name, value, dtype):
        compare_with_cpu(gpu, call, dtype, shift=0)


@pytest.mark.parametrize(("name", "dtype"), FAR)
def test_bias_far_from_0(gpu, name, dtype, monkeypatch):
    """Gradients of queries whose lse has no digits of their sum are right."""
    for call in calls_with_far_bias(monkeypatch, name, dtype):
        compare_with_cpu(gpu, call, dtype, shift=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["unused", "unused, transposed"])
def test_rows_and_weights_that_are_not_used(gpu, name, dtype):
    """Rows of no group, and weights of groups without rows, may be NaN."""
    for call in calls_with_unused(name, dtype):
        for shift in (0, 1):
            compare_with_cpu(gpu, call, dtype, shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["2 of 5", "6 of 64", "4 of 100", "8 of 300", "9 of 40", "bias", "groups", "worths"])
def test_tied_experts(gpu, name, dtype):
    """The lower index comes first among equal experts and among equal groups; NaN counts as -infinity."""
    for call in calls_with_ties(name, dtype):
        for shift in (0, 1):
            compare_with_cpu(gpu, call, dtype, shift)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_growth_over_parts(gpu, dtype):
    """A part of the steps of selective_scan may grow what is 0 by an infinite factor."""
    for call in calls_that_grow(dtype):
        compare_with_cpu(gpu, call, dtype, shift=0)


@pytest.mark.parametrize("raw", DECAYS)
def test_decays_in_chunks(gpu, raw, monkeypatch):
    """Chunks of steps on tensor cores take decays of any size."""
    for call in calls_with_decay(monkeypatch, raw):
        compare_with_cpu(gpu, call, "float16", shift=0)


@pytest.mark.parametrize(("card", "sizes"), HUGE)
def test_huge(huge_gpu, card, sizes):
    """Entries take more than 2^31 elements."""
    card.check_huge(huge_gpu, *sizes)
