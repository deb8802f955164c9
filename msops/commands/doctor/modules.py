"""Examines Python and the packages that msops needs: MindSpore, NumPy and SciPy."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__, files, pythons
from ...files import PACKAGE
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
    unset,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .smoke import Smoke

# MindSpore's wheels are built against NumPy 1, and need what SciPy 1.14 removed.
BELOW = {"NumPy": "2", "SciPy": "1.14"}
_MINDSPORE = "mindspore>=2.7,<2.11"
_TRIED = "1.10", "2.0", "2.7", "2.8", "2.9", "2.10"


def msops() -> Finding:
    complaint, mend = files.complaint()
    text = f"{__version__}, {PACKAGE}"
    return Finding("msops", "wrong", f"{text}; {complaint}", mend) if complaint else Finding("msops", "ok", text)


def operators(smoke: Smoke, *causes: Finding) -> Iterator[Finding]:
    """Yields a finding for each error of `msops.NAME`. A wrong line of `causes` has the commands already."""
    explained = any(finding.state == "wrong" for finding in causes)
    names: dict[str, list[str]] = {}
    for name, error in smoke.broken:
        names.setdefault(error, []).append(name)
    changed = files.git_files("--modified", "msops") if names and files.source() else []
    mend = (files.checkout(changed, "  # unless the changes are yours"),) if changed else ()
    if not files.source():
        mend = (files.reinstall(),)
    for error, broken in names.items():
        yield Finding("operators", "wrong", f"{', '.join(broken)}: {error}", () if explained else mend)


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
    hiding = _hiding(name.lower(), [importlib.metadata.distribution(name.lower())])
    if hiding:
        return Finding(name, "wrong", f"{version}, but {hiding} is imported instead", (_move(hiding),))
    if numbers(version) >= numbers(bound):
        return Finding(name, "wrong", f"{version}: MindSpore needs one below {bound}", mend)
    return Finding(name, "ok", version)


def mindspore(smoke: Smoke) -> Finding:
    """Examines the MindSpore that is installed. No suggested command replaces it by another version."""
    found = _distributions()
    there = {name: distribution.version for name, distribution in found.items()}
    text = " and ".join(f"{name} {version}" for name, version in there.items())
    if len(there) > 1:
        again = "  # or ".join(pip("install", f"{name}=={version}") for name, version in there.items())
        return Finding("MindSpore", "wrong", f"{text} overwrite each other", (pip("uninstall", "--yes", *there), again))
    hiding = _hiding("mindspore", found.values())
    if hiding:
        return Finding("MindSpore", "wrong", f"{text}, but {hiding} is imported instead", (_move(hiding),))
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
    return Finding("MindSpore", "wrong", text, unset(smoke.culprits) or _mend(there, smoke.error))


def device(smoke: Smoke) -> Finding:
    """Returns the finding of a device. A MindSpore that could be imported may lack a package that it needs later."""
    if smoke.version and smoke.culprits:
        return smoke.finding._replace(mend=unset(smoke.culprits))
    late = bool(smoke.version) and smoke.error.startswith("ModuleNotFoundError")
    there = {name: distribution.version for name, distribution in _distributions().items()}
    return smoke.finding._replace(mend=_mend(there, smoke.error)) if late else smoke.finding


def _hiding(package: str, distributions: Iterable[importlib.metadata.Distribution]) -> str:
    """Returns the file that is imported in the place of a distribution's package; "" if there is none.

    It lies in a folder that Python searches earlier, such as the working folder.
    """
    there = [Path(str(distribution.locate_file(package))) for distribution in distributions]
    spec = PathFinder.find_spec(package)
    if not spec or not spec.origin or not any(path.is_dir() for path in there):
        return ""
    imported = Path(spec.origin).resolve()
    return "" if any(path.resolve() in imported.parents for path in there) else str(Path(spec.origin).absolute())


def _move(path: str) -> str:
    """Returns the command that gives a module, or the folder of a package, a name that hides no other module."""
    module = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
    return f"mv -n {shlex.quote(str(module))} {shlex.quote(str(module.with_name(f'my_{module.name}')))}"


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
