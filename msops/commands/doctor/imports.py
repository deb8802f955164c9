"""Finds what Python imports in the place of what msops needs: files of the working folder, and PYTHONPATH's folders."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import importlib.metadata
    from collections.abc import Iterable

PYTHONPATH = "unset PYTHONPATH"
_MOVE = "mv -n "


def here() -> set[str]:
    """Returns how Python names the working folder among those that it searches."""
    return {"", os.getcwd()}  # noqa: PTH109 (as a string)


def given() -> set[str]:
    """Returns the folders that PYTHONPATH names."""
    return {str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}


def is_given(folder: Path) -> bool:
    """Tells whether PYTHONPATH names the folder, which then pip does not change."""
    return str(folder.absolute()) in given() - here()


def hiding(package: str, distributions: Iterable[importlib.metadata.Distribution]) -> str:
    """Returns the file that is imported in the place of a distribution's package; "" if there is none.

    It lies in a folder that Python searches earlier, such as the working folder.
    """
    there = [Path(str(distribution.locate_file(package))) for distribution in distributions]
    spec = PathFinder.find_spec(package)
    if not spec or not spec.origin or not any(path.is_dir() for path in there):
        return ""
    imported = Path(spec.origin).resolve()
    return "" if any(path.resolve() in imported.parents for path in there) else str(Path(spec.origin).absolute())


def of_python() -> list[str]:
    """Returns the files that a program imports in the place of Python's own modules, of those that the doctor uses."""
    standard = Path(os.__file__).parent
    folders = [folder for folder in sys.path if folder in here() | given()]
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file and standard in [*Path(file).parents][:2]:
            spec = PathFinder.find_spec(name, folders)
            if spec and spec.origin and not Path(spec.origin).samefile(file):
                found.append(str(Path(spec.origin).absolute()))
    return found


def away(path: str) -> str:
    """Returns the command after which Python does not import this file any more, and nothing else is overwritten."""
    module = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
    if is_given(module.parent):
        return PYTHONPATH
    to = module.with_name(f"my_{module.name}")
    while to.exists():
        to = to.with_name(f"my_{to.name}")
    return f"{_MOVE}{shlex.quote(str(module))} {shlex.quote(str(to))}"


def is_first(command: str) -> bool:
    """Tells whether what pip installs is found only once this command was run."""
    return command.startswith((PYTHONPATH, _MOVE))
