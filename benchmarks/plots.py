"""Draws pictures from a folder's times.csv: `python -m benchmarks.plots FOLDER`."""

import math
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from . import report
from .benchmark import DTYPES, Benchmark
from .cases import sequence_cases
from .llm import GRAPH, STACK
from .operators import BENCHMARKS

matplotlib.use("Agg")  # pictures go to files, not to windows
COLORS = {
    "msops forward": "#0b5fa5", "msops backward": "#c8102e",
    "torch": "#999999", "naive CUDA": "#e6994c", "NumPy": "#5aa469",
}  # fmt: skip
MODES = {"graph": "MindSpore,\ngraph mode", "pynative": "MindSpore,\nPyNative"}
LINES = {"float32": "-", "float16": "--"}
MODEL_KINDS = ("training", "prefill", "decoding")
MODEL_COLORS = {
    "MindSpore": "#e6994c", "msops": "#0b5fa5", GRAPH: "#3b2f8f", STACK: "#4fa3e0", "torch": "#999999",
    "torch.compile": "#555555",
}  # fmt: skip
LINE, FIELD = 0.22, 0.72  # height of a table's line and width of a field, in inches
HEAD = 4  # height of a table's head, in lines


def draw(folder):
    rows, about = report.read(folder)
    kernels = [row for row in rows if row["part"] == "kernel"]
    if any(row["share"] for row in kernels):
        shares(kernels, about["device"]).savefig(Path(folder) / "roof.png")
    named = [row for row in kernels if row["named"] and row["times_faster"]]
    if named:
        speedups(named, f"Kernels on {about['device']}").savefig(Path(folder) / "speedups.png")
    sequence = [row for row in rows if row["part"] == "sequence"]
    if len({row["case"] for row in sequence if not row["named"]}) > 1:
        sequences(sequence, about["device"]).savefig(Path(folder) / "sequences.png")
    of_mindspore = [row for row in rows if row["part"] in MODES and row["by"] == "MindSpore" and row["times_faster"]]
    cells = [dict(row, by=MODES[row["part"]]) for row in of_mindspore]
    if cells:
        speedups(cells, f"Whole Cells through MindSpore on {about['device']}").savefig(Path(folder) / "cells.png")
    of_models = [row for row in rows if row["part"] == "model"]
    if of_models:
        models(of_models, about["device"]).savefig(Path(folder) / "models.png")
    plt.close("all")


def by_op(rows):
    """Returns {operator: its rows}, in the order of the operators' names."""
    ops = sorted({row["op"] for row in rows})
    return {op: [row for row in rows if row["op"] == op] for op in ops}


def shares(rows, device):
    """Plots the share of the roof over the bytes moved, one panel per operator, in a grid about as wide as high."""
    ops = by_op(rows)
    columns = min(5, math.ceil(math.sqrt(len(ops))))
    lines = math.ceil(len(ops) / columns)
    size = (max(9, 4.5 * columns), 1.4 + 3.6 * lines)
    figure, panels = plt.subplots(
        lines, columns, figsize=size, dpi=110, layout="constrained", sharey=True, squeeze=False
    )
    figure.suptitle(
        f"Share of the roof that each kernel reaches on {device}: 1 is the time of a copy of as many bytes.\n"
        "Lines: the sweep. Circles and squares: other cases. Crosses: odd sizes."
    )
    labels = {}
    top = min(2, max(1.15, *(1.05 * row["share"] for row in rows)))
    for axes in panels.flat[len(ops) :]:
        axes.remove()
    for (op, of_op), axes in zip(ops.items(), panels.flat):
        benchmark = BENCHMARKS.get(op, Benchmark())
        for (direction, dtype, by), group in grouped(of_op).items():
            ours = by == "msops"
            if not ours and by not in COLORS:
                continue
            label = f"msops {direction}" if ours else by
            style = dict(color=COLORS[label], lw=2 if ours else 1, alpha=1 if ours else 0.7)
            line = sorted(
                (row["bytes"], row["share"]) for row in group if benchmark.on_line(row["case"]) and not row["beside"]
            )
            (drawn,) = axes.plot(*zip(*line), "." + LINES[dtype], **style) if line else (None,)
            for row in group if ours else ():
                if row["beside"] or not benchmark.on_line(row["case"]):
                    marker = "x" if row["beside"] else ("o" if dtype == "float32" else "s")
                    axes.plot(row["bytes"], row["share"], marker, color=COLORS[label], fillstyle="none", ms=5)
            if drawn:
                labels.setdefault(f"{label}, {dtype}", drawn)
        axes.axhline(1, color="k", lw=0.7)
        axes.set(title=f"{op}\nlines: {benchmark.line}" if benchmark.line else op, xscale="log", ylim=(0, top))
        axes.set_xlabel("bytes read and written")
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("share of the roof")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4)
    return figure


def grouped(rows):
    """Groups rows into lines. Peers come first, so that our lines lie above theirs."""
    groups = {}
    for row in sorted(rows, key=lambda row: row["by"] == "msops"):
        groups.setdefault((row["direction"], row["dtype"], row["by"]), []).append(row)
    return groups


def speedups(rows, title):
    """Draws how many times msops' time each peer takes, in a table per operator with a line per case."""
    tables = {op: _table(of_op) for op, of_op in by_op(rows).items()}
    columns = packed({op: len(lines) + HEAD for op, (_, lines) in tables.items()})
    words = [0.065 * max(len(name) for op in ops for name in tables[op][1]) + 0.3 for ops in columns]  # inches
    fields = [max(max(FIELD * len(tables[op][0]), 0.105 * len(op)) for op in ops) for ops in columns]
    width = sum(words) + sum(fields) + 0.2
    height = 0.4 + LINE * max(sum(len(tables[op][1]) + HEAD for op in ops) for ops in columns)
    figure = plt.figure(figsize=(width, height), dpi=110)
    figure.suptitle(f"{title}: how many times msops' time each takes", y=1 - 0.15 / height)
    left = 0
    for ops, word, field in zip(columns, words, fields):
        left, top = left + word, height - 0.3
        for op in ops:
            heads, lines = tables[op]
            size = len(heads) * FIELD, len(lines) * LINE
            top -= size[1] + HEAD * LINE
            _draw_table(
                figure.add_axes((left / width, top / height, size[0] / width, size[1] / height)), op, heads, lines
            )
        left += field
    return figure


def _table(rows):
    """Returns ([(dtype, peer)], {case: factors}) of an operator."""
    heads = sorted(dict.fromkeys((row["dtype"], row["by"]) for row in rows), key=lambda head: DTYPES.index(head[0]))
    lines = {}
    for row in rows:
        factors = lines.setdefault(f"{row['case']}, {row['direction']}", [math.nan] * len(heads))
        factors[heads.index((row["dtype"], row["by"]))] = row["times_faster"]
    return heads, lines


def packed(lengths):
    """Packs operators into at most four columns of about equal length, with some 45 lines unless four are too few."""
    total = sum(lengths.values())
    count = min(4, math.ceil(total / 45))
    columns, before = [[] for _ in range(count)], 0
    for op, length in lengths.items():
        columns[int((before + length / 2) * count / total)].append(op)
        before += length
    return [column for column in columns if column]


def _draw_table(axes, op, heads, lines):
    """Draws each factor in a field that is green where msops is faster, and red where it is slower."""
    axes.imshow(list(lines.values()), cmap="RdYlGn", norm=LogNorm(1 / 16, 16), aspect="auto", alpha=0.75)
    for i, factors in enumerate(lines.values()):
        for j, factor in enumerate(factors):
            if not math.isnan(factor):
                axes.text(
                    j, i, f"{factor:,.0f}" if factor >= 1000 else f"{factor:.3g}", ha="center", va="center", fontsize=8
                )
    names = [f"{peer}\n{dtype}".replace("torch ", "torch\n") for dtype, peer in heads]
    axes.set_xticks(range(len(heads)), names, fontsize=7)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=8)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_title(op, loc="left", fontsize=11, fontweight="bold")


def sequences(rows, device):
    """Plots the time of a step over each swept size of each operator, one row of panels per direction."""
    panels_of = [(op, *sweep) for op in by_op(rows) for sweep in BENCHMARKS[op].sequence_sweeps.items()]
    directions = ("forward", "forward+backward")
    peers = list(dict.fromkeys(row["by"] for row in rows if not row["named"]))
    size = (6.5 * len(panels_of), 10)
    figure, panels = plt.subplots(
        2, len(panels_of), figsize=size, dpi=110, layout="constrained", sharex="col", sharey="row", squeeze=False
    )
    figure.suptitle(f"Time of a step of sequences on {device}, with as many inputs as hidden units")
    colors = dict(float32="#0b5fa5", tf32="#e6994c", float16="#c8102e")
    for column, (op, label, (axis, swept)) in enumerate(panels_of):
        sizes = {case.name: case.size for case in sequence_cases("GPU", (op,))}
        for direction, axes in zip(directions, panels[:, column]):
            for (drawn, dtype, by), group in grouped(by_op(rows)[op]).items():
                points = sorted(
                    (sizes[row["case"]][axis], row["us_step"]) for row in group if swept(sizes[row["case"]])
                )
                if drawn == direction and by in peers and points:
                    line = ("-", "--", ":", "-.")[peers.index(by)]
                    axes.plot(*zip(*points), "." + line, color=colors[dtype], label=f"{by}, {dtype}")
            axes.set(title=f"{op} {direction}", yscale="log", xlabel=label, ylabel="µs")
            axes.set_xscale("log", base=2)
            axes.grid(alpha=0.3)
    panels[0, 0].legend()
    return figure


def models(rows, device):
    """Draws the tokens per second of whole models in groups of bars, one group for each case. Training is one panel,
    other cases have panels of their own, since their speeds differ a lot. A cross stands for what was not measured, in
    a panel that has the peer."""
    panels_of = {}
    for row in sorted(rows, key=lambda row: MODEL_KINDS.index(row["direction"])):
        panel = row["direction"], "" if row["direction"] == "training" else row["case"]
        panels_of.setdefault(panel, {}).setdefault((row["case"], row["dtype"]), {})[row["by"]] = row["tokens_s"]
    peers = [peer for peer in MODEL_COLORS if any(row["by"] == peer for row in rows)]
    widths = [len(cases) for cases in panels_of.values()]
    size = (1.5 + 2.6 * sum(widths), 4.5)
    figure, panels = plt.subplots(1, len(widths), figsize=size, dpi=110, layout="constrained", width_ratios=widths)
    panels = np.atleast_1d(panels)
    figure.suptitle(f"A language model of SmolLM2-135M's sizes on {device}: tokens per second")
    bars_of = {}
    for ((kind, _), cases), axes in zip(panels_of.items(), panels):
        here = [peer for peer in peers if any(peer in speeds for speeds in cases.values())]
        for i, peer in enumerate(here):
            places = np.arange(len(cases)) + (i - (len(here) - 1) / 2) * 0.8 / len(here)
            heights = [speeds.get(peer, 0) for speeds in cases.values()]
            bars = bars_of[peer] = axes.bar(places, heights, 0.76 / len(here), color=MODEL_COLORS[peer])
            axes.bar_label(bars, [_thousands(height) if height else "x" for height in heights], padding=2, fontsize=8)
        axes.set_xticks(range(len(cases)), [f"{case}\n{dtype}" for case, dtype in cases])
        axes.set(title=kind, xlim=(-0.5, len(cases) - 0.5))
        axes.margins(y=0.1)
        axes.yaxis.set_major_formatter(lambda value, _: _thousands(value))
    figure.legend([bars_of[peer] for peer in peers], peers, loc="outside lower center", ncols=len(peers))
    return figure


def _thousands(value):
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        draw(folder)
