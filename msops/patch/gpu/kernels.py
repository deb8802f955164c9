"""Puts functions of msops in place of those that launch MindSpore's kernels. See kernels.cc."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore

from msops.compat import VERSION
from msops.core import fast_calls
from msops.core.build import build_by_gxx
from msops.core.library import Library, of_package

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PLUGIN = "libmindspore_gpu.so"
# The libraries whose entries the functions call.
LIBRARIES = "binary", "cast", "select", "strided_copy", "band", "reduce", "concat"
OPERATIONS = {
    **dict(enumerate(("greater", "less", "equal", "greater_equal", "less_equal", "not_equal", "logical_and"))),
    **dict(enumerate(("logical_or", "maximum", "minimum", "add", "sub", "mul", "div", "pow", "real_div"), 7)),
    21: "squared_difference",
    27: "div_no_nan",
    28: "mul_no_nan",
    32: "add_ext",
    33: "sub_ext",
}


class Kernel(NamedTuple):
    """A function of MindSpore that launches a kernel, and in whose place one of msops stands.

    Attributes:
        name (str): The function's name, such as ``BinaryOpWithBroadcastCudaFunc`` .
        operation (str): What it computes, such as ``add`` , if its name does not tell, else an empty str.
        dtypes (tuple[str]): The dtypes of its tensors, or the one that all have.
    """

    name: str
    operation: str
    dtypes: tuple[str, ...]


@functools.cache
def build() -> Library:
    """Compiles the library, which needs g++ alone, once for each version of its sources."""
    missing = "msops needs g++ to replace MindSpore's kernels"
    return build_by_gxx(Path(__file__).with_name("kernels.cc"), "kernels", missing)


class Functions:
    """The functions of msops that may stand in MindSpore's places. A process has them once.

    Args:
        library (Library): What `build` returns.
    """

    def __init__(self, library: Library) -> None:
        self._handle = library.handle
        for name in ("list", "templates", "entries"):
            getattr(self._handle, f"kernels_{name}").restype = ctypes.c_char_p

    def install(self, entries: Mapping[str, int], plugin: str = PLUGIN, on_cpu: bool = False) -> int:
        """Puts functions in place, and returns in how many places.

        Args:
            entries (dict[str, int]): The addresses of msops' entries, by their names. Others are not called.
            plugin (str): A part of the path of MindSpore's plugin for GPUs.
            on_cpu (bool): Whether the entries may be called with the null stream, which means the CPU to them.
        """
        count = len(entries)
        names = (ctypes.c_char_p * count)(*map(str.encode, entries))
        addresses = (ctypes.c_void_p * count)(*entries.values())
        return int(self._handle.kernels_install(plugin.encode(), count, names, addresses, on_cpu))

    def undo(self) -> None:
        """Puts MindSpore's functions back."""
        self._handle.kernels_undo()

    @property
    def entries(self) -> list[str]:
        """The names of the entries that functions call."""
        return self._lines("entries")

    @property
    def templates(self) -> list[str]:
        """The names of MindSpore's functions."""
        return self._lines("templates")

    def accepts(self, symbol: str) -> bool:
        """Tells whether there is a function for one of MindSpore's with this mangled name, if all entries are there."""
        return bool(self._handle.kernels_accepts(symbol.encode()))

    def installed(self) -> list[Kernel]:
        return list(self.calls())

    def calls(self) -> dict[Kernel, tuple[int, int]]:
        """Returns, for each function that is in place, how many calls it did, and left to MindSpore's own."""
        found: dict[Kernel, tuple[int, int]] = {}
        for line in self._lines("list"):
            done, left, name, operation, *dtypes = line.split()
            kernel = Kernel(name, OPERATIONS.get(int(operation), ""), tuple(dtypes))
            before = found.get(kernel, (0, 0))  # some templates have two instances that differ in another argument
            found[kernel] = before[0] + int(done), before[1] + int(left)
        return found

    def _lines(self, what: str) -> list[str]:
        return getattr(self._handle, f"kernels_{what}")().decode().splitlines()


def addresses(names: list[str], on_cpu: bool = False) -> dict[str, int]:
    """Returns the addresses of those entries that are there and have code for GPUs, or for the CPU."""
    found = {}
    for each in LIBRARIES:
        try:
            library = of_package(each)
        except ImportError:
            continue
        if not on_cpu and b"msops: nvcc" not in library.path.read_bytes():
            continue
        for name in names:
            with contextlib.suppress(AttributeError):
                address = ctypes.cast(getattr(library.handle, name), ctypes.c_void_p).value
                found[name] = address or 0
    return found


class _State:
    is_wanted = False
    functions: Functions | None = None  # that are in place
    is_impossible = False  # in this process

    def __init__(self) -> None:
        self.watched: list[tuple[Any, str, Any]] = []  # a class, and its method by name


state = _State()


def put() -> None:
    """Puts msops' functions in place as soon as MindSpore runs on a GPU, if this is possible."""
    state.is_wanted = VERSION == (2, 10)
    if state.is_wanted and not _try() and not state.watched:
        _watch()


def take_away() -> None:
    """Puts MindSpore's functions back."""
    state.is_wanted = False
    _unwatch()
    if state.functions:
        state.functions.undo()
        state.functions = None


def replaced() -> list[Kernel]:
    """Returns MindSpore's functions in whose places msops' are."""
    return state.functions.installed() if _try() and state.functions else []


def _try() -> bool:
    """Returns whether the functions are in place, after an attempt if they may be now."""
    if state.functions or not state.is_wanted or state.is_impossible:
        return state.functions is not None
    if mindspore.get_context("device_target") != "GPU":
        return False
    try:
        functions = Functions(build())
        if functions.install(addresses(functions.entries)) == 0:  # MindSpore has not loaded its plugin yet
            return False
    except (OSError, RuntimeError, ImportError):
        state.is_impossible = True
        return False
    state.functions = functions
    _unwatch()
    with contextlib.suppress(OSError, RuntimeError, ImportError):  # without MindSpore's or Python's headers
        fast_calls.prepare()  # so that operators read results of reshape in place
    return True


def _watch() -> None:
    """Makes MindSpore's functions that choose the device try again. They load the plugin."""
    owner = getattr(mindspore._c_expression, "MSContext", None)
    for name in ("set_device_target_inner", "set_param"):
        method = getattr(owner, name, None)
        if method is not None:
            state.watched.append((owner, name, method))
            setattr(owner, name, _then_try(method))


def _then_try(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def choose(*arguments: Any) -> Any:
        result = method(*arguments)
        _try()
        return result

    return choose


def _unwatch() -> None:
    for owner, name, method in state.watched:
        setattr(owner, name, method)
    state.watched.clear()
