"""Calls C entries in another process, which may crash. The code of that process is worker.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ..core.library import Entry

# The real packages would import MindSpore, which takes seconds.
_PROGRAM = """
import sys, types
for name in ("msops", "msops.core", "msops.testing"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
from msops.testing.worker import Worker
Worker().run()
"""
_numbers = itertools.count()


class Memory:
    """Memory that both processes see; `parts` are arrays of these sizes, each a multiple of a page."""

    def __init__(self, sizes: Sequence[int]) -> None:
        assert all(size > 0 and size % mmap.PAGESIZE == 0 for size in sizes)
        self.number, self.sizes = next(_numbers), list(sizes)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (it is open as long as this object lives)
        self.file.truncate(sum(sizes))
        whole = np.frombuffer(mmap.mmap(self.file.fileno(), sum(sizes)), np.uint8)
        self.parts: list[npt.NDArray[np.uint8]] = np.split(whole, np.cumsum(sizes)[:-1])
        self.path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        weakref.finalize(self, self.file.close)  # avoids the warning about a file that nobody closed


class Place(NamedTuple):
    """Tells where an array begins in a Memory, and what an entry is told about it."""

    part: int
    begin: int
    shape: tuple[int, ...]
    dtype: str


class Crash(Exception):  # noqa: N818
    """A call ended its process.

    Attributes:
        words (str): The words of the message that follow the entry's name.
        how (str): "reads", "writes" or "accesses", if the call did so to bytes around an array; None if not known.
        part (int): The index of the memory's part that was accessed.
        offset (int): The offset of the access from the beginning of the part.
    """

    def __init__(self, words: str, how: str | None = None, part: int = 0, offset: int = 0) -> None:
        super().__init__(words)
        self.words, self.how, self.part, self.offset = words, how, part, offset


class Where(NamedTuple):
    """Tells where entries compute: on the CPU, or on a GPU.

    Attributes:
        device (int): The GPU's number; None means the CPU.
        driver (str): The file of the CUDA driver.
        stream (int): The stream's handle; None means a null pointer.
    """

    device: int | None = None
    driver: str | None = None
    stream: int | None = None

    @property
    def name(self) -> str:
        return "CPU" if self.device is None else "GPU"


class Process:
    """Calls entries in a process that starts with the first call, and again after a crash."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._running: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (it may be read after the process's end)
        weakref.finalize(self, self._said.close)
        self._said_before = 0

    def __enter__(self) -> Process:  # noqa: PYI034 (Self is newer than Python 3.9)
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            self._stop(self._running)

    def _stop(self, running: subprocess.Popen[bytes]) -> int:
        """Ends the input of the process, waits, and returns the exit status."""
        self._running = None
        for pipe in (running.stdin, running.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return running.wait()

    def said(self) -> str:
        """Returns the last line that the last call printed."""
        text = os.pread(self._said.fileno(), 10**6, self._said_before)  # pread leaves the shared offset
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def request(
        self, entry: Entry, memory: Memory, params: Sequence[Place], attributes: dict[str, int], count: int
    ) -> dict[str, Any]:
        """Describes a call of an entry, which is told that there are `count` parameters."""
        return {
            "library": str(entry.library.path),
            "entry": entry.name,
            "number": memory.number,
            "path": memory.path,
            "sizes": memory.sizes,
            "params": params,
            "attributes": attributes,
            "count": count,
            "device": None if self.where.device is None else (self.where.device, self.where.driver),
            "stream": self.where.stream,
        }

    def call(self, *requests: dict[str, Any], threads: int | None = None, leaks: bool = False) -> dict[str, Any]:
        """Makes the calls of all requests at once, each with `threads` OpenMP threads, and returns the largest status
        and the seconds of CPU time; with `leaks` also the bytes that each call leaves allocated.

        Raises:
            Crash: If the process does not survive it.
        """
        self._said_before = os.fstat(self._said.fileno()).st_size
        message = {"requests": requests, "threads": threads, "leaks": leaks, "limit": worker.LIMIT}
        running = self._running = self._running or self._start()
        assert running.stdin
        assert running.stdout
        answer: dict[str, Any] = {}
        with contextlib.suppress(BrokenPipeError):
            running.stdin.write(json.dumps(message).encode() + b"\n")
            running.stdin.flush()
        with contextlib.suppress(ValueError):  # the process ended without an answer
            answer = json.loads(running.stdout.readline())
        if "status" in answer:
            return answer
        raise self._crash(answer, self._stop(running))

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-c", _PROGRAM, str(Path(__file__).parents[2])]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said)

    def _crash(self, answer: dict[str, Any], status: int) -> Crash:
        if "error" in answer:
            return Crash(f"fails: {answer['error']}")
        if answer.get("found"):
            return Crash("crashes", answer["how"], *answer["found"])
        number = answer.get("signal", -status)
        if number == signal.SIGALRM:
            return Crash(f"does not return within {worker.LIMIT} s")
        if number <= 0:
            return Crash(f"ends the process with exit status {status}")
        return Crash(f"crashes: {signal.Signals(number).name}, {signal.strsignal(number)}")
