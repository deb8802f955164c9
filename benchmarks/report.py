"""Writes rows to CSV and reads them back, with what follows from the times: speeds, floors, shares and comparisons."""

import csv
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import msops
from msops.core.build import find_nvcc

COLUMNS = (
    "part", "op", "direction", "case", "dtype", "by", "us", "us_25", "us_75", "us_step", "times_faster",
    "share", "floor_us", "floor", "tb_s", "bytes", "operations", "how", "named", "beside",
    "tokens_s", "first_s", "peak_gb",
)  # fmt: skip
NUMBERS = (
    "us", "us_25", "us_75", "us_step", "times_faster", "share", "floor_us", "tb_s", "bytes", "operations",
    "tokens_s", "first_s", "peak_gb",
)  # fmt: skip
FILE = "times.csv"
ROOT = Path(__file__).resolve().parents[1]


def finish(rows):
    """Fills in the columns that follow from the times of all rows."""
    device = {row["op"]: row for row in rows if row["part"] == "device"}
    roof = device["copy"]["bytes"] / device["copy"]["us"] if "copy" in device else None
    peak = None
    if "multiply-add" in device:
        peak = device["multiply-add"]["operations"] / device["multiply-add"]["us"]
    ours = {what(row): row["us"] for row in rows if row["by"] == "msops"}
    for row in rows:
        row.update(dict.fromkeys(("times_faster", "share", "floor_us", "floor", "tb_s"), ""))
        if row["by"] != "msops" and what(row) in ours:
            row["times_faster"] = row["us"] / ours[what(row)]
        if row["bytes"]:
            row["tb_s"] = row["bytes"] / row["us"] / 1e6
        if row["part"] == "kernel" and roof:
            floors = dict(memory=row["bytes"] / roof, arithmetic=row["operations"] / peak if peak else 0)
            row["floor"] = max(floors, key=floors.get)
            row["floor_us"] = floors[row["floor"]]
            row["share"] = row["floor_us"] / row["us"]


def what(row):
    """Returns what was timed, which is the same for each peer."""
    return row["part"], row["op"], row["direction"], row["case"], row["dtype"]


def write(path, rows, about, columns=COLUMNS):
    with path.open("w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in about.items())
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})


def read(folder):
    """Returns (rows, {name: value} of the comment lines)."""
    lines = (Path(folder) / FILE).read_text().splitlines()
    about = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    for row in rows:
        row.update({name: float(row[name]) if row.get(name) else None for name in NUMBERS})
        row["named"] = row["named"] == "1"
    return rows, about


def about(device_target):
    """Returns the names of device, driver, compilers and packages."""
    found = {"device": processor(), "cores": len(os.sched_getaffinity(0))}
    if device_target == "GPU":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["device"], found["driver"] = _output(query).splitlines()[0].split(", ")
    nvcc = find_nvcc()
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if nvcc:
        found["nvcc"] = re.search("release .*", _output([nvcc, "--version"]))[0]
    if cxx:
        found["C++"] = _output([cxx, "--version"]).splitlines()[0]
    found["Python"] = platform.python_version()
    found["msops"] = msops.__version__
    for package in ("mindspore", "torch", "transformers", "triton", "liger-kernel", "quack-kernels", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor():
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


def _output(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def table(rows):
    """Returns the named cases as text: our kernels beside each peer, sequences, whole Cells, and models."""
    lines = []
    for parts, columns in (
        (("kernel",), ("us", "floor_us", "share")),
        (("sequence",), ("us", "us_step")),
        (("graph", "pynative"), ("us",)),
    ):
        chosen = [row for row in rows if row["part"] in parts and row["named"]]
        peers = list(dict.fromkeys(row["by"] for row in chosen if row["by"] != "msops"))
        faster = {(what(row), row["by"]): row["times_faster"] for row in chosen}
        heading = ["part", "case", "dtype", *columns, *(f"{peer} /" for peer in peers)]
        cells = []
        for row in chosen:
            if row["by"] == "msops":
                name = f"{row['op']} {row['direction']} {row['case']}"
                figures = [row[column] for column in columns] + [faster.get((what(row), peer)) for peer in peers]
                cells.append([row["part"], name, row["dtype"], *map(_short, figures)])
        if cells:
            lines += ["", *_aligned([heading, *cells])]
    lines += model_table([row for row in rows if row["part"] == "model"])
    lines += ["", "us, us_step: microseconds, of a step. 'PEER /': how many times msops' time the peer takes."]
    return "\n".join(lines)


def model_table(rows):
    """Returns lines about whole models, one for each case and peer."""
    cells = [
        [f"{row['op']} {row['direction']} {row['case']}", row["dtype"], row["by"]]
        + [_short(row[name] or None) for name in ("tokens_s", "us", "times_faster", "first_s", "peak_gb")]
        for row in rows
    ]
    heading = ["case", "dtype", "by", "tokens/s", "us", "/ msops", "first step, s", "memory, GB"]
    return ["", *_aligned([heading, *cells])] if cells else []


def _short(value):
    if not isinstance(value, float):
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _aligned(cells):
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        yield "  ".join(text.ljust(w) if i < 3 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths)))
