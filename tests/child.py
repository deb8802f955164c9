"""Processes that the tests start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables):
    """In which Python finds what it finds here, from any folder: msops need not be installed."""
    paths = dict.fromkeys([str(ROOT), *(str(Path(path).absolute()) for path in sys.path if path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def run_python(*arguments, cwd, **variables):
    """The finished process, with what it printed."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=900)
