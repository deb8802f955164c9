"""Lists what is timed of a language model, and times it: a Llama of SmolLM2-135M's sizes with random weights trains,
reads a prompt (prefill) and writes (decoding).

A case by a peer is a job, and runs in a process of its own: `of_mindspore` runs the networks of examples/smollm with
msops' operators, by layers, as CUDA graphs or as a stack, or with MindSpore's own, `of_torch` runs LlamaForCausalLM of
transformers.
This module imports neither.
"""

import faulthandler
import json
import sys
import time
from typing import NamedTuple

from ..messages import Step, say
from ..timing import Times

NAME = "llm"  # for --op, and in times.csv
SMOLLM2 = dict(vocabulary=49152, layers=30, width=576, heads=9, kv_heads=3, hidden=1536, eps=1e-5, base=1e5)
TINY = dict(vocabulary=256, layers=1, width=32, heads=4, kv_heads=2, hidden=64, eps=1e-5, base=1e5)
GRAPH = "msops, CUDA graph"  # by layers, each step a replay of msops.cuda_graph
STACK = "msops, stack"  # all layers in one operator, which does not train
PEERS = {
    "msops": "of_mindspore", GRAPH: "of_mindspore", STACK: "of_mindspore", "torch": "of_torch",
    "torch.compile": "of_torch", "MindSpore": "of_mindspore",
}  # fmt: skip
CASES = {  # (what, texts, tokens of each), what tells most first
    "GPU": (
        ("training", 16, 2048),
        ("training", 8, 2048),
        ("decoding", 64, 2048),
        ("prefill", 1, 2048),
        ("decoding", 1, 2048),
        ("training", 4, 8192),
    ),
    "CPU": (("training", 2, 256), ("prefill", 1, 256), ("decoding", 1, 1024)),
}
HEADLINE = (  # (what, case, dtype) of the rows that the main README shows
    ("training", "8 x 2048", "float16"),
    ("prefill", "1 x 2048", "float16"),
    ("decoding", "64 x 2048", "float16"),
    ("decoding", "1 x 2048", "float16"),
)
QUICK = (("training", 2, 16), ("prefill", 1, 16), ("decoding", 2, 32))  # cases of the sizes TINY
DTYPES = {"GPU": "float16", "CPU": "float32"}
TURN = {"training": 1, "prefill": 1, "decoding": 16}  # steps between two looks at the clock
LEAST, MOST, ENOUGH = 3, 20, 5  # turns that are timed, and s after which the least are enough
LIMIT = 600  # s after which a job is given up


class Job(NamedTuple):
    """A training step over `texts` texts of `length` tokens; or reading as many; or writing one more token of each,
    where the caches of keys and values have room for `length` tokens, and are full in the end."""

    kind: str
    texts: int
    length: int
    by: str
    device: str
    dtype: str
    sizes: dict

    @property
    def case(self):
        return f"{self.texts} x {self.length}"

    @property
    def name(self):
        return f"{self.by}: {NAME} {self.kind} {self.case} {self.dtype}"

    @property
    def tokens(self):
        """Returns the tokens of a step."""
        return self.texts * (1 if self.kind == "decoding" else self.length)


def jobs(device, dtypes, quick=False):
    """Returns the Jobs on a device, all peers of a case together."""
    dtype, sizes = DTYPES[device], TINY if quick else SMOLLM2
    cases = (QUICK if quick else CASES[device]) if dtype in dtypes else ()
    found = [Job(*case, by, device, dtype, sizes) for case in cases for by in PEERS if device == "GPU" or by != GRAPH]
    return [job for job in found if (job.kind, job.by) != ("training", STACK)]


def measure(job, prepare):
    """Times a job, and sends its row. `prepare` returns (run, peak): run(n) makes n steps and waits for their results,
    peak() returns the most bytes of the device that its tensors took, or 0 if that is not known."""
    with Step(job.name):
        run, peak = prepare(job)
        count = TURN[job.kind]
        first = _seconds(run, 1)
        _seconds(run, count)
        times = median(run, count)
        row = dict(part="model", op=NAME, direction=job.kind, case=job.case, dtype=job.dtype, by=job.by, named=1)
        row.update(times._asdict(), bytes=0, operations=0, beside="", first_s=first)
        say(row=dict(row, tokens_s=1e6 * job.tokens / times.us, peak_gb=peak() / 1e9 or ""))


def median(run, count):
    """Returns the Times of a step, over turns of `count` steps."""
    turns, start = [], time.perf_counter()
    while len(turns) < (MOST if time.perf_counter() - start < ENOUGH else LEAST):
        turns.append(1e6 * _seconds(run, count) / count)
    return Times.of(turns, "calls")


def _seconds(run, count):
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


def main(prepare):
    """Times the job that the command line describes."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    measure(Job(**json.loads(sys.argv[1])), prepare)
    faulthandler.cancel_dump_traceback_later()
