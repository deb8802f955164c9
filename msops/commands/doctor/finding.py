"""One line of the report, and what all parts of the doctor use to find out."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import signal
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from ...core.library import PACKAGE

AGAIN = "python -m msops doctor  # tells what is then to do"


class Finding(NamedTuple):
    """One line, and the commands that mend it. `state` is "ok", "wrong", or "none" of what need not be there."""

    what: str
    state: str
    text: str
    mend: tuple[str, ...] = ()


def output(*command: str, seconds: float = 60) -> str:
    """What a command prints, without its errors, and how it ended if not by itself."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
    except OSError:
        return ""
    try:
        printed = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # nothing waits for its end: a driver that hangs may keep it
        return f"no answer in {seconds:g} s"
    if process.returncode < 0:
        return f"{printed}\ncrash: {signal.Signals(-process.returncode).name}".strip()
    return printed.strip()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed(distribution: str) -> str | None:
    """The version of a distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def folders(package: str) -> list[Path]:
    """Where a package is, without importing it."""
    spec = PathFinder.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def source() -> Path | None:
    """The source folder, if the package that runs lies in it."""
    return PACKAGE.parent if (PACKAGE.parent / "Makefile").is_file() else None


def pip(*arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip {shlex.join(arguments)}"


def extra(name: str) -> str:
    """The command that installs what an extra has. By its name alone pip takes a package that is installed."""
    if installed("msops"):
        return pip("install", f"msops[{name}]")
    return f"{pip('install', f'.[{name}]')}  # in msops' source folder"


def missing_library(error: str) -> str:
    """The library that the loader did not find; empty if that is not what an error says."""
    found = re.search(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file: No such", error)
    return found[1] if found else ""


def system_package(library: str) -> str:
    """The command that installs a library of the system, by Debian's rule for names."""
    package = re.sub(r"\.so\.?", "", library)
    return f"apt install {package}  # elsewhere the package that has {library}"
