"""Programs that compute activations."""

import numpy as np
import scipy.special
from mindspore import mint, nn, ops

from . import case

F = mint.nn.functional
X = np.concatenate((np.random.default_rng(0).standard_normal(36) * 3, [-9.0, 9.0, -30.0, 30.0])).reshape(4, 10)
BOTH = ("float16", "float32")
SCALE, ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def normal(x):
    return x * scipy.special.ndtr(x)


def by_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FAR = np.linspace(-12, -5, 15)


def gaussian_reference(x, far):
    return normal(x), by_tanh(x), normal(x), by_tanh(x), 1e20 * normal(far), 1e20 * normal(far)


@case(X, FAR, reference=gaussian_reference)
def gaussian(x, far):
    """Small results for negative numbers keep their digits."""
    return (
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        ops.gelu(x),
        ops.gelu(x, "tanh"),
        1e20 * F.gelu(far),
        1e20 * ops.gelu(far),
    )


@case(X, reference=lambda x: (normal(x), by_tanh(x)), dtypes=BOTH)
def gaussian_of_ascend(x):
    return mint.npu_gelu(x), mint.npu_gelu(x, "tanh")


@case(X, reference=lambda x: (normal(x), by_tanh(x)), dtypes=("float16",))
def gaussian_of_half(x):
    return F.gelu(x), F.gelu(x, approximate="tanh")


def elu(x, alpha):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@case(X, reference=lambda x: (elu(x, 1), elu(x, 0.3), SCALE * elu(x, ALPHA)), dtypes=BOTH)
def exponential(x):
    return F.elu(x), F.elu(x, 0.3), F.selu(x)


@case(X, reference=lambda x: (x * np.tanh(np.logaddexp(0, x)), x * scipy.special.expit(x)), dtypes=BOTH)
def smooth(x):
    return F.mish(x), F.silu(x)


@case(X, reference=lambda x: (np.clip(x, -1, 1), np.clip(x, -2, 0.5), np.clip(x, 0, 6)), dtypes=BOTH)
def cut(x):
    return F.hardtanh(x), F.hardtanh(x, -2, 0.5), F.relu6(x)


def kinks_reference(x):
    return np.where(x > 0.1, x, 20), np.where(x > 0, x, 0.01 * x), np.where(x > 0, x, 1.5 * x), np.maximum(x, 0)


@case(X, reference=kinks_reference, dtypes=BOTH)
def kinks(x):
    return F.threshold(x, 0.1, 20), F.leaky_relu(x), F.leaky_relu(x, 1.5), F.relu(x)


@case(X, reference=lambda x: (-np.logaddexp(0, -x), np.logaddexp(0, x), np.logaddexp(0, 2 * x) / 2), dtypes=BOTH)
def logarithmic(x):
    return F.logsigmoid(x), F.softplus(x), F.softplus(x, 2, 15)


@case(
    X, reference=lambda x: (x[:, :5] * scipy.special.expit(x[:, 5:]), x[:2] * scipy.special.expit(x[2:])), dtypes=BOTH
)
def gated(x):
    return F.glu(x), F.glu(x, 0)


@case(
    X,
    reference=lambda x: (scipy.special.softmax(x, 1), *[scipy.special.log_softmax(x, i) for i in (0, 1)]),
    dtypes=BOTH,
)
def probabilities(x):
    return F.softmax(x, 1), F.log_softmax(x, 0), F.log_softmax(x, -1)


@case(X, reference=lambda x: (scipy.special.log_softmax(x, 1), normal(x), elu(x, 1), np.clip(x, 0, 6)))
class Cells(nn.Cell):
    """Holds Cells."""

    def __init__(self):
        super().__init__()
        self.log_softmax, self.gelu, self.elu = mint.nn.LogSoftmax(-1), mint.nn.GELU(), mint.nn.ELU()
        self.relu6 = mint.nn.ReLU6()

    def construct(self, x):
        return self.log_softmax(x), self.gelu(x), self.elu(x), self.relu6(x)
