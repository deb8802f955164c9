"""Loads shared libraries of C functions, and knows where the package's own libraries and headers are."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import os
import platform
import re
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
CPUINFO = Path("/proc/cpuinfo")


class Entry(NamedTuple):
    """A C function, which is an attribute of a :class:`msops.Library`. See :func:`msops.load`.

    Attributes:
        library (Library): The library that has the function.
        name (str): The function's name.
    """

    library: Library
    name: str


class Library:
    """A shared library; `library.F` is its C function `F`.

    The library stays loaded, whereas MindSpore would load it at the first call and unload it after the last. If the
    file is deleted while the program runs, an operator that needs it writes it again.

    Args:
        path (str, Path): The file.
        name (str): The library's name in messages. Default: the file's name without its suffix.
        variable (str): An environment variable, which is set to the path. From MindSpore 2.7 on, exported networks name
            the variable instead of the path, so that it can tell where the file is when they are loaded. Default: none.

    Raises:
        ImportError: If the library cannot be loaded, or its path has a colon.

    Examples:
        >>> import msops
        >>> built = msops.load("twice", '''
        ... #include "common/formula.h"
        ... MSOPS_FORMULA(Twice, (x), (y), y = 2 * x)
        ... ''')
        >>> library = msops.Library(built.path)
        >>> print(library.Twice.name)
        Twice
    """

    def __init__(self, path: str | Path, name: str | None = None, variable: str | None = None) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.stem if name is None else name
        self.variable = variable
        if ":" in str(self.path):  # MindSpore reads FILE:FUNCTION
            raise ImportError(f"msops cannot load the library {self.name}: its path must have no colon: {self.path}")
        _check_cpu()
        try:
            self.handle = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise ImportError(f"msops cannot load the library {self.name}: {_demangled(str(error))}") from None
        self._content = os.open(self.path, os.O_RDONLY)  # it stays readable when the file is deleted
        weakref.finalize(self, os.close, self._content).atexit = False
        if variable is not None:
            os.environ[variable] = str(self.path)

    def restore(self) -> None:
        """Writes the file again if it was deleted: MindSpore looks for it whenever it makes a kernel."""
        if self.path.exists():
            return
        with contextlib.suppress(OSError):  # if the file cannot be written, MindSpore says that it is missing
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = self.path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            written.write_bytes(os.pread(self._content, os.fstat(self._content).st_size, 0))
            written.replace(self.path)

    def __getattr__(self, entry: str) -> Entry:
        if entry.startswith("_"):
            raise AttributeError(entry)
        try:
            getattr(self.handle, entry)
        except AttributeError:
            names = set(re.findall(r"[A-Za-z]\w{2,}", self.path.read_bytes().decode("ascii", "replace")))
            added = "Rule", "InferShape", "Scratch"  # by MSOPS_ENTRY and MSOPS_SCRATCH
            names = {name for name in names if not name.endswith(added)}
            near = [name for name in difflib.get_close_matches(entry, names, 20) if hasattr(self.handle, name)]
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise AttributeError(f"{self.name}: the library has no entry {entry}{hint}") from None
        return Entry(self, entry)

    def __repr__(self) -> str:
        return f"Library({str(self.path)!r})"


@functools.cache
def _check_cpu() -> None:
    """Raises an ImportError if the CPU lacks what all libraries are compiled for (HOST_FLAGS_x86_64 in flags.mk)."""
    if platform.machine() != "x86_64":
        return
    try:
        known = set(CPUINFO.read_text().split())
    except OSError:
        return  # the system does not tell what the CPU has
    missing = {"avx2", "f16c", "fma"} - known
    if missing and "flags" in known:
        has_not = " and no ".join(sorted(missing))
        raise ImportError(f"msops needs a CPU with AVX2, F16C and FMA: this one has no {has_not}")


def _demangled(text: str) -> str:
    """Returns the text with C++ names as a source has them: `missing(int)` for `_Z7missingi`."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return text
    demangle.restype = ctypes.c_char_p

    def source_name(symbol: re.Match[str]) -> str:
        found = demangle(symbol[0].encode(), None, None, None)
        return found.decode() if found else symbol[0]

    return re.sub(r"\b_Z\w+", source_name, text)


def of_package(name: str) -> Library:
    """Loads the library of `aot_kernels/<name>.cu`, whose path the environment variable MSOPS_<NAME> may set."""
    variable = f"MSOPS_{name.upper()}"
    try:
        if variable in os.environ:
            return Library(os.environ[variable], name, variable)
        return Library(PACKAGE / "lib" / f"{name}.so")
    except ImportError as error:
        mend = "Build the kernels with 'make all' in msops' source folder"
        if not (PACKAGE.parent / "Makefile").exists():
            mend = "Install the wheel of msops again, by pip's --force-reinstall --no-deps"
        raise ImportError(f"{error}. {mend}.") from None


def get_include() -> str:
    """Returns the folder of the package's headers. A compiler that gets it by `-I` finds ``common/elementwise.h``.

    Examples:
        >>> import msops, os
        >>> print(os.path.exists(os.path.join(msops.get_include(), "common", "elementwise.h")))
        True
    """
    installed = PACKAGE / "include"
    return str(installed if installed.is_dir() else PACKAGE.parent / "aot_kernels")
