"""Tests msops.Library: what it loads from where, and its messages when it cannot."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor
from numpy.testing import assert_array_equal

import msops
from msops.core import library
from operator_test import Net

ANSWER = 'extern "C" __attribute__((visibility("default"))) int Answer() { return 1; }\n'


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Returns a library with one entry, Answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVCC", "")
        return msops.load("answer", ANSWER, cache_folder=tmp_path_factory.mktemp("cache"))


def test_entry_that_does_not_exist(loaded):
    with pytest.raises(AttributeError, match=r"^answer: the library has no entry Anwser; did you mean Answer\?$"):
        _ = loaded.Anwser
    with pytest.raises(AttributeError, match=r"^answer: the library has no entry something_else$"):
        _ = loaded.something_else
    assert not hasattr(loaded, "__wrapped__")


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("fpu fma f16c sse4_2", "avx2"),
        ("fpu avx fma avx2", "f16c"),
        ("fpu avx f16c", "avx2 and no fma"),
        ("fpu f16c avx2 fma", None),
    ],
)
def test_cpu_without_the_instructions(loaded, tmp_path, monkeypatch, flags, missing):
    """Where the CPU lacks what libraries are compiled for, an error tells so, not a signal at the first call."""
    list_of_flags = tmp_path / "cpuinfo"
    list_of_flags.write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(library, "CPUINFO", list_of_flags)
    monkeypatch.setattr(library, "_check_cpu", library._check_cpu.__wrapped__)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(ImportError, match=f"this one has no {missing}$") if missing else contextlib.nullcontext():
        msops.Library(loaded.path)


def test_missing_library(tmp_path, monkeypatch):
    """Where there is a Makefile beside the package, a build mends it, else the wheel does."""
    monkeypatch.setattr(library, "PACKAGE", tmp_path / "msops")
    with pytest.raises(ImportError, match=r"Install the wheel of msops again, by pip's --force-reinstall --no-deps\.$"):
        library.of_package("absent")
    (tmp_path / "Makefile").touch()
    with pytest.raises(ImportError, match=r"Build the kernels with 'make all' in msops' source folder\.$"):
        library.of_package("absent")


def test_library_by_a_relative_path(loaded, tmp_path, monkeypatch):
    """A relative path refers to the folder that was current when the library was loaded."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(loaded.path, "other.so")
    for path in ("other.so", Path("other.so"), "./other.so"):
        assert msops.Library(path).path == tmp_path / "other.so"


def test_path_with_a_colon(tmp_path):
    """msops refuses a colon, since MindSpore takes what follows it for the entry's name."""
    with pytest.raises(ImportError, match=r"^msops cannot load the library b: its path must have no colon: .*a:/b\.so"):
        msops.Library(tmp_path / "a:" / "b.so")


def test_library_that_is_none(tmp_path):
    with pytest.raises(ImportError, match=r"^msops cannot load the library nowhere: .*cannot open"):
        msops.Library(tmp_path / "nowhere.so")


def test_file_that_is_deleted(tmp_path, mode):
    """Operators that use the library still work, also where MindSpore makes a new kernel."""
    folder = tmp_path / "cache"
    folder.mkdir()
    moved = msops.Library(shutil.copy(library.of_package("sigmoid").path, folder))
    forward = msops.custom_op(moved.SigmoidForward, "x -> y")
    for size in (1, 2):
        assert_array_equal(Net(forward)(Tensor(np.zeros(size, np.float32))).asnumpy(), [0.5] * size)
        content = moved.path.read_bytes()
        shutil.rmtree(folder)
    assert_array_equal(Net(forward)(Tensor(np.zeros(2, np.float32))).asnumpy(), [0.5, 0.5])
    assert moved.path.read_bytes() == content
    assert list(folder.iterdir()) == [moved.path]


def test_library_of_the_package_by_a_variable(tmp_path, monkeypatch):
    moved = shutil.copy(library.of_package("sigmoid").path, tmp_path)
    monkeypatch.setenv("MSOPS_SIGMOID", moved)
    found = library.of_package("sigmoid")
    assert (str(found.path), found.variable) == (moved, "MSOPS_SIGMOID")
