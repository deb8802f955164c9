"""Tells where the time of a training step of msops goes: `python -m benchmarks.llm.shares`.

It times the whole step; its matmuls alone, in MindSpore; and msops' kernels alone, through their C entries. The rest
is what MindSpore's own operators, launches and the host take. The case is the first of the benchmark. Each of the three
runs in a process of its own, since MindSpore's GPU libraries and torch's can disturb each other.
"""

import argparse
import itertools
import json
import sys
import tempfile

from ..messages import Step, say
from . import DTYPES, NAME, Job, jobs, median


def kernels(job):
    """Returns (operator, its size as its benchmark has it, how often a step calls it)."""
    s, texts, length = job.sizes, job.texts, job.length
    rows, width, feature = texts * length, s["width"], s["width"] // s["heads"]
    heads = s["heads"], s["kv_heads"]
    return [
        ("rms_norm", (rows, width), 1),
        ("add_rms_norm", (rows, width), 2 * s["layers"]),
        *(("rotary_embedding", (texts, count, length, feature), s["layers"]) for count in heads),
        ("flash_attention", (texts, *heads, length, length, feature, 1), s["layers"]),
        ("swiglu", (rows, s["hidden"]), s["layers"]),
        ("cross_entropy", (rows, s["vocabulary"]), 1),
    ]


def matmuls(job):
    """Returns (inputs, outputs, how many such layers) of the linear layers, that of the scores among them."""
    s = job.sizes
    width, narrow = s["width"], s["width"] // s["heads"] * s["kv_heads"]
    shapes = {(width, width): 2, (width, narrow): 2, (width, s["hidden"]): 2, (s["hidden"], width): 1}
    return [(*shape, count * s["layers"]) for shape, count in shapes.items()] + [(width, s["vocabulary"], 1)]


def time_kernels(job):
    from ..kernels import prepare, random_sets, session
    from ..operators import BENCHMARKS

    with session(job.device) as (timer, arrays):
        for op, size, count in kernels(job):
            for case in BENCHMARKS[op].cases(size):
                with Step(f"{op} {case.direction} {case.name}"):
                    calls = prepare(case, *random_sets(case, job.dtype, timer, arrays), timer)
                    _tell(f"kernel {op} {case.direction} {case.name}", timer(calls).us, count)
                    del calls
                arrays.free()


def time_matmuls(job):
    """Times the products of each shape, forward and for both gradients. One graph has as many layers as the model, so
    that the time of a call does not count."""
    import mindspore
    import numpy as np
    from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

    class Products(nn.Cell):
        def __init__(self, weights):
            super().__init__()
            self.weights = ParameterTuple(Parameter(Tensor(w, dtype), name=f"w{i}") for i, w in enumerate(weights))
            self.forward, self.dx, self.dw = ops.MatMul(False, True), ops.MatMul(), ops.MatMul(True)

        def construct(self, x):
            x, results = x.astype(dtype), ()
            for weight in self.weights:
                y = self.forward(x, weight)
                results += (self.dx(y, weight), self.dw(y, x))
            return results

    dtype = getattr(mindspore, job.dtype)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(job.device)
    rng, rows = np.random.default_rng(0), job.texts * job.length
    for inputs, outputs, count in matmuls(job):
        with Step(f"matmul {rows} x {inputs} x {outputs}"):
            net = Products(0.02 * rng.standard_normal((count, outputs, inputs), np.float32))
            x = ops.standard_normal((rows, inputs))

            def run(_, net=net, x=x):
                net(x)
                mindspore.runtime.synchronize()

            run(1)  # compiles
            _tell(f"matmul {rows} x {inputs} x {outputs}, 3 products", median(run, 1).us / count, count)


def _tell(what, us, count):
    say(row=dict(what=what, us=us, count=count))


def report(step, rows):
    """Yields lines: what takes which part of a step, and what is left."""
    parts = {part: [row for row in rows if row["what"].startswith(part)] for part in ("matmul", "kernel")}
    yield f"{'ms':>9}  share of the step of {step / 1e3:.4g} ms"
    left = step
    for part, of_part in parts.items():
        total = sum(row["us"] * row["count"] for row in of_part)
        left -= total
        yield f"{total / 1e3:9.4g}  {total / step:5.1%}  all {part}s"
        for row in of_part:
            us = row["us"] * row["count"]
            yield f"{us / 1e3:9.4g}  {us / step:5.1%}    {row['count']} x {row['us']:.4g} us  {row['what']}"
    yield f"{left / 1e3:9.4g}  {left / step:5.1%}  the rest: MindSpore's own operators, launches and the host"


def main():
    if len(sys.argv) == 3 and sys.argv[1] in TIMED:
        TIMED[sys.argv[1]](Job(**json.loads(sys.argv[2])))
        return
    from .. import parts
    from ..__main__ import has_gpu
    from .run import run

    parser = argparse.ArgumentParser("python -m benchmarks.llm.shares", description=__doc__)
    parser.add_argument("--device-target", choices=("GPU", "CPU"), default="GPU" if has_gpu() else "CPU")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    job = jobs(options.device_target, DTYPES.values(), options.quick)[0]
    print(job.name)
    rows, step = [], None
    with tempfile.NamedTemporaryFile("w+") as log:
        timed = [parts.messages(part, [f"{NAME}.shares", part, json.dumps(job._asdict())], log) for part in TIMED]
        try:
            for message in itertools.chain(run(job, log), *timed):
                if "failed" in message or "crashed" in message:
                    print(f"not measured: {message}")
                elif "what" in message.get("row", ()):
                    rows.append(message["row"])
                elif "row" in message:
                    step = message["row"]["us"]
        except KeyboardInterrupt:
            print("not measured: what came after the interrupt")
    if step is None:
        sys.exit("The step was not measured.")
    print(*report(step, rows), sep="\n")


TIMED = {"matmuls": time_matmuls, "kernels": time_kernels}

if __name__ == "__main__":
    main()
