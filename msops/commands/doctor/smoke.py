"""Runs an operator on a device, in another process, since MindSpore may be what is broken."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import imports
from .finding import Finding, culprits, output, tell

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = 300
# The program prints how far it came, and the error that stopped it.
_RUN = """
import sys
sys.path[:] = {path!r}

def line(error):
    return type(error).__name__ + ": " + " ".join(str(error).partition("\\n\\n")[0].split())

def files():
    for name, module in [*sys.modules.items()]:
        if "." not in name and getattr(module, "__file__", None):
            print("file", name, module.__file__, flush=True)

try:
    import mindspore
    import numpy as np
    print("imported", mindspore.__version__, flush=True)
    from msops.compat import set_device
    set_device({device!r})
    import msops
    broken = {{}}
    for name in msops.__all__:
        try:
            getattr(msops, name)
        except Exception as error:
            broken[name] = error
            print("broken", name, line(error), flush=True)
    if broken:
        files()
    x = np.array([-1, 0, 1], np.float32)
    s = 1 / (1 + np.exp(-x))
    # One of them may lack its library.
    name, want = ("silu", x * s) if "sigmoid" in broken else ("sigmoid", s)
    if name in broken:
        raise broken[name]
    y = getattr(msops, name)(mindspore.Tensor(x)).asnumpy()
    if not np.allclose(y, want):
        raise ValueError(f"{{name}} gave {{y}} of {{x}}")
    print("passed", name, flush=True)
except BaseException as error:
    print("error", line(error), flush=True)
    files()
"""


class Smoke(NamedTuple):
    """The result. `version` is the version of the MindSpore that was imported, or "" if none was.

    `broken` has the name and the error of each public name that cannot be had, `culprits` the environment variables
    without which more works, and `hiding` the files of the working folder without which more does.
    """

    finding: Finding
    version: str
    error: str
    broken: tuple[tuple[str, str], ...] = ()
    culprits: tuple[str, ...] = ()
    hiding: tuple[str, ...] = ()


def run(device: str) -> Smoke:
    """Runs an operator. Where it or a public name fails, more runs find out what in this environment is the cause."""
    tell(f"runs an operator on the {device}")
    tried = _try(device)
    runs = tried.finding.state == "ok"
    if (runs and not tried.broken) or "no answer" in tried.error:
        return tried

    def better(other: Smoke) -> bool:
        return other.finding.state == "ok" and (not runs or len(other.broken) < len(tried.broken))

    tell(f"looks for what keeps the {device} from working, by more runs")
    if tried.hiding:
        if better(_try(device, path=_elsewhere())):
            return tried
        tried = tried._replace(hiding=())
    # A variable that breaks single libraries is found where they are examined.
    suspects = {"PYTHONPATH"} if runs else {*os.environ} - {"HOME", "PATH", "TMPDIR"}
    guilty = culprits(suspects, lambda env: better(_try(device, env)))
    return tried._replace(culprits=tuple(guilty))


def _elsewhere() -> list[str]:
    """Returns the folders that Python searches, without the working folder."""
    return [folder for folder in sys.path if folder not in imports.here()]


def _try(device: str, env: Mapping[str, str] | None = None, path: list[str] | None = None) -> Smoke:
    if env is not None and "PYTHONPATH" not in env:
        path = [folder for folder in sys.path if folder not in imports.given() - imports.here()]
    code = _RUN.format(path=sys.path if path is None else path, device=device)
    printed = output(sys.executable, "-c", code, seconds=_SECONDS, env=env).splitlines()
    version = next((line.split()[1] for line in printed if line.startswith("imported ")), "")
    broken = tuple(re.findall(r"^broken (\w+) (.*)", "\n".join(printed), re.MULTILINE))
    loaded = re.findall(r"^file (\w+) (.*)", "\n".join(printed), re.MULTILINE)
    last = printed[-1] if printed else "the process ended early"
    if last.startswith("passed "):
        works = Finding(device, "ok", f"msops.{last.split()[1]} works")
        return Smoke(works, version, "", broken, hiding=_hiding(loaded))
    # MindSpore 1.10 crashes at exit after an import that failed.
    error = next((line.removeprefix("error ") for line in printed if line.startswith("error ")), last)
    doing = "msops" if version else "import mindspore"
    return Smoke(Finding(device, "wrong", f"{doing}: {error}"), version, error, broken, hiding=_hiding(loaded))


def _hiding(loaded: list[tuple[str, str]]) -> tuple[str, ...]:
    """Returns which files of modules lie in the working folder, though Python has such a module elsewhere, too.

    msops itself may lie there, as its source folder does.
    """
    files = {name: Path(file) for name, file in loaded if name != "msops"}
    folders = {name: file.parents[file.name == "__init__.py"] for name, file in files.items()}
    found = [name for name, folder in folders.items() if str(folder) in imports.here()]
    return tuple(str(files[name]) for name in found if PathFinder.find_spec(name, _elsewhere()))
