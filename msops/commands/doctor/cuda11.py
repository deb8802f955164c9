"""Examines the CUDA 11 of MindSpore's GPU backend: which version CUDA_HOME tells, and which libraries it links."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from . import compilers
from .finding import AGAIN, Finding, dotted, extra, folders, numbers, output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .gpu import Gpus

# MindSpore's GPU backend links these libraries of CUDA. The wheels of the extra [gpu] have all of them.
LIBRARIES = "cublas", "cudart", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nvrtc"


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
        yield _libraries(backends[()], lacking)
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
        yield _libraries(backends[backend], lacking)


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


def _libraries(plugin: Path, lacking: str) -> Finding:
    """Tells whether the loader finds the libraries that a GPU backend links. `lacking` is the state if it does not."""
    lines = re.findall(r"^\s*(lib([a-z]+)\S*) => (?:(/.*)/.* \(|not found)", output("ldd", str(plugin)), re.MULTILINE)
    linked = {library: folder for library, name, folder in lines if name in LIBRARIES}
    if not linked:
        return Finding("CUDA 11", lacking, f"ldd does not tell what {plugin} links")
    missing = [library for library, folder in linked.items() if not folder]
    if not missing:
        return Finding("CUDA 11", "ok", f"{len(linked)} libraries in {', '.join(sorted(set(linked.values())))}")
    mend = export(missing) or (extra("gpu"), AGAIN)
    return Finding("CUDA 11", lacking, f"MindSpore's GPU backend misses {', '.join(missing)}", mend)


def export(missing: list[str]) -> tuple[str, ...]:
    """Returns the command that lets the loader find libraries, or no command if one of them is not found."""
    places = [place for folder in folders("nvidia") for place in folder.glob("*/lib")]
    places += sorted(compilers.USUAL.glob("cuda-11*/lib64"))
    found = {library: place for place in places for library in missing if (place / library).is_file()}
    if len(found) < len(missing):
        return ()
    path = os.pathsep.join(sorted(set(map(str, found.values()))))
    return (f'export LD_LIBRARY_PATH="{path}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',)
