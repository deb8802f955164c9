import pytest

from patient import Patient


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)
