"""Runs one measurement in a process of its own, since libraries of several packages do not fit into one."""

import json
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PYTHON_OF_TORCH = _ROOT / ".libraries" / "torch" / "bin" / "python"  # `make test-libraries` makes this environment


def rows_of_job(module, words, row, limit, *, of_torch):
    """Runs `python -m module --job words` and yields its rows, which it prints in JSON, each with what `row` has.

    A job that fails, or takes more than `limit` seconds, has a row that says why. With `of_torch`, the environment of
    PyTorch runs it where that is there.
    """
    python = str(_PYTHON_OF_TORCH) if of_torch and _PYTHON_OF_TORCH.exists() else sys.executable
    command = [python, "-m", module, "--job", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, cwd=_ROOT)
    except subprocess.TimeoutExpired:
        yield dict(row, why=f"took more than {limit} s")
        return
    for line in done.stdout.splitlines():
        if line.startswith('{"kind"'):
            yield dict(row, **json.loads(line))
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip("- ")]
        errors = [line for line in lines if "Error" in line.partition(":")[0]] or lines
        yield dict(row, why=errors[-1] if errors else f"ended with status {done.returncode}")
