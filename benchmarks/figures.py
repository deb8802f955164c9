"""Computes figures for the operators' targets: each function here returns a function of the rows of the operator and of
the device, which yields (figure, name of the case)."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import report


class Target(NamedTuple):
    what: str
    wanted: str
    least: float
    figures: Callable[[list], Iterable]  # rows -> (figure, name of the case); each figure should be at least `least`
    show: Callable[[float], str] = "{:.3g}".format


def pick(rows, by="msops", part="kernel", **equal):
    """Yields the rows whose named columns have the given values, or pass the given functions."""
    for row in rows:
        fits = row["by"] == by and row["part"] == part
        if fits and all(test(row[key]) if callable(test) else row[key] == test for key, test in equal.items()):
            yield row


def name(row):
    return f"{row['op']} {row['direction']} {row['case']} {row['dtype']}"


def ends(*ends):
    """Returns a function that tells whether a text has one of these ends."""
    return lambda text: text.endswith(ends)


def share(case, **equal):
    return lambda rows: [(row["share"], name(row)) for row in pick(rows, case=case, **equal)]


def best_peer(case, **equal):
    """Divides the time of the fastest peer by ours."""

    def figures(rows):
        for row in pick(rows, case=case, **equal):
            factors = [r["times_faster"] for r in rows if r["by"] != "msops" and report.what(r) == report.what(row)]
            if factors:
                yield min(factors), name(row)

    return figures


def of_elements():
    """Returns the targets of an operator that computes each element by itself, of the sizes ELEMENTS."""
    return {
        "GPU": [
            Target("2^28", "share 0.97", 0.97, share("2^28")),
            Target("2^28", "at most 1 % slower than the best peer", 0.99, best_peer("2^28")),
            Target("2^20", "not slower than the best peer", 1, best_peer("2^20")),
        ]
    }


def of_gated():
    """Returns the targets of a gated activation, of the sizes GATED."""
    return {
        "GPU": [
            Target("16384 x 14336", "share 0.99", 0.99, share("2^14 x 14336")),
            Target("16384 x 14336", "at most 1 % slower than the best peer", 0.99, best_peer("2^14 x 14336")),
            Target("4096 x 11008", "not slower than the best peer", 1, best_peer("2^12 x 11008")),
        ]
    }


def times_faster(peer, *parts, **equal):
    """Divides the peer's time by ours, in named cases of these parts."""

    def figures(rows):
        for part in parts:
            for row in pick(rows, by=peer, part=part, named=True, **equal):
                if row["times_faster"]:
                    yield row["times_faster"], f"{part} {name(row)}"

    return figures


def both_directions(case):
    """Computes the share of forward and backward together."""
    return _together(case, lambda rows, ours, same: sum(row["floor_us"] for row in ours))


def both_times_faster(case, *peers, mindspore=False):
    """Divides the time of the fastest peer for both directions by ours. MindSpore's time is that of a whole Cell."""

    def fastest(rows, ours, same):
        times = []
        for peer in peers:
            both = [row["us"] for row in pick(rows, by=peer, **same)]
            times += [sum(both)] if len(both) == 2 else []
        if mindspore:
            whole = pick(rows, by="MindSpore", part="graph", direction="forward+backward", **same)
            times += [row["us"] for row in whole]
        return min(times, default=float("nan"))

    return _together(case, fastest)


def _together(case, value):
    """Divides a value of our rows of both directions by their time."""

    def figures(rows):
        for forward in pick(rows, direction="forward", case=case, named=True):
            same = dict(case=forward["case"], dtype=forward["dtype"])
            for backward in pick(rows, direction="backward", **same):
                ours = forward, backward
                figure = value(rows, ours, same) / sum(row["us"] for row in ours)
                yield figure, name(forward).replace("forward", "both")

    return figures


def above_empty(case):
    """Subtracts the time of the case from that of an empty kernel, in microseconds."""

    def figures(rows):
        empty = next((row["us"] for row in rows if row["part"] == "device" and row["op"] == "nothing"), None)
        if empty is not None:
            yield from ((empty - row["us"], name(row)) for row in pick(rows, case=case))

    return figures


def without(term, case=None, **equal):
    """Divides the time of the case without a term by that of the case with it; of all cases, or of one."""

    def figures(rows):
        times = {report.what(row): row["us"] for row in pick(rows)}
        for row in pick(rows, case=ends(f" {term}"), **equal):
            alone = row["case"].removesuffix(term).rstrip(", ")
            neighbour = report.what(dict(row, case=alone))
            if neighbour in times and case in (None, alone):
                yield times[neighbour] / row["us"], name(row)

    return figures


def ragged(rows):
    """Divides the time per byte of the aligned neighbour by that of the odd size."""
    aligned = {report.what(row): row["us"] / row["bytes"] for row in pick(rows)}
    for row in pick(rows, beside=lambda beside: beside):
        neighbour = report.what(dict(row, case=row["beside"]))
        if neighbour in aligned:
            yield aligned[neighbour] / (row["us"] / row["bytes"]), name(row)
