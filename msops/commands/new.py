"""Runs `python -m msops new`, which writes an operator from a template: examples/swish or examples/logsumexp.

`make new` runs it with --package, which writes an operator of msops itself from those files of silu.
"""

from __future__ import annotations

import argparse
import ast
import builtins
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
    from . import Commands

_PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = _PACKAGE.parent
_NAMES = _PACKAGE / "__init__.pyi"
_TEMPLATES = {"elementwise": "swish", "reduction": "logsumexp", "package": "silu"}
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
    if (_ROOT / "Makefile").is_file():
        kind.add_argument(
            "--package",
            dest="kind",
            action="store_const",
            const="package",
            help="write an operator of msops itself into its source folder",
        )
    parser.add_argument("--dir", type=Path, metavar="PATH", help="the project's folder; default: ./NAME")
    parser.set_defaults(run=lambda options: _run(parser, options))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    of_package = options.kind == "package"
    if of_package and options.dir:
        parser.error("--dir is not for an operator of msops itself")
    default = Path(os.path.relpath(_ROOT)) if of_package else Path(options.name)
    folder = default if options.dir is None else options.dir
    try:
        paths = new(options.name, options.kind, folder)
        if of_package:
            _NAMES.write_text(_with_names(_NAMES.read_text(), options.name))
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    for path in paths:
        print(f"wrote {path}")
    if of_package:
        print(f"wrote {os.path.relpath(_NAMES)}: its public names")
        print(f'next: make test ARGS="-k {options.name}"')
    else:
        print(f"next: python -m pytest {shlex.quote(str(folder / f'test_{options.name}.py'))}")


def new(name: str, kind: str, folder: Path) -> list[Path]:
    """Writes an operator's files, all or none, and returns their paths."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME must be a Python name in lower case, such as my_op, got {name!r}")
    texts = {folder / file: text for file, text in _texts(name, kind).items()}
    if folder.is_dir() and any(folder.iterdir()):
        texts.pop(folder / "README.md", None)
    for path in texts:
        if os.path.lexists(path):
            raise FileExistsError(None, "exists, and is not overwritten", str(path))
    if name in _taken(kind):
        raise ValueError(f"NAME must not be that of a module or of something in the templates, got {name!r}")
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
    """Returns names that an operator cannot have: those of modules that it would hide, and those that its files use.

    A module of the package hides no other, but its function may hide a public or a built-in one.
    """
    if kind == "package":
        names = {*dir(builtins), *re.findall(r" as (\w+)", _NAMES.read_text())}
    else:
        elsewhere = [path for path in sys.path if path not in ("", str(Path.cwd()))]
        modules = {module.name for module in pkgutil.iter_modules(elsewhere)}
        names = {"msops", *sys.builtin_module_names, *modules}
    for file, text in _texts(_TEMPLATES[kind], kind).items():
        if file.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                names |= {getattr(node, field, "") for field in ("id", "arg", "name")}
    return names - {_TEMPLATES[kind]}


def _in_code(name: str) -> str:
    """Returns the name of an operator's Cell."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _texts(name: str, kind: str) -> dict[str, str]:
    """Returns the text of each file, by its name."""
    template = _TEMPLATES[kind]
    files: tuple[str, ...] = (
        f"{template}.cu", f"{template}.py", f"test_{template}.py", f"benchmark_{template}.py", "README.md"
    )  # fmt: skip
    folder = _PACKAGE / "templates" / template
    if kind == "package":
        folder = _ROOT
        files = (
            f"aot_kernels/{template}.cu",
            f"msops/operators/{template}.py",
            f"tests/operators/test_{template}.py",
            f"benchmarks/operators/{template}.py",
        )
    elif not folder.is_dir():
        folder = _ROOT / "examples" / template
    # MindSpore's and torch's functions of the template's name are peers in tests and benchmarks, and keep their names.
    words = re.compile(rf"(?<!\bops\.)(?<!\bfunctional\.)(?:{template}|{template.capitalize()}|SiLU)")

    def rename(text: str) -> str:
        return words.sub(lambda found: name if found[0] == template else _in_code(name), text)

    return {rename(file): rename((folder / file).read_text()) for file in files}


def _with_names(text: str, name: str) -> str:
    """Returns the list of public names with those of another operator, sorted by modules."""
    lines = text.splitlines(keepends=True)
    operators = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("operators.")
    ]
    after = [node.end_lineno or 0 for node in operators if (node.module or "") < f"operators.{name}"]
    at = max(after, default=operators[0].lineno - 1)
    cell = _in_code(name)
    return "".join((*lines[:at], f"from .operators.{name} import {cell} as {cell}, {name} as {name}\n", *lines[at:]))
