"""Prints a table of the targets that a folder's times meet: `python -m benchmarks.targets FOLDER`.

Each line names the worst of its cases. A share is the floor over the time; "best peer" is the fastest peer in the same
run. The table omits what the run has not measured.
"""

import sys

from . import report
from .figures import Target, ragged, times_faster
from .llm import NAME
from .llm.run import TARGETS
from .operators import BENCHMARKS

EVERY = (  # the targets of every operator
    Target("odd sizes", "at most 10 % slower per byte", 1 / 1.1, ragged),
    Target("whole Cells", "faster than MindSpore's own", 1, times_faster("MindSpore", "graph", "pynative")),
)


def table(rows, device):
    """Yields the table's lines for a run on GPU or CPU."""
    yield "| operator | what | target | worst case | reached | met |"
    yield "|---|---|---|---|---|---|"
    targets = {op: (*benchmark.targets.get(device, ()), *EVERY) for op, benchmark in BENCHMARKS.items()}
    for op, of_op in {**targets, NAME: TARGETS[device]}.items():
        chosen = [row for row in rows if row["op"] == op or row["part"] == "device"]
        for target in of_op:
            figures = [figure for figure in target.figures(chosen) if figure[0] == figure[0]]  # not NaN
            if figures:
                worst, case = min(figures)
                missed = sum(figure < target.least for figure, _ in figures)
                met = "yes" if not missed else f"no: {missed} of {len(figures)}"
                case = case.replace(f"{op} ", "", 1)
                yield f"| {op} | {target.what} | {target.wanted} | {case} | {target.show(worst)} | {met} |"


def main():
    for folder in sys.argv[1:]:
        rows, about = report.read(folder)
        print(f"{about['device']}\n")
        print("\n".join(table(rows, "GPU" if "driver" in about else "CPU")))


if __name__ == "__main__":
    main()
