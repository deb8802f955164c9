"""msops.Library: what is loaded from where, and what is said when it is not."""

import shutil
from pathlib import Path

import pytest

import msops
from msops import library

ANSWER = 'extern "C" __attribute__((visibility("default"))) int Answer() { return 1; }\n'


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A library with one entry, which is Answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVCC", "")
        return msops.load("answer", ANSWER, cache_folder=tmp_path_factory.mktemp("cache"))


def test_entry_that_does_not_exist(loaded):
    with pytest.raises(AttributeError, match=r"^answer: the library has no entry Anwser; did you mean Answer\?$"):
        _ = loaded.Anwser
    with pytest.raises(AttributeError, match=r"^answer: the library has no entry something_else$"):
        _ = loaded.something_else
    assert not hasattr(loaded, "__wrapped__")


def test_library_by_a_relative_path(loaded, tmp_path, monkeypatch):
    """The path is that of the folder where it was loaded."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(loaded.path, "other.so")
    for path in ("other.so", Path("other.so"), "./other.so"):
        assert msops.Library(path).path == tmp_path / "other.so"


def test_path_with_a_colon(tmp_path):
    """MindSpore takes what follows a colon for the entry's name."""
    with pytest.raises(ImportError, match=r"^msops cannot load the library b: its path must have no colon: .*a:/b\.so"):
        msops.Library(tmp_path / "a:" / "b.so")


def test_library_that_is_none(tmp_path):
    with pytest.raises(ImportError, match=r"^msops cannot load the library nowhere: .*cannot open"):
        msops.Library(tmp_path / "nowhere.so")


def test_library_of_the_package_by_a_variable(tmp_path, monkeypatch):
    moved = shutil.copy(library.of_package("sigmoid").path, tmp_path)
    monkeypatch.setenv("MSOPS_SIGMOID", moved)
    found = library.of_package("sigmoid")
    assert (str(found.path), found.variable) == (moved, "MSOPS_SIGMOID")
