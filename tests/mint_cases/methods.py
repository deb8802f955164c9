"""Programs that call methods of Tensors, with arguments as MindSpore has them for Ascend alone."""

import numpy as np
from mindspore import Tensor, nn

from . import case

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 3, 4))
Z = RNG.standard_normal((2, 3, 4))
WHOLE = RNG.integers(-9, 9, (3, 4))
ROWS = np.array([2, 0])
PLACES = np.array([[2, 0, 1, 1], [0, 0, 2, 1]])


@case(X, reference=lambda x: (*np.split(x, 2, 1), *np.split(x, 4, -1), x[:, :1], x[:, 1:], x[:, 1:3], x, x[[2, 0]]))
def cut(x):
    pieces = *x.chunk(2, dim=1), *x.split(1, dim=-1), *x.split((1, 3), dim=1)
    return *pieces, x.narrow(dim=1, start=1, length=2), x.clone(), x.index_select(dim=0, index=Tensor(ROWS))


@case(Z, reference=lambda x: (x.swapaxes(1, 2), x.swapaxes(0, 2), x.transpose(2, 0, 1), x.transpose(1, 0, 2), x.T))
def turned(x):
    return x.transpose(1, 2), x.transpose(0, dim1=2), x.transpose(2, 0, 1), x.transpose((1, 0, 2)), x.transpose()


@case(X, reference=lambda x: (np.tile(x, (2, 3)), np.tile(x, (3, 2, 1)), np.repeat(x, 2, 1), np.stack((x, x))))
def repeated(x):
    return x.repeat(2, 3), x.repeat((3, 2, 1)), x.repeat_interleave(2, dim=1), x.expand(2, -1, -1)


def added(x, y, i, j):
    first, second = x.copy(), x.copy()
    np.add.at(first, i, 2 * y[:2])
    np.add.at(second, (j, np.arange(4)), y[:2])
    return first, second


@case(X, Y, ROWS, PLACES, reference=added)
def sums_at_places(x, y, i, j):
    return x.index_add(dim=0, index=i, source=y[:2], alpha=2), x.scatter_add(0, j, y[:2])


@case(X, reference=lambda x: (x.std(1, ddof=1), x.std(0, keepdims=True), x.var(1, ddof=1), x.cumsum(1), x.sum()))
def statistics(x):
    return x.std(dim=1), x.std(dim=0, keepdim=True, correction=0), x.var(dim=1), x.cumsum(dim=1), x.nansum(dim=(0, 1))


@case(X, reference=lambda x: (np.sort(x, 1)[:, ::-1], np.sort(x, 0)[1], np.sort(x, 1)[:, 1], np.sort(x, 1)[:, 2]))
def ordered(x):
    middle = x.median(dim=0)[0], x.median(dim=1)[0]
    return x.sort(dim=1, descending=True)[0], *middle, x.kthvalue(3, dim=1)[0]


@case(
    X,
    reference=lambda x: (x.argmax(), x.argmin(1), np.count_nonzero(x > 0, 1), np.unique(x > 0) * 1),
    differentiable=False,
)
def found(x):
    return (
        x.argmax(),
        x.argmin(dim=1).astype("int64"),
        (x > 0).astype("float32").count_nonzero(dim=1),
        (x > 0).int().unique().long(),
    )


@case(X, Y, reference=lambda x, y: (x + 2 * (x / (y + 9)), x // 0.5, np.round(x, 1), np.full((2, 3), 1.5)))
def computed(x, y):
    return x.addcdiv(x, y + 9, value=2), x.floor_divide(0.5), x.round(decimals=1), x.new_full((2, 3), 1.5)


@case(X, reference=lambda x: (np.diag(x, 1), np.diag(x[0], -1), np.diag(x[0]), x.reshape(3, 2, 2)))
def diagonals(x):
    return x.diag(1), x[0].diag(-1), x[0].diag(), x.unflatten(1, (2, 2))


@case(WHOLE, reference=lambda x: (x & 3, x | 3, x ^ 3, ~x, x // 2))
def whole_numbers(x):
    return x.bitwise_and(3), x.bitwise_or(3), x.bitwise_xor(3), x.bitwise_not(), x.floor_divide(2)


class Split(nn.Cell):
    """Has methods of these names, which are not a Tensor's."""

    def construct(self, x):
        return x

    def chunk(self, x, dim):
        return x * dim

    def transpose(self, x):
        return x + 1


@case(X, reference=lambda x: (3 * x, x + 1, x * 5, *np.split(x, 2, 1)))
class MethodsOfOthers(nn.Cell):
    def __init__(self):
        super().__init__()
        self.split = Split()
        self.words = "1 2 5"

    def expand(self, x):
        return x * int(self.words.split(" ")[-1])

    def construct(self, x):
        pieces = [piece + 0 for piece in x.chunk(2, dim=1)]
        return self.split.chunk(x, dim=3), self.split.transpose(x), self.expand(x), *pieces
