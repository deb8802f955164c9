"""Runs a benchmark in parts, each in its own process: kernels, sequences, whole Cells in graph and PyNative mode.

MindSpore's GPU libraries and torch's can disturb each other in one process, and a crash costs only one part. A part
sends messages, one JSON object a line: {"row": {}}, {"step": "what comes now"}, {"failed": "what failed, and why"}. A
part that ended early adds {"crashed": ...}. The jobs of language models (llm/run.py) are such processes, too.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from . import llm
from .benchmark import DTYPES
from .operators import BENCHMARKS

ROOT = Path(__file__).resolve().parents[1]
# glibc keeps memory that was freed, so that no library is timed while it gets new pages from the system.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
PARTS = {"kernels": "kernels", "sequences": "sequences", "graph": "cells", "pynative": "cells"}  # name -> module


def add_options(parser):
    """Adds the options that a part and the whole benchmark share."""
    ops = tuple(BENCHMARKS)
    words = f"some of {','.join(ops)}; default: all of these. {llm.NAME} is a language model"
    parser.add_argument("--op", type=_some_of((*ops, llm.NAME)), default=ops, help=words)
    parser.add_argument("--dtype", type=_some_of(DTYPES), default=DTYPES, help="float32, float16; default: both")
    parser.add_argument("--device-target", choices=("GPU", "CPU"), help="default: GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="a size or two of each operator")


def _some_of(known):
    def parse(text):
        words = tuple(text.split(","))
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {word!r}")
        return words

    return parse


def options_of_part():
    """Parses the options that `run` below gave to this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    add_options(parser)
    return parser.parse_args()


def run(part, options, log):
    """Runs a part and yields its messages."""
    arguments = [PARTS[part], part, "--device-target", options.device_target, *["--quick"] * options.quick]
    operators = ",".join(op for op in options.op if op in BENCHMARKS)
    return messages(part, [*arguments, "--op", operators, "--dtype", ",".join(options.dtype)], log)


def messages(part, arguments, log):
    """Runs a module of the benchmark with arguments, and yields its messages; the rest of what it prints goes to the
    file `log`."""
    module, *rest = arguments
    command = [sys.executable, "-m", f"benchmarks.{module}", *rest]
    step = "its start"
    # When MindSpore is imported, it sets OMP_NUM_THREADS=1 for processes that start later. os.environ does not have it.
    environment = {**os.environ, **KEEP_MEMORY}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            for line in process.stdout:
                message = _parse(line)
                if message is None:
                    log.write(line)
                else:
                    step = message.get("step", step)
                    yield message
        except BaseException:  # includes interrupts
            process.kill()
            raise
    if process.returncode:
        yield dict(crashed=f"{part} ended with status {process.returncode} at {step}")


def _parse(line):
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
