"""Programs that hold Cells of `mindspore.mint.nn`."""

import numpy as np
import scipy.special
from mindspore import Parameter, Tensor, mint, nn

from . import case
from .activation import elu
from .conv import LINE, OF_LINE, OF_VOLUME, VOLUME, convolution
from .loss import LABELS, SIGNS, P, Q, X, Y, entropy, likelihood
from .norm import by_batch
from .pool import LINES, PLANES, VOLUMES, WINDOW, adapted, columns, images, largest, pooled, resized, unpooled

N = mint.nn
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((4, 6))  # MindSpore's tanh is less exact for larger numbers
TABLE = RNG.standard_normal((6, 3))


def set_to(cell, **parameters):
    """Sets parameters of a Cell, and returns it."""
    for name, value in parameters.items():
        getattr(cell, name).set_data(Tensor(value.astype(np.float32)))
    return cell


class Several(nn.Cell):
    """Returns what each of some Cells makes of one input."""

    def __init__(self, *cells):
        super().__init__()
        self.members = nn.CellList(list(cells))

    def construct(self, x):
        results = ()
        for cell in self.members:
            results = (*results, cell(x))
        return results


def bounded(x):
    sigmoid, soft = scipy.special.expit(x), np.logaddexp(0, x)
    hard = np.where(np.abs(x) > 0.5, x, 0), np.clip(x / 6 + 0.5, 0, 1), x * np.clip(x / 6 + 0.5, 0, 1)
    shrunk, kinked = np.where(np.abs(x) > 0.5, x - 0.5 * np.sign(x), 0), np.where(x > 0, x, 0.25 * x)
    selu = 1.0507009873554805 * elu(x, 1.6732632423543772)
    exponents = sigmoid, x * sigmoid, np.tanh(x), -np.logaddexp(0, -x), x * np.tanh(soft), selu
    return *hard, shrunk, np.clip(x, -1, 0.5), np.where(x > 0.1, x, 9), kinked, np.maximum(x, 0), *exponents


@case(ROWS, reference=bounded, dtypes=("float16", "float32"))
class Activations(Several):
    """Computes functions of each element."""

    def __init__(self):
        hard = N.Hardshrink(0.5), N.Hardsigmoid(), N.Hardswish(), N.Softshrink(0.5), N.Hardtanh(-1, 0.5)
        kinks = N.Threshold(0.1, 9.0), N.PReLU(init=0.25), N.ReLU()
        super().__init__(*hard, *kinks, N.Sigmoid(), N.SiLU(), N.Tanh(), N.LogSigmoid(), N.Mish(), N.SELU())

    def construct(self, x):
        results = ()
        for cell in self.members:
            results = (*results, cell(x).astype(x.dtype))
        return results


def of_rows(x):
    linear = x @ TABLE + np.arange(3)
    return scipy.special.softmax(x, 1), x[:, :3] * scipy.special.expit(x[:, 3:]), x, x, linear, x, x


@case(ROWS, reference=of_rows)
class Rows(Several):
    """Computes functions of rows. What drops elements is not in training."""

    def __init__(self):
        linear = set_to(N.Linear(6, 3), weight=TABLE.T, bias=np.arange(3.0))
        super().__init__(N.Softmax(-1), N.GLU(), N.Identity(), N.Flatten(), linear, N.Dropout(0.5), N.Dropout2d(0.5))
        self.set_train(False)


def padded(x, pad, mode="constant", **settings):
    pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
    return np.pad(x, pairs, mode, **settings)


PADS = (1, 2), (1, 2, 0, 1), (1, 2, 0, 1, 2, 1)


def of_pads(x, pad):
    constant = padded(x, pad, constant_values=0.5), padded(x, pad)
    return *constant, padded(x, pad, "reflect"), padded(x, pad, "edge")


@case(LINES, PLANES, VOLUMES, reference=lambda *inputs: sum(map(of_pads, inputs, PADS), ()))
class Pads(nn.Cell):
    """Pads lines, planes and volumes."""

    def __init__(self):
        super().__init__()
        self.lines = Several(N.ConstantPad1d(PADS[0], 0.5), N.ZeroPad1d(PADS[0]), *self.copying("1d", PADS[0]))
        self.planes = Several(N.ConstantPad2d(PADS[1], 0.5), N.ZeroPad2d(PADS[1]), *self.copying("2d", PADS[1]))
        self.volumes = Several(N.ConstantPad3d(PADS[2], 0.5), N.ZeroPad3d(PADS[2]), *self.copying("3d", PADS[2]))

    def copying(self, rank, pad):
        return getattr(N, f"ReflectionPad{rank}")(pad), getattr(N, f"ReplicationPad{rank}")(pad)

    def construct(self, x, y, z):
        return *self.lines(x), *self.planes(y), *self.volumes(z)


def of_pools(x, y, z):
    lines = pooled(x, 3, 2), adapted(x, (4,), np.mean), adapted(x, (4,), np.max)
    planes = pooled(y, 3, 2), adapted(y, (3, 5), np.mean), adapted(y, (3, 5), np.max), largest(y, 2, 2)[0]
    return *lines, *planes, pooled(z, 2), adapted(z, (2, 3, 4), np.mean), unpooled(y, (7, 8))


@case(LINES, PLANES, VOLUMES, reference=of_pools)
class Pools(nn.Cell):
    """Takes means and largest numbers."""

    def __init__(self):
        super().__init__()
        self.lines = Several(N.AvgPool1d(3, 2), N.AdaptiveAvgPool1d(4), N.AdaptiveMaxPool1d(4))
        means = N.AvgPool2d(3, 2), N.AdaptiveAvgPool2d((3, 5)), N.AdaptiveMaxPool2d((3, 5))
        self.planes = Several(*means, N.MaxPool2d(2))
        self.volumes = Several(N.AvgPool3d(2), N.AdaptiveAvgPool3d((2, 3, 4)))
        self.both, self.back = N.MaxPool2d(2, return_indices=True), N.MaxUnpool2d(2)

    def construct(self, x, y, z):
        values, places = self.both(y)
        return *self.lines(x), *self.planes(y), *self.volumes(z), self.back(values, places, output_size=(7, 8))


CHANNELS = RNG.standard_normal((2, 12, 3, 4))
WINDOWS = RNG.standard_normal((2, 18, 24))


def moved(x, y, z):
    shuffled = x.reshape(2, 3, 2, 2, 3, 4).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 6, 8)
    nearest, bilinear = resized(z, (14, 16), "nearest"), resized(z, (14, 16), "linear", True)
    return shuffled, images(y, (7, 8), *WINDOW), columns(z, *WINDOW), nearest, nearest, bilinear


@case(CHANNELS, WINDOWS, PLANES, reference=moved)
class Planes(nn.Cell):
    """Moves and resizes planes."""

    def __init__(self):
        super().__init__()
        self.shuffle, self.fold = N.PixelShuffle(2), N.Fold((7, 8), *WINDOW)
        sizes = N.Upsample(scale_factor=2.0), N.UpsamplingNearest2d((14, 16)), N.UpsamplingBilinear2d((14, 16))
        self.others = Several(N.Unfold(*WINDOW), *sizes)

    def construct(self, x, y, z):
        return self.shuffle(x), self.fold(y), *self.others(z)


@case(
    *(LINE, VOLUME),
    reference=lambda x, y: (
        convolution(x, OF_LINE, np.arange(6), 2, [(1, 1)]),
        convolution(y, OF_VOLUME, np.arange(6)),
        by_batch(y, np.ones(4), np.zeros(4)),
    ),
)
class Convolutions(nn.Cell):
    """Convolves lines and volumes."""

    def __init__(self):
        super().__init__()
        bias = np.arange(6.0)
        self.lines = set_to(N.Conv1d(4, 6, 3, 2, 1), weight=OF_LINE, bias=bias)
        self.volumes = set_to(N.Conv3d(4, 6, (2, 3, 2)), weight=OF_VOLUME, bias=bias)
        self.batch = N.BatchNorm3d(4, track_running_stats=False)

    def construct(self, x, y):
        return self.lines(x), self.volumes(y), self.batch(y)


def losses_reference(x, y, p, q):
    soft, sizes = np.logaddexp(0, -SIGNS[:, None] * x), np.sqrt((x * x).sum(1) * (y * y).sum(1))
    cosine, distance = (x * y).sum(1) / sizes, np.abs(x - y)
    angles = np.where(SIGNS == 1, 1 - cosine, np.maximum(cosine, 0)).mean()
    smooth = np.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
    binary = -(q * np.log(p) + (1 - q) * np.log1p(-p)).mean(), (np.logaddexp(0, x) - x * q).mean()
    of_labels = entropy(x, LABELS), likelihood(x, LABELS), (q * (np.log(q) - x)).mean()
    return distance.mean(), (distance**2).mean(), smooth, soft.mean(), angles, *binary, *of_labels


@case(X, Y, P, Q, reference=losses_reference)
class Losses(nn.Cell):
    """Computes losses."""

    def __init__(self):
        super().__init__()
        self.of_distances = nn.CellList([N.L1Loss(), N.MSELoss(), N.SmoothL1Loss()])
        self.soft, self.cosine, self.binary = N.SoftMarginLoss(), N.CosineEmbeddingLoss(), N.BCELoss()
        self.of_logits, self.of_labels = N.BCEWithLogitsLoss(), nn.CellList([N.CrossEntropyLoss(), N.NLLLoss()])
        self.divergence, self.labels = N.KLDivLoss(), Parameter(Tensor(LABELS), requires_grad=False)
        self.signs = Parameter(Tensor(SIGNS.astype(np.float32)), requires_grad=False)

    def construct(self, x, y, p, q):
        distances = ()
        for loss in self.of_distances:
            distances = (*distances, loss(x, y))
        signs = self.signs.expand_dims(1).broadcast_to((6, 5))
        margins = self.soft(x, signs), self.cosine(x, y, self.signs)
        binary = self.binary(p, q), self.of_logits(x, q)
        labels = self.of_labels[0](x, self.labels), self.of_labels[1](x, self.labels)
        return *distances, *margins, *binary, *labels, self.divergence(x, q)


@case(np.array([[1, 5, 1], [0, 2, 1]]), reference=lambda ids: np.float32(TABLE)[ids])
class Table(nn.Cell):
    """Takes rows of a table."""

    def __init__(self):
        super().__init__()
        self.rows = set_to(N.Embedding(6, 3), weight=TABLE)

    def construct(self, ids):
        return self.rows(ids)
