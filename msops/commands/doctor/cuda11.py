"""Examines the CUDA 11 of MindSpore's GPU backend: which version CUDA_HOME tells, and which libraries it links."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import compilers
from .finding import AGAIN, Finding, dotted, extra, folders, numbers, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .gpu import Gpus

# MindSpore's GPU backend links these libraries of CUDA. The wheels of the extra [gpu] have all of them.
LIBRARIES = "cublas", "cudart", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nvrtc"


# The program prints the release of the CUDA runtime of a file, such as 11060, or why it cannot be loaded. It prints
# nothing where there is no driver, without which the runtime itself does not tell.
_RELEASE = """
import ctypes, sys
try:
    release = ctypes.c_int()
    ctypes.CDLL(sys.argv[1]).cudaRuntimeGetVersion(ctypes.byref(release))
    print(release.value or "")
except (OSError, AttributeError) as error:
    print(error)
"""


def plugins() -> dict[tuple[int, ...], Path]:
    """Returns the path of each of MindSpore's GPU backends, by its version of CUDA.

    The version is () for the backend of MindSpore 1.10, which has none in its name.
    """
    paths = [path for folder in folders("mindspore") for path in folder.glob("lib/plugin/libmindspore_gpu.so*")]
    return {numbers(path.name): path for path in paths}


def findings(gpus: Gpus, nvcc: str) -> Iterator[Finding]:
    """Tells whether MindSpore takes a GPU backend and finds its CUDA libraries. `nvcc` is the one that msops uses."""
    backends = plugins()
    lacking = "wrong" if gpus.usable else "none"
    if () in backends:
        yield _libraries(backends[()], (), lacking)
    elif backends:
        home = os.environ.get("CUDA_HOME", "")
        told = compilers.look(f"{home}/bin/nvcc").release if home else ()
        # MindSpore takes the newest backend that is not newer than the release that $CUDA_HOME/bin/nvcc tells.
        fitting = [version for version in backends if _serves(told, version)]
        backend = max(fitting or backends)
        if fitting:
            yield Finding("CUDA_HOME", "ok", f"{home}, of CUDA {dotted(told)}")
        else:
            text = f"{home}/bin/nvcc does not tell CUDA {dotted(backend)}" if home else "not set"
            yield Finding("CUDA_HOME", lacking, f"{text}, so that MindSpore has no GPU", _home(backend, nvcc))
        yield _libraries(backends[backend], backend, lacking)


def _serves(release: tuple[int, ...], backend: tuple[int, ...]) -> bool:
    """Tells whether MindSpore takes the backend if nvcc tells this release."""
    return bool(release) and release[0] == backend[0] and release >= backend


def _home(backend: tuple[int, ...], nvcc: str) -> tuple[str, ...]:
    """Returns the commands that set CUDA_HOME to a toolkit or, without one, to a folder with a stand-in for nvcc.

    The libraries may come from wheels, which have no nvcc.
    """
    for toolkit in sorted(compilers.toolkits(), key=lambda toolkit: toolkit.release, reverse=True):
        if _serves(toolkit.release, backend) and Path(toolkit.path).parent.name == "bin":
            return (f"export CUDA_HOME={shlex.quote(str(Path(toolkit.path).parents[1]))}",)
    home, release = f"$HOME/.cache/msops/cuda-{dotted(backend)}", dotted(backend)
    tells = f"Cuda compilation tools, release {release}, V{release}.0"
    return (
        f"mkdir -p {home}/bin",
        f"printf '#!/bin/sh\\necho \"{tells}\"\\n' > {home}/bin/nvcc && chmod +x {home}/bin/nvcc",
        f"export CUDA_HOME={home} NVCC={shlex.quote(nvcc) if nvcc else ''}",
    )


def _libraries(plugin: Path, release: tuple[int, ...], lacking: str) -> Finding:
    """Tells whether the loader finds the libraries that a GPU backend links. `lacking` is the state if it does not."""
    said = output("sh", "-c", 'ldd "$0" 2>&1', str(plugin))
    lines = re.findall(r"^\s*(lib([a-z]+)\S*) => (?:(/.*)/.* \(|not found)", said, re.MULTILINE)
    linked = {library: folder for library, name, folder in lines if name in LIBRARIES}
    foreign, complaint = _foreign(said, linked, release)
    if foreign:
        text = f"LD_LIBRARY_PATH names {foreign}, which MindSpore's GPU backend cannot use: {complaint}"
        right = export([foreign.name], wrong=foreign.parent)
        return Finding("CUDA 11", lacking, text, right or ("unset LD_LIBRARY_PATH", AGAIN))
    if not linked:
        return Finding("CUDA 11", lacking, f"ldd does not tell what {plugin} links")
    missing = [library for library, folder in linked.items() if not folder]
    if not missing:
        return Finding("CUDA 11", "ok", f"{len(linked)} libraries in {', '.join(sorted(set(linked.values())))}")
    mend = export(missing) or (extra("gpu"), AGAIN)
    return Finding("CUDA 11", lacking, f"MindSpore's GPU backend misses {', '.join(missing)}", mend)


def _foreign(said: str, linked: dict[str, str], release: tuple[int, ...]) -> tuple[Path | None, str]:
    """Returns a file of LD_LIBRARY_PATH that is another library than its name tells, and what is wrong with it."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    for path, complaint in re.findall(r"(/\S+): ((?!error while loading)[^(\n]+)", said):
        if Path(path).parent in folders:
            return Path(path), complaint.strip()
    runtimes = [Path(folder, name) for name, folder in linked.items() if name.startswith("libcudart.") and folder]
    for path in runtimes:
        told = output(sys.executable, "-I", "-S", "-c", _RELEASE, str(path)) if path.parent in folders else ""
        found = (int(told) // 1000, int(told) % 1000 // 10) if told.isdigit() else ()
        if told and not found:
            return path, told.removeprefix(f"{path}: ")
        if found and found < release:
            return path, f"is of CUDA {dotted(found)}, older than {dotted(release)}"
    return None, ""


def export(missing: list[str], wrong: Path | None = None) -> tuple[str, ...]:
    """Returns the command that lets the loader find libraries, or no command if one of them is not found.

    It does not look for them in the folder `wrong`.
    """
    places = [place for folder in folders("nvidia") for place in folder.glob("*/lib")]
    places += sorted(compilers.USUAL.glob("cuda-11*/lib64"))
    found = {library: place for place in places for library in missing if (place / library).is_file()}
    found = {library: place for library, place in found.items() if place != wrong}
    if len(found) < len(missing):
        return ()
    path = os.pathsep.join(sorted(set(map(str, found.values()))))
    return (f'export LD_LIBRARY_PATH="{path}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',)
