"""Compares every C entry on the GPU with the same entry on the CPU, for all cases of the cards, and at huge sizes.

This file also runs under compute-sanitizer. It is skipped without torch, a GPU, or GPU code in the libraries.
"""

import numpy as np
import pytest

from card import DTYPES, cards, names_of
from gpu import Guarded
from msops.testing.entry import prepare_operator

CARDS = cards()
CASES = [
    pytest.param(card, *case, id=f"{card.name()} {name}")
    for card in CARDS
    for name, case in card.entry_cases().items()
    if card.operators(case[0], **case[1])
]
HUGE = [pytest.param(card, sizes, id=f"{card.name()} {sizes}") for card in CARDS for sizes in card.huge]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("card", "shapes", "settings"), CASES)
def test_gpu_equals_cpu(gpu, card, shapes, settings, dtype):
    """Entries agree at three alignments: that of packs, of single elements, and of pairs."""
    for call in card.entry_calls(shapes, settings, dtype):
        for shift in (0, 1, 2):
            check_call(gpu, call, dtype, shift, f"{call.operator.entry.name}, shifted by {shift}")


def check_call(gpu, call, dtype, shift, what):
    inputs = [Guarded(gpu.torch, x.shape, x.dtype.name, shift, x) for x in call.inputs]
    outputs = [Guarded(gpu.torch, x.shape, x.dtype.name, shift) for x in [*call.results, *call.scratch]]
    assert prepare_operator(call.operator, [g.array for g in [*inputs, *outputs]])() == 0, what
    gpu.torch.cuda.synchronize()
    for x, g in zip(call.inputs, inputs):
        np.testing.assert_array_equal(g.array.cpu().numpy(), x, f"{what}: an input was changed")
    assert all(g.untouched() for g in [*inputs, *outputs]), what
    for name, want, g in zip(names_of(call.operator).results, call.results, outputs):
        got = g.array.cpu().numpy()
        # A sum of many terms may happen to be small, but its error is as large as if it had the usual size.
        terms = max(x.size for x in call.inputs) / max(1, want.size)
        scale = max(np.abs(want).max(initial=0), terms**0.5)
        tolerance = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-13}[dtype]
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=f"{what}: {name}")


@pytest.mark.parametrize(("card", "sizes"), HUGE)
def test_huge(huge_gpu, card, sizes):
    """Entries take more than 2^31 elements."""
    card.check_huge(huge_gpu, *sizes)
