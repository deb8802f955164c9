"""Memory of the GPU by the CUDA driver, in the context that MindSpore computes in: another CUDA runtime beside that of
MindSpore, such as torch's, would not do."""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_POINTER, _SIZE = ctypes.c_ulonglong, ctypes.c_size_t  # CUdeviceptr
_ARGUMENTS = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxSetCurrent": [ctypes.c_void_p],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [ctypes.POINTER(_POINTER), _SIZE],
    "cuMemFree_v2": [_POINTER],
    "cuMemcpyHtoD_v2": [_POINTER, ctypes.c_void_p, _SIZE],
    "cuMemcpyDtoH_v2": [ctypes.c_void_p, _POINTER, _SIZE],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class Driver:
    """The CUDA driver, and the primary context of one of its devices. What fails raises a RuntimeError."""

    def __init__(self, device: int = 0, path: str = "libcuda.so.1") -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
        self._context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._check("cuInit", 0)
        self._check("cuDeviceGet", handle, device)
        self._check("cuDevicePrimaryCtxRetain", self._context, handle)

    def _check(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](status, text)  # leaves null of what it does not know
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")

    def _call(self, name: str, *arguments: Any) -> None:
        """Of any thread, each of which has a current context."""
        self._check("cuCtxSetCurrent", self._context)
        self._check(name, *arguments)

    def copy(self, array: npt.NDArray[Any]) -> DeviceArray:
        """The DeviceArray of a NumPy array."""
        pointer = _POINTER()
        self._call("cuMemAlloc_v2", pointer, max(array.nbytes, 1))
        copied = DeviceArray(self, pointer.value, array.shape, array.dtype)
        weakref.finalize(copied, self._call, "cuMemFree_v2", pointer.value).atexit = False
        self._call("cuMemcpyHtoD_v2", pointer, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return copied

    def read(self, pointer: int, array: npt.NDArray[Any]) -> None:
        """Fills a NumPy array."""
        self._call("cuMemcpyDtoH_v2", array.ctypes.data, pointer, array.nbytes)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")


class DeviceArray:
    """A contiguous array in the GPU's memory, with what entry.py asks of torch's. Freed with the last of its parts."""

    is_cuda = True

    def __init__(
        self,
        driver: Driver,
        pointer: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        whole: DeviceArray | None = None,
    ) -> None:
        self._driver, self._pointer, self._whole = driver, pointer, whole
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    def part(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """An array that begins so many bytes behind this one's beginning, in the same memory."""
        assert 0 <= offset <= offset + math.prod(shape) * np.dtype(dtype).itemsize <= self.nbytes
        return DeviceArray(self._driver, self._pointer + offset, shape, dtype, self)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def data_ptr(self) -> int:
        return self._pointer

    def is_contiguous(self) -> bool:
        return True

    def numpy(self) -> npt.NDArray[Any]:
        """A copy."""
        array = np.empty(self.shape, self.dtype)
        self._driver.read(self._pointer, array)
        return array


@functools.cache
def driver(device: int) -> Driver:
    """The Driver of a device, made once: its context stays until the process ends."""
    return Driver(device)
