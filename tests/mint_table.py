"""Writes the table of docs/mint.md: which names of `mindspore.mint` run on a device while MindSpore is patched.

`python tests/mint_table.py GPU` runs all examples of MindSpore's documentation there, and writes that column.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mint_examples import findings, left_out, names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mint.md"
DEVICES = ("CPU", "GPU")
BEGIN, END = "<!-- python tests/mint_table.py writes this -->", "<!-- until here -->"
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
    return finding.replace("|", "/").replace("\n", " ")[:90].strip()


def measured(device):
    """Returns {name: (its cell, why)}. Two processes run the examples."""
    paths = names()
    with ThreadPoolExecutor(2) as threads:
        halves = list(threads.map(lambda half: findings(device, True, half), (paths[::2], paths[1::2])))
    found = {**halves[0], **halves[1]}
    rows, whys = {}, left_out(device)
    for path in paths:
        both = found[path, False], found[path, True]
        rows[path] = cell(*both), "" if cell(*both) == "yes" else whys.get(path) or reason(*both)
    return rows


def rows_of(text):
    """Returns {name: [cell of each device, why]} of a page's table."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    return {name.strip("`"): rest for name, *rest in lines}


def with_column(text, device, rows):
    """Returns a page with a device's column, and what it says where a name does not run."""
    old, at = rows_of(text), DEVICES.index(device)
    lines = [f"| name | {' | '.join(DEVICES)} | why not |", "|---|---|---|---|"]
    for path, (value, why) in sorted(rows.items()):
        *cells, before = old.get(path, [""] * (len(DEVICES) + 1))
        cells[at] = value
        others_run = all(each in ("yes", "") for i, each in enumerate(cells) if i != at)
        lines.append(f"| `{path}` | {' | '.join(cells)} | {why or ('' if others_run else before)} |")
    head, _, rest = text.partition(BEGIN)
    return "\n".join([head + BEGIN, *lines, END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_column(PAGE.read_text(), sys.argv[1], measured(sys.argv[1])))
