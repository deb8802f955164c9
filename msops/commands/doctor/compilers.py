"""Examines what `msops.load` needs: nvcc, a C++ compiler, and a folder for what they compile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...core.build import default_cache_folder, find_nvcc, host_compiler
from .finding import Finding, dotted, numbers, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .gpu import Gpus

USUAL = Path("/usr/local")  # NVIDIA's packages put their toolkits here
_ARCHIVE = "https://developer.nvidia.com/cuda-toolkit-archive"


class Nvcc(NamedTuple):
    """An nvcc. `release` is (13, 0) for 13.0, `archs` are what it compiles for, `ptxas` is its assembler's release."""

    path: str
    release: tuple[int, ...]
    archs: list[int]
    ptxas: tuple[int, ...]


def look(path: str) -> Nvcc:
    archs = re.findall(r"compute_(\d+)\b", output(path, "--list-gpu-arch"))
    release = _release(path)
    # An nvcc without a profile beside it, such as Debian's, takes the ptxas from the PATH.
    own = Path(path).resolve().with_name("nvcc.profile").exists() or not shutil.which("ptxas")
    return Nvcc(path, release, sorted(map(int, archs)), release if own else _release("ptxas"))


def _release(tool: str) -> tuple[int, ...]:
    told = re.search(r"release (\d+\.\d+)", output(tool, "--version"))
    return numbers(told[1]) if told else ()


def toolkits() -> Iterator[Nvcc]:
    """Yields every nvcc that is in a usual place."""
    usual = [Path(folder, "nvcc") for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    usual += [Path(os.environ["CUDA_HOME"], "bin", "nvcc")] if os.environ.get("CUDA_HOME") else []
    usual += sorted(USUAL.glob("cuda-*/bin/nvcc"))
    # Each nvcc counts once: /bin may be a link to /usr/bin.
    once = {path.resolve(): path for path in reversed(usual) if os.access(path, os.X_OK)}
    return (look(str(path)) for path in once.values())


def _complaint(nvcc: Nvcc, gpus: Gpus) -> str:
    """Tells why this nvcc compiles nothing for the GPUs; returns "" if it does."""
    if not nvcc.release or not nvcc.archs:
        return "does not compile"
    if nvcc.ptxas != nvcc.release:
        return f"takes the ptxas of CUDA {dotted(nvcc.ptxas)} from the PATH"
    if gpus.capabilities and gpus.capabilities[0] < nvcc.archs[0]:
        return f"is too new for sm_{gpus.capabilities[0]}"
    if gpus.capabilities and gpus.capabilities[-1] > nvcc.archs[-1]:
        return f"is too old for sm_{gpus.capabilities[-1]}"
    # Within a major version, machine code runs with older drivers, too, but PTX does not, which is for unknown GPUs.
    newest = gpus.cuda[:1] if gpus.cards else gpus.cuda
    if newest and nvcc.release[: len(newest)] > newest:
        return f"is too new for the driver, which is for CUDA up to {dotted(gpus.cuda)}"
    return ""


def nvcc_finding(gpus: Gpus) -> tuple[Finding, str]:
    """Returns the finding, and the path of the nvcc to use once its commands have run, or "" if there is none."""
    path = find_nvcc()
    nvcc = look(path)
    nobody = "none on the PATH or in CUDA_HOME: msops.load compiles for the CPU alone"
    complaint = _complaint(nvcc, gpus) if path else nobody
    if path and not complaint:
        return Finding("nvcc", "ok", f"{dotted(nvcc.release)}, {path}"), path
    fitting = [other for other in toolkits() if not _complaint(other, gpus)]
    other = max(fitting, key=lambda other: other.release).path if fitting else ""
    mend = (f"export NVCC={shlex.quote(other)}",) if other else _install(nvcc, gpus)
    if os.environ.get("NVCC") == "":
        text = "switched off: the environment variable NVCC is empty"
        return Finding("nvcc", "none", text, mend if other else ("unset NVCC", *mend)), other
    if path and not shutil.which(path):
        text = f"there is no {path}, which the environment variable NVCC names"
        mend = mend if other else ("unset NVCC", *(mend if gpus.usable else ()))
        return Finding("nvcc", "wrong", text, mend), other
    text = f"{dotted(nvcc.release) or '?'}, {path}, {complaint}" if path else complaint
    if gpus.cuda and not gpus.cards:
        text += f"; for a GPU of this driver, it must be of CUDA {dotted(gpus.cuda)} or older"
    return Finding("nvcc", "wrong" if gpus.usable else "none", text, mend), other


def _install(nvcc: Nvcc, gpus: Gpus) -> tuple[str, ...]:
    bounds = [gpus.cuda] if gpus.cuda else []
    if gpus.capabilities and gpus.capabilities[0] < 75:
        bounds.append((12, 9))  # it is the last release that knows sm_70
    which = f"CUDA toolkit, {dotted(min(bounds))} or older" if bounds else "CUDA toolkit"
    if gpus.capabilities and nvcc.archs and gpus.capabilities[-1] > nvcc.archs[-1]:
        which += f", newer than {dotted(nvcc.release)}"
    mend = f"# install the {which}: {_ARCHIVE}"
    if gpus.cuda and nvcc.release and nvcc.release[0] > gpus.cuda[0] and not _complaint(nvcc, gpus._replace(cuda=())):
        mend += f", or a driver for CUDA {dotted(nvcc.release)}: https://www.nvidia.com/drivers"
    return (mend,)


def cxx_finding(nvcc: Finding) -> Finding:
    cxx = os.environ.get("CXX")
    path = shutil.which(cxx or "g++")
    if nvcc.state == "ok":
        try:
            path = host_compiler(find_nvcc(), cxx)
        except LookupError as error:
            return Finding("C++", "wrong", str(error), _mend_cxx(cxx))
    if not path and cxx:
        return Finding("C++", "wrong", f"there is no {cxx}, which CXX names", ("unset CXX",))
    if not path:
        return Finding("C++", "none", "no g++: msops.load compiles nothing (Debian: apt install g++)")
    return Finding("C++", "ok", f"{output(path, '-dumpfullversion')}, {path}")


def _mend_cxx(cxx: str | None) -> tuple[str, ...]:
    """Returns the commands after which host_compiler finds a compiler.

    It knows which g++ this nvcc takes, unless CXX names one.
    """
    unset = ("unset CXX",) if cxx else ()
    try:
        host_compiler(find_nvcc())
    except LookupError as error:
        install = re.search(r"apt install [^\s)]+", str(error))
        return (*unset, install[0]) if install else unset
    return unset


def cache_finding() -> Finding:
    mend = ('export MSOPS_CACHE="${TMPDIR:-/tmp}/msops-$(id -u)"',)
    try:
        folder = default_cache_folder()
        complaint = _unusable(folder)
    except (KeyError, RuntimeError):  # Python 3.9 raises KeyError, later ones RuntimeError
        return Finding("cache", "wrong", "there is no home folder, so msops.load keeps nothing", mend)
    if complaint:
        return Finding("cache", "wrong", f"msops.load keeps nothing in {folder}: {complaint}", mend)
    return Finding("cache", "ok", str(folder))


def _unusable(folder: Path) -> str:
    if ":" in str(folder):
        return "its path has a colon"
    # os.path.lexists returns False where Path.exists may raise.
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there}: {error.strerror}"
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return f"{there} is on a file system mounted with noexec"
    return ""
