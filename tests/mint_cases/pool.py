"""Programs that take means and largest numbers of windows, and that resize."""

import itertools

import numpy as np
from mindspore import mint

from . import case

F = mint.nn.functional
RNG = np.random.default_rng(0)
LINES, PLANES, VOLUMES = (
    RNG.permutation(np.linspace(-3, 3, np.prod(s))).reshape(s) for s in ((2, 3, 11), (2, 3, 7, 8), (2, 2, 5, 6, 7))
)
BOTH = ("float16", "float32")


def pooled(x, kernel, stride=None, padding=0, ceil=False, count_padding=True, divisor=None, rank=None):
    """Takes means of windows, by their places."""
    rank = rank or x.ndim - 2
    kernel, padding = np.broadcast_to(kernel, rank), np.broadcast_to(padding, rank)
    stride = kernel if stride is None else np.broadcast_to(stride, rank)
    axes = []
    for n, k, s, p in zip(x.shape[-rank:], kernel, stride, padding):
        starts = [i for i in range(-p, n + p, s) if (i < n + p if ceil else i + k <= n + p)]
        count = -(-(n + 2 * p - k) // s) + 1 if ceil else (n + 2 * p - k) // s + 1
        axes.append([(i, min(i + k, n + p)) for i in starts[:count] if i < n])
    out = np.zeros((*x.shape[:-rank], *map(len, axes)))
    for place in itertools.product(*[range(len(axis)) for axis in axes]):
        spans = [axis[i] for axis, i in zip(axes, place)]
        window = x[(..., *[slice(max(first, 0), last) for first, last in spans])]
        whole = np.prod([last - first for first, last in spans]) if count_padding else np.prod(window.shape[-rank:])
        out[(..., *place)] = window.sum(tuple(range(-rank, 0))) / (divisor or whole)
    return out


@case(
    LINES,
    reference=lambda x: (pooled(x, 3), pooled(x, 4, 2, 2, True, False), pooled(x[0], 3, 2, 1, rank=1)),
    dtypes=BOTH,
)
def means_of_lines(x):
    return F.avg_pool1d(x, 3), F.avg_pool1d(x, 4, 2, 2, True, False), F.avg_pool1d(x[0], 3, 2, 1)


def means_of_planes_reference(x):
    uneven = pooled(x, (3, 2), (2, 1), (1, 0), True), pooled(x, 3, 3, 1, True, False)
    return pooled(x, 2), *uneven, pooled(x, 2, divisor=3), pooled(x[0], 3, 1, 1, rank=2)


@case(PLANES, reference=means_of_planes_reference, dtypes=BOTH)
def means_of_planes(x):
    uneven = F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), True), F.avg_pool2d(x, 3, 3, 1, True, False)
    return F.avg_pool2d(x, 2), *uneven, F.avg_pool2d(x, 2, divisor_override=3), F.avg_pool2d(x[0], 3, 1, 1)


@case(
    VOLUMES,
    reference=lambda x: (pooled(x, 2), pooled(x, 3, 2, 1, True, False), pooled(x, (1, 2, 3), None, 0, divisor=5)),
)
def means_of_volumes(x):
    return F.avg_pool3d(x, 2), F.avg_pool3d(x, 3, 2, 1, True, False), F.avg_pool3d(x, (1, 2, 3), divisor_override=5)


def adapted(x, sizes, function):
    rank = len(sizes)
    out = np.zeros((*x.shape[:-rank], *sizes), x.dtype)
    for place in np.ndindex(*sizes):
        window = x[
            (..., *[slice(i * n // size, -(-(i + 1) * n // size)) for i, n, size in zip(place, x.shape[-rank:], sizes)])
        ]
        out[(..., *place)] = function(window, axis=tuple(range(-rank, 0)))
    return out


@case(
    *(LINES, PLANES, VOLUMES),
    reference=lambda x, y, z: (
        adapted(x, (4,), np.mean),
        adapted(y, (3, 8), np.mean),
        adapted(y[0], (1, 1), np.mean),
        adapted(z, (2, 3, 7), np.mean),
    ),
)
def adapted_means(x, y, z):
    planes = F.adaptive_avg_pool2d(y, (3, None)), F.adaptive_avg_pool2d(y[0], 1)
    return F.adaptive_avg_pool1d(x, 4), *planes, F.adaptive_avg_pool3d(z, (2, 3, None))


def places_of_largest(x, size):
    planes, n = x.reshape(*x.shape[:-2], -1), x.shape[-1] * x.shape[-2]
    found = adapted(x, size, np.max)
    return np.argmax(planes[..., None, :] == found.reshape(*found.shape[:-2], -1, 1), -1).reshape(found.shape), n


@case(
    LINES,
    PLANES,
    reference=lambda x, y: (adapted(x, (4,), np.max), adapted(y, (3, 5), np.max), places_of_largest(y, (3, 5))[0]),
)
def adapted_largest(x, y):
    return F.adaptive_max_pool1d(x, 4), *F.adaptive_max_pool2d(y, (3, 5), True)


def largest(x, kernel, stride, padding=0, dilation=1, ceil=False):
    n = x.shape[-1] * x.shape[-2]
    places = np.arange(n, dtype=np.float64).reshape(x.shape[-2:])
    pad = [(0, 0)] * (x.ndim - 2) + [(padding, padding + (stride if ceil else 0))] * 2
    wide = np.pad(x, pad, constant_values=-np.inf)
    indices = np.pad(places, pad[-2:])
    span = dilation * (kernel - 1) + 1
    sizes = []
    for length in x.shape[-2:]:
        steps = length + 2 * padding - span
        count = (-(-steps // stride) if ceil else steps // stride) + 1
        sizes.append(count - 1 if ceil and (count - 1) * stride >= length + padding else count)
    out, where = np.zeros((*x.shape[:-2], *sizes)), np.zeros((*x.shape[:-2], *sizes), np.int64)
    for i, j in np.ndindex(*sizes):
        spans = [slice(k * stride, k * stride + span, dilation) for k in (i, j)]
        window = wide[(..., *spans)].reshape(*x.shape[:-2], -1)
        out[..., i, j] = window.max(-1)
        where[..., i, j] = indices[tuple(spans)].reshape(-1)[window.argmax(-1)]
    return out, where


@case(
    PLANES,
    reference=lambda x: (
        *largest(x, 2, 2),
        largest(x, 3, 2, 1)[0],
        *largest(x, 2, 3, 1, 2, True),
        largest(x[0], 3, 1)[0],
    ),
    dtypes=BOTH,
)
def largest_of_planes(x):
    unusual = F.max_pool2d(x, 2, 3, 1, 2, True, True)
    return *F.max_pool2d(x, 2, return_indices=True), F.max_pool2d(x, 3, 2, 1), *unusual, F.max_pool2d(x[0], 3, 1)


def unpooled(x, size):
    y, where = largest(x, 2, 2)
    out = np.zeros((*x.shape[:2], size[0] * size[1]))
    np.put_along_axis(out, where.reshape(*x.shape[:2], -1), y.reshape(*x.shape[:2], -1), -1)
    return out.reshape(*x.shape[:2], *size)


@case(PLANES, reference=lambda x: (unpooled(x[:, :, :6], (6, 8)), unpooled(x, (7, 8))))
def unpooled_planes(x):
    even, odd = F.max_pool2d(x[:, :, :6], 2, return_indices=True), F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(*even, 2), F.max_unpool2d(*odd, 2, output_size=(7, 8))


def columns(x, kernel, dilation, padding, stride):
    x = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(x.shape[2:], kernel, dilation, stride)]
    parts = [
        x[:, :, i * dilation[0] :, j * dilation[1] :][:, :, :: stride[0], :: stride[1]][:, :, : sizes[0], : sizes[1]]
        for i, j in np.ndindex(*kernel)
    ]
    return np.stack(parts, 2).reshape(len(x), -1, sizes[0] * sizes[1])


def images(x, size, *settings):
    """Multiplies columns by the transposed matrix of `columns`."""
    units = np.eye(size[0] * size[1]).reshape(-1, 1, *size)
    matrix = columns(units, *settings).reshape(len(units), -1)
    rows = x.reshape(len(x), -1, matrix.shape[1])
    return (rows @ matrix.T).reshape(*rows.shape[:2], *size)


WINDOW = ((3, 2), (1, 2), (1, 0), (2, 1))
COLUMNS = RNG.standard_normal((2, 18, 24))


@case(
    PLANES,
    COLUMNS,
    reference=lambda x, y: (columns(x, *WINDOW), columns(x[:1], *WINDOW)[0], images(y, (7, 8), *WINDOW)),
)
def windows(x, y):
    return F.unfold(x, *WINDOW), F.unfold(x[0], *WINDOW), F.fold(y, (7, 8), *WINDOW)


@case(
    RNG.standard_normal((2, 12, 3, 4)),
    reference=lambda x: x.reshape(2, 3, 2, 2, 3, 4).transpose(0, 1, 4, 2, 5, 3).reshape(2, 3, 6, 8),
)
def shuffled(x):
    return F.pixel_shuffle(x, 2)


def weights(n, size, kind, aligned=False, scale=None):
    """Returns the matrix that resizes an axis."""
    matrix = np.zeros((size, n))
    for i in range(size):
        step = n / size if scale is None else 1 / scale
        place = i * (n - 1) / max(size - 1, 1) if aligned else (i + 0.5) * step - 0.5
        if kind == "nearest":
            matrix[i, min(int(i * step), n - 1)] = 1
        elif kind == "linear":
            place = max(place, 0)
            for k in range(n):
                matrix[i, k] = max(1 - abs(min(place, n - 1) - k), 0)
        else:
            for k in range(int(np.floor(place)) - 1, int(np.floor(place)) + 3):
                t = abs(place - k)
                near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
                matrix[i, min(max(k, 0), n - 1)] += near if t <= 1 else far
    return matrix


def resized(x, sizes, kind, aligned=False, scales=(None,) * 3):
    for axis, (size, scale) in enumerate(zip(sizes, scales)):
        x = np.moveaxis(
            np.tensordot(weights(x.shape[axis + 2], size, kind, aligned, scale), x, (1, axis + 2)), 0, axis + 2
        )
    return x


def of_nearest(x, y, z):
    planes = resized(y, (14, 16), "nearest"), resized(y, (4, 20), "nearest")
    return resized(x, (7,), "nearest"), *planes, resized(z, (4, 6, 14), "nearest")


@case(LINES, PLANES, VOLUMES, reference=of_nearest)
def nearest(x, y, z):
    resize = F.interpolate
    return resize(x, 7), resize(y, scale_factor=2.0), resize(y, (4, 20)), resize(z, (4, 6, 14))


def of_linear(x, y, z):
    return (
        resized(x, (5,), "linear"),
        resized(x, (23,), "linear", True),
        resized(y, (14, 16), "linear"),
        resized(y, (10, 12), "linear", False, (1.5, 1.5)),
        resized(y, (3, 15), "linear", True),
        resized(z, (3, 9, 14), "linear"),
        resized(z, (10, 4, 5), "linear", True),
    )


@case(LINES, PLANES, VOLUMES, reference=of_linear)
def linear(x, y, z):
    resize, (kind, of_planes, of_volumes) = F.interpolate, ("linear", "bilinear", "trilinear")
    lines = resize(x, 5, mode=kind), resize(x, 23, mode=kind, align_corners=True)
    planes = resize(y, scale_factor=2.0, mode=of_planes), resize(y, scale_factor=1.5, mode=of_planes)
    aligned = resize(y, (3, 15), mode=of_planes, align_corners=True)
    volumes = resize(z, (3, 9, 14), mode=of_volumes), resize(z, (10, 4, 5), mode=of_volumes, align_corners=True)
    return *lines, *planes, aligned, *volumes


def of_cubic(y):
    scaled = resized(y, (10, 12), "cubic", False, (1.5, 1.5)), resized(y, (10, 12), "cubic")
    return resized(y, (14, 5), "cubic"), *scaled, resized(y, (5, 17), "cubic", True)


@case(PLANES, reference=of_cubic)
def cubic(y):
    kind, resize = "bicubic", F.interpolate
    scaled = resize(y, scale_factor=1.5, mode=kind), resize(y, scale_factor=1.5, mode=kind, recompute_scale_factor=True)
    return resize(y, (14, 5), mode=kind), *scaled, resize(y, (5, 17), mode=kind, align_corners=True)


@case(
    LINES,
    PLANES,
    reference=lambda x, y: (
        resized(y, (14, 24), "nearest", False, (2.0, 3.0)),
        resized(y, (10, 12), "nearest", False, (1.5, 1.5)),
        resized(x, (16,), "nearest", False, (1.5,)),
    ),
)
def nearest_by_factors(x, y):
    return (
        F.interpolate(y, scale_factor=(2.0, 3.0)),
        F.interpolate(y, scale_factor=1.5),
        F.interpolate(x, scale_factor=1.5),
    )
