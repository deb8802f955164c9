"""Programs that move, copy and select elements."""

import numpy as np
from mindspore import mint, ops

from . import case

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 4))
Z = RNG.standard_normal((2, 3, 5, 6))
WHOLE = RNG.integers(-9, 9, (3, 4))
ROWS = np.array([2, 0, 2])
PLACES = np.array([[2, 0, 1, 1], [0, 0, 2, 1]])


@case(X, Y, reference=lambda x, y: (np.stack((x, y), 1), np.concatenate((x, y)), np.hstack((x, y)), np.dstack((x, y))))
def joined(x, y):
    return mint.stack((x, y), 1), mint.cat((x, y)), mint.hstack((x, y)), mint.dstack((x, y))


@case(WHOLE, reference=lambda x: (np.stack((x, x)), x, x.T, np.roll(x, 1), np.repeat(x, 2)))
def whole_numbers(x):
    return mint.stack((x, x)), mint.clone(x), mint.t(x), mint.roll(x, 1), mint.repeat_interleave(x, 2)


@case(Z, reference=lambda x: (x, x.swapaxes(1, 3), x.transpose(0, 2, 3, 1), x[:, None], x.reshape(2, -1)))
def views(x):
    moved = mint.transpose(x, 1, 3), mint.permute(x, (0, 2, 3, 1))
    return mint.clone(x), *moved, mint.unsqueeze(x, 1), mint.flatten(x, 1)


@case(Z, reference=lambda x: (*np.split(x, 3, 3), x[:, :, :2], x[:, :, 2:], *np.split(x, [3], 3)))
def split(x):
    return *mint.split(x, 2, 3), *mint.split(x, (2, 3), 2), *mint.chunk(x, 2, -1)


@case(X, reference=lambda x: (*x.T, x[1], x[:, 1:3], np.broadcast_to(x, (2, 3, 4))))
def parts(x):
    return *mint.unbind(x, 1), mint.select(x, 0, 1), mint.narrow(x, 1, 1, 2), mint.broadcast_to(x, (2, 3, 4))


@case(X, ROWS, reference=lambda x, i: (x[i], x[:, i], x.ravel()[i - 3]))
def gathered(x, i):
    return mint.index_select(x, 0, i), mint.index_select(x, 1, i), mint.take(x, i - 3)


def added(x, y, i, j):
    first, second, third = x.copy(), x.copy(), x.copy()
    np.add.at(first, i, 2 * y)
    np.add.at(second, (slice(None), i), y[:, :3])
    np.add.at(third, (j, np.arange(4)), y[:2])
    return first, second, third


@case(X, Y, ROWS, PLACES, reference=added)
def scattered(x, y, i, j):
    columns = mint.index_add(x, 1, i, y[:, :3])
    return mint.index_add(x, 0, i, y, alpha=2), columns, mint.scatter_add(x, 0, j, y)


@case(X, reference=lambda x: (np.roll(x, 1), np.roll(x, -1, 0), np.roll(x, (1, -2), (0, 1)), x[::-1]))
def rolled(x):
    return mint.roll(x, 1), mint.roll(x, -1, 0), mint.roll(x, (1, -2), (0, 1)), mint.flip(x, (0,))


@case(X, reference=lambda x: (np.repeat(x, 3, 0), np.repeat(x, 2, 1), np.tile(x, (2, 1))))
def repeated(x):
    return mint.repeat_interleave(x, 3, 0), mint.repeat_interleave(x, 2, dim=-1), mint.tile(x, (2, 1))


@case(WHOLE > 0, reference=lambda x: (np.argwhere(x), *np.nonzero(x)))
def places_of_truths(x):
    return mint.nonzero(x), *mint.nonzero(x, as_tuple=True)


@case(WHOLE > 0, reference=lambda x: (*np.nonzero(x), np.where(x, 1.5, 0)))
def where(x):
    return *mint.where(x), mint.where(x, 1.5, ops.zeros(x.shape))


@case(
    Z,
    reference=lambda x: (
        np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 2)), constant_values=0.5),
        np.pad(x, ((0, 0), (0, 0), (2, 1), (1, 2)), "reflect"),
        np.pad(x, ((0, 0), (0, 0), (0, 3), (4, 0)), "edge"),
        x[..., 1:-2],
    ),
)
def padded(x):
    pad = mint.nn.functional.pad
    reflected, copied = pad(x, (1, 2, 2, 1), "reflect"), pad(x, (4, 0, 0, 3), "replicate")
    return pad(x, (1, 2), value=0.5), reflected, copied, pad(x, (-1, -2))


REPEATED = np.array([[3, 1, 1, 0], [0, 3, 3, 3]])


@case(REPEATED, reference=lambda x: (*np.unique(x, return_inverse=True, return_counts=True), np.unique(x)))
def unique_values(x):
    values, places, counts = mint.unique(x, return_inverse=True, return_counts=True)
    return values, places.reshape(-1), counts, mint.unique(x)


def runs(x):
    changes = np.append(True, x[1:] != x[:-1])
    starts = np.flatnonzero(changes)
    return x[starts], np.cumsum(changes) - 1, np.diff(starts, append=x.size)


RUNS = np.array([3, 3, 1, 1, 1, 3, 0])


@case(RUNS, reference=lambda x: (*runs(x), *[each[None] for each in runs(x)[:1]]))
def runs_of_values(x):
    columns = mint.broadcast_to(x, (2, 7))
    return (
        *mint.unique_consecutive(x, return_inverse=True, return_counts=True),
        mint.unique_consecutive(columns, dim=1)[:1],
    )


def placed(x, index, src, sums):
    y = x.copy()
    for place, value in zip(np.ndindex(index.shape), src[: index.shape[0], : index.shape[1]].reshape(-1)):
        row, column = place[0], index[place]
        y[row, column] = y[row, column] + value if sums else value
    return y


CORNER = np.array([[0, 2], [3, 1]])


@case(
    np.arange(12.0).reshape(3, 4),
    np.arange(12.0, 24.0).reshape(3, 4),
    CORNER,
    reference=lambda x, src, i: (placed(x, i, src, False), placed(x, i, np.full((2, 2), 5.0), False)),
)
def scatters(x, src, places):
    return mint.scatter(x, 1, places, src), mint.scatter(x, 1, places, 5.0)
