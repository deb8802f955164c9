"""Tells which Pythons msops runs on.

Older Pythons can read this file, too, so that `python -m msops` can tell what is wrong.
"""

from __future__ import annotations

import platform
import subprocess
import sys

OLDEST, NEWEST = (3, 9), (3, 12)


def complaint() -> str:
    """Tells what is wrong with the running Python; returns "" if nothing is."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"{platform.python_version()}, {sys.executable}: must be {oldest} to {newest}"


def another() -> str:
    """Returns the command that makes an environment with another Python."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        python = f"python3.{minor}"
        try:
            subprocess.run([python, "-c", "import ensurepip"], stderr=subprocess.DEVNULL, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return f"{python} -m venv .venv && .venv/bin/pip install '.[mindspore]'  # in msops' source folder"
    return "# install Python {}.{}: https://www.python.org/downloads".format(*NEWEST)
