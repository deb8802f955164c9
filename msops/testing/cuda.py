"""Allocates and copies GPU memory by the CUDA driver. The standard library is enough, so that worker.py starts fast."""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"
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
    """The CUDA driver, and the primary context of a device, which becomes the thread's current context: the CUDA
    runtime in a library computes there, too. A call that fails raises a RuntimeError."""

    def __init__(self, device: int = 0, path: str = LIBRARY) -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_int
        context, handle = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", handle, device)
        self._call("cuDevicePrimaryCtxRetain", context, handle)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorString"](status, text)  # text stays null if the driver does not know the error
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'error {status}'}")

    def allocate(self, size: int) -> int:
        """Allocates bytes on the device, and returns their address."""
        pointer = _POINTER()
        self._call("cuMemAlloc_v2", pointer, size)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def write(self, pointer: int, host: int, size: int) -> None:
        """Copies bytes from an address of the host to the device."""
        self._call("cuMemcpyHtoD_v2", pointer, host, size)

    def read(self, pointer: int, host: int, size: int) -> None:
        """Copies bytes from the device to an address of the host."""
        self._call("cuMemcpyDtoH_v2", host, pointer, size)

    def synchronize(self) -> None:
        """Waits for all kernels, and raises a RuntimeError if one of them failed."""
        self._call("cuCtxSynchronize")
