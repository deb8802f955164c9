"""Tests of the build: without nvcc, after changes, with a broken compiler, and the error when no library is built."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest

import msops
from child import ROOT, run_python
from msops.testing.entry import Status, call

pytestmark = pytest.mark.wide

OPERATORS = "sigmoid", "lltm_cell", "depthwise_conv2d"  # these few show what is built again


def make(folder, *variables):
    command = ["make", "all", "V=1", "NVCC=", "FLAGS=-std=c++17 -O0", *variables]  # takes 6 s instead of 40 s
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)


def built(folder, *variables):
    """Returns how many libraries make builds."""
    return make(folder, *variables).stdout.count("-o msops/lib/")


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory):
    """Returns a copy of the project, built without nvcc in a path with a space, and the process that built it."""
    folder = tmp_path_factory.mktemp("without nvcc")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("aot_kernels", "msops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    for source in (folder / "aot_kernels").glob("*.cu"):
        if source.stem not in OPERATORS:
            source.unlink()
    return folder, make(folder)


def test_without_nvcc(cpu_build, capfd):
    folder, done = cpu_build
    assert done.stderr == ""
    assert "warning" not in done.stdout
    assert "msops is built for the CPU only, as NVCC is empty.\n" in done.stdout
    x = np.array([0, 1000], np.float32)
    y = np.full_like(x, np.nan)
    entry = msops.Library(folder / "msops" / "lib" / "sigmoid.so").SigmoidForward
    assert call(entry, [x, y]) == Status.OK
    np.testing.assert_array_equal(y, [0.5, 1])
    assert call(entry, [x, y], stream=1) == Status.NO_GPU_CODE
    assert "built without nvcc" in capfd.readouterr().err


def test_no_header_of_cuda():
    """No kernel needs a header of CUDA where g++ compiles it for the CPU."""
    sources = sorted((ROOT / "aot_kernels").glob("*.cu"))
    command = ["g++", "-std=c++17", "-fopenmp", "-M", "-x", "c++", *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.findall(r"\S*/(?:cuda|cublas)\w*\.h", done.stdout)


def test_builds_what_changed(cpu_build):
    folder, done = cpu_build
    everything = len(list((folder / "aot_kernels").glob("*.cu")))
    assert done.stdout.count("-o msops/lib/") == everything
    assert built(folder) == 0
    (folder / "aot_kernels" / "sigmoid.cu").touch()
    assert built(folder) == 1
    (folder / "aot_kernels" / "depthwise_conv2d" / "large.h").touch()
    assert built(folder) == 1
    (folder / "aot_kernels" / "common" / "call.h").touch()
    assert built(folder) == everything
    assert built(folder, "CXX=g++ -DNDEBUG") == everything  # the command has changed


def test_tells_how_far_it_is(cpu_build):
    """Each library that is done gets a line, and only V=1 shows the compiler's commands."""
    folder, _ = cpu_build
    built(folder)

    def lines(changed):
        for name in changed:
            (folder / "aot_kernels" / f"{name}.cu").touch()
        said = make(folder, "V=").stdout.splitlines()
        return said[0], sorted(said[1:-1])

    assert lines([]) == ("msops is built for the CPU only, as NVCC is empty.", [])
    for changed in (["sigmoid"], OPERATORS):
        first, others = lines(changed)
        assert first == f"Libraries to compile: {len(changed)}."
        counts, names = zip(*(line.split(": ") for line in others))
        assert set(names) == set(changed)
        assert counts == tuple(f"{number} of {len(changed)}" for number in range(1, len(changed) + 1))


def test_broken_compiler(cpu_build, tmp_path):
    """A compiler that fails replaces no library, and no later build uses what it left."""
    folder, _ = cpu_build
    libraries = {path: path.read_bytes() for path in (folder / "msops" / "lib").glob("*.so")}
    compiler = tmp_path / "g++"
    compiler.touch(0o755)
    for does in ("exit 0", "exit 1", "kill -9 $$", 'for last; do :; done; echo half > "$last"; exit 1'):
        compiler.write_text(f"#!/bin/sh\n{does}\n")
        with pytest.raises(subprocess.CalledProcessError):
            make(folder, f"CXX={compiler}")
        assert {path: path.read_bytes() for path in libraries} == libraries
    assert built(folder) == len(libraries)
    assert {path: path.read_bytes() for path in libraries} == libraries


@pytest.mark.parametrize(("given", "jobs"), [("", 3), ("-j1", 1), ("MAKEFLAGS=-j2", 2)])
def test_builds_at_once(tmp_path, given, jobs):
    """make starts a compiler for each core, unless -j or the make that runs it sets the number."""
    (tmp_path / "nproc").write_text("#!/bin/sh\necho 3\n")
    (tmp_path / "compiler").write_text(f"#!/bin/sh\ntouch {tmp_path}/started.$$\nsleep 1\nexit 1\n")
    for command in ("nproc", "compiler"):
        (tmp_path / command).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **dict(re.findall(r"(\w+)=(.*)", given))}
    command = ["make", "-B", "all", "NVCC=", f"CXX={tmp_path}/compiler", *re.findall(r"^-\w+", given)]
    for name in ("Makefile", "aot_kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {key: value for key, value in os.environ.items() if key != "MAKEFLAGS"}
    done = subprocess.run(command, cwd=tmp_path, env={**environment, **variables}, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(list(tmp_path.glob("started.*"))) == jobs


def make_dry(*arguments, **variables):
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)


def test_says_why_it_builds_for_the_cpu(tmp_path, monkeypatch):
    assert "for the CPU only, as NVCC is empty." in make_dry("-B", "all", NVCC="").stdout
    for name in ("make", "sh", "nproc", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.delenv("NVCC", raising=False)
    done = make_dry("-B", "all", PATH=str(tmp_path), CUDA_HOME="")
    assert "for the CPU only: no nvcc on the PATH or in CUDA_HOME." in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["NVCC", "CXX"])
def test_compiler_that_does_not_exist(tmp_path, name):
    """make names the variable that is wrong, and installs nothing under a path's name."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'gcc: fatal error: no input files' >&2; exit 1\n")
    nvcc.chmod(0o755)
    lost = tmp_path / "lost" / "g++"
    script = ROOT / "aot_kernels" / "compile" / "host_compiler.sh"
    done = subprocess.run(["sh", script, *([lost] if name == "NVCC" else [nvcc, lost])], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"there is no {lost}, which {name} names\n"


@pytest.mark.parametrize(
    ("entry", "source"), [("SiluForward", "aot_kernels/silu"), ("SwishBackward", "examples/swish/swish")]
)
def test_fuzz_compiles_what_it_calls(entry, source):
    """`make fuzz` for one entry compiles the source that has it, under the sanitizers, and no other."""

    def compiled(arguments):
        commands = make_dry("-B", "fuzz", f"ARGS={arguments}", "NVCC=").stdout
        return sorted(re.findall(r"-o build/fuzz/(\S+)\.o", commands))

    assert compiled(f"20 {entry}") == sorted([source, "tests/fuzz_entries"])
    sources = [*ROOT.glob("aot_kernels/*.cu"), *ROOT.glob("examples/*/*.cu"), ROOT / "tests" / "fuzz_entries"]
    everything = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in sources)
    assert compiled("1") == compiled("1 all") == everything


def test_fuzz_of_no_entry():
    done = make_dry("fuzz", "ARGS=20 NoEntry")
    assert done.returncode != 0
    assert "no source has the entry NoEntry" in done.stderr


def test_environment_behind_a_link(tmp_path):
    """make does not empty the folder that .venv links to."""
    project, environment = tmp_path / "project", tmp_path / "environment"
    project.mkdir()
    environment.mkdir()
    (environment / "kept").touch()
    (project / ".venv").symlink_to(environment)
    (project / "aot_kernels").symlink_to(ROOT / "aot_kernels")
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, project)
    done = subprocess.run(["make", ".venv/.ready"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert ".venv is a link" in done.stdout
    assert (environment / "kept").is_file()


@pytest.mark.parametrize(
    ("goal", "files"), [("demo", ["digits"]), ("chat", ["llama", "smollm/generation", "smollm/quantized"])]
)
def test_builds_what_an_example_needs(tmp_path, goal, files):
    """The libraries are those of the operators that the example's files name."""
    command = ["make", "--dry-run", goal, "NVCC=", f"LIB={tmp_path}"]
    commands = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(rf"-o {tmp_path}/(\w+)\.so", commands))
    text = "".join((ROOT / "examples" / f"{name}.py").read_text() for name in files)
    names = re.findall(r"\b(?:msops|operators)\.(\w+)", text)
    assert libraries == {getattr(msops, name).__module__.split(".")[-1] for name in names}


@pytest.mark.parametrize("code", ["from msops import sigmoid", "import msops; msops.sigmoid", "from msops import *"])
def test_import_without_libraries(cpu_build, code):
    folder, _ = cpu_build
    (folder / "msops" / "lib").rename(folder / "msops" / "elsewhere")
    done = run_python("-c", code, cwd=folder)  # Python finds this folder's package first
    (folder / "msops" / "elsewhere").rename(folder / "msops" / "lib")
    assert done.returncode == 1
    assert re.match(r"ImportError: msops cannot load the library (add|sigmoid): ", done.stderr.splitlines()[-1])
    assert "make all" in done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
@pytest.mark.parametrize("library", sorted((ROOT / "msops" / "lib").glob("*.so")), ids=lambda path: path.stem)
def test_loops_for_the_cpu_are_whole(library):
    """nvcc inlines no lambda into code for the CPU's vectors, where it then runs without them; a struct is inlined."""
    symbols = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r".*::cpu::.*\{lambda.*::operator\(\).*", symbols)


def test_pytorch_has_an_environment_of_its_own():
    """Hugging Face's libraries load torch where they find it, beside MindSpore, whose NumPy and SciPy are older."""
    printed = make_dry("--always-make", ".libraries/.ready", "NVCC=").stdout
    (installs,) = [line for line in printed.splitlines() if "torch>" in line]
    assert installs.startswith(".libraries/torch/bin/pip install ")
