import numpy as np
from msops.testing import opcheck

from swish import swish


def reference(x):
    return x / (1 + np.exp(-x))


def test_swish():
    for shape in ((), (0,), (1,), (7, 13), (3, 2, 1025)):
        opcheck(swish, [np.random.default_rng(0).normal(0, 3, shape)], reference)
