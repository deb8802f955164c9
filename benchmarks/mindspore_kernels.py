"""Times MindSpore's own operators on a GPU with its own kernels and with msops', beside PyTorch's.

    python -m benchmarks.mindspore_kernels [--sizes 24 20] [--dtypes float16 float32] [--only "row" ...]

A time is that of a CUDA graph with many calls of an operator less that of one with fewer calls, by the difference of
their numbers, so that neither Python nor the graph's start is part of it. It is shown as a share of a copy's rate: a
copy of a large tensor reads and writes as many bytes in a second. PyTorch is left out where it is not installed.
"""

import argparse
import json
import statistics
import sys
import time
from typing import NamedTuple

from .jobs import rows_of_job

COLUMNS = 4096
FEW, MANY = 8, 40
LIMIT = 900  # seconds that a job may take


class Case(NamedTuple):
    """An operator as both libraries have it. `call` gets the library's functions and the inputs."""

    name: str
    inputs: tuple  # shapes in rows (r) and columns (c); ":bool" marks a condition
    moved: float  # elements that are read and written, for each element of the first input
    call: object
    flags: int = 0  # bools that are read and written, for each element of the first input


CASES = (
    Case("x + y", ("r c", "r c"), 3, lambda f, x, y: x + y),
    Case("x + row", ("r c", "c"), 2, lambda f, x, y: x + y),
    Case("x * column", ("r c", "r 1"), 2, lambda f, x, y: x * y),
    Case("x * one element", ("r c", "1"), 2, lambda f, x, y: x * y),
    Case("x * 1.5", ("r c",), 2, lambda f, x: x * 1.5),
    Case("x + 0.5 * y", ("r c", "r c"), 3, lambda f, x, y: f.add_scaled(x, y)),
    Case("x ** 2", ("r c",), 2, lambda f, x: x**2),
    Case("maximum", ("r c", "r c"), 3, lambda f, x, y: f.maximum(x, y)),
    Case("x > row", ("r c", "c"), 1, lambda f, x, y: x > y, 1),
    Case("where", ("r c:bool", "r c", "r c"), 3, lambda f, c, x, y: f.where(c, x, y), 1),
    Case("masked_fill", ("r c", "r c:bool"), 2, lambda f, x, c: f.masked_fill(x, c), 1),
    Case("transpose", ("r c",), 2, lambda f, x: f.permute(x, (1, 0))),
    Case("permute 0 2 1 3", ("r/256 256 c/128 128",), 2, lambda f, x: f.permute(x, (0, 2, 1, 3))),
    Case("x[:, 1:-1]", ("r c",), 2, lambda f, x: f.contiguous(x[:, 1:-1])),
    Case("x[:, ::2]", ("r c",), 1.5, lambda f, x: f.contiguous(x[:, ::2])),
    Case("concat", ("r c/2", "r c/2"), 4, lambda f, x, y: f.cat((x, y))),
    Case("split", ("r c",), 2, lambda f, x: f.split(x)),
    Case("tile", ("r/4 c",), 5, lambda f, x: f.tile(x)),
    Case("column sum", ("r c",), 1, lambda f, x: x.sum(0)),
    Case("row sum", ("r c",), 1, lambda f, x: x.sum(1)),
    Case("sum", ("r c",), 1, lambda f, x: x.sum()),
    Case("triu", ("r c",), 2, lambda f, x: f.triu(x)),
)


def shape_of(words, elements):
    """Returns the sizes that the words name, such as "r c/2"."""
    sizes = {"r": elements // COLUMNS, "c": COLUMNS}
    numbers = (word.partition("/") for word in words.partition(":")[0].split())
    return tuple(max(1, sizes.get(a, 0) or int(a)) // int(b or 1) or 1 for a, _, b in numbers)


def clock(replays, synchronize):
    """Returns the median times in us of a call in each of the two graphs."""
    found = []
    for replay in replays:
        for _ in range(3):
            replay()
        synchronize()
        samples = []
        for _ in range(15):
            start = time.perf_counter()
            replay()
            synchronize()
            samples.append(1e6 * (time.perf_counter() - start))
        found.append(statistics.median(samples))
    return (found[1] - found[0]) / (MANY - FEW)


class OfMindspore:
    """MindSpore's functions, and how to time them."""

    def __init__(self):
        import mindspore
        from mindspore import mint, ops

        import msops
        from msops.compat import set_device

        set_device("GPU")
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        self.mindspore, self.msops = mindspore, msops
        self.maximum, self.where, self.permute, self.triu = ops.maximum, ops.where, self._permute, ops.triu
        self.add_scaled = lambda x, y: mint.add(x, y, alpha=0.5)
        self.masked_fill = lambda x, c: ops.masked_fill(x, c, mindspore.Tensor(0.5, x.dtype))
        self.contiguous = lambda x: x.contiguous()
        self.cat, self.tile = (lambda xs: ops.cat(xs, 1)), (lambda x: ops.tile(x, (4, 1)))
        self.split = lambda x: tuple(each.contiguous() for each in ops.split(x, x.shape[1] // 4, 1))
        self._ops = ops

    def _permute(self, x, order):
        return self._ops.transpose(x, order).contiguous()

    def random(self, shape, dtype):
        x = self._ops.standard_normal(shape)
        return x > 0 if dtype == "bool" else x.astype(getattr(self.mindspore, dtype))

    def copy(self, x):
        return x.copy()

    def time(self, call, inputs):
        graphs = []
        for count in (FEW, MANY):

            def calls(*xs, count=count):
                for _ in range(count):
                    y = call(*xs)
                return (y[0] if isinstance(y, tuple) else y).reshape(-1)[:1]

            graphs.append(self.msops.cuda_graph(calls))
        for graph in graphs:
            for _ in range(3):
                graph(*inputs)  # the first calls are usual ones, then it is recorded
        return clock([lambda g=graph: g(*inputs) for graph in graphs], self.mindspore.runtime.synchronize)


class OfTorch:
    """PyTorch's functions, and how to time them."""

    def __init__(self):
        import torch

        self.torch = torch
        self.maximum, self.where, self.triu = torch.maximum, torch.where, torch.triu
        self.permute = lambda x, order: x.permute(order).contiguous()
        self.add_scaled = lambda x, y: torch.add(x, y, alpha=0.5)
        self.masked_fill = lambda x, c: x.masked_fill(c, 0.5)
        self.contiguous = lambda x: x.contiguous()
        self.cat, self.tile = (lambda xs: torch.cat(xs, 1)), (lambda x: x.tile((4, 1)))
        self.split = lambda x: [each.contiguous() for each in x.split(x.shape[1] // 4, 1)]

    def random(self, shape, dtype):
        x = self.torch.randn(shape, device="cuda")
        return x > 0 if dtype == "bool" else x.to(getattr(self.torch, dtype))

    def copy(self, x):
        return x.clone()

    def time(self, call, inputs):
        graphs = []
        for count in (FEW, MANY):
            call(*inputs)
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                for _ in range(count):
                    call(*inputs)
            graphs.append(graph)
        return clock([graph.replay for graph in graphs], self.torch.cuda.synchronize)


def job(kind, only, sizes, dtypes):
    """Prints the times of a library as JSON, a line for each case."""
    library = OfTorch() if kind == "torch" else OfMindspore()
    patch = library.msops.patch_mindspore(mint=False) if kind == "msops" else None
    if patch is not None and not patch.kernels:
        sys.exit("RuntimeError: msops' kernels cannot replace MindSpore's here")
    large = library.random((2**26,), "float32")
    rate = 8 * 2**26 / library.time(library.copy, [large])
    del large
    for case in CASES:
        if only and not any(each in case.name for each in only):
            continue
        for size in sizes:
            for dtype in dtypes:
                shapes = [(shape_of(words, 2**size), words.partition(":")[2] or dtype) for words in case.inputs]
                inputs = [library.random(*each) for each in shapes]
                us = library.time(lambda *xs, f=case.call: f(library, *xs), inputs)
                elements = 1
                for length in shapes[0][0]:
                    elements *= length
                moved = elements * (case.moved * (2 if dtype == "float16" else 4) + case.flags)
                share = moved / us / rate
                row = {"kind": kind, "case": case.name, "size": size, "dtype": dtype, "us": us, "share": share}
                print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--sizes", nargs="*", type=int, default=[24, 20])
    parser.add_argument("--dtypes", nargs="*", default=["float16", "float32"])
    given = parser.parse_args()
    if given.job:
        return job(given.job, given.only, given.sizes, given.dtypes)
    words = [
        "--sizes",
        *map(str, given.sizes),
        "--dtypes",
        *given.dtypes,
        *(["--only", *given.only] if given.only else []),
    ]
    rows = {}
    for kind in ("mindspore", "msops", "torch"):
        for row in rows_of_job("benchmarks.mindspore_kernels", [kind, *words], {}, LIMIT, of_torch=kind == "torch"):
            if "why" in row:
                print(f"{kind}: {row['why']}", file=sys.stderr)
            else:
                rows.setdefault((row["case"], row["size"], row["dtype"]), {})[kind] = row
    kinds = "mindspore", "msops", "torch"
    print("share of a copy's rate".ljust(38) + "".join(kind.rjust(22) for kind in kinds))
    for (case, size, dtype), found in rows.items():
        cells = (f"{found[k]['share']:.2f} ({found[k]['us']:.1f} us)" if k in found else "-" for k in kinds)
        print(f"{case}, 2^{size}, {dtype}".ljust(38) + "".join(cell.rjust(22) for cell in cells))
    return None


if __name__ == "__main__":
    main()
