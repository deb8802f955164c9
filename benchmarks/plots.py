"""Draws the pictures of a folder's times.csv: `python -m benchmarks.plots FOLDER`."""

import itertools
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from . import report
from .cases import DTYPES, KERNELS, sequence_cases

matplotlib.use("Agg")  # pictures go to files, not to windows
COLORS = {
    "msops forward": "#0b5fa5", "msops backward": "#c8102e",
    "torch": "#999999", "torch channels-last": "#c9b458", "torch.compile": "#6a51a3",
    "naive CUDA": "#e6994c", "NumPy": "#5aa469", "MindSpore, graph mode": "#5aa469",
    "MindSpore, PyNative mode": "#b3d6b3",
}  # fmt: skip
MODES = {"graph": "MindSpore, graph mode", "pynative": "MindSpore, PyNative mode"}
LINES = {"float32": "-", "float16": "--"}
# The sizes that one line connects; others are single points.
SERIES = {
    "add": lambda case: " x " not in case,
    "sigmoid": lambda case: True,
    "trilinear": lambda case: case.endswith(" x 16"),
    "depthwise": lambda case: case.endswith("k3 s1"),
    "lltm": lambda case: True,
}


def draw(folder):
    rows, about = report.read(folder)
    kernels = [row for row in rows if row["part"] == "kernel"]
    if any(row["share"] for row in kernels):
        shares(kernels, about["device"]).savefig(Path(folder) / "roof.png")
    named = [row for row in kernels if row["named"]]
    if named:
        speedups(named, f"Kernels on {about['device']}").savefig(Path(folder) / "speedups.png")
    sequence = [row for row in rows if row["part"] == "sequence"]
    if len({row["case"] for row in sequence if not row["named"]}) > 1:
        sequences(sequence, about["device"]).savefig(Path(folder) / "sequences.png")
    cells = [dict(row, by=MODES[row["part"]]) for row in rows if row["part"] in MODES and row["by"] == "MindSpore"]
    if cells:
        speedups(cells, f"Whole Cells through MindSpore on {about['device']}").savefig(Path(folder) / "cells.png")
    plt.close("all")


def shares(rows, device):
    """Share of the roof over the bytes moved, one panel per operator."""
    figure, panels = plt.subplots(2, 3, figsize=(18, 10), dpi=110, layout="constrained", sharey=True)
    figure.suptitle(f"Share of the roof that each kernel reaches on {device}: 1 is the time of a copy of as many bytes")
    labels = {}
    top = min(2, max(1.15, *(1.05 * row["share"] for row in rows)))
    for op, axes in zip(KERNELS, panels.flat):
        for (direction, dtype, by), group in grouped([row for row in rows if row["op"] == op]).items():
            ours = by == "msops"
            if not ours and by not in ("torch", "naive CUDA", "NumPy"):
                continue
            label = f"msops {direction}" if ours else by
            style = dict(color=COLORS[label], lw=2 if ours else 1, alpha=1 if ours else 0.7)
            line = sorted(
                (row["bytes"], row["share"]) for row in group if SERIES[op](row["case"]) and not row["beside"]
            )
            (drawn,) = axes.plot(*zip(*line), "." + LINES[dtype], **style) if line else (None,)
            others = [row for row in group if ours and (row["beside"] or not SERIES[op](row["case"]))]
            for row in others:
                marker = "x" if row["beside"] else ("o" if dtype == "float32" else "s")
                axes.plot(row["bytes"], row["share"], marker, color=COLORS[label], fillstyle="none", ms=5)
            if drawn:
                labels.setdefault(f"{label}, {dtype}", drawn)
        axes.axhline(1, color="k", lw=0.7)
        axes.set(title=op, xscale="log", xlabel="bytes read and written", ylabel="share of the roof", ylim=(0, top))
        axes.grid(alpha=0.3)
    legend = panels.flat[-1]
    legend.axis("off")
    legend.legend(labels.values(), labels.keys(), loc="center", ncols=2)
    note = (
        "Lines: the sweep (trilinear: 16 features; depthwise: 3 x 3, stride 1).\n"
        "Circles and squares: other cases. Crosses: odd sizes."
    )
    legend.text(0.5, 0.1, note, ha="center", transform=legend.transAxes)
    return figure


def grouped(rows):
    """Peers first, so that our lines lie above theirs."""
    groups = {}
    for row in sorted(rows, key=lambda row: row["by"] == "msops"):
        groups.setdefault((row["direction"], row["dtype"], row["by"]), []).append(row)
    return groups


def speedups(rows, title):
    """How many times msops' time each peer takes, a bar each; one panel per dtype."""
    rows = [row for row in rows if row["by"] != "msops" and row["times_faster"]]
    names = list(dict.fromkeys(_name(row) for row in rows))
    peers = list(dict.fromkeys(row["by"] for row in rows))
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    size = (8 * len(dtypes), 2 + len(names) * (0.2 + 0.12 * len(peers)))
    figure, panels = plt.subplots(
        1, len(dtypes), figsize=size, dpi=110, layout="constrained", sharey=True, squeeze=False
    )
    figure.suptitle(f"{title}: how many times msops' time each takes")
    for dtype, axes in zip(dtypes, panels.flat):
        for i, peer in enumerate(peers):
            chosen = [row for row in rows if row["by"] == peer and row["dtype"] == dtype]
            places = [names.index(_name(row)) + 0.8 * (i + 0.5) / len(peers) - 0.4 for row in chosen]
            factors = [row["times_faster"] for row in chosen]
            bars = axes.barh(places, [f - 1 for f in factors], 0.8 / len(peers), 1, color=COLORS[peer], label=peer)
            axes.bar_label(bars, [f" {f:.3g} " for f in factors], fontsize=6)
        axes.axvline(1, color="k", lw=0.7)
        axes.set(title=dtype, xscale="log", xlabel="times faster")
        axes.margins(x=0.12, y=0.01)
        axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(names)), names)
    panels[0, 0].invert_yaxis()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(peers))
    return figure


def sequences(rows, device):
    """Time of a step over the hidden units and over the samples, one row of panels per direction."""
    sizes = {case.name: case.size for case in sequence_cases("GPU")}
    sweeps = {  # of steps, batch, inputs, hidden
        "hidden units, of 64 samples": (3, lambda size: size == (128, 64, size[3], size[3])),
        "samples, of 512 hidden units": (1, lambda size: size == (128, size[1], 512, 512)),
    }
    figure, panels = plt.subplots(2, 2, figsize=(13, 10), dpi=110, layout="constrained", sharex="col", sharey="row")
    figure.suptitle(
        f"LLTM over sequences of 128 steps on {device}: time of a step, with as many inputs as hidden units"
    )
    colors, lines = dict(float32="#0b5fa5", tf32="#e6994c", float16="#c8102e"), {"msops": "-", "cuDNN LSTM x 3/4": "--"}
    for (direction, (label, (axis, swept))), axes in zip(
        itertools.product(("forward", "forward+backward"), sweeps.items()), panels.flat
    ):
        for (drawn, dtype, by), group in grouped(rows).items():
            points = sorted((sizes[row["case"]][axis], row["us_step"]) for row in group if swept(sizes[row["case"]]))
            if drawn == direction and by in lines and points:
                axes.plot(*zip(*points), "." + lines[by], color=colors[dtype], label=f"{by}, {dtype}")
        axes.set(title=direction, yscale="log", xlabel=label, ylabel="µs")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    return figure


def _name(row):
    return f"{row['op']} {row['direction']}\n{row['case']}"


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        draw(folder)
