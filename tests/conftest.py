import os
import sys

import pytest

from gpu import Gpu
from msops.testing.entry import has_gpu_code
from patient import Patient

# `make test` hands its jobserver down. A make that a test runs cannot use it, and would warn of that.
for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(variable, None)


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)


@pytest.fixture
def gpu():
    """Returns torch's GPU. MindSpore's GPU backend and torch cannot share a process."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not has_gpu_code("add"):
        pytest.skip("needs a GPU, and libraries that nvcc built")
    return Gpu(torch)


@pytest.fixture
def huge_gpu(gpu):
    gpu.torch.cuda.empty_cache()
    if gpu.torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    yield gpu
    gpu.torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    """Restores sys.path, where MindSpore leaves folders of its own when it rewrites a Cell for level O1."""
    monkeypatch.setattr(sys, "path", list(sys.path))
