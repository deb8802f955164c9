"""Tests scatter.h: the gradient of a gather, summed in the order of the sources."""

import numpy as np
import pytest

from msops import custom_op
from operator_test import DTYPES, Net, load_kernels, run


@pytest.fixture(scope="module")
def library():
    return load_kernels("scatter")


def gradient_of_gather(library, dout, index, targets, last=False):
    lists = index.shape[0]
    channels = dout.shape[2 if last else 1]
    of_dout, of_dx = ("B, M, C", "B, N, C") if last else ("B, C, M", "B, C, N")
    signature = f"dout({of_dout}), index(B, M, dtype={index.dtype}) -> dx({of_dx.replace('N', 'targets')})"
    op = custom_op(
        getattr(library, "GatherGradient64" if index.dtype == "int64" else "GatherGradient32"),
        f"{signature}; scratch(..., dtype=int32)",
        targets=targets,
        last=last,
    )
    (dx,) = run(Net(op), dout, index)
    assert dx.shape == ((lists, targets, channels) if last else (lists, channels, targets))
    return dx


def expected_of(dout, index, targets, last):
    dout = dout.astype("float64")
    dout = dout if last else dout.swapaxes(1, 2)
    dx, size = np.zeros((2, len(index), targets, dout.shape[2]))
    for list_, of_list in enumerate(index):
        inside = (of_list >= 0) & (of_list < targets)
        np.add.at(dx[list_], of_list[inside], dout[list_, inside])
        np.add.at(size[list_], of_list[inside], np.abs(dout[list_, inside]))
    return (dx, size) if last else (dx.swapaxes(1, 2), size.swapaxes(1, 2))


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("lists", "channels", "targets", "sources"),
    [(1, 1, 1, 1), (2, 3, 5, 7), (2, 5, 100, 33), (3, 4, 50, 1023), (1, 2, 700, 5000), (2, 3, 9, 40_000)],
)
def test_gradient_of_gather(library, lists, channels, targets, sources, last, dtype, index_dtype):
    """Some indices are out of range, and some targets have no source."""
    rng = np.random.default_rng(sources)
    index = rng.integers(-2, targets + 2, (lists, sources)).astype(index_dtype)
    dout = rng.standard_normal((lists, sources, channels) if last else (lists, channels, sources)).astype(dtype)
    dx = gradient_of_gather(library, dout, index, targets, last)
    expected, size = expected_of(dout, index, targets, last)
    unit = np.finfo(np.promote_types(dtype, "float32")).eps
    assert (np.abs(dx - expected) <= 2 * unit * size + np.finfo(dtype).eps * np.abs(expected)).all()


@pytest.mark.parametrize("far", [2**31, 2**32, -(2**32), 2**40 + 1])
def test_indices_beyond_32_bits_are_out_of_range(library, far):
    dx = gradient_of_gather(library, np.ones((1, 1, 3), "float32"), np.array([[1, far, 1]], "int64"), 2)
    assert dx.tolist() == [[[0, 2]]]


def test_all_sources_of_one_target(mode, library):
    """Sums run in the order of the sources: the large ones cancel, and what each addition loses is kept."""
    dout = np.resize(np.array([1e8, 1, -1e8, 1], "float32"), (1, 1, 4096))
    dx = gradient_of_gather(library, dout, np.full((1, 4096), 2, "int32"), 4)
    assert dx.tolist() == [[[0, 0, 2048, 0]]]


@pytest.mark.parametrize(("targets", "sources"), [(0, 3), (3, 0)])
def test_nothing_to_add(library, targets, sources):
    dx = gradient_of_gather(library, np.ones((2, 1, sources), "float32"), np.zeros((2, sources), "int32"), targets)
    assert not dx.any()
