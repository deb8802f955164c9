import os
import sys

import pytest

from patient import Patient

# `make test` hands its jobserver down, which a make that a test runs cannot use: it would warn of that.
for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(variable, None)


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    """Undoes what MindSpore does when it rewrites a Cell for level O1: it leaves folders of its own in sys.path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
