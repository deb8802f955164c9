import numpy as np
from mindspore import Tensor, ops
from numpy import inf, nan

from logsumexp import logsumexp, logsumexp_op
from msops.testing import opcheck


def reference(x):
    return np.logaddexp.reduce(x, axis=-1)


def test_logsumexp():
    normal = np.random.default_rng(0).normal
    opcheck(logsumexp_op, [[normal(0, 3, shape)] for shape in ((5,), (7, 13), (2, 999))], reference)


def test_infinity_and_nan():
    x = Tensor(np.array([[-inf, -inf], [-inf, 2], [inf, 2], [nan, 2]], np.float32))
    np.testing.assert_array_equal(logsumexp(x).asnumpy(), [-inf, 2, inf, nan])
    np.testing.assert_array_equal(ops.grad(logsumexp)(x).asnumpy(), [[0, 0], [0, 1], [nan, 0], [nan, nan]])
