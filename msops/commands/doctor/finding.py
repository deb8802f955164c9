"""Defines one line of the report, and the helpers that all parts of the doctor use."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

AGAIN = f"{shlex.quote(sys.executable)} -m msops doctor  # tells what is then to do"

_FILES = 1024  # that MindSpore and msops may open


class Finding(NamedTuple):
    """One line, and the commands that mend it. `state` is "ok", "wrong", or "none" for what may be missing."""

    what: str
    state: str
    text: str
    mend: tuple[str, ...] = ()


def output(*command: str, seconds: float = 60, env: Mapping[str, str] | None = None) -> str:
    """Returns what a command prints to standard output, and how it ended if a signal or the time limit ended it."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace", env=env
        )
    except OSError as error:
        return str(error) if error.errno == errno.EMFILE else ""
    try:
        printed = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # no wait follows, since a driver that hangs may keep the process
        return f"no answer in {seconds:g} s"
    if process.returncode < 0:
        return f"{printed}\ncrash: {signal.Signals(-process.returncode).name}".strip()
    return printed.strip()


def culprits(suspects: set[str], works: Callable[[Mapping[str, str]], bool]) -> list[str]:
    """Returns the environment variables without which something works; [] if it does not work without all suspects."""
    left = [name for name in os.environ if name in suspects]

    def works_without(names: list[str]) -> bool:
        return works({name: value for name, value in os.environ.items() if name not in names})

    if not left or not works_without(left):
        return []
    while len(left) > 1:
        halves = left[: len(left) // 2], left[len(left) // 2 :]
        fewer = next((half for half in halves if works_without(half)), None)
        if not fewer:
            break
        left = fewer
    for name in left if len(left) > 1 else ():  # several are needed
        rest = [other for other in left if other != name]
        if works_without(rest):
            left = rest
    return left


def tell(doing: str) -> None:
    """Says on a terminal what takes a while."""
    if sys.stderr.isatty():
        print(f"...    {doing}", file=sys.stderr, flush=True)


def unset(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"unset {name}" for name in names)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed(distribution: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def folders(package: str) -> list[Path]:
    """Returns the folders of a package, without importing it."""
    spec = PathFinder.find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]


def pip(*arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip {shlex.join(arguments)}"


def installs(command: str) -> bool:
    """Tells whether a command installs something, or builds it again."""
    return " -m pip " in command or "make -C " in command


def extra(name: str) -> str:
    """Returns the command that installs an extra. pip knows it by name only if msops is installed."""
    if installed("msops"):
        return pip("install", f"msops[{name}]")
    return f"{pip('install', f'.[{name}]')}  # in msops' source folder"


def few_files(error: str) -> tuple[str, ...]:
    """Returns the command that lets a process open more files, if the error says that it may not."""
    if "Too many open files" not in error:
        return ()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < _FILES:  # a shell may not raise this one
        return (f"# open another shell: the processes of this one may open {most} files at most",)
    return (f"ulimit -S -n {_FILES}",)


def missing_library(error: str) -> str:
    """Returns the library that the loader did not find, or "" if the error says something else."""
    found = re.search(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file: No such", error)
    return found[1] if found else ""


def system_package(library: str) -> str:
    """Returns the command that installs a library of the system; Debian's rule for names gives the package."""
    package = re.sub(r"\.so\.?", "", library).lower()
    return f"apt install {package}  # elsewhere the package that has {library}"
