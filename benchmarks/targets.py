"""Which targets a folder's times meet, as a table: `python -m benchmarks.targets FOLDER`.

Each line names the worst of its cases. A share is the floor over the time; "best peer" is the fastest beside it in the
same run. No line for what the run has not measured.
"""

import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import report
from .cases import OPS


class Target(NamedTuple):
    kernel: str
    wanted: str
    least: float
    figures: Callable[[list], Iterable]  # rows -> (figure, of which case); none below `least` is wanted
    show: Callable[[float], str] = "{:.3g}".format


def pick(rows, op=None, by="msops", part="kernel", **equal):
    """The rows of some operators and cases."""
    ops = (op,) if isinstance(op, str) else op
    for row in rows:
        fits = (ops is None or row["op"] in ops) and row["by"] == by and row["part"] == part
        if fits and all(test(row[key]) if callable(test) else row[key] == test for key, test in equal.items()):
            yield row


def name(row):
    return f"{row['op']} {row['direction']} {row['case']} {row['dtype']}"


def share(op, case, **equal):
    return lambda rows: [(row["share"], name(row)) for row in pick(rows, op, case=case, **equal)]


def best_peer(op, case, **equal):
    """The time of the fastest peer over ours."""

    def figures(rows):
        for row in pick(rows, op, case=case, **equal):
            factors = [r["times_faster"] for r in rows if r["by"] != "msops" and report.what(r) == report.what(row)]
            if factors:
                yield min(factors), name(row)

    return figures


def together(case, value):
    """Of a depthwise case, a value of its forward and backward rows, all peers' rows, and those of whole Cells."""

    def figures(rows):
        for forward in pick(rows, "depthwise", direction="forward", case=case, named=True):
            same = dict(case=forward["case"], dtype=forward["dtype"])
            for backward in pick(rows, "depthwise", direction="backward", **same):
                yield value(rows, forward, backward, same), name(forward).replace("forward", "both")

    return figures


def floor_share(rows, forward, backward, same):
    return (forward["floor_us"] + backward["floor_us"]) / (forward["us"] + backward["us"])


def against(*peers, mindspore=False):
    """Times that the fastest of the peers takes for both directions, over ours."""

    def factor(rows, forward, backward, same):
        times = []
        for peer in peers:
            both = [row["us"] for row in pick(rows, "depthwise", by=peer, **same)]
            times += [sum(both)] if len(both) == 2 else []
        if mindspore:
            whole = pick(rows, "depthwise", by="MindSpore", part="graph", direction="forward+backward", **same)
            times += [row["us"] for row in whole]
        return min(times, default=float("nan")) / (forward["us"] + backward["us"])

    return factor


def above_empty(rows):
    """Minus the microseconds that the smallest LLTM takes more than an empty kernel."""
    empty = next((row["us"] for row in rows if row["op"] == "nothing"), None)
    if empty is not None:
        yield from ((empty - row["us"], name(row)) for row in pick(rows, "lltm", case="16 x 128"))


def ragged(rows):
    """Time per byte of the aligned neighbour over that of the odd size."""
    aligned = {report.what(row): row["us"] / row["bytes"] for row in pick(rows)}
    for row in pick(rows, beside=lambda beside: beside):
        neighbour = report.what(dict(row, case=row["beside"]))
        if neighbour in aligned:
            yield aligned[neighbour] / (row["us"] / row["bytes"]), name(row)


def cells(*ops):
    """MindSpore's time over ours."""

    def figures(rows):
        for part in ("graph", "pynative"):
            for row in pick(rows, ops, by="MindSpore", part=part):
                if row["times_faster"]:
                    yield row["times_faster"], f"{part} {name(row)}"

    return figures


def sequences(peer, case=lambda case: True):
    """The peer's time over ours."""

    def figures(rows):
        for row in pick(rows, by=peer, part="sequence", named=True, case=case):
            if row["times_faster"]:
                yield row["times_faster"], name(row)

    return figures


def ends(*ends):
    return lambda text: text.endswith(ends)


PLAIN, TORCHES = ("add", "sigmoid"), ("torch", "torch channels-last")
ON_GPU = [
    Target("add, sigmoid, 2^28", "share 0.97", 0.97, share(PLAIN, "2^28")),
    Target("", "at most 1 % slower than the best peer", 0.99, best_peer(PLAIN, "2^28")),
    Target("add, sigmoid, 2^20", "not slower than the best peer", 1, best_peer(PLAIN, "2^20")),
    Target("trilinear F=256", "share 0.95", 0.95, share("trilinear", "2^16 x 256")),
    Target("trilinear F=16, 2, forward", "share 0.90", 0.90,
           share("trilinear", ends("x 16", "x 2"), named=True, direction="forward")),
    Target("trilinear F=16, 2, backward", "share 0.85", 0.85,
           share("trilinear", ends("x 16", "x 2"), named=True, direction="backward")),
]  # fmt: skip
for direction, dtype, least in (
    ("forward", "float32", 0.85),
    ("forward", "float16", 0.75),
    ("backward", "float32", 0.70),
    ("backward", "float16", 0.60),
):
    figures = share("depthwise", ends("k3 s1", "k3 s2"), named=True, direction=direction, dtype=dtype)
    ON_GPU.append(Target(f"depthwise k=3, {direction}, {dtype}", f"share {least:.2f}", least, figures))
ON_GPU += [
    Target("depthwise k=5, 7, both", "5 times faster than torch and MindSpore", 5,
           together(ends("k5 s1", "k7 s1"), against(*TORCHES, mindspore=True))),
    Target("", "share 0.5", 0.5, together(ends("k5 s1", "k7 s1"), floor_share)),
    Target("depthwise k=31, both", "4 times faster than torch", 4, together(ends("k31 s1"), against(*TORCHES))),
    Target("LLTM pointwise, 2^26", "share 0.95", 0.95, share("lltm", "2^16 x 2^10")),
    Target("LLTM pointwise, 2^11", "within 1 µs of an empty kernel", -1, above_empty,
           lambda figure: f"{-figure:.2f} µs"),
    Target("LLTM sequence, both directions", "not slower than cuDNN's LSTM x 3/4", 1, sequences("cuDNN LSTM x 3/4")),
    Target("LLTM sequence, 16 x 32 x 128", "10 times faster than the stepped cell in a CUDA graph", 10,
           sequences("stepped cell, CUDA graph", ends(" 16 x 32 x 128"))),
    Target("odd sizes, all kernels", "at most 10 % slower per byte", 1 / 1.1, ragged),
    Target("whole Cells", "faster than MindSpore's own", 1, cells(*OPS)),
]  # fmt: skip
ON_CPU = [
    Target(
        "add, sigmoid, LLTM Cells",
        "not slower than MindSpore's own",
        1,
        cells("add", "sigmoid", "lltm", "lltm_sequence"),
    ),
    Target("depthwise, trilinear Cells", "faster than MindSpore's own", 1, cells("depthwise", "trilinear")),
]


def table(rows, targets):
    yield "| kernel | target | worst case | reached | met |"
    yield "|---|---|---|---|---|"
    for target in targets:
        figures = [figure for figure in target.figures(rows) if figure[0] == figure[0]]  # not NaN
        if figures:
            worst, case = min(figures)
            missed = sum(figure < target.least for figure, _ in figures)
            met = "yes" if not missed else f"no: {missed} of {len(figures)}"
            yield f"| {target.kernel} | {target.wanted} | {case} | {target.show(worst)} | {met} |"


def main():
    for folder in sys.argv[1:]:
        rows, about = report.read(folder)
        print(f"{about['device']}\n")
        print("\n".join(table(rows, ON_GPU if "driver" in about else ON_CPU)))


if __name__ == "__main__":
    main()
