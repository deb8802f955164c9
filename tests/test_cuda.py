"""opcheck's memory on the GPU, with a driver whose device is the CPU."""

import ctypes
import gc
import subprocess
import threading

import mindspore
import numpy as np
import pytest

import test_sigmoid
from msops.operators.sigmoid import _sigmoid
from msops.testing import cuda, memory, opcheck
from msops.testing.entry import Param, call
from msops.testing.opcheck import CHECKS

DRIVER = r"""
#include <stdlib.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;
static int initialized, allocations, context;
static __thread void* current;

int cuInit(unsigned int flags) { initialized = flags == 0; return initialized ? 0 : 1; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return !initialized ? 3 : ordinal < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** made, int device) { *made = &context; return device < 2 ? 0 : 101; }
int cuCtxSetCurrent(void* made) { current = made; return made == &context ? 0 : 201; }
int cuCtxSynchronize(void) { return current ? 0 : 201; }
int cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  if (!current) return 201;
  if (size == 0 || size >> 40) return size ? 2 : 1;
  *pointer = (CUdeviceptr)malloc(size);
  ++allocations;
  return 0;
}
int cuMemFree_v2(CUdeviceptr pointer) {
  if (!current) return 201;
  free((void*)pointer);
  --allocations;
  return 0;
}
int cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  if (!current) return 201;
  memcpy((void*)to, from, size);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  if (!current) return 201;
  memcpy(to, (const void*)from, size);
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : error == 101 ? "invalid device ordinal" : NULL;
  return *text ? 0 : 1;
}
int allocated(void) { return allocations; }
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    return str(path)


@pytest.fixture
def driver(path):
    """All that a test allocates is freed."""
    yield cuda.Driver(path=path)
    gc.collect()
    assert ctypes.CDLL(path).allocated() == 0


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_copies(driver, path, shape, dtype):
    array = np.resize(np.arange(-3, 21), shape).astype(dtype)
    copied = driver.copy(array.T)
    assert ctypes.CDLL(path).allocated() == 1
    assert (copied.shape, copied.dtype, copied.nbytes) == (array.T.shape, array.dtype, array.nbytes)
    np.testing.assert_array_equal(copied.numpy(), array.T)
    assert Param.of(copied) == Param(copied.data_ptr(), array.T.shape, dtype)


def test_parts(driver, path):
    part = driver.copy(np.arange(6, dtype=np.float32)).part(4, (2, 2), "float32")
    gc.collect()
    assert ctypes.CDLL(path).allocated() == 1  # a part keeps the whole
    np.testing.assert_array_equal(part.part(8, (2,), "float32").numpy(), [3, 4])
    for offset, shape in ((0, (5,)), (16, (1,)), (-4, (1,))):
        with pytest.raises(AssertionError):
            part.part(offset, shape, "float32")


def test_other_thread(driver):
    """Has no current context at first."""
    copied, copies = driver.copy(np.arange(3)), []
    thread = threading.Thread(target=lambda: copies.append(copied.numpy()))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(copies, [[0, 1, 2]])


def test_errors(driver, path):
    with pytest.raises(RuntimeError, match=r"^cuDeviceGet: invalid device ordinal$"):
        cuda.Driver(2, path)
    with pytest.raises(RuntimeError, match=r"^cuMemAlloc_v2: out of memory$"):
        driver.copy(np.broadcast_to(np.int8(0), (2**41,)))
    with pytest.raises(RuntimeError, match=r"^cuInit: error 1$"):
        driver._check("cuInit", 1)
    with pytest.raises(OSError, match="nowhere"):
        cuda.Driver(path="nowhere")


@pytest.fixture
def on_gpu(driver, monkeypatch):
    """What seems to be a GPU; entries are called on the CPU's null stream."""
    get_context = mindspore.get_context
    monkeypatch.setattr(mindspore, "get_context", lambda key: "GPU" if key == "device_target" else get_context(key))
    monkeypatch.setattr(memory, "has_gpu_code", lambda library: True)
    monkeypatch.setattr(memory, "DEFAULT_STREAM", None)
    monkeypatch.setattr(cuda, "driver", {0: driver}.get)


@pytest.mark.usefixtures("on_gpu")
def test_opcheck(monkeypatch):
    copies = []
    monkeypatch.setattr(cuda.Driver, "copy", lambda self, x, copy=cuda.Driver.copy: copies.append(1) or copy(self, x))
    report = opcheck(_sigmoid, [np.linspace(-5, 5, 35)], test_sigmoid.TestSigmoid.reference)
    assert set(report.skipped) == {"other instance"}
    assert report.made | set(report.skipped) == set(CHECKS)
    assert len(copies) > 30


@pytest.mark.usefixtures("on_gpu")
def test_findings(driver):
    """Guards and inputs that change are found in that memory."""
    placed = memory.call_entry(_sigmoid, [np.zeros(3)], ("y",), driver)
    assert call(_sigmoid.entry, [a.array for a in placed.arrays]) == 0
    np.testing.assert_array_equal(placed.arrays[1].values(), [0.5] * 3)
    memory.check_bounds(placed)
    memory.check_inputs_unchanged(placed)
    ctypes.memset(placed.arrays[1].array.data_ptr() - 2, 0, 1)
    with pytest.raises(AssertionError, match="SigmoidForward writes before the beginning of y, up to 2 bytes away"):
        memory.check_bounds(placed)
    ctypes.memset(placed.arrays[0].array.data_ptr(), 1, 1)
    with pytest.raises(AssertionError, match=r"SigmoidForward: x\[0\]"):
        memory.check_inputs_unchanged(placed)


@pytest.mark.usefixtures("on_gpu")
def test_library_without_gpu_code(monkeypatch):
    monkeypatch.setattr(memory, "has_gpu_code", lambda library: False)
    report = opcheck(_sigmoid, [np.zeros(3)])
    assert {report.skipped[check] for check in ("bounds", "wrong calls")} == {"the library has no GPU code"}
