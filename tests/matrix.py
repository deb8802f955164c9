"""`make test-matrix` runs the operators' tests under each version of MindSpore, and writes which features work there to
docs/versions.md. Each version's environment installs the one wheel in dist.

python tests/matrix.py [VERSION ...]      tests all versions, or some, such as 1.10.0 2.7
python tests/matrix.py GPU                tries features on this machine's GPU, with the installed MindSpore
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import child

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
TABLE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- make test-matrix writes this -->\n", "<!-- until here -->\n"

PINS = ["hypothesis>=6.100", "pytest>=8", "pytest-xdist>=3.6"]
OLD = [*PINS, "pillow<10"]  # old MindSpores need what Pillow 10 removed, and their wheels do not say so
CUDA_RUNTIME = "nvidia-cuda-runtime-cu11"  # without it mindspore-gpu cannot be imported
MATRIX = (
    ("1.10.0", "3.9", ["mindspore-gpu==1.10.0", CUDA_RUNTIME, *OLD]),
    ("2.0.0", "3.9", ["mindspore==2.0.0", *OLD]),
    ("2.7", "3.9", ["mindspore==2.7.*", *PINS]),
    ("2.9", "3.10", ["mindspore==2.9.*", *PINS]),
    ("2.10", "3.10", ["mindspore==2.10.*", *PINS]),
    ("2.10", "3.11", ["mindspore==2.10.*", *PINS]),
    ("2.10", "3.12", ["mindspore==2.10.*", *PINS]),
)
FEATURES = {
    "forward": "forward", "gradient": "gradient", "several_shapes": "shapes", "second_order": "second order",
    "dynamic_shape": "dynamic shape", "compiled": "jit", "model": "Model", "mixed_precision": "AMP",
    "recompute": "recompute", "vmap": "vmap", "gradient_accumulation": "accumulation", "checkpoint": "checkpoint",
    "mindir": "MindIR", "mindir_elsewhere": "MindIR, moved",
}  # fmt: skip
MODES = ("graph", "pynative")
# What depends on MindSpore's version: how it calls and compiles operators, whatever these compute.
TESTS = ("operators", "test_custom_op.py", "test_calls.py")
CHOSEN = ("test_case", "test_cell", "test_second_order", "test_training", "custom_op", "test_calls")
LEFT_OUT = ("float16", "float64", "of_the_package")  # of the package: make builds its own operators, the wheel none


def interpreter(version):
    """Returns a Python of this version that can make environments, or None."""
    root = os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")
    for candidate in (shutil.which(f"python{version}"), *sorted(Path(root).glob(f"versions/{version}.*/bin/python"))):
        check = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if candidate and not subprocess.run([candidate, "-c", check], capture_output=True).returncode:
            return candidate
    return None


def environment(python, name, requirements):
    """Returns the Python of a virtual environment with these requirements and the wheel, and the environment variables
    to run it with."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    folder = FOLDER / name
    made, wanted = folder / ".ready", "\n".join(requirements)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    if not made.is_file() or made.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*pip, *requirements], check=True)
        made.write_text(wanted)
    else:
        subprocess.run([*pip, "--force-reinstall", "--no-deps"], check=True)
    runtime = folder.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
    libraries = [*map(str, runtime), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = {"GLOG_v": "3", "LD_LIBRARY_PATH": ":".join(libraries), "PYTHONPATH": ""}
    return folder / "bin" / "python", {**os.environ, **variables}


def run_tests(python, variables):
    """Returns pytest's totals, and whether all tests passed.

    A test that crashes its process is run once more, alone: MindSpore 1.10 crashed in one of some ten runs, in a test
    that had passed before.
    """
    # The wheel is tested, not the working tree, which conftest.py would otherwise put on the path.
    command = [python.with_name("pytest"), "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "pythonpath=tests tests/cards tests/operators", "--import-mode=importlib"]
    words = f"({' or '.join(CHOSEN)}) and not ({' or '.join(LEFT_OUT)})"
    chosen = ["-m", "not wide", "-k", words, *(f"tests/{name}" for name in TESTS)]
    spread = ["-n", str(len(os.sched_getaffinity(0))), "--maxprocesses", "4", "--dist", "worksteal"]
    output, totals, passed = run_pytest([*command, *spread, *chosen], variables)
    crashed = re.findall(r"^worker '\w+' crashed while running '(.+)'$", output, re.MULTILINE)
    if crashed and totals.startswith(f"{len(crashed)} failed,"):
        _, again, passed = run_pytest([*command, *crashed], variables)
        totals += f"; run again: {again}"
    return totals, passed


def run_pytest(command, variables):
    """Returns pytest's output, its totals, and whether all tests passed."""
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, flush=True)
    totals = re.findall(r"^[= ]*(\d+ \w+.*?) in [\d.]+s", done.stdout, re.MULTILINE)
    return done.stdout, totals[-1] if totals else "no totals", done.returncode == 0


def here():
    """Returns the running versions of MindSpore and Python, and the environment variables for another process of
    them."""
    version, python_version = (
        ".".join(re.findall(r"\d+", text)[:2]) for text in (metadata.version("mindspore"), sys.version)
    )
    return version, python_version, child.environment()


def working(python, variables, device, mode, features):
    """Returns which features work in one process."""
    command = [python, ROOT / "tests" / "features.py", device, mode, *features]
    with tempfile.TemporaryDirectory() as folder:  # MindSpore leaves files here
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return set(re.findall(r"^works: (\w+)$", done.stdout, re.MULTILINE))


def rows_of(page):
    """Returns {(MindSpore, Python, device, mode): the rest of the row} of the page's table."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row[:4]): row[4:] for row in rows}


def write(rows):
    """Puts rows into the page's table."""
    before, _, rest = TABLE.read_text().partition(BEGIN)
    rows = {**rows_of(TABLE.read_text()), **rows}
    lines = [["MindSpore", "Python", "device", "mode", *FEATURES.values()]]
    lines += [["---"] * len(lines[0])]
    keys = [(*row[:2], device, mode) for row in MATRIX for device in ("CPU", "GPU") for mode in MODES]
    lines += [[*key, *rows[key]] for key in keys if key in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    TABLE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


def try_features(python, variables, version, python_version, device="CPU"):
    """Tries all features, writes their rows, and returns whether the rows are as before. What does not work in a
    process with the others is tried again alone."""
    committed, rows = rows_of(TABLE.read_text()), {}

    def tried(mode_and_features):
        return {(mode_and_features[0], each) for each in working(python, variables, device, *mode_and_features)}

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = set().union(*pool.map(tried, [(mode, FEATURES) for mode in MODES]))
        alone = [(mode, [each]) for mode in MODES for each in FEATURES if (mode, each) not in found]
        found = found.union(*pool.map(tried, alone))
    for mode in MODES:
        key = version, python_version, device, mode
        row = rows[key] = ["yes" if (mode, each) in found else "no" for each in FEATURES]
        for feature, was, now in zip(FEATURES, committed.get(key, row), row):
            if was != now:
                print(f"{', '.join(key)}: {feature}: was {was}, is {now}")
    write(rows)
    return all(committed.get(key, row) == row for key, row in rows.items())


def main(wanted):
    if wanted == ["GPU"]:
        version, python_version, variables = here()
        return int(not try_features(sys.executable, variables, version, python_version, "GPU"))
    failed = False
    for version, python_version, requirements in MATRIX:
        if wanted and version not in wanted:
            continue
        name, start = f"MindSpore {version}, Python {python_version}", time.time()
        base = interpreter(python_version)
        if base is None:
            print(f"{name}: skipped, there is no python{python_version} with its venv module", flush=True)
            continue
        python, variables = environment(base, f"{version}-{python_version}", requirements)
        made = time.time()
        tests, passed = run_tests(python, variables)
        failed |= not passed
        failed |= not try_features(python, variables, version, python_version)
        print(f"{name}: {tests}; {made - start:.0f} s to set up, {time.time() - made:.0f} s to run", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
