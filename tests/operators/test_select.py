"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np
import pytest

from card import Call, Card, chain, lengths, results_of
from msops.operators.select import forward, select
from msops.testing.checks import run

DTYPES = ("float16", "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))


class Select(Card):
    function = select
    formulas = (lambda condition, x, y: (np.where(condition, x, y),),)
    cases = {
        "same": ([(7, 13)] * 3, {}),
        "whole packs": ([(64, 128)] * 3, {}),
        "empty": ([(0, 3), (3,), (0, 1)], {}),
        "scalars": ([(), (), ()], {}),
        "prime": ([(10_007,)] * 3, {}),
        "masked fill": ([(48, 64), (), (48, 64)], {}),
        "masked fill, odd": ([(37, 29), (1, 1), (37, 29)], {}),
        "causal mask": ([(16, 32), (3, 16, 32), ()], {}),
        "mask of columns": ([(40, 1), (40, 64), (64,)], {}),
        "mask of columns, odd": ([(41, 1), (41, 33), (33,)], {}),
        "one condition": ([(), (40, 64), (40, 1)], {}),
        "only conditions": ([(40, 64), (), ()], {}),
        "outer": ([(1, 7, 1), (5, 1, 1), (1, 1, 16)], {}),
        "six axes": ([(3, 1, 4, 1, 5, 16), (1, 2, 1, 6, 1, 16), ()], {}),
        "two blocks": ([(300, 512), (512,), ()], {}),
    }
    small = "same"

    def operators(self, shapes=()):
        return chain(forward)

    def inputs(self, shapes, dtype, seed=1):
        condition, x, y = super().inputs(shapes, dtype, seed)
        return [np.asarray(condition > 0), x, y]

    others = DTYPES

    def other_calls(self, dtype):
        for shapes in ([(9, 32)] * 3, [(9, 7), (), (9, 1)], [(5, 16), (5, 16), (16,)]):
            condition, *rest = (np.random.default_rng(7).integers(0, 2**15, shape) for shape in shapes)
            inputs = [condition % 2 == 0, *(x.astype(dtype) for x in rest)]
            yield Call(forward, inputs, results_of(forward, *inputs), [])

    def random_case(self, random):
        axes = [random.choice(((n, n, n), (n, 1, n), (1, n, 1), (1, 1, n))) for n in lengths(random)]
        return [tuple(each[k] for each in axes) for k in range(3)], {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    for call in Select().other_calls(dtype):
        np.testing.assert_array_equal(call.results[0], np.where(*call.inputs))


def test_nan_stays_where_it_is_not_taken(mode):
    x = np.array([np.nan, 1, 2], np.float32)
    np.testing.assert_array_equal(run(select, ~np.isnan(x), x, np.float32([0]))[0], [0, 1, 2])
