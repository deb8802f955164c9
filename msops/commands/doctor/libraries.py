"""Examines the package's own libraries: whether all are there, load, and fit the GPUs."""

from __future__ import annotations

import os
import re
import shlex
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ... import files
from ...files import PACKAGE
from .finding import (
    AGAIN,
    Finding,
    culprits,
    dotted,
    few_files,
    missing_library,
    numbers,
    output,
    pip,
    system_package,
    unset,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .gpu import Gpus

# The program loads a library, and prints the error, or the first of the named entries that the library lacks.
_LOAD = """
import ctypes, sys
try:
    library = ctypes.CDLL(sys.argv[1])
    print(*[f"has no entry {name}" for name in sys.argv[2:] if not hasattr(library, name)][:1])
except OSError as error:
    print(error)
"""


class _Library(NamedTuple):
    """The state of a library, and the commands that mend it.

    `build` tells what must be done else: "again" to write the same library again, or "other" to build another one.
    `machine` and `portable` are the architectures that it has machine code and PTX for.
    """

    state: str
    text: str
    mend: tuple[str, ...] = ()
    build: str = ""
    nvcc: tuple[int, ...] = ()
    machine: tuple[int, ...] = ()
    portable: tuple[int, ...] = ()


def expected() -> list[str]:
    """Returns the libraries that must be there: all that exist, that have a source in git, or that pip installed."""
    names = {path.stem for path in (*PACKAGE.glob("lib/*.so"), *PACKAGE.parent.glob("aot_kernels/*.cu"))}
    names |= {Path(file).stem for file in files.recorded() if re.fullmatch(r"lib/\w+\.so", file)}
    deleted = files.git_files("--deleted", "aot_kernels") if files.source() else []
    return sorted(names | {Path(file).stem for file in deleted if re.fullmatch(r"aot_kernels/\w+\.cu", file)})


def findings(gpus: Gpus, nvcc: Finding) -> Iterator[Finding]:
    """Yields one finding for each group of libraries in the same state."""
    folder = PACKAGE / "lib"
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        yield Finding("libraries", "wrong", f"{folder} may not be read", (files.allow(folder),))
        return
    groups: dict[_Library, list[str]] = {}
    for name in expected():
        groups.setdefault(_examine(name, gpus), []).append(name)
    if not groups:
        yield Finding(
            "libraries", "wrong", "nobody knows which there must be: msops was not installed by pip", _build([])
        )
    sound = next((library for library in groups if library.state == "ok"), None)
    for library, names in groups.items():
        mend = library.mend
        if library.build == "again":
            mend = _build(names, like=sound)
        elif library.build:
            mend = _build(names, nvcc if gpus.usable else None)
        yield Finding("libraries", library.state, f"{', '.join(names)}: {library.text}", mend)
    yield from _lost(gpus, [library.nvcc for library in groups if library.nvcc])


def _build(names: list[str], nvcc: Finding | None = None, like: _Library | None = None) -> tuple[str, ...]:
    """Returns the commands that build these libraries again, for the same devices as the library `like`."""
    first = nvcc.mend if nvcc and nvcc.state != "ok" else ()
    if any(command.startswith("#") for command in first):
        return *first, AGAIN
    variables = _variables(like) if like else ""
    folder = files.source()
    if not folder:
        # Where pip installed just these files, the same wheel would not help.
        if {f"lib/{name}.so" for name in names} & {*files.changed()}:
            return *first, files.reinstall(variables)
        return *first, f"{variables}{pip('install', '--force-reinstall', '--no-deps', '.')}  # in msops' source folder"
    changed, deleted = (files.git_files(option, "Makefile", "aot_kernels") for option in ("--modified", "--deleted"))
    yours = "" if changed == deleted else "  # unless the changes are yours"
    restore = [files.checkout(changed, yours)] if changed else []
    goals = ["all"] if names == expected() else [f"msops/lib/{name}.so" for name in names]
    return *first, *restore, f"{variables}make -C {shlex.quote(str(folder))} -B {' '.join(goals)}"


def _variables(library: _Library) -> str:
    """Returns what goes before a command that builds, so that it builds for the same devices as this library."""
    if not library.nvcc:
        return "NVCC= "
    given = {"ARCHS": library.machine, "PTX": library.portable}
    return "".join(f"{name}={shlex.quote(' '.join(map(str, archs)))} " for name, archs in given.items() if archs)


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
        return _Library("wrong", f"{path} may not be read", (files.allow(path),))
    except OSError:
        return _Library("wrong", "not built", build="again")
    entries = _entries(PACKAGE.parent / "aot_kernels" / f"{path.stem}.cu") if PACKAGE in path.parents else []
    failure = _load(path, entries)
    if failure:
        return _failed(path, code, failure)
    machine, portable = architectures(code)
    stamp = re.search(rb"msops: ((?:nvcc ([\d.]+), )?C\+\+ compiler [^\0]+)\0", code)
    compiler = stamp[1].decode() if stamp else "an unknown compiler"
    release = numbers(stamp[2].decode()) if stamp and stamp[2] else ()
    text = "for the CPU" + "".join(f", sm_{arch}" for arch in machine) + "".join(f", PTX {arch}" for arch in portable)
    text += f"; by {compiler}"
    if path in (PACKAGE / file for file in files.changed()):
        return _Library("wrong", f"{text}; not the file that pip installed", build="again")
    newer = _newer_source(path)
    if newer:
        return _Library("wrong", f"{text}; older than its source {newer}", build="again")
    complaint = _complaint(machine, portable, release, gpus)
    if complaint:
        return _Library("wrong", f"{text}; {complaint}", build="other", nvcc=release)
    return _Library("ok", text, (), "", release, tuple(machine), tuple(portable))


def _entries(source: Path) -> list[str]:
    """Returns the names of the C entries of a source; [] if there is none, as beside an installed package."""
    text = source.read_text() if source.is_file() else ""
    return re.findall(r"^MSOPS_(?:ENTRY|FORMULA)\((\w+)", text, re.MULTILINE)


def _load(path: Path, entries: list[str], env: Mapping[str, str] | None = None) -> str:
    """Loads a library in another process, and tells what is wrong with it."""
    return output(sys.executable, "-I", "-S", "-c", _LOAD, str(path), *entries, env=env)


def _newer_source(library: Path) -> str:
    """Returns a source that was changed after the library was built from it; "" if none was or no source is here.

    The compiler has written a rule of make beside the library, which names all of them.
    """
    rule = library.with_suffix(".d")
    sources = sorted(set(re.findall(r"\baot_kernels/[\w./]+", rule.read_text()))) if rule.is_file() else []
    built = library.stat().st_mtime
    paths = {name: PACKAGE.parent / name for name in sources}
    return next((name for name, path in paths.items() if path.is_file() and path.stat().st_mtime > built), "")


def _failed(path: Path, code: bytes, failure: str) -> _Library:
    """Describes a library that the loader refuses, from what the loader says."""
    if failure.startswith("has no entry"):
        return _Library("wrong", f"{failure}, so it is built from another source", build="again")
    if code[:4] == b"\x7fELF" and _processor(code) != _processor(Path(sys.executable).read_bytes()):
        return _Library("wrong", "cannot be loaded: built for another processor than this Python", build="again")
    text = f"cannot be loaded: {failure.removeprefix(f'{path}: ')}"
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        mount = next(folder for folder in path.resolve().parents if folder.is_mount())
        mend = f"mount -o remount,exec {shlex.quote(str(mount))}  # as root; else install msops in another place"
        return _Library("wrong", f"{text}; {mount} is mounted with noexec", (mend,))
    if few_files(text):
        return _Library("wrong", text, few_files(text))
    variables = culprits({name for name in os.environ if name.startswith("LD_")}, lambda env: not _load(path, [], env))
    if variables:
        return _Library("wrong", f"{text}; not so without {', '.join(variables)}", unset(variables))
    missing = missing_library(failure)
    if missing:
        return _Library("wrong", text, (system_package(missing),))
    return _Library("wrong", text, build="again")


def _processor(code: bytes) -> bytes:
    """Returns the part of an ELF file's header that says for which processor it is."""
    return code[4:6] + code[18:20]


def _complaint(machine: list[int], portable: list[int], release: tuple[int, ...], gpus: Gpus) -> str:
    """Tells why a library does not run on one of the GPUs; returns "" if it runs on all."""
    if not gpus.usable:
        return ""
    if not machine + portable:
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
