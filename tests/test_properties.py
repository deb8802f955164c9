"""Compares every C entry with its formula, for calls that hypothesis chooses."""

import functools
import math

import mindspore
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from card import DTYPES, cards, check_formula
from msops.core.spec import Spec
from msops.operators.add import backward as add_backward
from msops.operators.depthwise_conv2d import operators as convolutions
from msops.operators.lltm_cell import backward as lltm_cell_backward

pytestmark = pytest.mark.wide

settings.register_profile(
    "msops", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("msops")

randoms = st.randoms(use_true_random=False)
WITH_FORMULAS = [card for card in cards() if card.formulas]


@pytest.mark.parametrize("card", WITH_FORMULAS, ids=lambda card: card.name())
@given(random=randoms)
def test_entries(card, random):
    shapes, of = card.random_call(random)
    dtype, scale = random.choice(DTYPES), random.choice((0.1, 1, 5))
    calls = card.entry_calls(shapes, of, dtype, random.randrange(2**32), scale, random.randint(1, 4))
    for call, formula in zip(calls, card.formulas):
        check_formula(call, functools.partial(formula, **of), card.roundings, card.units(**of))


sizes = st.one_of(st.integers(0, 70), st.integers(1, 2**22))


@given(
    st.tuples(sizes, sizes),
    st.sampled_from([(0,), (1,), (0, 1)]),
    sizes,
    sizes,
    st.integers(1, 40),
    st.integers(0, 2**14),
)
def test_scratch(shape, summed, batch, channels, taps, hidden):
    """Scratch takes no more memory than docs/speed.md says."""

    def numbers(operator, *shapes):
        return math.prod(operator.infer(*(Spec(shape, mindspore.float32) for shape in shapes))[-1].shape)

    x = tuple(1 if axis in summed else size for axis, size in enumerate(shape))
    assert numbers(add_backward, shape, x) <= 2**19
    convolution = convolutions(1, "same", 0, 1).gradient
    image = (batch, channels, 56, 56)
    scratch = numbers(convolution, image, (channels, 1, taps, taps), image)
    assert scratch <= max(2048, channels) * (taps**2 + 1)
    state = (batch, hidden)
    assert numbers(lltm_cell_backward, (batch, 3 * hidden), (3 * hidden,), *[state] * 3) <= 3 * max(2**16, hidden)
