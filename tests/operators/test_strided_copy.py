"""This operator serves patch_mindspore alone: msops has no public name for it."""

import math
import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from card import Card, chain, lengths
from guarded_call import GuardedCall
from msops.operators.strided_copy import operators, strided_copy
from msops.testing.checks import Gradient, Net, run
from msops.testing.entry import Status

KINDS = ("bool", "int8", "int16", "int32", "int64", "complex64", "complex128")


def view_of(x, shape, stride, offset):
    """Returns the view of contiguous memory that the operator copies."""
    if not math.prod(shape):
        return np.empty(shape, x.dtype)
    strides = [each * x.itemsize for each in stride]
    return np.lib.stride_tricks.as_strided(x.reshape(-1)[offset:], shape, strides)


def copied(x, shape, stride, offset=0, kind=None):
    return (view_of(x, shape, stride, offset).copy(),)


def scattered(dy, x, shape, stride, offset=0, kind=None):
    dx = np.zeros_like(x)
    view_of(dx, shape, stride, offset)[...] = dy
    return (dx,)


def of_view(shape, change, kind=None):
    """Returns the case that copies what a function of NumPy makes of an array of bytes."""
    x = np.zeros(shape, np.int8)
    view = change(x)
    offset = view.__array_interface__["data"][0] - x.__array_interface__["data"][0]
    settings = dict(shape=view.shape, stride=view.strides, offset=offset if view.size else 0)
    return [shape], settings if kind is None else {**settings, "kind": kind}


def permuted(shape, *axes, kind=None):
    return of_view(shape, lambda x: x.transpose(axes), kind)


class StridedCopy(Card):
    function = strided_copy
    formulas = (copied, scattered)
    cases = {
        "small": ([(3, 4, 7)], dict(shape=(3, 3, 4), stride=(28, 9, 2), offset=1)),
        "scalar": ([()], dict(shape=(), stride=())),
        "empty": ([(3, 4)], dict(shape=(4, 0, 3), stride=(1, 0, 4))),
        "nothing": ([(0,)], dict(shape=(0, 3), stride=(3, 1))),
        "one of many": ([(1001,)], dict(shape=(1, 1), stride=(0, 7), offset=1000)),
        "whole": permuted((7, 13), 0, 1),
        "transposed": permuted((33, 47), 1, 0),
        "heads": permuted((2, 5, 3, 8), 0, 2, 1, 3),
        "channels last": permuted((2, 35, 6, 7), 0, 2, 3, 1),
        "channels first": permuted((2, 6, 7, 35), 0, 3, 1, 2),
        "large": permuted((1, 259, 517), 0, 2, 1),
    }
    further = {
        "transposed packs": permuted((64, 192), 1, 0),
        "transposed packs, short": permuted((24, 40), 1, 0),
        "transposed packs, narrow": permuted((520, 32), 1, 0, kind="float16"),
        "transposed packs of rows": permuted((72, 130), 1, 0),
        "transposed packs of columns": permuted((130, 72), 1, 0),
        "transposed bytes": permuted((80, 144), 1, 0, kind="int8"),
        "transposed odd bytes": permuted((67, 131), 1, 0, kind="bool"),
        "transposed halves": permuted((80, 144), 1, 0, kind="float16"),
        "transposed odd halves": permuted((81, 145), 1, 0, kind="float16"),
        "transposed pairs of bytes": permuted((70, 150), 1, 0, kind="int16"),
        "transposed complex": permuted((34, 68), 1, 0, kind="complex64"),
        "transposed, 16 bytes": permuted((37, 21), 1, 0, kind="complex128"),
        "transposed pairs": permuted((40, 36, 2), 1, 0, 2),
        "transposed fours": permuted((19, 23, 4), 1, 0, 2),
        "tall": permuted((8, 700), 1, 0),
        "wide": permuted((700, 8), 1, 0),
        "reversed axes": permuted((9, 10, 11, 12), 3, 2, 1, 0),
        "batches of tiles": permuted((3, 2, 40, 5, 33), 3, 0, 4, 1, 2),
        "three channels first": permuted((2, 15, 17, 3), 0, 3, 1, 2),
        "three channels last": permuted((2, 3, 15, 17), 0, 2, 3, 1),
        "two axes of three": permuted((61, 3, 3), 0, 2, 1),
        "rank 8": permuted((2, 3, 2, 2, 3, 2, 2, 3), 7, 1, 5, 3, 0, 2, 6, 4),
        "rank 8, rows": permuted((2, 3, 2, 2, 3, 2, 2, 5), 6, 1, 5, 3, 0, 2, 4, 7),
        "rank 8, complex": permuted((2, 3, 2, 2, 3, 2, 2, 3), 7, 1, 5, 3, 0, 2, 6, 4, kind="complex128"),
        "slice of rows": of_view((21, 40), lambda x: x[2:17, 8:24]),
        "slice of odd rows": of_view((21, 37), lambda x: x[1:, 3:22]),
        "slice of odd halves": of_view((21, 37), lambda x: x[1:, 3:36], kind="float16"),
        "slice of odd bytes": of_view((21, 137), lambda x: x[1:, 3:76], kind="int8"),
        "long row": of_view((2053,), lambda x: x[3:]),
        "steps": of_view((30, 50), lambda x: x[1::3, 3::2]),
        "backwards": of_view((30, 50), lambda x: x[::-1, ::-2]),
        "rows backwards": of_view((30, 48), lambda x: x[::-1]),
        "transposed, backwards": of_view((40, 50), lambda x: x[::-1].T[::-3]),
        "repeated rows": of_view((1, 37), lambda x: np.broadcast_to(x, (19, 37))),
        "repeated packs": of_view((1, 64), lambda x: np.broadcast_to(x, (3, 19, 64))),
        "repeated columns": of_view((37, 1), lambda x: np.broadcast_to(x, (37, 90))),
        "repeated short columns": of_view((37, 1), lambda x: np.broadcast_to(x, (37, 3)), kind="float16"),
        "one number": of_view((), lambda x: np.broadcast_to(x, (5, 7, 11))),
        "tiled": of_view((6, 10), lambda x: np.broadcast_to(x[:, None], (6, 4, 10))),
        "windows": ([(67,)], dict(shape=(16, 52), stride=(1, 1))),
        "columns of windows": ([(131,)], dict(shape=(100, 32), stride=(1, 1), kind="bool")),
        **{f"{kind}": of_view((9, 22), lambda x: x[:, 2:19:3], kind) for kind in KINDS},
    }
    small = "small"

    def operators(self, shapes=(), shape=(3, 2), stride=(1, 3), offset=0, kind=None):
        operator = operators(shape, stride, offset)
        # The cards' gradients of results are floating.
        return [operator] if kind in KINDS else chain(operator)

    def inputs(self, shapes, dtype, seed=1, kind=None, **settings):
        rng = np.random.default_rng(seed)
        kind = np.dtype(kind or dtype)
        if kind.kind == "c":
            return [np.asarray(rng.standard_normal(s) + 1j * rng.standard_normal(s), kind) for s in shapes]
        if kind.kind == "f":
            return [np.asarray(rng.standard_normal(s), kind) for s in shapes]
        return [np.asarray(rng.integers(0, 2 if kind.kind == "b" else 100, s), kind) for s in shapes]

    def random_case(self, random):
        """Takes a view of an array whose axes are permuted, sliced and repeated."""
        x = np.zeros(lengths(random), np.int8)

        def change(x):
            steps = (random.choice((1, 1, 2, -1, -3)) for _ in x.shape)
            view = x[(..., *(slice(None, None, step) for step in steps))]  # with ..., a number stays an array
            view = view.transpose(random.sample(range(x.ndim), x.ndim))
            return np.broadcast_to(view, (random.randrange(1, 4), *view.shape)) if random.random() < 0.3 else view

        return of_view(x.shape, change)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", *KINDS])
def test_forward(mode, kind):
    card = StridedCopy()
    [shape], settings = permuted((3, 5, 7), 2, 0, 1)
    (x,) = card.inputs([shape], kind)
    (y,) = run(Net(strided_copy, **settings), x)
    np.testing.assert_array_equal(y, x.transpose(2, 0, 1))
    assert y.dtype == x.dtype


def test_gradient(mode):
    shape, stride, offset = (3, 4), (-12, 2), 30
    x, dy = np.ones((5, 8), np.float32), np.arange(12, dtype=np.float32).reshape(shape)
    (dx,) = run(Gradient(Net(strided_copy, shape=shape, stride=stride, offset=offset), 1), x, dy)
    np.testing.assert_array_equal(dx, *scattered(dy, x, shape, stride, offset))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(shape=(2, 3), stride=(3,)), "stride must be a tuple of at most 8 ints for each axis, got (3,)"),
        (dict(shape=(1,) * 9, stride=(1,) * 9), "shape must be a tuple of at most 8 ints"),
        (dict(shape=(2, -3), stride=(3, 1)), "shape must have ints above -1 and below"),
        (dict(shape=(2, 3), stride=(2**40, 1)), "stride must have ints above"),
        (dict(shape=(2, 3), stride=(3, 1), offset=-1), "offset must be at least 0"),
        (dict(shape=(2, 3), stride=(-3, 1), offset=2), "stride must not lead to elements before the first one"),
        (dict(shape=(2, 3), stride=(3, 1), offset=5), "x must have at least 11 elements, got 10"),
    ],
)
def test_wrong_settings(settings, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    with pytest.raises(ValueError, match=f"^strided_copy: {re.escape(words)}"):
        strided_copy(Tensor(np.zeros(10, np.float32)), **settings)


def test_no_gradient_of_repeated_elements():
    assert operators((3, 4), (0, 1)).gradient is None
    assert operators((3, 4), (3, 1)).gradient is None
    assert operators((3, 1, 4), (4, 0, 1)).gradient is not None


def test_entry_refuses_a_gradient_of_repeated_elements(capfd):
    """The strides 2 and 1 lead to one element twice."""
    call = StridedCopy().entry_calls([(9,)], dict(shape=(2, 3), stride=(3, 1)), "float32")[1]
    attributes = {**call.operator.attributes, "stride_0": 2}
    GuardedCall(call, capfd).refused(Status.BAD_ATTRIBUTE, attributes=attributes)
