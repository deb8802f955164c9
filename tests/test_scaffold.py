"""Tests of `python -m msops new`: what it writes works, and existing files stay."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from child import ROOT, run_python
from msops.__main__ import main
from msops.compat import VERSION

FILES = {"my_op.cu", "my_op.py", "test_my_op.py", "benchmark_my_op.py", "README.md"}


@pytest.fixture
def new(tmp_path, monkeypatch):
    """Returns a function that calls `python -m msops new` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["msops", "new", *arguments])
        main()

    return run


@pytest.fixture
def refused(new, capsys):
    """Returns a function that requires `python -m msops new` to fail, and returns its message."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            new(*arguments)
        assert caught.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.removeprefix("python -m msops new: ").strip()

    return run


def files(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["elementwise", "reduction"])
def test_works_unchanged(new, tmp_path, capsys, kind):
    new("my_op", f"--{kind}", "--dir", "a project")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "next: python -m pytest 'a project/test_my_op.py'"
    assert files(tmp_path / "a project") == FILES
    if VERSION < (2, 0):  # its default device is the GPU; the README says what to do
        code = re.search(r"`(import mindspore; .*?)`", (tmp_path / "a project" / "README.md").read_text())[1]
        (tmp_path / "a project" / "conftest.py").write_text(code)
    # The project does not cause the warnings of MindSpore and of pytest's other plugins when they are imported.
    # MindSpore 1.10 leaves pipes open then, which Python closes, with a warning, when it starts its next process.
    options = ["-W", "error", *(["-W", "ignore::ResourceWarning"] if VERSION < (2, 0) else [])]
    code = f"import sys, mindspore, pytest; sys.exit(pytest.main({options}))"
    tested = run_python("-c", code, cwd=tmp_path / "a project", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    if VERSION < (2, 5):  # the README says that the benchmark needs 2.5
        return
    timed = run_python("benchmark_my_op.py", cwd=tmp_path / "a project")
    assert timed.returncode == 0, timed.stderr
    assert timed.stdout.count(" us, MindSpore's own operators ") == 6


@pytest.mark.parametrize(("name", "options"), [("swish", []), ("logsumexp", ["--reduction"])])
def test_examples_are_what_it_writes(new, tmp_path, name, options):
    new(name, *options)
    for path in (tmp_path / name).iterdir():
        assert path.read_text() == (ROOT / "examples" / name / path.name).read_text()


def test_adds_to_a_project(new, tmp_path):
    new("my_op")
    new("other_op2", "--reduction", "--dir", "my_op")
    assert files(tmp_path / "my_op") == FILES | {name.replace("my_op", "other_op2") for name in FILES}
    module = (tmp_path / "my_op" / "other_op2.py").read_text()
    for word in ("_library.OtherOp2Forward", "def other_op2(x)", "class OtherOp2(nn.Cell)"):
        assert word in module
    assert (tmp_path / "my_op" / "README.md").read_text().startswith("# my_op")


def test_never_overwrites(new, refused, tmp_path):
    (tmp_path / "test_my_op.py").write_text("mine")
    assert refused("my_op", "--dir", ".") == "test_my_op.py: exists, and is not overwritten"
    assert files(tmp_path) == {"test_my_op.py"}
    assert (tmp_path / "test_my_op.py").read_text() == "mine"


def test_never_overwrites_what_comes_meanwhile(refused, tmp_path, monkeypatch):
    (tmp_path / "test_my_op.py").write_text("mine")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    assert refused("my_op", "--dir", ".") == "test_my_op.py: File exists"
    assert files(tmp_path) == {"test_my_op.py"}
    assert (tmp_path / "test_my_op.py").read_text() == "mine"


def test_writes_all_or_nothing(refused, tmp_path, monkeypatch):
    """A disk that gets full leaves none of the files."""
    open_ = Path.open

    def opened(path, *arguments, **settings):
        file = open_(path, *arguments, **settings)
        return open_(Path("/dev/full"), "w") if path.match("*/b/benchmark_*") else file

    monkeypatch.setattr(Path, "open", opened)
    assert refused("my_op", "--dir", "a/b") == "a/b/benchmark_my_op.py: No space left on device"
    assert files(tmp_path) == set()


def test_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    assert refused("my_op", "--dir", "file") == "file: File exists"
    assert refused("my_op", "--dir", "file/folder") == "file/folder: Not a directory"
    assert files(tmp_path) == {"file"}


@pytest.mark.parametrize("name", ["2d", "my-op", "class", "größe", "MyOp", "a b", "", "_x", "x.y", "../x"])
def test_names_that_are_none(refused, tmp_path, name):
    assert refused(name) == f"NAME must be a Python name in lower case, such as my_op, got {name!r}"
    assert files(tmp_path) == set()


@pytest.mark.parametrize("name", ["numpy", "random", "packaging", "msops", "ops", "shape", "what", "sum", "inf"])
def test_names_that_are_taken(refused, name):
    assert (
        refused(name, "--reduction")
        == f"NAME must not be that of a module or of something in the templates, got {name!r}"
    )


def test_wrong_options(refused):
    assert refused() == "the following arguments are required: NAME"
    assert "not allowed with" in refused("my_op", "--elementwise", "--reduction")
    assert "unrecognized arguments: --elementary" in refused("my_op", "--elementary")


@pytest.mark.parametrize("arguments", [["--help"], ["new", "--help"]])
def test_help(arguments, tmp_path):
    done = run_python("-m", "msops", *arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "usage: python -m msops" in done.stdout


@pytest.fixture
def package(tmp_path):
    """Returns a function that runs a command in a copy of msops' source folder."""
    for name in ("aot_kernels", "benchmarks", "msops", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results", "lib", "__pycache__"))
    for name in ("Makefile", "conftest.py", "pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / name, tmp_path)
    return functools.partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)


def sources(folder):
    return {path: path.read_text() for path in folder.rglob("*") if path.suffix in (".cu", ".py", ".pyi", ".so")}


@pytest.mark.wide
def test_operator_of_the_package(package, tmp_path):
    """`make new` writes four files and a line, and the new operator's tests pass."""
    made = package(["make", "new", "OP=my_gate"], check=True)
    assert made.stdout.count("wrote ") == 5
    assert "wrote msops/__init__.pyi: its public names" in made.stdout
    text = "".join(path.read_text() for path in tmp_path.rglob("*my_gate.*"))
    assert "MSOPS_FORMULA(MyGateBackward, " in text
    assert len(re.findall("silu", text)) == text.count("ops.silu)") + text.count("functional.silu") == 3
    before = sources(tmp_path)
    refused = {
        "my_gate": "aot_kernels/my_gate.cu: exists",
        "class": "NAME must",
        "load": "NAME must",
        "sum": "NAME must",
    }
    for name, words in {
        **refused,
        "My": "NAME must",
        "a b": "NAME must",
        "": "NAME must",
        "x;y": "NAME must",
    }.items():
        done = package(["make", "new", f"OP={name}"])
        assert done.returncode != 0
        assert words in done.stderr, name
    assert sources(tmp_path) == before
    package(["make", "msops/lib/my_gate.so", "NVCC="], check=True)
    for library in (ROOT / "msops" / "lib").glob("*.so"):
        (tmp_path / "msops" / "lib" / library.name).symlink_to(library)
    tests = ("tests/operators/test_my_gate.py", "tests/test_entries.py", "-k", "my_gate or MyGate or every")
    tested = run_python("-m", "pytest", "-p", "no:cacheprovider", *tests, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"\b[3-9]\d passed", tested.stdout), tested.stdout
    peers = "from benchmarks.operators import BENCHMARKS; print(BENCHMARKS['my_gate'].cells)"
    assert "my_gate.MyGate" in run_python("-c", peers, cwd=tmp_path, PYTHONPATH=str(tmp_path)).stdout


@pytest.mark.wide
def test_operators_of_the_package_are_formatted(package, tmp_path):
    """`make lint` accepts what `make new` writes, whatever the name's length and place are."""
    pytest.importorskip("ruff")
    pytest.importorskip("clang_format")
    for name in ("b", "my_gate", "zoneout", "a_name_of_20_letters"):
        package(["make", "new", f"OP={name}", f"VENV={sys.prefix}"], check=True)
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["clang-format", "--dry-run", "--Werror"]):
        suffixes = (".cu",) if command[0] == "clang-format" else (".py", ".pyi")
        paths = [path for path in sources(tmp_path) if path.suffix in suffixes]
        done = package([str(Path(sys.executable).with_name(command[0])), *command[1:], *paths])
        assert done.returncode == 0, done.stdout + done.stderr
