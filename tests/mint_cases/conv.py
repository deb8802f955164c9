"""Programs that compute convolutions."""

import numpy as np
from mindspore import Tensor, mint, nn

from . import case

F = mint.nn.functional
RNG = np.random.default_rng(0)
LINE, PLANE, VOLUME = (RNG.standard_normal((2, 4, *sizes)) for sizes in ((9,), (6, 7), (3, 5, 4)))
OF_LINE, OF_PLANE, OF_VOLUME = (RNG.standard_normal((6, 4, *sizes)) for sizes in ((3,), (3, 2), (2, 3, 2)))
BIAS = RNG.standard_normal(6)
BOTH = ("float16", "float32")


def convolution(x, weight, bias=None, stride=1, padding=(), dilation=1, groups=1, mode="constant"):
    """Adds products of the input, moved by each place of the kernel. `padding` has pairs, one along each axis."""
    rank = weight.ndim - 2
    stride, dilation = np.broadcast_to(stride, rank), np.broadcast_to(dilation, rank)
    x = np.pad(x, ((0, 0), (0, 0), *(padding or [(0, 0)] * rank)), mode)
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(x.shape[2:], dilation, weight.shape[2:], stride)]
    parts = []
    for part, rows in zip(np.split(x, groups, 1), np.split(weight, groups)):
        y = np.zeros((len(x), len(rows), *sizes))
        for place in np.ndindex(weight.shape[2:]):
            window = tuple(
                slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in zip(place, dilation, sizes, stride)
            )
            y += np.einsum("nc...,oc->no...", part[(..., *window)], rows[(..., *place)])
        parts.append(y)
    y = np.concatenate(parts, 1)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


def lines_reference(x, w, b):
    return (
        convolution(x, w, b),
        convolution(x, w, b, 2, [(2, 2)], 2),
        convolution(x, w, None, 1, [(1, 1)]),
        convolution(x, w[:, :2], b, groups=2),
        convolution(x[:1], w, b)[0],
    )


@case(LINE, OF_LINE, BIAS, reference=lines_reference)
def lines(x, w, b):
    several = F.conv1d(x, w, padding="same"), F.conv1d(x, w[:, :2], b, groups=2)
    return F.conv1d(x, w, b), F.conv1d(x, w, b, 2, 2, 2), *several, F.conv1d(x[0], w, b)


def rows_of_times(x, w, b, padding):
    return convolution(x.transpose(1, 2, 0), w.transpose(2, 1, 0), b, 1, [padding]).transpose(2, 0, 1)


@case(
    *(LINE.transpose(2, 0, 1).copy(), OF_LINE.transpose(2, 1, 0).copy(), BIAS),
    reference=lambda x, w, b: (rows_of_times(x, w, b, (0, 0)), rows_of_times(x, w, b, (2, 2))),
    dtypes=BOTH,
)
def times_first(x, w, b):
    return mint.conv_tbc(x, w, b), mint.conv_tbc(x, w, b, 2)


def planes_reference(x, w, b):
    return (
        convolution(x, w, b),
        convolution(x, w, b, (2, 1), [(1, 1), (2, 2)], (1, 3)),
        convolution(x, w, None, 1, [(2, 2), (0, 1)], (2, 1)),
        convolution(x, w, b),
        convolution(x, w[:, :2], b, groups=2),
        convolution(x[1:], w, b, 2)[0],
    )


@case(PLANE, OF_PLANE, BIAS, reference=planes_reference)
def planes(x, w, b):
    same = F.conv2d(x, w, padding="same", dilation=(2, 1))
    grouped, single = F.conv2d(x, w[:, :2], b, groups=2), F.conv2d(x[1], w, b, 2)
    return (
        F.conv2d(x, w, b),
        F.conv2d(x, w, b, (2, 1), (1, 2), (1, 3)),
        same,
        F.conv2d(x, w, b, padding="valid"),
        grouped,
        single,
    )


@case(PLANE, OF_PLANE, BIAS, reference=lambda x, w, b: convolution(x, w, b, 1, [(1, 1), (1, 1)]), dtypes=BOTH)
def planes_of_either_dtype(x, w, b):
    return F.conv2d(x, w, b, padding=1)


def volumes_reference(x, w, b):
    return (
        convolution(x, w, b, (1, 2, 1), [(1, 1), (0, 0), (1, 1)]),
        convolution(x, w, None, 1, [(0, 1), (1, 1), (0, 1)]),
        convolution(x[:1], w[:, :2], b, groups=2)[0],
    )


@case(VOLUME, OF_VOLUME, BIAS, reference=volumes_reference)
def volumes(x, w, b):
    return (
        F.conv3d(x, w, b, (1, 2, 1), (1, 0, 1)),
        F.conv3d(x, w, padding="same"),
        F.conv3d(x[0], w[:, :2], b, groups=2),
    )


def transposed(x, weight, bias, stride=1, padding=0, extra=0, groups=1, dilation=1):
    """Adds each element's products with the kernel at its places in the result."""
    stride, padding, extra, dilation = (np.broadcast_to(each, 2) for each in (stride, padding, extra, dilation))
    kernel = weight.shape[2:]
    sizes = [(n - 1) * s + d * (k - 1) + 1 + e for n, s, d, k, e in zip(x.shape[2:], stride, dilation, kernel, extra)]
    parts = []
    for part, rows in zip(np.split(x, groups, 1), np.split(weight, groups)):
        y = np.zeros((len(x), weight.shape[1], *sizes))
        for place in np.ndindex(kernel):
            window = tuple(
                slice(i * d, i * d + (n - 1) * s + 1, s) for i, d, n, s in zip(place, dilation, x.shape[2:], stride)
            )
            y[(..., *window)] += np.einsum("nc...,co->no...", part, rows[(..., *place)])
        parts.append(y)
    (top, left), (height, width) = padding, sizes
    y = np.concatenate(parts, 1)[:, :, top : height - top, left : width - left]
    return y if bias is None else y + bias[:, None, None]


def transposed_reference(x, w, b):
    return (
        transposed(x, w, b),
        transposed(x, w, b, 2, 1, 1),
        transposed(x, w[:, :3], b, (2, 1), (0, 1), groups=2, dilation=(1, 2)),
        transposed(x[:1], w, None)[0],
    )


@case(PLANE, OF_PLANE.swapaxes(0, 1).copy(), BIAS, reference=transposed_reference)
def transposed_convolutions(x, w, b):
    strided = F.conv_transpose2d(x, w, b, 2, 1, 1), F.conv_transpose2d(x, w[:, :3], b, (2, 1), (0, 1), 0, 2, (1, 2))
    return F.conv_transpose2d(x, w, b), *strided, F.conv_transpose2d(x[0], w)


def cells_reference(x):
    w, pads = np.float64(np.float32(OF_PLANE)), [(1, 1), (2, 2)]
    bias = np.float64(np.float32(BIAS))
    around = [convolution(x, w, bias, 1, pads, mode=mode) for mode in ("reflect", "edge", "wrap")]
    return *around, convolution(x, w, bias, 1, [(1, 1), (0, 1)]), transposed(x, w.swapaxes(0, 1)[:, :6], bias, 2)


@case(PLANE, reference=cells_reference)
class Cells(nn.Cell):
    """Holds Cells of each padding mode."""

    def __init__(self):
        super().__init__()
        modes = ("reflect", "replicate", "circular")
        cells = [mint.nn.Conv2d(4, 6, (3, 2), padding=(1, 2), padding_mode=mode) for mode in modes]
        cells += [mint.nn.Conv2d(4, 6, (3, 2), padding="same"), mint.nn.ConvTranspose2d(4, 6, (3, 2), 2)]
        for cell in cells:
            own = OF_PLANE if cell.weight.shape == OF_PLANE.shape else OF_PLANE.swapaxes(0, 1).copy()
            cell.weight.set_data(Tensor(own.astype(np.float32)))
            cell.bias.set_data(Tensor(BIAS.astype(np.float32)))
        self.own = nn.CellList(cells)

    def construct(self, x):
        return tuple([cell(x) for cell in self.own])
