import sys

import pytest

from patient import Patient


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    """Undoes what MindSpore does when it rewrites a Cell for level O1: it leaves folders of its own in sys.path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
