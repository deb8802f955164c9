"""Runs the jobs of a language model, each in a process of its own, so that one that dies or takes all memory costs only
its own rows."""

import importlib.util
import json
import re
from pathlib import Path

from .. import parts
from ..figures import Target, times_faster
from ..messages import is_out_of_memory
from . import NAME, PEERS, jobs

TARGETS = {
    "GPU": (
        Target("training", "8 times MindSpore's own", 8, times_faster("MindSpore", "model", direction="training")),
        Target("training", "not slower than PyTorch eager", 1, times_faster("torch", "model", direction="training")),
        Target("all", "faster than MindSpore's own", 1, times_faster("MindSpore", "model")),
    ),
    "CPU": (Target("all", "faster than MindSpore's own", 1, times_faster("MindSpore", "model")),),
}


def chosen(options):
    """Returns the Jobs that the options ask for."""
    of_device = jobs(options.device_target, options.dtype, options.quick) if NAME in options.op else []
    return [job for job in of_device if re.search(options.jobs, job.name)]


def messages(options, log):
    """Runs the jobs, and yields their messages."""
    absent = [package for package in ("torch", "transformers") if not importlib.util.find_spec(package)]
    for job in chosen(options):
        if PEERS[job.by] == "of_torch" and absent:
            yield dict(step=job.name, failed=f"{job.name}: {' and '.join(absent)} not installed")
        else:
            yield from run(job, log)


def run(job, log):
    """Runs a job, and yields its messages."""
    log.flush()
    path, failed = Path(log.name), False
    before = path.stat().st_size
    for message in parts.messages(job.name, [f"{NAME}.{PEERS[job.by]}", json.dumps(job._asdict())], log):
        if "crashed" not in message:
            yield message
        elif not failed:  # Otherwise it has said why it failed, and that it then does not end well says nothing more.
            no_memory = is_out_of_memory(path.read_bytes()[before:].decode(errors="replace"))
            yield dict(failed=f"{job.name}: out of memory") if no_memory else message
        failed |= "failed" in message
