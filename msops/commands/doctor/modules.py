"""Examines Python and the packages that msops needs: MindSpore, NumPy and SciPy."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from typing import TYPE_CHECKING

from ... import __version__, pythons
from ...core.library import PACKAGE
from .cuda11 import LIBRARIES, export, plugins
from .finding import (
    AGAIN,
    Finding,
    dotted,
    extra,
    folders,
    installed,
    missing_library,
    numbers,
    pip,
    system_package,
)

if TYPE_CHECKING:
    from .smoke import Smoke

# MindSpore's wheels are built against NumPy 1, and need what SciPy 1.14 removed.
BELOW = {"NumPy": "2", "SciPy": "1.14"}
_MINDSPORE = "mindspore>=2.7,<2.11"
_TRIED = "1.10", "2.0", "2.7", "2.8", "2.9", "2.10"


def msops() -> Finding:
    return Finding("msops", "ok", f"{__version__}, {PACKAGE}")


def python() -> Finding:
    complaint = pythons.complaint()
    if complaint:
        return Finding("Python", "wrong", complaint, (pythons.another(),))
    return Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def module(name: str) -> Finding:
    bound, version = BELOW[name], installed(name.lower())
    mend = (pip("install", f"{name.lower()}<{bound}"),)
    if version is None:
        return Finding(name, "wrong", "not installed", mend)
    if numbers(version) >= numbers(bound):
        return Finding(name, "wrong", f"{version}: MindSpore needs one below {bound}", mend)
    return Finding(name, "ok", version)


def mindspore(smoke: Smoke) -> Finding:
    """Examines the MindSpore that is installed. No suggested command replaces it by another version."""
    there = _distributions()
    text = " and ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        again = "  # or ".join(pip("install", f"{name}=={version}") for name, version in there.items())
        return Finding("MindSpore", "wrong", f"{text} overwrite each other", (pip("uninstall", "--yes", *there), again))
    if not text and folders("mindspore"):
        text = f"in {folders('mindspore')[0]}"
    if smoke.version:
        backends = ["CPU", *(f"GPU with CUDA {dotted(version) or '11'}" for version in sorted(plugins()))]
        text = f"{text if there else f'{smoke.version} {text}'}, backends: {', '.join(backends)}"
        if dotted(numbers(smoke.version)[:2]) not in _TRIED:
            text += f"; msops was tried with {', '.join(_TRIED)} only"
        return Finding("MindSpore", "ok", text)
    if not text and smoke.error.endswith("No module named 'mindspore'"):
        return Finding("MindSpore", "wrong", "not installed", (pip("install", _MINDSPORE, *_bounds()),))
    text = f"{text} cannot be imported: {smoke.error}".lstrip()
    return Finding("MindSpore", "wrong", text, _mend(there, smoke.error))


def device(smoke: Smoke) -> Finding:
    """Returns the finding of a device. A MindSpore that could be imported may lack a package that it needs later."""
    late = bool(smoke.version) and smoke.error.startswith("ModuleNotFoundError")
    return smoke.finding._replace(mend=_mend(_distributions(), smoke.error)) if late else smoke.finding


def _bounds() -> list[str]:
    return [f"{name.lower()}<{bound}" for name, bound in BELOW.items()]


def _distributions() -> dict[str, str]:
    """Returns the version of each distribution that has the package mindspore, by the distribution's name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith("mindspore") and "mindspore" in (distribution.read_text("top_level.txt") or "").split():
            found.setdefault(name, distribution.version)
    return found


def _mend(there: dict[str, str], error: str) -> tuple[str, ...]:
    """Returns the commands that mend an error of `import mindspore`. `there` has the version of each distribution."""
    if len(there) != 1:
        return ()
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
