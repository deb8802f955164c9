"""`make test-matrix`: the operators' tests under each version of MindSpore, and what works there, as docs/versions.md.
Each installs the one wheel in dist.

python tests/matrix.py [VERSION ...]      of all, or of those: 1.10.0 2.7
"""

import glob
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".matrix"
TABLE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- make test-matrix writes this -->\n", "<!-- until here -->\n"

PINS = ["pytest>=8"]
OLD = [*PINS, "pillow<10"]  # MindSpore's wheels do not say that they need what Pillow 10 removed
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
    "dynamic_shape": "dynamic shape", "mindir": "MindIR", "recompute": "recompute", "vmap": "vmap",
}  # fmt: skip
MODES = ("graph", "pynative")
TESTS = ("add", "sigmoid", "depthwise_conv2d", "lltm", "lltm_sequence", "trilinear_interpolation")
TESTS += ("custom_op", "signature")


def interpreter(version):
    """A Python of this version that can make environments, or None."""
    root = os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")
    for candidate in (shutil.which(f"python{version}"), *sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))):
        check = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if candidate and not subprocess.run([candidate, "-c", check], capture_output=True).returncode:
            return candidate
    return None


def environment(python, name, requirements):
    """The Python of a virtual environment with these requirements and the wheel, and what to run it with."""
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
    runtime = glob.glob(f"{folder}/lib/python*/site-packages/nvidia/cuda_runtime/lib")
    libraries = [*runtime, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = {"GLOG_v": "3", "LD_LIBRARY_PATH": ":".join(libraries), "PYTHONPATH": ""}
    return folder / "bin" / "python", {**os.environ, **variables}


def run_tests(python, variables):
    """pytest's last line, and whether all passed."""
    # pythonpath: the wheel is tested, not the working tree.
    command = [python.with_name("pytest"), "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "pythonpath=tests"]
    # What is compared with MindSpore's own convolution is about values, and slow.
    chosen = "not float16 and not float64 and not ops_conv2d and not nn_conv2d and not many_operators"
    command += ["-k", chosen, *(f"tests/test_{name}.py" for name in TESTS)]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout)
    lines = done.stdout.strip().splitlines()
    return lines[-1].partition(" in ")[0].strip("= ") if lines else "nothing", done.returncode == 0


def works(python, variables, feature, mode):
    """Whether a feature does, as the table says it."""
    command = [python, ROOT / "tests" / "features.py", feature, mode]
    return "no" if subprocess.run(command, env=variables, capture_output=True).returncode else "yes"


def rows_of(page):
    """(MindSpore, Python, mode) -> the rest of the row, of the table that is committed."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row[:3]): row[3:] for row in rows}


def write(rows):
    """Puts rows into the page's table."""
    before, _, rest = TABLE.read_text().partition(BEGIN)
    rows = {**rows_of(TABLE.read_text()), **rows}
    lines = [["MindSpore", "Python", "mode", *FEATURES.values()]]
    lines += [["---"] * len(lines[0])]
    keys = [(version, python_version, mode) for version, python_version, _ in MATRIX for mode in MODES]
    lines += [[*key, *rows[key]] for key in keys if key in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    TABLE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


def main(wanted):
    committed = rows_of(TABLE.read_text())
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
        rows = {}
        for mode in MODES:
            key = version, python_version, mode
            rows[key] = [works(python, variables, feature, mode) for feature in FEATURES]
            if rows[key] != committed.get(key, rows[key]):
                print(f"{name}, {mode}: was {' '.join(committed[key])}, is {' '.join(rows[key])}")
                failed = True
        write(rows)
        print(f"{name}: {tests}; {made - start:.0f} s to set up, {time.time() - made:.0f} s to run", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
