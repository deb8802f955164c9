"""Calls C entries for opcheck in a process of its own, so that an entry that crashes takes nothing else with it.

A line of standard input is a call, in JSON; a line of standard output is its result. The arrays are in a file that both
processes map. This process maps each array between pages that nobody may read or write. The module needs only Python's
standard library and the modules core.abi and cuda, so that the process starts within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import signal
import sys
import threading
import time
from typing import Any

from ..core.abi import Param, prepare_call
from .cuda import Driver

GUARD = 1 << 24  # bytes of addresses before and after each array that cannot be accessed
LIMIT = 60  # seconds that a call may take
LEAK_CALLS = 32  # calls between two looks at the memory in use

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


class _Mallinfo2(ctypes.Structure):
    """Mirrors C's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple(zip(_names, [ctypes.c_size_t] * len(_names)))


def allocated() -> int:
    """Returns how many bytes are allocated by malloc, or 0 if the C library does not tell (glibc before 2.33)."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _Mallinfo2
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def use_threads(threads: int) -> None:
    """Sets how many threads OpenMP uses for the calls of this thread."""
    with contextlib.suppress(OSError, AttributeError):  # the library does not use OpenMP
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(threads)


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


def at_once(calls: list[Any], threads: int) -> list[int]:
    """Makes several calls at the same time, each with OpenMP threads of its own, and returns their statuses."""
    statuses, barrier = [0] * len(calls), threading.Barrier(len(calls))

    def make(i: int) -> None:
        use_threads(threads)
        barrier.wait()
        statuses[i] = calls[i]()

    each = [threading.Thread(target=make, args=(i,)) for i in range(len(calls))]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    return statuses


def leak_of(call: Any) -> int:
    """Returns how many bytes each call leaves allocated: the median of three series of calls, after a first one."""
    grown = []
    for _ in range(4):
        before = allocated()
        for _ in range(LEAK_CALLS):
            call()
        grown.append(allocated() - before)
    return sorted(grown[1:])[1] // LEAK_CALLS


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
        self.arrays: dict[int, Arrays] = {}  # by the number of their memory
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
        self.reply(signal=number, how=how, found=self.find(address))
        os._exit(1)

    def find(self, address: int) -> tuple[int, int] | None:
        """Returns (index, offset) of the array around which an address lies, if one request has all arrays."""
        return next(iter(self.arrays.values())).find(address) if len(self.arrays) == 1 else None

    def prepare(self, request: dict[str, Any]) -> Any:
        """Returns a function that makes the call of a request, and returns its status."""
        device, number = request["device"], request["number"]
        if device and tuple(device) not in self.drivers:
            self.drivers[tuple(device)] = Driver(*device)
        if number not in self.arrays:
            driver = self.drivers[tuple(device)] if device else None
            self.arrays[number] = Arrays(request["path"], request["sizes"], driver)
        arrays = self.arrays[number]
        params = [
            Param(arrays.addresses[i] + begin, tuple(shape), dtype) for i, begin, shape, dtype in request["params"]
        ]
        function = getattr(ctypes.CDLL(request["library"]), request["entry"])
        run = prepare_call(function, params, request["attributes"], request["stream"])
        return lambda: arrays.call(run, request["count"])

    def call(self, requests: list[dict[str, Any]], threads: int | None, leaks: bool, limit: int) -> dict[str, Any]:
        """Makes the calls of all requests at once, each in a thread of its own, and returns the answer."""
        for number in self.arrays.keys() - {request["number"] for request in requests}:
            self.arrays.pop(number).close()
        calls = [self.prepare(request) for request in requests]
        use_threads(threads or len(os.sched_getaffinity(0)))
        signal.alarm(limit)
        try:
            if leaks:
                return {"status": 0, "leak": leak_of(calls[0])}
            before = time.process_time()
            statuses = [calls[0]()] if len(calls) == 1 else at_once(calls, threads or 1)
            return {"status": max(statuses), "seconds": time.process_time() - before}
        finally:
            signal.alarm(0)

    def run(self) -> None:
        for line in sys.stdin:
            try:
                self.reply(**self.call(**json.loads(line)))
            except Exception as error:  # noqa: BLE001 (the parent reports it; the GPU's context may not survive it)
                self.reply(
                    error=f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
                )
                os._exit(1)
