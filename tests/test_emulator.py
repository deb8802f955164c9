"""Tests the emulator of a GPU: its instructions, and that it shows when a kernel does not wait; and launches."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

import emulator
from msops.testing.entry import Status

SOURCE = Path(__file__).with_name("kernels") / "emulator.cu"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return ctypes.CDLL(str(emulator.library(SOURCE, tmp_path_factory.mktemp("emulated"))))


def launch(function, x, size, *rest):
    x, y = np.asarray(x, np.float32), np.full(size, np.nan, np.float32)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), *rest)
    return y


@pytest.mark.parametrize("kernel", ["neighbours", "copies"])
def test_missing_wait_shows(library, kernel):
    x = np.arange(1, 129)
    want = np.roll(x, -1) if kernel == "neighbours" else x
    assert (launch(library[kernel], x, 128, True) == want).all()
    assert (launch(library[kernel], x, 128, False) != want).sum() >= 127


def test_clusters(library):
    x = np.arange(1024)
    np.testing.assert_array_equal(launch(library["sum"], x, 8), np.repeat(x.reshape(2, 512).sum(1), 4))
    assert library.clusters(4) > 0
    assert library.clusters(1) > 0


def test_product_of_matrices(library):
    a, b = np.random.default_rng(0).integers(-8, 9, (2, 16, 16)) / 4
    np.testing.assert_array_equal(launch(library["product"], np.r_[a.ravel(), b[:, :8].ravel()], (16, 8)), a @ b[:, :8])


def counted(function, *arguments):
    """Calls a function, and returns its status and how many blocks it ran."""
    counter = ctypes.c_uint()
    return function(*map(ctypes.c_int64, arguments), ctypes.byref(counter)), counter.value


def test_number_of_blocks(library):
    assert counted(library.count, 5, 3) == (0, 15)
    assert counted(library.count, 5, 0) == (0, 0)
    for blocks in ((1, 2**16), (2**31, 1)):
        assert counted(library.count, *blocks) == (Status.BAD_SHAPE, 0)


def test_all_blocks_at_once(library):
    assert counted(library.meet) == (0, 6)


def test_error_of_a_launch(library):
    """The first error of CUDA fails its call, which then launches nothing more. Later calls do not see it."""
    assert counted(library.fail_and_count) == (Status.LAUNCH_FAILED, 1)
    assert counted(library.count, 2, 1) == (0, 2)


def test_each_gpu_is_asked(library):
    """A GPU with twice as many multiprocessors runs twice as many blocks, also if another GPU was asked before."""
    x, partial = np.ones((4096, 4), np.float32), np.empty((4096, 4), np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, partial)]
    parts = [library.parts_of_sums(gpu, *pointers, ctypes.c_int64(4096)) for gpu in (0, 1, 0, 1)]
    assert parts == [parts[0], 2 * parts[0]] * 2
