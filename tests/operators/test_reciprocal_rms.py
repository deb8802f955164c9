"""This operator serves patch_mindspore alone: msops has no public name for it."""

import numpy as np
import pytest

from card import Card, chain
from msops.operators.reciprocal_rms import operators, reciprocal_rms
from msops.testing.checks import Gradient, Net, run
from test_rms_norm import scale_of


def formula(x, eps=1e-6):
    return (scale_of(x, eps)[..., 0],)


class ReciprocalRms(Card):
    function = reciprocal_rms
    formulas = (formula,)
    cases = {
        "small": ([(3, 4, 7)], {"eps": 0.1}),
        "no rows": ([(0, 5)], {}),
        "no columns": ([(3, 0)], {}),
        "one row": ([(9,)], {}),
        "long rows": ([(2, 70_001)], {}),
        "large": ([(4001, 129)], {}),
    }
    small = "small"

    def operators(self, shapes=(), eps=1e-6):
        return chain(operators(eps))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_forward(mode, dtype):
    x = np.random.default_rng(0).standard_normal((3, 4, 70)).astype(dtype)
    (r,) = run(Net(reciprocal_rms, eps=1e-12), x)
    assert r.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(r, *formula(np.float64(x), 1e-12), rtol=1e-15 if dtype == "float64" else 3e-7)


def test_no_gradient(mode):
    x = np.ones((2, 3), np.float32)
    assert not run(Gradient(Net(reciprocal_rms), 1), x, np.ones(2, np.float32))[0].any()
