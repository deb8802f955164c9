"""Tests that the package imports what a name needs when the name is first used."""

import ast
import graphlib
import pydoc
import re
import runpy
import shutil
import subprocess

import pytest
from packaging.version import Version

import msops
from child import ROOT, run_python
from msops.core.library import of_package

IN_GRAPH = """
import sys
import mindspore
import msops

assert not any(name.startswith("msops.") for name in sys.modules)
mindspore.set_context(mode=mindspore.{mode})


class Cell(mindspore.nn.Cell):
    def construct(self, x):
        return getattr(msops, "add")(msops.sigmoid(x), x)


print(Cell()(mindspore.Tensor([0.0], mindspore.float32)))
import msops.operators.sigmoid
from msops import *
print(sigmoid is msops.sigmoid, callable(sigmoid))
"""


def run(code, tmp_path):
    path = tmp_path / "program.py"  # MindSpore reads the source of what it compiles
    path.write_text(code)
    done = run_python(path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light(tmp_path):
    code = "import sys, msops, msops.__main__; print([name for name in sys.modules if name in ('mindspore', 'numpy')])"
    assert run(code, tmp_path) == "[]\n"


@pytest.mark.parametrize("mode", ["GRAPH_MODE", pytest.param("PYNATIVE_MODE", marks=pytest.mark.wide)])
def test_first_use_in_a_cell(mode, tmp_path):
    """An operator's name then stays its function, though its module has the same name."""
    assert run(IN_GRAPH.format(mode=mode), tmp_path) == "[0.5]\nTrue True\n"


ONE_BROKEN = """
import sys
import msops

try:
    msops.sigmoid
except ImportError as error:
    print(error)
print(*(name.__name__ for name in (msops.add, msops.lltm, msops.custom_op)))
print("msops.operators.depthwise_conv2d" in sys.modules)
"""


def test_a_broken_library_breaks_one_operator(tmp_path):
    """The other operators work, and libraries that nobody uses are not loaded."""
    broken = tmp_path / "sigmoid.so"
    broken.write_text("no library")
    path = tmp_path / "program.py"
    path.write_text(ONE_BROKEN)
    done = run_python(path, cwd=tmp_path, MSOPS_SIGMOID=str(broken))
    message, *others = done.stdout.splitlines()
    assert message.startswith(f"msops cannot load the library sigmoid: {broken}: "), done.stderr
    assert others == ["add lltm custom_op", "False"]


def test_version(tmp_path):
    """A commit makes the version greater; a copy says what setup.py wrote into it; without either, the number is 0."""
    package = tmp_path / "msops"
    package.mkdir()
    shutil.copy(ROOT / "msops" / "version.py", package)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]

    def version():
        return runpy.run_path(str(package / "version.py"))["version"]()

    assert version() == "0.1.0.dev0"
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert version() == "0.1.0.dev0"
    for number in (1, 2):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=a"], check=True)
        assert version() == f"0.1.0.dev{number}"
    assert Version("0.1.0.dev9") < Version("0.1.0.dev10") < Version("0.1.0")
    (package / "version.txt").write_text("0.1.0.dev700\n")
    assert version() == "0.1.0.dev700"
    assert msops.__version__.startswith("0.1.0.dev")


def test_names(tmp_path):
    assert run("import msops; print({*msops.__all__} <= {*dir(msops)})", tmp_path) == "True\n"
    for name in msops.__all__:
        assert getattr(msops, name).__name__ == name
    with pytest.raises(AttributeError, match=r"^module 'msops' has no attribute 'sigmiod'$"):
        _ = msops.sigmiod


def module_of(name):
    return getattr(msops, name).__module__


def test_files_have_public_names():
    """The four files of an operator have its public name, unless they say whom else it serves; so has its folder."""
    public = {name for name in msops.__all__ if module_of(name).startswith("msops.operators.") and name.islower()}
    operators = {name for name in public if module_of(name) == f"msops.operators.{name}"}
    kernels = {path.stem: path for path in ROOT.glob("aot_kernels/*.cu")}
    assert "patch_mindspore alone" in first_line(kernels.pop("concat"))  # it takes addresses, as no operator does
    modules = {path.stem: path for path in ROOT.glob("msops/operators/[!_]*.py")}
    for files in (kernels, modules):
        assert {name for name, path in files.items() if "patch_mindspore alone" in first_line(path)} == {
            *files
        } - operators
    benchmarks = {path.stem for path in ROOT.glob("benchmarks/operators/[!_]*.py")}
    tests = {path.stem.removeprefix("test_") for path in ROOT.glob("tests/operators/test_*.py")}
    # Their entries are beside those of gather_points and layer_norm, which have their kernels.
    entries = {*kernels, "group_points", "layer_norm_of_samples", "add_layer_norm"}
    assert operators < entries == {*modules} == benchmarks == tests - (public - operators)
    folders = {path.name for path in ROOT.glob("aot_kernels/*/") if path.is_dir()}
    assert folders - {"common", "compile", "shared"} <= {*kernels}


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("msops/**/[!_]*.py")}


def imports_of(name):
    """Returns the modules of msops that a module imports: also in functions, and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            package = name.rsplit(".", node.level)[0] + "." if node.level else ""
            module = f"{package}{node.module or ''}".rstrip(".")
            found |= {module, *(f"{module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & MODULES.keys()


def test_imports_have_an_order():
    """No module imports one that imports it in turn, and none of `core` imports what is built on it."""
    imports = {name: imports_of(name) for name in MODULES}
    assert imports["msops.core.factory"] >= {"msops.core.operator", "msops.core.primitive"}
    [*graphlib.TopologicalSorter(imports).static_order()]
    of_core = set().union(*(found for name, found in imports.items() if name.startswith("msops.core.")))
    assert not {name for name in of_core if not name.startswith("msops.core.")} - {"msops.compat"}


# Python checks what C++ bounds, too, since its error comes first: the same number in both.
LIMITS = (
    ("msops/shared/attention.py", r"_MOST_FEATURES = (\d+)", "aot_kernels/flash_attention.cu", r"Features = (\d+)", 0),
    ("msops/shared/broadcast.py", r"MAX_RANK = (\d+)", "aot_kernels/common/axes.h", r"kMaxRank = (\d+)", 0),
    ("msops/core/primitive.py", r"_LABEL = (\d+)", "aot_kernels/common/call.h", r"label\[(\d+)\]", 1),  # 1: its end
)


@pytest.mark.parametrize(("module", "ours", "source", "theirs", "more"), LIMITS)
def test_limits_are_those_of_the_kernels(module, ours, source, theirs, more):
    limits = [int(re.search(words, (ROOT / path).read_text())[1]) for path, words in ((module, ours), (source, theirs))]
    assert limits[1] - limits[0] == more


def first_line(path):
    return path.read_text().splitlines()[0]


def test_completion_offers_public_names():
    assert {name for name in dir(msops) if not name.startswith("__")} == {*msops.__all__}


# Each Cell of a module of an operator leads to a function of that module, or is documented by itself.
CELLS = {
    name: next(each for each in msops.__all__ if each.islower() and module_of(each) == module_of(name))
    for name in msops.__all__
    if not name.islower()
    and module_of(name).startswith("msops.operators.")
    and ("See :func:" in getattr(msops, name).__doc__ or "Inputs:" not in getattr(msops, name).__doc__)
}


@pytest.mark.parametrize("cell", CELLS)
def test_help_of_a_cell_has_the_formula(cell):
    """A Cell's help shows its function's formula, with the shapes of the inputs."""
    shown = [line.strip(" |") for line in pydoc.render_doc(getattr(msops, cell), renderer=pydoc.plaintext).splitlines()]
    wanted = [line.strip() for line in getattr(msops, CELLS[cell]).__doc__.splitlines()]
    first = shown.index(wanted[0])
    assert shown[first : first + len(wanted) - 1] == wanted[:-1]
    assert any(".. math::" in line for line in wanted)


def test_libraries_elsewhere_are_not_loaded(tmp_path):
    """msops loads libraries neither from the current folder nor from the loader's search path."""
    folder = tmp_path / "msops" / "lib"
    folder.mkdir(parents=True)
    for path in (tmp_path / "add.so", folder / "add.so"):
        path.write_text("no library")
    (tmp_path / "program.py").write_text("from msops.core.library import of_package; print(of_package('add').path)")
    done = run_python("program.py", cwd=tmp_path, LD_LIBRARY_PATH=f"{tmp_path}:{folder}", MSOPS_CACHE=str(folder))
    assert done.stdout == f"{of_package('add').path}\n", done.stderr


TYPED = """
import mindspore
import msops
import msops.testing

x = mindspore.Tensor([0.0])
msops.LLTM(8, 2, bidirectional=True).to_cells()[0](x, (x, x))
library = msops.Library("x.so")
operator = msops.custom_op(library.F, "x -> y", alpha=1, beta=0.5, infer=lambda x, **_: x._replace(shape=x.shape[1:]))
msops.custom_op(library.G, "dy -> dx", gradient=operator)
print(msops.Spec((3,), mindspore.float32).size + 1, operator.names()[0][0].upper())


@msops.once
def half(n: int) -> int:
    return n // 2


msops.testing.opcheck(operator, [x.asnumpy()], lambda x: x + half(2))
"""
MISTYPED = {
    'msops.LLTM("8", 2)': "arg-type",
    "msops.sigmiod(x)": "attr-defined",
    'msops.load("name")': "call-arg",
    'msops.custom_op(library.F, "x -> y", mode="same")': "arg-type",
    'half("n")': "arg-type",
    "msops.testing.opcheck(operator, [x.asnumpy()]).passed": "attr-defined",
}


@pytest.mark.wide
def test_types(tmp_path):
    """A type checker knows all names of msops, accepts a correct program, and refuses an incorrect one."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    revealed = [f"reveal_type(msops.{name})" for name in msops.__all__]
    program.write_text("\n".join([TYPED, *MISTYPED, *revealed]))
    options = ["--config-file=", f"--cache-dir={tmp_path}", "--ignore-missing-imports", "--follow-imports=silent"]
    done = run_python("-m", "mypy", *options, "--strict", program, cwd=tmp_path, MYPYPATH=str(ROOT))
    errors = re.findall(r"^program.py:(\d+): error: .* \[(.*)\]$", done.stdout, re.MULTILINE)
    first = TYPED.count("\n") + 2
    assert errors == [(str(line), kind) for line, kind in enumerate(MISTYPED.values(), first)], done.stdout
    types = re.findall(r'note: Revealed type is "(.*)"$', done.stdout, re.MULTILINE)
    assert len(types) == len(msops.__all__)
    assert "Any" not in types


THREADS = """
from concurrent.futures import ThreadPoolExecutor

import mindspore
import msops
import numpy as np
from mindspore import Tensor

mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def work(n):
    x = Tensor(np.linspace(-9, 9, 1000 * n + 7, dtype=np.float32))
    return msops.add(msops.sigmoid(x), x[:1]).asnumpy().tobytes()


def same(n):
    x = Tensor(np.full((64, 64), n, np.float32))
    want = msops.silu(x).asnumpy()[0, 0]
    return sum((msops.silu(x).asnumpy() != want).any() for _ in range(100))


alone = [work(n) for n in range(25)]
with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(work, range(25))) == alone, *pool.map(same, range(4)))
"""


def test_four_threads(tmp_path):
    """Threads may call operators at once, of any shapes. (MindSpore's `grad` fails if two threads do so.)"""
    assert run(THREADS, tmp_path) == "True 0 0 0 0\n"


FORK = """
import os

import msops
from mindspore import Tensor

sigmoid = msops.sigmoid  # MindSpore and the libraries are loaded; had they computed, MindSpore would hang in the child
child = os.fork()
y = sigmoid(Tensor([0.0])).asnumpy()
if child:
    print(os.waitpid(child, 0)[1])
print(y, flush=True)
"""


def test_fork_after_import(tmp_path):
    """Both processes can use operators after a fork."""
    assert run(FORK, tmp_path) == "[0.5]\n0\n[0.5]\n"
