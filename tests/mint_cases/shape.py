"""Programs that move and copy elements."""

import numpy as np
from mindspore import mint

from . import case

X, Y = np.random.default_rng(0).standard_normal((2, 3, 4))


@case(X, Y, reference=lambda x, y: np.stack((x, y), 1))
def stack(x, y):
    return mint.stack((x, y), 1)


@case(X, reference=lambda x: x)
def clone(x):
    return mint.clone(x)


@case(X, reference=lambda x: x.T)
def transpose(x):
    return mint.transpose(x, 0, 1)
