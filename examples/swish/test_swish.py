import numpy as np

from msops.testing import opcheck
from swish import swish_op


def reference(x):
    return x / (1 + np.exp(-x))


def test_swish():
    normal = np.random.default_rng(0).normal
    opcheck(swish_op, [[normal(0, 3, shape)] for shape in ((), (7, 13), (3, 1025))], reference)
