"""Runs measurements in processes of their own, since libraries of several packages do not fit into one."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PYTHON_OF_TORCH = _ROOT / ".libraries" / "torch" / "bin" / "python"  # `make test-libraries` makes this environment


def rows_of_job(module, words, row, limit, *, of_torch):
    """Runs `python -m module --job words` and yields its rows, which it prints in JSON, each with what `row` has.

    A job that fails, or takes more than `limit` seconds, has a row that says why. With `of_torch`, the environment of
    PyTorch runs it where that is there.
    """
    yield from Job(module, words, row, of_torch=of_torch).rows(limit)


class Job:
    """The process of such a job. It may print words at which it waits for a line, which `go_on` writes."""

    def __init__(self, module, words, row, *, of_torch):
        python = str(_PYTHON_OF_TORCH) if of_torch and _PYTHON_OF_TORCH.exists() else sys.executable
        self._row = row
        self._output, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 (rows closes them)
        command = [python, "-m", module, "--job", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors, text=True, cwd=_ROOT
        )

    def wait_for(self, word, limit):
        """Waits until the process has printed a word in a line of its own, has ended, or a time is over."""
        end = time.monotonic() + limit
        while word not in _lines(self._output) and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)

    def go_on(self):
        with contextlib.suppress(OSError):  # if the process has ended
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def rows(self, limit):
        """Yields the rows once the process has ended."""
        try:
            status = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = None
        for line in _lines(self._output):
            if line.startswith('{"kind"'):
                yield dict(self._row, **json.loads(line))
        lines = [line for line in _lines(self._errors) if line.strip("- ")]
        errors = [line for line in lines if "Error" in line.partition(":")[0]] or lines
        if status is None:
            yield dict(self._row, why=f"took more than {limit} s")
        elif status:
            yield dict(self._row, why=errors[-1] if errors else f"ended with status {status}")
        for each in (self._output, self._errors, self._process.stdin):
            with contextlib.suppress(OSError):  # what the process has not read
                each.close()


def _lines(file):
    file.seek(0)
    return file.read().splitlines()
