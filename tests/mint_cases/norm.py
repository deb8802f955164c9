"""Programs that normalize."""

import numpy as np
from mindspore import Tensor, mint, nn, ops

from . import case

F = mint.nn.functional
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 3, 5))
IMAGES = RNG.standard_normal((4, 3, 2, 5))
WEIGHT, BIAS = RNG.standard_normal((2, 5))
MATRIX, OFFSETS = RNG.standard_normal((2, 3, 5))
OF_CHANNELS, BIAS_OF_CHANNELS, MEAN = RNG.standard_normal((3, 3))
VARIANCE = RNG.uniform(0.5, 2, 3)
BOTH = ("float16", "float32")


def normalized(x, axes, eps=1e-5):
    x = x - x.mean(axes, keepdims=True)
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + eps)


@case(X, WEIGHT, BIAS, reference=lambda x, w, b: (normalized(x, -1) * w + b, normalized(x, -1)), dtypes=BOTH)
def rows(x, w, b):
    return F.layer_norm(x, (5,), w, b), ops.layer_norm(x, [5])


def of_several_axes(x, w, b):
    y = normalized(x, (1, 2), 1e-3)
    return y * w + b, y + b, normalized(x, (1, 2)), y * w


@case(X, MATRIX, OFFSETS, reference=of_several_axes)
def rows_of_several_axes(x, w, b):
    shape = (3, 5)
    single = F.layer_norm(x, shape, None, b, 1e-3), F.layer_norm(x, shape), F.layer_norm(x, shape, w, None, 1e-3)
    return F.layer_norm(x, shape, w, b, 1e-3), *single


def per_channel(x, *values):
    return [value.reshape(-1, *[1] * (x.ndim - 2)) for value in values]


def by_batch(x, w, b, eps=1e-5):
    w, b = per_channel(x, w, b)
    return normalized(x, (0, *range(2, x.ndim)), eps) * w + b


def by_running(x, w, b, mean, variance):
    w, b, mean, variance = per_channel(x, w, b, mean, variance)
    return (x - mean) / np.sqrt(variance + 1e-5) * w + b


@case(
    *(IMAGES, OF_CHANNELS, BIAS_OF_CHANNELS),
    reference=lambda x, w, b: (
        by_batch(x, w, b),
        by_batch(x[:, :, 0], w, b),
        by_batch(x[:, :, 0, 0], w, b),
        by_running(x, w, b, MEAN, VARIANCE),
        by_running(x, 1 + 0 * w, 0 * b, MEAN, VARIANCE),
    ),
)
def batches(x, w, b):
    own = [F.batch_norm(each, None, None, w, b, True) for each in (x, x[:, :, 0], x[:, :, 0, 0])]
    mean, variance = Tensor(MEAN.astype(np.float32)), Tensor(VARIANCE.astype(np.float32))
    return *own, F.batch_norm(x, mean, variance, w, b), F.batch_norm(x, mean, variance)


@case(IMAGES, reference=lambda x: (by_batch(x, OF_CHANNELS, BIAS_OF_CHANNELS), normalized(x, -1), normalized(x, -1)))
class Cells(nn.Cell):
    """Holds Cells, a batch norm in training. test_mint_state.py tests its running statistics."""

    def __init__(self):
        super().__init__()
        self.batch, self.rows, self.plain = (
            mint.nn.BatchNorm2d(3, track_running_stats=False),
            mint.nn.LayerNorm(5),
            mint.nn.LayerNorm(5, bias=False),
        )
        self.batch.weight.set_data(Tensor(OF_CHANNELS.astype(np.float32)))
        self.batch.bias.set_data(Tensor(BIAS_OF_CHANNELS.astype(np.float32)))
        self.set_train()

    def construct(self, x):
        return self.batch(x), self.rows(x), self.plain(x)


def in_groups(x, w, b):
    parts = x.reshape(4, 3, 1, -1)
    y = normalized(parts, (2, 3)).reshape(x.shape)
    whole = normalized(x.reshape(4, -1), 1).reshape(x.shape)
    w, b = per_channel(x, w, b)
    return y * w + b, whole, y * w, whole + b


@case(IMAGES, OF_CHANNELS, BIAS_OF_CHANNELS, reference=in_groups, dtypes=BOTH)
def groups(x, w, b):
    return F.group_norm(x, 3, w, b), F.group_norm(x, 1), F.group_norm(x, 3, w), ops.group_norm(x, 1, bias=b)


@case(IMAGES + 1000, reference=lambda x: in_groups(x, OF_CHANNELS, BIAS_OF_CHANNELS)[:2])
class CellsOfGroups(nn.Cell):
    """Holds Cells, whose input is far from 0."""

    def __init__(self):
        super().__init__()
        self.groups, self.whole = mint.nn.GroupNorm(3, 3), mint.nn.GroupNorm(1, 3, affine=False)
        self.groups.weight.set_data(Tensor(OF_CHANNELS.astype(np.float32)))
        self.groups.bias.set_data(Tensor(BIAS_OF_CHANNELS.astype(np.float32)))

    def construct(self, x):
        return self.groups(x), self.whole(x)


def unit(x, p, axis):
    return x / (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)


@case(X, reference=lambda x: (unit(x, 2, 1), unit(x, 1, -1), unit(x, 3, 0)))
def units(x):
    return F.normalize(x), F.normalize(x, 1.0, -1), F.normalize(x, p=3.0, dim=0)
