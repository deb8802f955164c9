"""`python -m msops doctor`: what is found, what is wrong, and what mends it.

MindSpore and the libraries, which may be what is broken, are loaded in other processes only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from .library import _PACKAGE, _find_nvcc, _oldest_arch, _output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from .__main__ import Commands

_DESCRIPTION = """\
Shows what is found of all that msops needs, what is wrong, and the commands that mend it; runs an operator on each
device. The exit status is 0 if a device works, else 1."""

_PYTHONS = (3, 9), (3, 12)
_MINDSPORE = "mindspore>=2.7,<2.11"
# MindSpore's wheels are built against NumPy 1, and need what SciPy 1.14 removed.
_BELOW = {"NumPy": "2", "SciPy": "1.14"}
_OLDEST_GPU = 70
# What MindSpore's GPU backend links of CUDA; the wheels of the extra [gpu] have all of it.
_CUDA = "cublas", "cudart", "cudnn", "cufft", "curand", "cusolver", "cusparse", "nvrtc"
_SECONDS = 300  # for a process

# Prints how far it came, and the error that stopped it.
_SMOKE_RUN = """
import sys
sys.path[:] = {path!r}
try:
    import mindspore
    import numpy as np
    print("imported", flush=True)
    from msops.compat import set_device
    set_device({device!r})
    import msops
    x = np.array([-1, 0, 1], np.float32)
    y = msops.sigmoid(mindspore.Tensor(x)).asnumpy()
    if not np.allclose(y, 1 / (1 + np.exp(-x))):
        raise ValueError(f"sigmoid gave {{y}} of {{x}}")
    print("passed", flush=True)
except BaseException as error:
    print("error", type(error).__name__ + ": " + " ".join(str(error).partition("\\n\\n")[0].split()), flush=True)
"""


class Finding(NamedTuple):
    """One line, and the commands that mend it. `state` is "ok", "wrong", or "none" of what need not be there."""

    what: str
    state: str
    text: str
    mend: tuple[str, ...] = ()


def add_command(commands: Commands) -> None:
    """Adds `doctor` to the sub-parsers of a command line."""
    parser = commands.add_parser(
        "doctor", help="show what is found, what is wrong, and what mends it", description=_DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> NoReturn:
    findings = examine()
    devices = [finding.what for finding in findings if finding.what in ("CPU", "GPU") and finding.state == "ok"]
    if options.json:
        print(json.dumps({"devices": devices, "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        for what, state, text, mend in findings:
            print(f"{state:5}  {what:9}  {text}")
            for command in mend if state == "wrong" else ():
                print(f"{'':18}{command}")
        print(f"msops works on {' and '.join(devices) or 'no device'}.")
    sys.exit(not devices)


def examine() -> list[Finding]:
    """All findings, in the order in which one needs the other."""
    cards = _cards()
    capabilities = [int(major + minor) for _, major, minor, _ in cards]
    nvcc = _nvcc(capabilities)
    on_cpu, imported = _smoke("CPU")
    return [
        _python(),
        _mindspore(imported),
        *(_module(name, bound) for name, bound in _BELOW.items()),
        _driver(cards),
        nvcc,
        *_libraries(capabilities, nvcc),
        *_cuda11(capabilities),
        on_cpu,
        _smoke("GPU")[0] if cards else Finding("GPU", "none", "not tried"),
    ]


def _python() -> Finding:
    text = f"{platform.python_version()}, {sys.executable}"
    if _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        return Finding("Python", "ok", text)
    oldest, newest = (".".join(map(str, version)) for version in _PYTHONS)
    other = f"python{newest} -m venv .venv && .venv/bin/pip install .  # in msops' source folder"
    return Finding("Python", "wrong", f"{text}: must be {oldest} to {newest}", (other,))


def _mindspore(imported: bool) -> Finding:
    version = _version("mindspore")
    wanted = [_MINDSPORE, *(f"{name.lower()}<{bound}" for name, bound in _BELOW.items())]
    if not imported and version is None:
        return Finding("MindSpore", "wrong", "not installed", _pip(*wanted))
    if not imported:
        return Finding("MindSpore", "wrong", f"{version} cannot be imported", _pip("--force-reinstall", *wanted))
    backends = ["CPU", *(f"GPU with CUDA {major}.{minor}" for major, minor in sorted(_plugins()))]
    return Finding("MindSpore", "ok", f"{version}, backends: {', '.join(backends)}")


def _module(name: str, bound: str) -> Finding:
    version, mend = _version(name.lower()), _pip(f"{name.lower()}<{bound}")
    if version is None:
        return Finding(name, "wrong", "not installed", mend)
    if _numbers(version) >= _numbers(bound):
        return Finding(name, "wrong", f"{version}: MindSpore needs one below {bound}", mend)
    return Finding(name, "ok", version)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _pip(*requirements: str) -> tuple[str]:
    return (f"{shlex.quote(sys.executable)} -m pip install {shlex.join(requirements)}",)


def _extra(name: str) -> tuple[str]:
    """The command that installs what an extra has. By its name alone pip takes a package that is installed."""
    if _version("msops"):
        return _pip(f"msops[{name}]")
    return (f"{_pip(f'.[{name}]')[0]}  # in msops' source folder",)


def _cards() -> list[tuple[str, str, str, str]]:
    """Name, capability's two numbers and driver of each GPU."""
    text = _output("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    return re.findall(r"^(.+), (\d+)\.(\d+), (.+)$", text, re.MULTILINE)


def _cuda_of_driver() -> str:
    """The newest CUDA whose programs the driver runs, as in "13.0"; "" if that is not known."""
    version = re.search(r"CUDA Version: *(\d+\.\d+)", _output("nvidia-smi"))
    return version[1] if version else ""


def _driver(cards: list[tuple[str, str, str, str]]) -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("driver", "none", "no nvidia-smi on the PATH, so no GPU")
    if not cards:
        said = " ".join(_output("nvidia-smi").split())[:200]
        return Finding("driver", "wrong", f"nvidia-smi finds no GPU: {said}", ("sudo modprobe nvidia",))
    names = ", ".join(f"{name} (sm_{major}{minor})" for name, major, minor, _ in cards)
    text = f"{cards[0][-1]} for CUDA up to {_cuda_of_driver() or '?'}; {names}"
    if all(int(major + minor) < _OLDEST_GPU for _, major, minor, _ in cards):
        return Finding("driver", "wrong", f"{text}: must be sm_{_OLDEST_GPU} or newer")
    return Finding("driver", "ok", text)


def _nvcc(capabilities: list[int]) -> Finding:
    nvcc = _find_nvcc()
    if os.environ.get("NVCC") == "":
        return Finding("nvcc", "none", "switched off: the environment variable NVCC is empty", ("unset NVCC",))
    version, archs = (_output(nvcc, option) if nvcc else "" for option in ("--version", "--list-gpu-arch"))
    release = re.search(r"release ([\d.]+)", version)
    supported = [capability for capability in capabilities if capability >= _OLDEST_GPU]
    if not nvcc:
        text = "none on the PATH or in CUDA_HOME, so that msops.load compiles for the CPU alone"
    elif not release or "compute_" not in archs:
        text = f"{nvcc} does not compile"
    elif supported and min(supported) < _oldest_arch(nvcc):
        text = f"{release[1]}, {nvcc}, is too new for sm_{min(supported)}"
    else:
        return Finding("nvcc", "ok", f"{release[1]}, {nvcc}")
    others = [f"export NVCC={path}" for path in sorted(Path("/usr/local").glob("cuda-*/bin/nvcc")) if str(path) != nvcc]
    mend = others[-1:] or ["# install the CUDA toolkit: https://developer.nvidia.com/cuda-toolkit-archive"]
    return Finding("nvcc", "wrong" if capabilities else "none", text, tuple(mend))


def _libraries(capabilities: list[int], nvcc: Finding) -> Iterator[Finding]:
    """A finding for all libraries of which the same is to say."""
    source = _PACKAGE.parent
    make = f"make -C {shlex.quote(str(source))} -B all"
    if not (source / "Makefile").is_file():
        make = f"{_pip('--force-reinstall', '--no-deps', '.')[0]}  # in msops' source folder"
    groups: dict[tuple[str, str], list[str]] = {}
    for module in sorted((_PACKAGE / "operators").glob("[!_]*.py")):
        groups.setdefault(_library(_PACKAGE / "lib" / f"{module.stem}.so", capabilities), []).append(module.stem)
    for (state, text), names in groups.items():
        first = nvcc.mend if nvcc.state != "ok" and capabilities else ()
        yield Finding("libraries", state, f"{', '.join(names)}: {text}", (*first, make) if state == "wrong" else ())


def _library(path: Path, capabilities: list[int]) -> tuple[str, str]:
    """State and text of a finding."""
    if not path.is_file():
        return "wrong", "not built"
    load = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError as error: print(error)"
    failure = _process(load, str(path))
    if failure:
        return "wrong", f"cannot be loaded: {failure.removeprefix(f'{path}: ')}"
    code = path.read_bytes()
    machine, portable = _architectures(code)
    stamp = re.search(rb"msops: ((nvcc [\d.]+, )?C\+\+ compiler [^\0]+)\0", code)
    compiler = stamp[1].decode() if stamp else "an unknown compiler"
    text = "for the CPU" + "".join(f", sm_{arch}" for arch in machine) + "".join(f", PTX {arch}" for arch in portable)
    text += f"; by {compiler}"
    if not capabilities:
        return "ok", text
    if not machine + portable:
        return "wrong", f"{text}; not for the GPU"
    for capability in capabilities:
        # Machine code runs on later GPUs of the same generation, PTX on all later ones.
        same = any(arch <= capability and arch // 10 == capability // 10 for arch in machine)
        if not same and not any(arch <= capability for arch in portable):
            return "wrong", f"{text}; not for sm_{capability}"
    nvcc, driver = re.match(r"nvcc (\d+)", compiler), _cuda_of_driver()
    if nvcc and driver and int(nvcc[1]) > float(driver):
        return "wrong", f"{text}; the driver is for CUDA up to {driver}"
    return "ok", text


def _architectures(code: bytes) -> tuple[list[int], list[int]]:
    """Those that a library has machine code for, and those of its PTX."""
    found: dict[int, set[int]] = {1: set(), 2: set()}  # PTX, machine code
    # Each fat binary: magic number, version, size of this header, and of what follows, which is of header and content.
    for fat in re.finditer(rb"\x50\xed\x55\xba\x01\0\x10\0(.{8})", code, re.DOTALL):
        at, end = fat.end(), fat.end() + int.from_bytes(fat[1], "little")
        while at < end:
            kind, header, size, arch = struct.unpack_from("<HxxIQ12xI", code, at)
            found.setdefault(kind, set()).add(arch)
            at += header + size
    return sorted(found[2]), sorted(found[1])


def _process(code: str, *arguments: str) -> str:
    """What a Python process printed, and how it crashed if so."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no end in {_SECONDS} s"
    if done.returncode < 0:
        return f"{done.stdout}\ncrash: {signal.Signals(-done.returncode).name}".strip()
    return done.stdout.strip()


def _plugins() -> dict[tuple[int, ...], Path]:
    """MindSpore's GPU backends: version of CUDA -> path."""
    paths = [path for folder in _folders("mindspore") for path in folder.glob("lib/plugin/libmindspore_gpu.so.*")]
    return {tuple(_numbers(path.name)): path for path in paths}


def _folders(package: str) -> list[Path]:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def _cuda11(capabilities: list[int]) -> Iterator[Finding]:
    """Whether MindSpore takes a GPU backend, and finds the CUDA libraries of that."""
    plugins = _plugins()
    if not plugins:
        return
    lacking = "wrong" if capabilities else "none"
    home = os.environ.get("CUDA_HOME", "")
    told = re.search(r"release (\d+\.\d+)", _output(f"{home}/bin/nvcc", "--version"))
    release = _numbers(told[1]) if told else [0, 0]
    # MindSpore takes the newest of those not newer than the release that $CUDA_HOME/bin/nvcc tells.
    fitting = [version for version in plugins if version[0] == release[0] and version[1] <= release[1]]
    major, minor = max(fitting or plugins)
    toolkits = [path for path in sorted(Path("/usr/local").glob(f"cuda-{major}.*")) if _numbers(path.name)[1] >= minor]
    if fitting:
        yield Finding("CUDA_HOME", "ok", f"{home}, of CUDA {release[0]}.{release[1]}")
    else:
        text = f"{home}/bin/nvcc does not tell CUDA {major}.{minor}" if home else "not set"
        mend = [f"export CUDA_HOME={path}" for path in toolkits if (path / "bin" / "nvcc").is_file()]
        yield Finding(
            "CUDA_HOME", lacking, f"{text}, so that MindSpore has no GPU", tuple(mend[-1:]) or _home(major, minor)
        )
    yield _cuda_libraries(plugins[major, minor], toolkits, lacking)


def _cuda_libraries(plugin: Path, toolkits: list[Path], lacking: str) -> Finding:
    """Whether the loader finds what a GPU backend links. `lacking` is the state if not."""
    lines = re.findall(r"^\s*(lib([a-z]+)\S*) => (?:(/.*)/.* \(|not found)", _output("ldd", str(plugin)), re.MULTILINE)
    linked = {library: folder for library, name, folder in lines if name in _CUDA}
    missing = [library for library, folder in linked.items() if not folder]
    if not missing:
        folders = ", ".join(sorted(set(linked.values())))
        return Finding("CUDA 11", "ok", f"{len(linked)} libraries in {folders}")
    places = [place for folder in _folders("nvidia") for place in folder.glob("*/lib")]
    places += [path / "lib64" for path in toolkits]
    found = {library: place for place in places for library in missing if (place / library).is_file()}
    mend: tuple[str, ...]
    if len(found) < len(missing):
        mend = *_extra("gpu"), "python -m msops doctor  # tells the LD_LIBRARY_PATH"
    else:
        path = os.pathsep.join(sorted(set(map(str, found.values()))))
        mend = (f'export LD_LIBRARY_PATH="{path}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"',)
    return Finding("CUDA 11", lacking, f"MindSpore's GPU backend misses {', '.join(missing)}", mend)


def _home(major: int, minor: int) -> tuple[str, ...]:
    """Commands for a CUDA_HOME beside the libraries of wheels, which have no nvcc; msops keeps the one that it has."""
    home = f"$HOME/.cache/msops/cuda-{major}.{minor}"
    tells = f"Cuda compilation tools, release {major}.{minor}, V{major}.{minor}.0"
    return (
        f"mkdir -p {home}/bin",
        f"printf '#!/bin/sh\\necho \"{tells}\"\\n' > {home}/bin/nvcc && chmod +x {home}/bin/nvcc",
        f"export CUDA_HOME={home} NVCC={_find_nvcc()}",
    )


def _smoke(device: str) -> tuple[Finding, bool]:
    """The finding of an operator that runs, and whether MindSpore could be imported."""
    printed = _process(_SMOKE_RUN.format(path=sys.path, device=device)).splitlines()
    imported, last = "imported" in printed, printed[-1] if printed else "the process ended early"
    if last == "passed":
        return Finding(device, "ok", "msops.sigmoid works"), imported
    doing = "msops.sigmoid" if imported else "import mindspore"
    return Finding(device, "wrong", f"{doing}: {last.removeprefix('error ')}"), imported
