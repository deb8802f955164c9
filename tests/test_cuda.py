"""Tests opcheck's GPU memory through a driver whose device is the CPU."""

import ctypes
import subprocess
from pathlib import Path

import mindspore
import numpy as np
import pytest

import test_sigmoid
from msops.operators.sigmoid import forward as _sigmoid
from msops.testing import cuda, memory, opcheck, process
from msops.testing.report import CHECKS, Finding


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_gpu") / "driver.c"
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", path], check=True)
    return str(path)


@pytest.fixture
def driver(path):
    """Returns a driver, and requires that the test frees all that it allocates."""
    yield cuda.Driver(path=path)
    assert ctypes.CDLL(path).allocated() == 0


def test_copies(driver, path):
    array, copied = np.arange(6), np.zeros(6, int)
    pointer = driver.allocate(array.nbytes)
    assert ctypes.CDLL(path).allocated() == 1
    driver.write(pointer, array.ctypes.data, array.nbytes)
    driver.read(pointer + 8, copied.ctypes.data, array.nbytes - 8)
    driver.synchronize()
    driver.free(pointer)
    np.testing.assert_array_equal(copied, [1, 2, 3, 4, 5, 0])


def test_errors(driver, path):
    with pytest.raises(RuntimeError, match=r"^cuDeviceGet: invalid device ordinal$"):
        cuda.Driver(2, path)
    with pytest.raises(RuntimeError, match=r"^cuMemAlloc_v2: out of memory$"):
        driver.allocate(2**41)
    with pytest.raises(RuntimeError, match=r"^cuMemAlloc_v2: error 1$"):
        driver.allocate(0)
    with pytest.raises(OSError, match="nowhere"):
        cuda.Driver(path="nowhere")


@pytest.fixture
def on_gpu(path, monkeypatch):
    """Makes the CPU look like a GPU. Entries are called on its null stream."""
    get_context = mindspore.get_context
    monkeypatch.setattr(mindspore, "get_context", lambda key: "GPU" if key == "device_target" else get_context(key))
    monkeypatch.setattr(memory, "has_gpu_code", lambda library: True)
    monkeypatch.setattr(memory, "DEFAULT_STREAM", None)
    monkeypatch.setattr(cuda, "LIBRARY", path)


@pytest.mark.wide
@pytest.mark.usefixtures("on_gpu")
def test_opcheck(monkeypatch):
    devices = []
    call = process.Process.call
    monkeypatch.setattr(process.Process, "call", lambda self, *a: devices.append(self.where.device) or call(self, *a))
    report = opcheck(_sigmoid, [np.linspace(-5, 5, 35)], test_sigmoid.sigmoid)
    assert set(report.skipped) == {"other attributes", "threads", "no leak"}
    assert report.made | set(report.skipped) == set(CHECKS)
    assert set(devices) == {0}
    assert len(devices) > 30


@pytest.mark.usefixtures("on_gpu")
def test_findings(monkeypatch):
    """opcheck finds changed guards and changed inputs in that memory, and an error of the driver ends a call."""
    with process.Process(memory.mindspores_device()) as calls:
        placed = memory.EntryCall(_sigmoid, [np.zeros(3)], ("y",), calls)
        assert placed.status == 0
        x, y = placed.arrays
        np.testing.assert_array_equal(y.values(), [0.5] * 3)
        memory.check_bounds(placed)
        memory.check_inputs_unchanged(placed)
        y.part[y.place.begin - 2] = 1
        with pytest.raises(AssertionError, match="SigmoidForward writes element -1 of y, before its beginning"):
            memory.check_bounds(placed)
        x.part[x.place.begin] = 1
        with pytest.raises(AssertionError, match=r"SigmoidForward: x\[0\]"):
            memory.check_inputs_unchanged(placed)
    monkeypatch.setenv("ILLEGAL_ADDRESS", "1")
    words = "SigmoidForward fails: cuCtxSynchronize: an illegal memory access was encountered"
    with process.Process(memory.mindspores_device()) as calls, pytest.raises(Finding, match=words):
        memory.EntryCall(_sigmoid, [np.zeros(3)], ("y",), calls)


@pytest.mark.usefixtures("on_gpu")
def test_library_without_gpu_code(monkeypatch):
    monkeypatch.setattr(memory, "has_gpu_code", lambda library: False)
    report = opcheck(_sigmoid, [np.zeros(3)])
    assert {report.skipped[check] for check in ("no crash", "bounds", "wrong calls")} == {"the library has no GPU code"}
