"""Examines Python and the packages that msops needs: MindSpore, NumPy and SciPy."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__, files, pythons
from ...files import PACKAGE
from . import imports
from .cuda11 import LIBRARIES, export, plugins
from .finding import (
    AGAIN,
    Finding,
    dotted,
    extra,
    few_files,
    folders,
    missing_library,
    numbers,
    pip,
    system_package,
    unset,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .smoke import Smoke

# MindSpore's wheels are built against NumPy 1, and need what SciPy 1.14 removed.
BELOW = {"NumPy": "2", "SciPy": "1.14"}
_MINDSPORE = "mindspore>=2.7,<2.11"
_TRIED = "1.10", "2.0", "2.7", "2.8", "2.9", "2.10"
_UNKNOWN = "(its dist-info is missing, so that pip does not know it)"
_MANY = 3  # errors of public names that have lines of their own


def msops() -> Finding:
    text = f"{__version__}, {PACKAGE}"
    other = imports.hiding("msops", importlib.metadata.distributions(name="msops")) if not files.source() else ""
    if other:
        text += "; pip installed another one, but this is imported instead"
        return Finding("msops", "wrong", text, (imports.away(other),))
    complaint, mend = files.complaint()
    return Finding("msops", "wrong", f"{text}; {complaint}", mend) if complaint else Finding("msops", "ok", text)


def operators(smoke: Smoke, *causes: Finding) -> Iterator[Finding]:
    """Yields a finding for each error of `msops.NAME`. A wrong line of `causes` has the commands already."""
    explained = any(finding.state == "wrong" for finding in causes)
    names: dict[str, list[str]] = {}
    for name, error in smoke.broken:
        names.setdefault(error, []).append(name)
    if len(names) > _MANY:
        names = {f"{next(iter(names))}; and {len(names) - 1} other errors": [name for name, _ in smoke.broken]}
    changed = files.git_files("--modified", "msops") if names and files.source() else []
    mend = (files.checkout(changed, "  # unless the changes are yours"),) if changed else ()
    for error, broken in names.items():
        text = f"{', '.join(broken)}: {error}"
        yield Finding("operators", "wrong", text, () if explained else _mend_later(smoke, error) or mend)


def python() -> Finding:
    complaint = pythons.complaint()
    if complaint:
        return Finding("Python", "wrong", complaint, (pythons.another(),))
    return Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def hidden(name: str) -> Finding | None:
    """Returns a finding if a file is imported in the place of a package that is installed."""
    package, found = name.lower(), _named(name.lower())[:1]
    if package == "mindspore":
        found = [*_distributions().values()]
    hiding = imports.hiding(package, found)
    if not hiding:
        return None
    text = " and ".join(f"{distribution.metadata['Name']} {distribution.version}" for distribution in found)
    return Finding(name, "wrong", f"{text}, but {hiding} is imported instead", (imports.away(hiding),))


def _named(package: str) -> list[importlib.metadata.Distribution]:
    return [*importlib.metadata.distributions(name=package)]


def module(name: str) -> Finding:
    bound, distribution = BELOW[name], next(iter(_named(name.lower())), None)
    mend = (pip("install", f"{name.lower()}<{bound}"),)
    if distribution is None:
        there = folders(name.lower())
        return Finding(name, "wrong", f"in {there[0]} {_UNKNOWN}" if there else "not installed", mend)
    version = distribution.version
    if numbers(version) >= numbers(bound):
        if imports.is_given(Path(str(distribution.locate_file("")))):
            mend = (imports.PYTHONPATH,)
        return Finding(name, "wrong", f"{version}: MindSpore needs one below {bound}", mend)
    return Finding(name, "ok", version)


def mindspore(smoke: Smoke) -> Finding:
    """Examines the MindSpore that is installed. No suggested command replaces it by another version."""
    known, there = _distributions(), _versions()
    text = " and ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        again = "  # or ".join(pip("install", f"{name}=={version}") for name, version in there.items())
        return Finding("MindSpore", "wrong", f"{text} overwrite each other", (pip("uninstall", "--yes", *there), again))
    if not known and folders("mindspore"):
        text = f"{text} in {folders('mindspore')[0]} {_UNKNOWN}".lstrip()
    if smoke.version:
        backends = ["CPU", *(f"GPU with CUDA {dotted(version) or '11'}" for version in sorted(plugins()))]
        text = f"{text if there else f'{smoke.version} {text}'}, backends: {', '.join(backends)}"
        if dotted(numbers(smoke.version)[:2]) not in _TRIED:
            text += f"; msops was tried with {', '.join(_TRIED)} only"
        return Finding("MindSpore", "ok", text)
    if not text and smoke.error.endswith("No module named 'mindspore'"):
        return Finding("MindSpore", "wrong", "not installed", (pip("install", _MINDSPORE, *_bounds()),))
    text = f"{text} cannot be imported: {smoke.error}".lstrip()
    return Finding("MindSpore", "wrong", text, _of_here(smoke) or _mend(there, smoke.error))


def device(smoke: Smoke) -> Finding:
    """Returns the finding of a device. A MindSpore that could be imported may lack a package that it needs later."""
    wrong = smoke.version and smoke.finding.state == "wrong"
    return smoke.finding._replace(mend=_mend_later(smoke, smoke.error)) if wrong else smoke.finding


def _mend_later(smoke: Smoke, error: str) -> tuple[str, ...]:
    """Returns the commands that mend an error that came after the import of MindSpore."""
    lacks_module = re.match(r"ModuleNotFoundError: No module named '(?!msops\b)", error)
    mend = _of_here(smoke) or few_files(error) or _mend_damaged()
    return mend or (_mend(_versions(), error) if lacks_module else ())


def _of_here(smoke: Smoke) -> tuple[str, ...]:
    """Returns the commands that end what breaks MindSpore in this folder and with these environment variables alone."""
    return (*map(imports.away, smoke.hiding), *unset(smoke.culprits))


def _bounds() -> list[str]:
    return [f"{name.lower()}<{bound}" for name, bound in BELOW.items()]


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """Returns each distribution that has the package mindspore, by its name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        packages = (distribution.read_text("top_level.txt") or "").split()
        packages += re.findall(r"^(\w+)/__init__\.py,", distribution.read_text("RECORD") or "", re.MULTILINE)
        if name.lower().startswith("mindspore") and "mindspore" in packages:
            found.setdefault(name, distribution)
    return found


def _versions() -> dict[str, str]:
    """Returns the version of each distribution of MindSpore or, where pip knows none, what the package itself tells."""
    known = {name: distribution.version for name, distribution in _distributions().items()}
    files = [] if known else [folder / "version.py" for folder in folders("mindspore")]
    told = [re.search(r"__version__ = '([\d.]+)'", file.read_text()) for file in files if file.is_file()]
    return known or {"mindspore-gpu" if () in plugins() else "mindspore": each[1] for each in told if each}


def _mend_damaged() -> tuple[str, ...]:
    """Returns the command that installs again, of MindSpore and what it requires, what is not as pip installed it.

    Two MindSpores, which overwrite each other, have a line of their own.
    """
    known = [*_distributions()]
    waiting, seen, damaged = known if len(known) == 1 else [], set(), []
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        for distribution in _named(name)[: name not in seen]:
            required = [each for each in distribution.requires or () if "extra ==" not in each]
            waiting += re.findall(r"^[\w.-]+", "\n".join(required), re.MULTILINE)
            if not _is_whole(distribution):
                damaged.append(f"{distribution.metadata['Name']}=={distribution.version}")
        seen.add(name)
    return (pip("install", "--force-reinstall", "--no-deps", *sorted(damaged)),) if damaged else ()


def _is_whole(distribution: importlib.metadata.Distribution) -> bool:
    """Tells whether the files of a distribution can be read and have their sizes.

    Their digests are not compared, since MindSpore's files have some gigabytes.
    """
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    # Python may write __pycache__ again, and files beside the packages, such as commands, have names with "..".
    sizes = {file: int(size) for file, _, size in rows if size and not re.match(r"\.|.*__pycache__", file)}
    paths = {Path(str(distribution.locate_file(file))): size for file, size in sizes.items()}
    return all(os.access(path, os.R_OK) and path.stat().st_size == size for path, size in paths.items())


def _mend(there: dict[str, str], error: str) -> tuple[str, ...]:
    """Returns the commands that mend an error of `import mindspore`. `there` has the version of each distribution."""
    mend = few_files(error) or _mend_damaged()
    if mend or len(there) != 1:
        return mend
    ((name, version),) = there.items()
    requirement = f"{name}=={version}"
    old = ("pillow<10",) if numbers(version) < (2, 7) else ()  # these use what Pillow 10 removed
    if "'PIL.Image' has no attribute" in error:
        return (pip("install", "pillow<10"),)
    # pip installs what MindSpore depends on, but the newest of it. What MindSpore itself lacks, it does not see.
    if re.match(r"ModuleNotFoundError: No module named '(?!mindspore\b)", error):
        return (pip("install", requirement, *_bounds(), *old),)
    library = missing_library(error)
    name = re.sub(r"^lib|\.so.*", "", library)
    if name in LIBRARIES:
        runtime = pip("install", "nvidia-cuda-runtime-cu11") if name == "cudart" else extra("gpu")
        return export([library]) or (runtime, AGAIN)
    if library:
        return (system_package(library),)
    return (pip("install", "--force-reinstall", "--no-deps", requirement),)
