"""Runs `python -m msops new`, which writes an operator from a template: examples/swish or examples/logsumexp."""

from __future__ import annotations

import argparse
import ast
import contextlib
import keyword
import os
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..__main__ import Commands

_PACKAGE = Path(__file__).resolve().parents[1]
_TEMPLATES = {"elementwise": "swish", "reduction": "logsumexp"}
_DESCRIPTION = """\
Writes an operator that works, to be changed into yours:

  NAME.cu            the formula and its gradient, for the GPU and the CPU
  NAME.py            the operator, as a function and as a Cell
  test_NAME.py       tests against NumPy
  benchmark_NAME.py  times it beside MindSpore's own operators
  README.md          in a new or empty folder only

Nothing is overwritten."""


def add_command(commands: Commands) -> None:
    """Adds `new` to the sub-parsers of a command line."""
    parser = commands.add_parser(
        "new",
        help="write an operator to start from, with gradient, tests and benchmark",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="of the operator, such as my_op")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--elementwise",
        dest="kind",
        action="store_const",
        const="elementwise",
        default="elementwise",
        help="start from a formula of each element: x * sigmoid(x); the default",
    )
    kind.add_argument(
        "--reduction",
        dest="kind",
        action="store_const",
        const="reduction",
        help="start from a reduction of each row: log(sum(e^x)) over the last axis",
    )
    parser.add_argument("--dir", type=Path, metavar="PATH", help="the project's folder; default: ./NAME")
    parser.set_defaults(run=lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    folder = Path(options.name) if options.dir is None else options.dir
    try:
        paths = new(options.name, options.kind, folder)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    for path in paths:
        print(f"wrote {path}")
    print(f"next: python -m pytest {shlex.quote(str(folder / f'test_{options.name}.py'))}")


def new(name: str, kind: str, folder: Path) -> list[Path]:
    """Writes an operator's files, all or none, and returns their paths."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME must be a Python name in lower case, such as my_op, got {name!r}")
    if name in _taken(kind):
        raise ValueError(f"NAME must not be that of a module or of something in the templates, got {name!r}")
    texts = {folder / file: text for file, text in _texts(name, kind).items()}
    if folder.is_dir() and any(folder.iterdir()):
        del texts[folder / "README.md"]
    for path in texts:
        if os.path.lexists(path):
            raise FileExistsError(None, "exists, and is not overwritten", str(path))
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x") as file:
                made.insert(0, path)
                file.write(text)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk has none
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise
    return list(texts)


def _taken(kind: str) -> set[str]:
    """Returns names that an operator cannot have: those of modules that it would hide, and those that its files use."""
    names = {"msops", *sys.builtin_module_names}
    elsewhere = [path for path in sys.path if path not in ("", str(Path.cwd()))]
    names |= {module.name for module in pkgutil.iter_modules(elsewhere)}
    for file, text in _texts(_TEMPLATES[kind], kind).items():
        if file.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                names |= {getattr(node, field, "") for field in ("id", "arg", "name")}
    return names - {_TEMPLATES[kind]}


def _texts(name: str, kind: str) -> dict[str, str]:
    """Returns the text of each file, by its name."""
    template = _TEMPLATES[kind]
    installed = _PACKAGE / "templates"
    folder = (installed if installed.is_dir() else _PACKAGE.parent / "examples") / template
    in_code = "".join(part[:1].upper() + part[1:] for part in name.split("_"))

    def rename(text: str) -> str:
        return text.replace(template, name).replace(template.capitalize(), in_code)

    files = (f"{template}.cu", f"{template}.py", f"test_{template}.py", f"benchmark_{template}.py", "README.md")
    return {rename(file): rename((folder / file).read_text()) for file in files}
