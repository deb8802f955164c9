import importlib
import importlib.util
import os
import subprocess
import sys

import mindspore
import pytest

from gpu import Gpu, is_there
from patient import Patient

# `make test` hands its jobserver down. A make that a test runs cannot use it, and would warn of that.
for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(variable, None)


@pytest.fixture
def patient(tmp_path, monkeypatch):
    return Patient(tmp_path, monkeypatch)


@pytest.fixture
def load(tmp_path):
    """Imports a module from its text, as a model library is imported."""
    names = []

    def load(text):
        names.append(f"library_{len(names)}")
        path = tmp_path / f"{names[-1]}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(names[-1], path)
        sys.modules[names[-1]] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


@pytest.fixture
def without(monkeypatch):
    """Returns functions that compute by a library's own code, since a part of the patch takes no call. The rest of the
    patch stays: MindSpore lacks operators of the library without it."""
    import msops

    def of(part):
        def compute(function, *arguments, **named):
            with monkeypatch.context() as context, msops.patch_mindspore():
                context.setattr(part, "_takes", lambda *_: False)
                return function(*arguments, **named)

        return compute

    return of


@pytest.fixture
def noted(monkeypatch):
    """Returns a function that chooses PyNative mode, and lets a module's function note the arguments of its calls in
    the list that it returns."""

    def note(module, name):
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
        calls, own = [], getattr(module, name)

        def noting(*arguments):  # graph mode compiles its source
            calls.append(arguments)
            return own(*arguments)

        monkeypatch.setattr(module, name, noting)
        return calls

    return note


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """A plugin that stands for MindSpore's plugin for GPUs, and the functions that may stand in its places. A process
    has one of each."""
    kernels = importlib.import_module("msops.patch.gpu.kernels")
    folder, include = tmp_path_factory.mktemp("plugin"), importlib.import_module("msops").get_include()
    return importlib.import_module("fake_plugin").Plugin(folder, include), kernels.Functions(kernels.build())


@pytest.fixture
def gpu():
    """Returns torch's GPU. MindSpore's GPU backend and torch cannot share a process."""
    if not is_there():
        pytest.skip("needs torch, a GPU, and libraries that nvcc built")
    return Gpu(importlib.import_module("torch"))


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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Measures no coverage in graph mode, where tests take a quarter longer with it, and which compiles what PyNative
    mode runs."""
    coverage = sys.modules.get("coverage")
    measured = coverage and coverage.Coverage.current()
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if not measured or not any(isinstance(value, str) and value == "graph" for value in parameters):
        yield
        return
    measured.stop()
    yield
    measured.start()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test marked `alone` in a process of its own."""
    if not pyfuncitem.get_closest_marker("alone") or "MSOPS_ALONE" in os.environ:
        return None
    config = pyfuncitem.config
    test = f"{pyfuncitem.path}::{pyfuncitem.nodeid.partition('::')[2]}"
    device = f"--device-target={config.getoption('--device-target')}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", device, test],
        cwd=config.rootpath, env=environment | {"MSOPS_ALONE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return True
