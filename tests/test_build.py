"""The build: without nvcc, incremental, and what its absence looks like."""

import shutil
import subprocess

import numpy as np
import pytest

import msops
from child import ROOT, run_python
from msops.testing.entry import Status, call


def make(folder, *variables):
    command = ["make", "-j2", "all", "NVCC=", *variables]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)


def built(folder, *variables):
    """How many libraries make builds."""
    return make(folder, *variables).stdout.count("-o msops/lib/")


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory):
    """A copy of the project that was built without nvcc, in a path with a space, and the process that built it."""
    folder = tmp_path_factory.mktemp("without nvcc")
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("aot_kernels", "msops"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return folder, make(folder)


def test_without_nvcc(cpu_build, capfd):
    folder, done = cpu_build
    assert done.stderr == ""
    assert "warning" not in done.stdout
    assert "CPU only" in done.stdout
    x = np.array([0, 1000], np.float32)
    y = np.full_like(x, np.nan)
    entry = msops.Library(folder / "msops" / "lib" / "sigmoid.so").SigmoidForward
    assert call(entry, [x, y]) == Status.OK
    np.testing.assert_array_equal(y, [0.5, 1])
    assert call(entry, [x, y], stream=1) == Status.NO_GPU_CODE
    assert "built without nvcc" in capfd.readouterr().err


def test_builds_what_changed(cpu_build):
    folder, done = cpu_build
    everything = len(list((folder / "aot_kernels").glob("*.cu")))
    assert done.stdout.count("-o msops/lib/") == everything
    assert built(folder) == 0
    (folder / "aot_kernels" / "sigmoid.cu").touch()
    assert built(folder) == 1
    (folder / "aot_kernels" / "common" / "axes.h").touch()
    assert built(folder) == everything
    assert built(folder, "CXX=g++ -DNDEBUG") == everything  # another command


def test_broken_compiler(cpu_build, tmp_path):
    """Replaces no library, and no later build takes what it left."""
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


def test_environment_behind_a_link(tmp_path):
    """Is not emptied."""
    project, environment = tmp_path / "project", tmp_path / "environment"
    project.mkdir()
    environment.mkdir()
    (environment / "kept").touch()
    (project / ".venv").symlink_to(environment)
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, project)
    done = subprocess.run(["make", ".venv/.ready"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert ".venv is a link" in done.stdout
    assert (environment / "kept").is_file()


@pytest.mark.parametrize("code", ["from msops import sigmoid", "import msops; msops.sigmoid", "from msops import *"])
def test_import_without_libraries(cpu_build, code):
    folder, _ = cpu_build
    (folder / "msops" / "lib").rename(folder / "msops" / "elsewhere")
    done = run_python("-c", code, cwd=folder)  # of which the package comes first
    (folder / "msops" / "elsewhere").rename(folder / "msops" / "lib")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: msops cannot load the library add: ")
    assert "make all" in done.stderr
