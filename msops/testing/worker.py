"""Calls C entries for opcheck in a process of its own, so that an entry that crashes takes nothing else with it.

A line of standard input is a call, in JSON; a line of standard output is its result. The arrays are in a file that both
processes map. This process maps each array between pages that nobody may read or write. The module needs only Python's
standard library and the modules abi and cuda, so that the process starts within a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import signal
import sys
from typing import Any

from .abi import Param, prepare_call
from .cuda import Driver

GUARD = 1 << 24  # bytes of addresses before and after each array that cannot be accessed
LIMIT = 60  # seconds that a call may take

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS, _NO_RESERVE, _FIXED = 0, 0x4000, 0x10


def _map(address: int | None, size: int, access: int, flags: int, file: int = -1, offset: int = 0) -> int:
    mapped = _libc.mmap(address, size, access, flags, file, offset)
    if mapped in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(os.strerror(ctypes.get_errno()))
    return int(mapped)


class Arrays:
    """The arrays of a call; `addresses` tells where an entry finds the bytes of each array."""

    def __init__(self, path: str, sizes: list[int], driver: Driver | None) -> None:
        self.sizes, self.driver = sizes, driver
        self.mapped: list[int] = []
        file, offset = os.open(path, os.O_RDWR), 0
        for size in sizes:
            self.mapped.append(
                _map(None, size + 2 * GUARD, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE) + GUARD
            )
            _map(self.mapped[-1], size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, file, offset)
            offset += size
        os.close(file)
        self.addresses = [driver.allocate(size) for size in sizes] if driver else self.mapped

    def call(self, run: Any, count: int) -> int:
        """Makes a prepared call, and returns its status."""
        each = list(zip(self.addresses, self.mapped, self.sizes))
        if self.driver:
            for there, here, size in each:
                self.driver.write(there, here, size)
        status = int(run.func(count, *run.args[1:]))
        if self.driver:
            self.driver.synchronize()
            for there, here, size in each:
                self.driver.read(there, here, size)
        return status

    def close(self) -> None:
        for there, here, size in zip(self.addresses, self.mapped, self.sizes):
            _libc.munmap(here - GUARD, size + 2 * GUARD)
            if self.driver:
                self.driver.free(there)

    def find(self, address: int) -> tuple[int, int] | None:
        """Returns (index, offset) of the array around which an address lies."""
        for i, (begin, size) in enumerate(zip(self.mapped, self.sizes)):
            if begin - GUARD <= address < begin + size + GUARD:
                return i, address - begin
        return None


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """Mirrors C's struct sigaction."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Worker:
    """Answers calls."""

    def __init__(self) -> None:
        self.replies = os.dup(1)
        os.dup2(2, 1)  # C functions print to stderr instead of into the replies
        self.arrays: Arrays | None = None
        self.number: int | None = None
        self.drivers: dict[Any, Driver] = {}
        self.handler = _Handler(self.fault)  # it must live as long as signals may come
        # SA_SIGINFO | SA_RESETHAND: a fault in the handler ends the process.
        action = _Action(handler=self.handler, flags=4 | -0x80000000)
        for number in (signal.SIGSEGV, signal.SIGBUS):
            _libc.sigaction(int(number), ctypes.byref(action), None)

    def reply(self, **answer: Any) -> None:
        os.write(self.replies, json.dumps(answer).encode() + b"\n")

    def fault(self, number: int, info: int, context: int) -> None:
        """Handles a signal: tells which address was accessed, and how, and ends the process."""
        address = ctypes.c_uint64.from_address(info + 16).value  # si_addr
        how = "accesses"
        if platform.machine() == "x86_64":  # the ucontext's registers include the page fault's error code
            how = "writes" if ctypes.c_uint64.from_address(context + 192).value & 2 else "reads"
        self.reply(signal=number, how=how, found=self.arrays and self.arrays.find(address))
        os._exit(1)

    def call(self, request: dict[str, Any]) -> int:
        if request["number"] != self.number:
            if self.arrays:
                self.arrays.close()
                self.arrays = None
            device = request["device"]
            if device and tuple(device) not in self.drivers:
                self.drivers[tuple(device)] = Driver(*device)
            self.arrays = Arrays(request["path"], request["sizes"], self.drivers[tuple(device)] if device else None)
            self.number = request["number"]
        assert self.arrays
        params = [
            Param(self.arrays.addresses[i] + begin, tuple(shape), dtype) for i, begin, shape, dtype in request["params"]
        ]
        function = getattr(ctypes.CDLL(request["library"]), request["entry"])
        run = prepare_call(function, params, request["attributes"], request["stream"])
        signal.alarm(request["limit"])
        try:
            return self.arrays.call(run, request["count"])
        finally:
            signal.alarm(0)

    def run(self) -> None:
        for line in sys.stdin:
            try:
                self.reply(status=self.call(json.loads(line)))
            except Exception as error:  # noqa: BLE001 (the parent reports it; the GPU's context may not survive it)
                self.reply(
                    error=f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
                )
                os._exit(1)
