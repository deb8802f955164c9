"""Writes the table of docs/mint.md: which names of `mindspore.mint` run on a device while MindSpore is patched.

`python tests/mint_table.py GPU` runs all examples of MindSpore's documentation there, and writes that column, and what
each name stands on. The other device's column keeps what it has, and is empty for names that were not run there. Where
no example tells what a name stands on, that is written by hand, and kept.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mint_examples import findings, left_out, names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mint.md"
DEVICES = ("CPU", "GPU")
BEGIN, END = "<!-- python tests/mint_table.py writes this -->", "<!-- until here -->"
RANDOM = "patch/mint/random.py"  # it calls the kernel of this name without a function of msops/operators
MINDSPORE, COMPOSED = "MindSpore", "composed"
NONE = "\N{EN DASH}"  # there is no example that tells


def cell(pynative, graph):
    """Returns in a word what `findings` says of a name in both modes."""
    if pynative is None or graph is None:
        return NONE
    modes = [mode for mode, finding in (("PyNative", pynative), ("graph", graph)) if not finding]
    return "yes" if len(modes) == 2 else modes[0] if modes else "no"


def reason(pynative, graph):
    finding = pynative or graph
    if finding is None:
        return "no example"
    if "BFloat16" in finding:
        return "the example makes bfloat16, which GPUs have no kernels for"
    kernel = re.search(r"kernel (\w+) unregistered|op \[(\w+)\]|kernelmod for op (\w+)", finding)
    if kernel:
        return f"no kernel of `{kernel[1] or kernel[2] or kernel[3]}`"
    if "size depends on values" in finding:
        return "the result's size depends on values, which graph mode cannot have"
    return finding.replace("|", "/").replace("\n", " ")[:90].strip()


def base(files):
    """Returns what a name stands on that needs these files of msops."""
    folders = "operators/", RANDOM
    kernels = sorted({Path(file).stem for file in files if file.startswith(folders)} - {"__init__"})
    if kernels:
        return ", ".join(f"`{kernel}`" for kernel in kernels)
    return COMPOSED if any(file.startswith("patch/") for file in files) else MINDSPORE


class Row(NamedTuple):
    """Says what a name stands on, a device's cell, and why it is not yes."""

    base: str
    cell: str
    why: str


def measured(device):
    """Returns {name: Row}. Two processes run the examples."""
    paths = names()
    with ThreadPoolExecutor(2) as threads:
        halves = list(threads.map(lambda half: findings(device, True, half), (paths[::2], paths[1::2])))
    found, files = ({**first, **second} for first, second in zip(*halves))
    rows, whys = {}, left_out(device)
    for path in paths:
        both = found[path, False], found[path, True]
        told = base(files[path]) if files[path] or both[0] is not None else NONE
        rows[path] = Row(told, cell(*both), "" if cell(*both) == "yes" else whys.get(path) or reason(*both))
    return rows


def rows_of(text):
    """Returns {name: [what it stands on, cell of each device, why]} of a page's table."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    return {name.strip("`"): rest for name, *rest in lines}


def with_column(text, device, rows):
    """Returns a page with a device's column, and what it says where a name does not run. What a name stands on is what
    the CPU tells, where a GPU may take another way, unless the CPU tells nothing."""
    old, at = rows_of(text), DEVICES.index(device)
    lines = [f"| name | stands on | {' | '.join(DEVICES)} | why not |", "|---|---|---|---|---|"]
    for path, row in sorted(rows.items()):
        before, *cells, why = old.get(path, ["", *[""] * len(DEVICES), ""])
        cells[at] = row.cell
        others_run = all(each in ("yes", "") for i, each in enumerate(cells) if i != at)
        is_told = row.base != NONE and (device == DEVICES[0] or before in ("", NONE))
        told = row.base if is_told or not before else before
        lines.append(f"| `{path}` | {told} | {' | '.join(cells)} | {row.why or ('' if others_run else why)} |")
    head, _, rest = text.partition(BEGIN)
    return "\n".join([head + BEGIN, *lines, END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_column(PAGE.read_text(), sys.argv[1], measured(sys.argv[1])))
