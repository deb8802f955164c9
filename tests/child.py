"""Runs Python in other processes for the tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables):
    """Returns an environment where Python finds the same modules as here from any folder, so that msops need not be
    installed."""
    paths = dict.fromkeys([str(ROOT), *(str(Path(path).absolute()) for path in sys.path if path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def run_python(*arguments, cwd, **variables):
    """Runs Python and returns the finished process, with what it printed."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=900)
