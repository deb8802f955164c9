"""Tells the version: the next release, and the number of the commit, so that pip upgrades one wheel by another."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

_NEXT = "0.1.0"


def version() -> str:
    """Returns a version such as 0.1.0.dev700.

    setup.py writes it into wheels and source distributions. In a repository, git counts the commits; in any other copy
    of the source, nobody knows, and the number is 0.
    """
    package = Path(__file__).resolve().parent
    written, count = package / "version.txt", ""
    if written.is_file():
        return written.read_text().strip()
    if (package.parent / ".git").exists():
        command = ["git", "-C", str(package.parent), "rev-list", "--count", "HEAD"]
        with contextlib.suppress(OSError):  # there is no git
            count = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{_NEXT}.dev{count or 0}"
