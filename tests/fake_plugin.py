"""Calls a plugin that stands for MindSpore's plugin for GPUs, and notes what it calls of msops. See test_kernels.py."""

import contextlib
import ctypes
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent / "fake_gpu"
ENTRY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)),
    ctypes.POINTER(ctypes.c_char_p),
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class Numbers(ctypes.Structure):
    """A list of numbers, as the plugin's functions get it."""

    _fields_ = (("data", ctypes.POINTER(ctypes.c_int64)), ("count", ctypes.c_int))

    def __init__(self, numbers):
        super().__init__((ctypes.c_int64 * len(numbers))(*numbers), len(numbers))


class Called(NamedTuple):
    """A call of an entry: its name, and the address, shape and dtype of each tensor."""

    entry: str
    addresses: list
    shapes: list
    dtypes: list
    attributes: dict
    stream: int


def compiled(folder, include):
    """Compiles the plugin and the library that it calls, and returns both."""
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-z,now", "-Wl,-rpath,$ORIGIN", f"-L{folder}"]
    for source, name, needed in (
        ("cuda_ops.cc", "cuda_ops_fake", []),
        ("kernels_plugin.cc", "mindspore_gpu_of_tests", ["-lcuda_ops_fake"]),
    ):
        options = [f"-I{include}", *needed, f"-Wl,-soname,lib{name}.so", "-o", f"{folder}/lib{name}.so"]
        subprocess.run([*command, str(HERE / source), *options], check=True)
    return ctypes.CDLL(f"{folder}/libmindspore_gpu_of_tests.so"), ctypes.CDLL(f"{folder}/libcuda_ops_fake.so")


class Plugin:
    """The plugin's operators, and what they call.

    Args:
        folder (Path): Where the libraries are compiled.
        include (str): The folder of msops' headers.
    """

    NAME = "libmindspore_gpu_of_tests.so"

    def __init__(self, folder, include):
        self._plugin, self._ops = compiled(folder, include)
        self._ops.ops_attribute.restype = ctypes.c_int64
        self.called, self.status, self.attributes = [], 0, ()
        self._functions = []

    def entries(self, names):
        """Returns entries that note their calls, and return `status`. What asks for scratch is left out."""
        found = {}
        for name in names:
            if name.endswith("Scratch"):
                continue
            function = ENTRY(self._noting(name))
            self._functions.append(function)  # it must outlive the calls
            found[name] = ctypes.cast(function, ctypes.c_void_p).value
        return found

    def _noting(self, name):
        def entry(count, params, ranks, shapes, dtypes, stream, extra):
            sizes = [[shapes[i][axis] for axis in range(ranks[i])] for i in range(count)]
            pairs = {key: self._ops.ops_attribute(ctypes.c_void_p(extra), key.encode()) for key in self.attributes}
            given = {key.removeprefix("msops_"): value for key, value in pairs.items() if value != -(2**63)}
            names = [dtypes[i].decode() for i in range(count)]
            self.called.append(Called(name, [params[i] for i in range(count)], sizes, names, given, stream))
            return self.status

        return entry

    @property
    def originals(self):
        """How often the plugin called MindSpore's own functions."""
        return self._ops.ops_calls()

    def __getattr__(self, operator):
        function = getattr(self._plugin, f"op_{operator}")

        def call(*arguments, stream=None):
            return function(*map(_argument, arguments), ctypes.c_void_p(stream))

        return call


def _argument(value):
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (tuple, list)):
        return Numbers(value)
    return ctypes.c_size_t(value)


@contextlib.contextmanager
def installed(plugin, functions, entries, on_cpu=True):
    """Has the functions in place, which call these entries."""
    functions.install(entries, plugin.NAME, on_cpu=on_cpu)
    try:
        yield plugin
    finally:
        functions.undo()
        plugin.called.clear()
        plugin.status = 0
