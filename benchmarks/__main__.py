"""Measures every operator beside its peers, and writes a table of times and pictures of them.

python -m benchmarks                        measures everything, on the GPU where there is one
python -m benchmarks --op add --quick       takes a first look at one operator
python -m benchmarks --op llm               measures a whole language model, which the default leaves out

Everything is written to benchmarks/results/DEVICE. A part, also one that an interrupt or a crash leaves, is written to
build/benchmarks/DEVICE, so that it replaces no results.
"""

import argparse
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from . import parts, report
from .cases import cell_cases, kernel_cases, precisions, sequence_cases
from .llm import run as llm
from .operators import BENCHMARKS

RESULTS = Path(__file__).with_name("results")
PARTS = RESULTS.parents[1] / "build" / "benchmarks"


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts.add_options(parser)
    words = "for --op llm, measure only what this expression finds, as in 'msops: .* training|decoding 64'"
    parser.add_argument("--jobs", type=re.compile, default="", metavar="EXPRESSION", help=words)
    parser.add_argument("--output", type=Path, help="folder to write to")
    options = parser.parse_args(arguments)
    options.everything = all(getattr(options, name) == parser.get_default(name) for name in ("op", "dtype", "quick"))
    options.device_target = options.device_target or ("GPU" if has_gpu() else "CPU")
    return options


def has_gpu():
    return bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0


def folder_name(device):
    """Returns h200 for NVIDIA H200, and cpu for any processor."""
    words = [word for word in re.findall(r"[a-z0-9]+", device.lower()) if word not in ("nvidia", "geforce", "rtx")]
    return words[0] if words else "gpu"


def measure(options, log):
    """Returns (rows, what was not measured, whether all parts came to their end)."""
    rows, troubles, whole = [], [], True
    operators = [op for op in options.op if op in BENCHMARKS]
    arguments = options.device_target, operators, options.quick
    sequences = len(precisions(options.device_target, options.dtype)) * len(sequence_cases(*arguments))
    steps = len(options.dtype) * (len(kernel_cases(*arguments)) + 2 * len(cell_cases(*arguments))) + sequences
    with tqdm(total=steps + len(llm.chosen(options)), unit="case", dynamic_ncols=True) as progress:
        try:
            for message in messages(options, operators, sequences, log):
                if "row" in message:
                    rows.append(message["row"])
                    continue
                if "step" in message:
                    progress.set_description(message.pop("step"))
                    progress.update()
                whole &= "crashed" not in message
                troubles += message.values()
        except KeyboardInterrupt:
            whole = False
            troubles.append("what came after the interrupt")
    return rows, troubles, whole


def messages(options, operators, sequences, log):
    """Yields the messages of all parts."""
    for part in parts.PARTS if operators else ():
        if part != "sequences" or sequences:
            yield from parts.run(part, options, log)
    yield from llm.messages(options, log)


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts as an interrupt
    options = parse()
    about = report.about(options.device_target)
    name = folder_name(about["device"]) if options.device_target == "GPU" else "cpu"
    folder = options.output or PARTS / name
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "log.txt"
    with log_path.open("w+") as log:
        rows, troubles, whole = measure(options, log)
    if whole and options.everything and not options.output:
        folder = RESULTS / name
        folder.mkdir(parents=True, exist_ok=True)
    report.finish(rows)
    report.write(folder / report.FILE, rows, about)

    print(report.table(rows))
    for trouble in troubles:
        print(f"not measured: {trouble}")
    try:
        from . import plots
    except ImportError as error:
        print(f"no pictures: {error}. Where matplotlib is: python -m benchmarks.plots {folder}")
    else:
        plots.draw(folder)
    print(f"results: {folder}")
    if not whole:
        sys.exit(f"The benchmark did not come to its end: see {log_path}")


if __name__ == "__main__":
    main()
