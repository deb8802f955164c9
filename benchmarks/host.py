"""Times what the host needs for a replay of a CUDA graph with one input and one output, beside a usual call and beside
PyTorch's graphs, whose input and output are copied, too: `python -m benchmarks.host [--csv FILE]`, on a GPU.

The function adds 1 to 1024 numbers, so that the GPU is never waited for. MindSpore and PyTorch run in processes of
their own, since their libraries of CUDA can disturb each other.
"""

import argparse
import csv
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CALLS, TURNS, SIZE = 200, 30, 1024
COLUMNS = ("by", "call", "us", "us_25", "us_75")
FAST = "msops, fast calls"


def row(by, call, function, wait):
    """Returns the median and the quartiles of the time until a call returns, over turns of many calls."""
    turns = []
    for turn in range(TURNS + 3):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        if turn >= 3:
            turns.append(1e6 * (time.perf_counter() - start) / CALLS)
        wait()
    low, middle, high = statistics.quantiles(turns, n=4, method="inclusive")
    return dict(by=by, call=call, us=middle, us_25=low, us_75=high)


def of_torch(by):
    import torch

    x, static = (torch.ones(SIZE, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = static + 1

    def replay():
        static.copy_(x)
        graph.replay()
        return y.clone()

    yield row(by, "usual call", lambda: x + 1, torch.cuda.synchronize)
    yield row(by, "replay", replay, torch.cuda.synchronize)


def of_msops(by):
    import mindspore
    from mindspore import ops

    import msops

    mindspore.set_device("GPU")
    if by == FAST:
        msops.use_fast_calls()
    for name in ("PYNATIVE_MODE", "GRAPH_MODE")[: 1 if by == FAST else 2]:
        mindspore.set_context(mode=getattr(mindspore, name))
        x = ops.ones(SIZE, mindspore.float32) + 0  # lies on the GPU
        recorded = msops.cuda_graph(lambda x: x + 1)
        wait = mindspore.runtime.synchronize
        mode = name.replace("_", " ").lower()
        yield row(by, f"usual call, {mode}", lambda x=x: x + 1, wait)
        yield row(by, f"replay, {mode}", functools.partial(recorded, x), wait)


JOBS = {"torch": of_torch, "msops": of_msops, FAST: of_msops}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--job", choices=JOBS, help="run one, for the first command")
    options = parser.parse_args()
    if options.job:
        for each in JOBS[options.job](options.job):
            print(json.dumps(each), flush=True)
        return
    rows, failed = [], []
    for by in JOBS:
        command = [sys.executable, "-m", "benchmarks.host", "--job", by]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"by"')]
        failed += [by] * (done.returncode != 0)
    for each in rows:
        print("{by}, {call}: {us:.1f} µs ({us_25:.1f} to {us_75:.1f})".format(**each))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(dict(each, **{name: f"{each[name]:.4g}" for name in COLUMNS[2:]}) for each in rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
