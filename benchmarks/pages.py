"""Writes the tables of the READMEs from all runs in `results`: `python -m benchmarks.pages`.

A table stands between two comments, of which the first names it. A case that several runs have measured comes from the
run with the most peers; of a language model, from a run that has CUDA graphs, if there is one.
"""

import functools
import re
import statistics
from pathlib import Path

from . import report
from .llm import GRAPH, HEADLINE, NAME, STACK
from .operators import BENCHMARKS

RESULTS = Path(__file__).with_name("results")
PAGES = (report.ROOT / "README.md", report.ROOT / "benchmarks" / "README.md")
BEGIN, END = "<!-- python -m benchmarks.pages writes {} -->\n", "<!-- until here -->\n"
NAMES = {
    "torch": "PyTorch",
    "torch flash": "FlashAttention-2",
    "torch cuDNN": "cuDNN",
    "torch efficient": "PyTorch's memory-efficient",
    "torch channels-last": "PyTorch channels-last",
    "naive CUDA": "naive kernel",
    "MindSpore": "MindSpore's own operators",
}
GPU, CPU = "NVIDIA H200", "AMD EPYC"  # the tables of kernels are from runs on these devices
SMALLEST_SHARE = 0.1  # below it, a copy is no measure of a search or of products on tensor cores


def runs():
    """Returns {name of the run: (its rows, its device)}."""
    folders = sorted(path.parent for path in RESULTS.glob(f"*/{report.FILE}"))
    read = {folder.name: report.read(folder) for folder in folders}
    return {name: (rows, about["device"]) for name, (rows, about) in read.items()}


def cases_of(every, wanted):
    """Returns {(part, operator, case, dtype): (run, {(direction, by): row})} of what was measured on a device."""
    found = {}
    for run, (rows, device) in every.items():
        cases = {}
        for row in rows if device == wanted else ():
            if row["part"] in ("kernel", "sequence", "model") and not row["beside"]:
                case = tuple(row[name] for name in ("part", "op", "case", "dtype"))
                cases.setdefault(case, {})[row["direction"], row["by"]] = row
        for case, times in cases.items():
            if case not in found or rank(times) > rank(found[case][1]):
                found[case] = run, times
    return found


def rank(times):
    return GRAPH in {by for _, by in times}, len(times)


def number(value):
    """Writes three digits: 0.985, 12.3, 1,230,000."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if value >= 100 else text


def speedup(value):
    return f"{value:.2f}" if value < 10 else number(value)


def plain(case):
    """Writes 32768 for 2^15, but leaves millions as they are."""
    return re.sub(r"2\^(1\d)\b", lambda found: str(2 ** int(found[1])), case)


def texts(case):
    """Writes "8 texts of 2048 tokens" for 8 x 2048."""
    number, tokens = case.split(" x ")
    return f"{number} text{'s' * (number != '1')} of {tokens} tokens"


def link(run):
    return f"[{run}](results/{run})"


def peers_of(times, direction):
    """Returns the rows of the peers, the fastest first."""
    rows = [row for (way, by), row in times.items() if way == direction and by != "msops"]
    return sorted(rows, key=lambda row: row["us"])


def lines_of(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def kernels(every, device=GPU):
    """Returns the lines of each operator's named cases beside its best peer, forward and backward; on a CPU, of those
    that PyTorch has."""
    head = ["operator", "case", "dtype", "forward, µs", "roof", "best peer", "speedup"]
    rows = []
    for (part, op, case, dtype), (run, times) in sorted(cases_of(every, device).items(), key=lambda item: item[0][1]):
        ours = [row for (_, by), row in times.items() if by == "msops"]
        if device == CPU and "torch" not in {by for _, by in times}:
            continue
        if part == "model" or not (any(row["named"] for row in ours) or (case, dtype) in BENCHMARKS[op].headline):
            continue
        cells = []
        for direction in ("forward", "backward") if part == "kernel" else ("forward", "forward+backward"):
            row = times.get((direction, "msops"))
            bound = BENCHMARKS[op].flops(case, direction) is None
            cells += four_cells(row, peers_of(times, direction), bound) if row else [""] * 4
        rows.append([f"`{op}`", plain(case), dtype, *cells, link(run)])
    return lines_of([*head, "backward, µs", *head[4:], "run"], rows)


def four_cells(row, peers, bound):
    """Returns our time, our share of the roof if that bounds the case, the best peer, and how many times our time it
    takes."""
    share = (bound and row["share"]) or 0
    cells = [number(row["us"]), f"{share:.2f}" if share >= SMALLEST_SHARE else ""]
    if not peers:
        return [*cells, "", ""]
    return [*cells, NAMES.get(peers[0]["by"], peers[0]["by"]), speedup(peers[0]["us"] / row["us"])]


def models(every):
    """Returns the lines of tokens per second of a whole language model."""
    peers, rows = ("msops", GRAPH, STACK, "MindSpore", "torch", "torch.compile"), []
    for device in dict.fromkeys(device for _, device in every.values()):
        for (part, _, case, dtype), (run, times) in cases_of(every, device).items():
            for direction in dict.fromkeys(way for way, _ in times) if part == "model" else ():
                speeds = [times.get((direction, by)) for by in peers]
                figures = [number(row["tokens_s"]) if row else "" for row in speeds]
                rows.append([device, f"{direction}, {texts(case)}, {dtype}", *figures, link(run)])
    return lines_of(["device", "tokens per second", *(NAMES.get(by, by) for by in peers), "run"], rows)


def cells(every):
    """Returns the lines that tell how many Cells are faster than MindSpore's own operators."""
    rows = []
    for run, (measured, device) in every.items():
        factors = [
            row["times_faster"]
            for row in measured
            if row["part"] in ("graph", "pynative") and row["by"] == "MindSpore" and row["times_faster"]
        ]
        if factors:
            faster = f"{sum(factor >= 1 for factor in factors)} of {len(factors)}"
            speeds = [speedup(value) for value in (min(factors), statistics.median(factors), max(factors))]
            rows.append([device, faster, *speeds, link(run)])
    return lines_of(["device", "Cells that are not slower", "slowest", "median", "fastest", "run"], rows)


def headline(every):
    """Returns the lines of the cases that operators and the model put into the main README."""
    found, rows = cases_of(every, GPU), []
    for op, benchmark in BENCHMARKS.items():
        for case, dtype in benchmark.headline:
            _, times = found.get(("kernel", op, case, dtype), (None, {}))
            for direction in ("forward", "backward"):
                if (direction, "msops") in times:
                    flops = benchmark.flops(case, direction)
                    what = f"`{op}` {direction}, {plain(case)}, {dtype}, {'TFLOP/s' if flops else 'µs'}"
                    value = (lambda row, flops=flops: flops / row["us"] / 1e6) if flops else (lambda row: row["us"])
                    rows.append(compared(what, times, direction, value))
    for direction, case, dtype in HEADLINE:
        _, times = found.get(("model", NAME, case, dtype), (None, {}))
        if times:
            ours = [row for (way, by), row in times.items() if way == direction and by in ("msops", GRAPH, STACK)]
            others = {key: row for key, row in times.items() if key[1] not in (GRAPH, STACK)}
            best = {(direction, "msops"): min(ours, key=lambda row: row["us"])}
            what = f"{direction}, {texts(case)}, tokens/s"
            rows.append(compared(what, {**others, **best}, direction, lambda row: row["tokens_s"]))
    return lines_of([GPU, "msops", "roof", "others"], rows)


def compared(what, times, direction, value):
    """Returns the cells of a line, where the fastest is bold."""
    row, peers = times[direction, "msops"], peers_of(times, direction)
    best = min([row, *peers], key=lambda each: each["us"])
    shown = {id(each): number(value(each)) for each in (row, *peers)}
    shown[id(best)] = f"**{shown[id(best)]}**"
    share = row["share"] if row["share"] and row["share"] >= SMALLEST_SHARE and value(row) == row["us"] else None
    named = [f"{NAMES.get(peer['by'], peer['by'])} {shown[id(peer)]}" for peer in peers if peer["by"] != "naive CUDA"]
    return [what, shown[id(row)], f"{share:.2f}" if share else "", ", ".join(named)]


TABLES = {
    "the headline": headline,
    "kernels": kernels,
    "kernels on the CPU": functools.partial(kernels, device=CPU),
    "the model": models,
    "Cells": cells,
}


def written(page, every):
    """Returns the text of a page, with its tables as the results are now."""
    for name, table in TABLES.items():
        begin = BEGIN.format(name)
        if begin in page:
            before, _, rest = page.partition(begin)
            page = before + begin + "\n".join(table(every)) + "\n" + END + rest.partition(END)[2]
    return page


def main():
    every = runs()
    for path in PAGES:
        path.write_text(written(path.read_text(), every))


if __name__ == "__main__":
    main()
