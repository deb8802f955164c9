"""Runs `python -m msops doctor`, which shows what is found, what is wrong, and what mends it.

MindSpore and the libraries may be what is broken, so they are loaded in other processes only.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from . import compilers, cuda11, gpu, graphs, imports, kernels, libraries, modules, smoke
from .finding import AGAIN, Finding, installs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from .. import Commands

_DESCRIPTION = """\
Shows what is found of all that msops needs, what is wrong, and the commands that mend it; runs an operator on each
device. The exit status is 0 if a device works, else 1."""


def add_command(commands: Commands) -> None:
    """Adds `doctor` to the sub-parsers of a command line."""
    parser = commands.add_parser(
        "doctor", help="show what is found, what is wrong, and what mends it", description=_DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> NoReturn:
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            _print(finding)
    devices = [finding.what for finding in findings if finding.what in ("CPU", "GPU") and finding.state == "ok"]
    if options.json:
        print(json.dumps({"devices": devices, "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        wrong = any(finding.state == "wrong" for finding in findings)
        print(f"msops works on {' and '.join(devices) or 'no device'}{'; see what is wrong above' * wrong}.")
    sys.exit(not devices)


def _print(finding: Finding) -> None:
    what, state, text, mend = finding
    print(f"{state:5}  {what:9}  {text}", flush=True)
    for command in mend if state == "wrong" else ():
        print(f"{'':18}{command}", flush=True)


def examine() -> Iterator[Finding]:
    """Yields the findings, each as soon as it is known. A command has one place, where it is needed first.

    Commands that differ only in the variables before them, which say for what to build, are one.
    """
    python = modules.python()
    named: set[str] = set()
    for finding in _look(python):
        mend = finding.mend
        if python.state == "wrong" and finding != python:
            mend = ()  # pip finds no MindSpore for this Python, so another Python comes first
        if any(map(imports.is_first, named)) and any(map(installs, mend)):
            mend = (*(command for command in mend if not installs(command)), AGAIN)
        mend = tuple(command for command in mend if _alone(command) not in named)
        if finding.state == "wrong":
            named.update(map(_alone, mend))
        yield finding._replace(mend=mend)


def _alone(command: str) -> str:
    return re.sub(r"^(\w+=('.*?'|\S*) )*", "", command)


def _look(python: Finding) -> Iterator[Finding]:
    """Yields the findings. What another finding depends on, and what is known soon, comes first."""
    for file in imports.of_python():
        yield Finding("imports", "wrong", f"{file} is imported instead of Python's own module", (imports.away(file),))
    hidden = {name: finding for name in ("MindSpore", *modules.BELOW) if (finding := modules.hidden(name))}
    yield from hidden.values()
    yield (msops := modules.msops())
    yield python
    yield from (modules.module(name) for name in modules.BELOW if name not in hidden)
    gpus = gpu.look()
    nvcc, right_nvcc = compilers.nvcc_finding(gpus)
    yield gpu.finding(gpus)
    yield nvcc
    yield compilers.cxx_finding(nvcc)
    yield compilers.cache_finding()
    its_libraries = list(libraries.findings(gpus, nvcc))
    yield from its_libraries
    on_cpu = smoke.run("CPU")
    if "MindSpore" not in hidden:
        yield modules.mindspore(on_cpu)
    yield from cuda11.findings(gpus, right_nvcc)
    yield from modules.operators(on_cpu, msops, *its_libraries)
    yield modules.device(on_cpu)
    on_gpu = modules.device(smoke.run("GPU")) if gpus.usable else Finding("GPU", "none", "not tried")
    yield on_gpu
    yield graphs.finding(on_gpu)
    yield kernels.finding(on_gpu)
