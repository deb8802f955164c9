"""Examines the package's own libraries: whether all are there, load, and fit the GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...core.library import PACKAGE
from .finding import AGAIN, Finding, dotted, missing_library, numbers, output, pip, source, system_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .gpu import Gpus

_LOAD = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError as error: print(error)"


class _Library(NamedTuple):
    """The state of a library, and the commands that mend it. `build` tells whether it must be built again."""

    state: str
    text: str
    mend: tuple[str, ...] = ()
    build: bool = False
    nvcc: tuple[int, ...] = ()


def expected() -> list[str]:
    """Returns the libraries that must be there: all that exist, that have a source, or that pip installed."""
    names = {path.stem for path in (*PACKAGE.glob("lib/*.so"), *PACKAGE.parent.glob("aot_kernels/*.cu"))}
    for distribution in importlib.metadata.distributions(name="msops"):
        if Path(str(distribution.locate_file("msops"))).resolve() == PACKAGE:
            # From Python 3.12 on, `distribution.files` leaves out the files that are missing.
            names |= set(re.findall(r"^msops/lib/(\w+)\.so,", distribution.read_text("RECORD") or "", re.MULTILINE))
    return sorted(names)


def findings(gpus: Gpus, nvcc: Finding) -> Iterator[Finding]:
    """Yields one finding for each group of libraries in the same state."""
    folder = PACKAGE / "lib"
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        yield Finding("libraries", "wrong", f"{folder} may not be read", (_allow(folder),))
        return
    groups: dict[_Library, list[str]] = {}
    for name in expected():
        groups.setdefault(_examine(name, gpus), []).append(name)
    if not groups:
        yield Finding(
            "libraries", "wrong", "nobody knows which there must be: msops was not installed by pip", _build()
        )
    for library, names in groups.items():
        mend = library.mend
        if library.build:
            mend = (*mend, *_build(nvcc, for_gpu=gpus.usable))
        yield Finding("libraries", library.state, f"{', '.join(names)}: {library.text}", mend)
    yield from _lost(gpus, [library.nvcc for library in groups if library.nvcc])


def _build(nvcc: Finding | None = None, *, for_gpu: bool = False) -> tuple[str, ...]:
    """Returns the commands that build the libraries again."""
    first = nvcc.mend if nvcc and nvcc.state != "ok" and for_gpu else ()
    if any(command.startswith("#") for command in first):
        return *first, AGAIN
    folder = source()
    if not folder:
        return *first, f"{pip('install', '--force-reinstall', '--no-deps', '.')}  # in msops' source folder"
    where = shlex.quote(str(folder))
    changed, deleted = (
        output("git", "-C", str(folder), "ls-files", option, "Makefile", "aot_kernels").split()
        for option in ("--modified", "--deleted")
    )
    yours = "" if changed == deleted else "  # unless the changes are yours"
    restore = [f"git -C {where} checkout -- {shlex.join(changed)}{yours}"] if changed else []
    return *first, *restore, f"make -C {where} -B all"


def _examine(name: str, gpus: Gpus) -> _Library:
    variable = f"MSOPS_{name.upper()}"
    if variable not in os.environ:
        return _look(PACKAGE / "lib" / f"{name}.so", gpus)
    named = os.environ[variable]
    library = _look(Path(named).absolute(), gpus)
    text = f"{variable} names {named or 'nothing'}; {library.text}"
    if library.state == "wrong":
        return _Library("wrong", text, (f"unset {variable}",))
    return library._replace(text=text)


def _look(path: Path, gpus: Gpus) -> _Library:
    try:
        code = path.read_bytes()
    except PermissionError:
        return _Library("wrong", f"{path} may not be read", (_allow(path),))
    except OSError:
        return _Library("wrong", "not built", build=True)
    failure = output(sys.executable, "-I", "-S", "-c", _LOAD, str(path))
    if failure:
        return _failed(path, failure)
    machine, portable = architectures(code)
    stamp = re.search(rb"msops: ((?:nvcc ([\d.]+), )?C\+\+ compiler [^\0]+)\0", code)
    compiler = stamp[1].decode() if stamp else "an unknown compiler"
    release = numbers(stamp[2].decode()) if stamp and stamp[2] else ()
    text = "for the CPU" + "".join(f", sm_{arch}" for arch in machine) + "".join(f", PTX {arch}" for arch in portable)
    text += f"; by {compiler}"
    complaint = _complaint(machine, portable, release, gpus)
    if complaint:
        return _Library("wrong", f"{text}; {complaint}", build=True, nvcc=release)
    return _Library("ok", text, nvcc=release)


def _allow(path: Path) -> str:
    return f"chmod -R a+rX {shlex.quote(str(path))}  # as root or its owner"


def _failed(path: Path, failure: str) -> _Library:
    """Describes a library that the loader refuses, from what the loader says."""
    text = f"cannot be loaded: {failure.removeprefix(f'{path}: ')}"
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        mount = next(folder for folder in path.resolve().parents if folder.is_mount())
        mend = f"mount -o remount,exec {shlex.quote(str(mount))}  # as root; else install msops in another place"
        return _Library("wrong", f"{text}; {mount} is mounted with noexec", (mend,))
    missing = missing_library(failure)
    if missing:
        return _Library("wrong", text, (system_package(missing),))
    return _Library("wrong", text, build=True)


def _complaint(machine: list[int], portable: list[int], release: tuple[int, ...], gpus: Gpus) -> str:
    """Tells why a library does not run on one of the GPUs; returns "" if it runs on all."""
    if gpus.usable and not machine + portable:
        return "not for the GPU"
    if release and gpus.cuda and release[0] > gpus.cuda[0]:
        return f"the driver is for CUDA up to {dotted(gpus.cuda)}"
    for capability in gpus.capabilities:
        # Machine code runs on later GPUs of the same generation, PTX on all later ones.
        if any(arch <= capability and arch // 10 == capability // 10 for arch in machine):
            continue
        if not any(arch <= capability for arch in portable):
            return f"not for sm_{capability}"
        if release and gpus.cuda and release > gpus.cuda:  # within a major version, machine code runs, PTX does not
            return f"as PTX, for sm_{capability}, it needs a driver for CUDA {dotted(release)}, not {dotted(gpus.cuda)}"
    return ""


def _lost(gpus: Gpus, releases: list[tuple[int, ...]]) -> Iterator[Finding]:
    """Yields a finding about features that the GPUs have, but the toolkit is too old to compile."""
    if not releases:
        return
    oldest, newest = min(releases), (gpus.capabilities or [0])[-1]
    since = {f"machine code for sm_{newest}": (11, 8)} if newest >= 89 else {}
    since |= {"TMA": (12, 0), "wgmma": (12, 0), "clusters": (12, 1)} if newest == 90 else {}
    lost = [what for what, release in since.items() if oldest < release]
    if lost:
        text = f"built by nvcc {dotted(oldest)}, so without {', '.join(lost)}, which make sm_{newest} faster"
        yield Finding("libraries", "none", f"{text}: nvcc {dotted(max(since.values()))} has all of it")


def architectures(code: bytes) -> tuple[list[int], list[int]]:
    """Returns the architectures that a library has machine code for, and those of its PTX."""
    found: dict[int, set[int]] = {1: set(), 2: set()}  # PTX, machine code
    # A fat binary begins with a magic number, a version, the size of this header, and the size of the rest. The rest is
    # a sequence of parts, each with a header and content.
    for fat in re.finditer(rb"\x50\xed\x55\xba\x01\0\x10\0(.{8})", code, re.DOTALL):
        at, end = fat.end(), fat.end() + int.from_bytes(fat[1], "little")
        while at < end:
            kind, header, size, arch = struct.unpack_from("<HxxIQ12xI", code, at)
            found.setdefault(kind, set()).add(arch)
            at += header + size
    return sorted(found[2]), sorted(found[1])
