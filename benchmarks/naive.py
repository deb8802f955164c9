"""Calls the naive CUDA versions in libnaive.so, which `make bench` builds from all .cu files here if it finds nvcc."""

import ctypes
import functools
from pathlib import Path

LIBRARY = Path(__file__).with_name("libnaive.so")
LONGEST = 2**18  # terms that one thread may add up; a longer loop takes more than 100 ms


@functools.cache
def _load():
    return ctypes.CDLL(str(LIBRARY))


def available(op="device"):
    """Returns whether there is a naive version of an operator."""
    return LIBRARY.exists() and any(LIBRARY.parent.rglob(f"{op}.cu"))


def prepare(function, arrays, sizes, stream, half=False):
    """Returns a function without arguments that launches `naive_<function>` on a stream."""
    pointers = (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays))
    launch = functools.partial(
        getattr(_load(), f"naive_{function}"),
        ctypes.c_int(half),
        pointers,
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_void_p(stream),
    )
    launch.arrays = arrays  # must live as long as `launch`
    return launch


def prepare_case(case, inputs, results, stream):
    """Returns the case's launch, or None if a single thread would have too much to add up."""
    if case.serial > LONGEST:
        return None
    arrays = [*inputs[: len(inputs) - case.unread], *results]
    return prepare(f"{case.op}_{case.direction}", arrays, case.naive, stream, "16" in str(inputs[0].dtype))


def multiply_adds(device_memory, multiprocessors, stream):
    """Returns a launch that fills the device with multiply-adds in float32, and its number of operations."""
    blocks, threads, rounds, chains = 8 * multiprocessors, 256, 8192, 8  # chains must equal kChains in device.cu
    launch = prepare("multiply_add", [device_memory], (blocks, threads, rounds), stream)
    return launch, 2 * blocks * threads * rounds * chains
