"""Runs a benchmark in parts, each in its own process: kernels, sequences, whole Cells in graph and PyNative mode.

MindSpore's GPU libraries and torch's can disturb each other in one process, and a crash costs only one part. A part
sends messages, one JSON object a line: {"row": {}}, {"step": "what comes now"}, {"failed": "what failed, and why"}. A
part that ended early adds {"crashed": ...}.
"""

import argparse
import json
import subprocess
import sys
import traceback
from pathlib import Path

from .benchmark import DTYPES
from .operators import BENCHMARKS

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"kernels": "kernels", "sequences": "sequences", "graph": "cells", "pynative": "cells"}  # name -> module


def add_options(parser):
    """Adds the options that a part and the whole benchmark share."""
    ops = tuple(BENCHMARKS)
    parser.add_argument("--op", type=_some_of(ops), default=ops, help=f"some of {','.join(ops)}; default: all")
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


def say(**message):
    print(json.dumps(message), flush=True)


class Attempt:
    """Names the step in its block, and reports a failure there instead of ending the part."""

    def __init__(self, step, silent=False):
        self.step = step
        if not silent:
            say(step=step)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None or not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        lines = str(error).strip().splitlines()
        say(failed=f"{self.step}: {kind.__name__}: {lines[0] if lines else ''}")
        return True


def run(part, options, log):
    """Runs a part and yields its messages; the rest of what it prints goes to the file `log`."""
    command = [sys.executable, "-m", f"benchmarks.{PARTS[part]}", part, "--device-target", options.device_target]
    command += ["--op", ",".join(options.op), "--dtype", ",".join(options.dtype), *["--quick"] * options.quick]
    step = "its start"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as process:
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
