"""Runs `python -m msops doctor`, which shows what is found, what is wrong, and what mends it.

MindSpore and the libraries may be what is broken, so they are loaded in other processes only.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, NoReturn

from . import compilers, cuda11, gpu, libraries, modules, smoke
from .finding import Finding

if TYPE_CHECKING:
    import argparse

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
    findings = examine()
    devices = [finding.what for finding in findings if finding.what in ("CPU", "GPU") and finding.state == "ok"]
    if options.json:
        print(json.dumps({"devices": devices, "findings": [finding._asdict() for finding in findings]}, indent=2))
    else:
        for what, state, text, mend in findings:
            print(f"{state:5}  {what:9}  {text}")
            for command in mend if state == "wrong" else ():
                print(f"{'':18}{command}")
        wrong = any(finding.state == "wrong" for finding in findings)
        print(f"msops works on {' and '.join(devices) or 'no device'}{'; see what is wrong above' * wrong}.")
    sys.exit(not devices)


def examine() -> list[Finding]:
    """Returns all findings. What another finding depends on comes first."""
    gpus = gpu.look()
    nvcc, right_nvcc = compilers.nvcc_finding(gpus)
    on_cpu = smoke.run("CPU")
    python, msops = modules.python(), modules.msops()
    its_libraries = list(libraries.findings(gpus, nvcc))
    others = [
        modules.mindspore(on_cpu),
        *map(modules.module, modules.BELOW),
        gpu.finding(gpus),
        nvcc,
        compilers.cxx_finding(nvcc),
        compilers.cache_finding(),
        *its_libraries,
        *cuda11.findings(gpus, right_nvcc),
        *modules.operators(on_cpu, msops, *its_libraries),
        modules.device(on_cpu),
        modules.device(smoke.run("GPU")) if gpus.usable else Finding("GPU", "none", "not tried"),
    ]
    if python.state == "wrong":  # pip finds no MindSpore for this Python, so another Python comes first
        others = [finding._replace(mend=()) for finding in others]
    return [msops, python, *others]
