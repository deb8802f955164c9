"""Tests when `patch_mindspore` puts msops' kernels in the places of MindSpore's, without a GPU: see test_kernels.py."""

import mindspore
import numpy as np
import pytest

import msops
from msops.compat import VERSION
from msops.patch.gpu import kernels


class Context:
    """Stands for MindSpore's class that keeps the device."""

    def set_device_target_inner(self, target):
        return "inner", target

    def set_param(self, name, value):
        return name, value


@pytest.fixture
def on_gpu(stand_ins, monkeypatch):
    """A process whose plugin for GPUs is the tests' own. Returns what there is to choose: the device, the entries."""
    plugin, functions = stand_ins
    own = mindspore.get_context
    chosen = {"device": "GPU", "entries": plugin.entries(functions.entries), "plugin": plugin.NAME, "prepared": 0}

    def prepare():
        chosen["prepared"] += 1

    class Found(kernels.Functions):
        def install(self, entries):
            return super().install(entries, chosen["plugin"], on_cpu=True)

    monkeypatch.setattr(kernels, "Functions", Found)
    monkeypatch.setattr(kernels, "addresses", lambda names: chosen["entries"])
    monkeypatch.setattr(kernels, "state", kernels._State())
    monkeypatch.setattr(kernels.fast_calls, "prepare", prepare)
    monkeypatch.setattr(mindspore._c_expression, "MSContext", Context)
    monkeypatch.setattr(
        mindspore, "get_context", lambda name: chosen["device"] if name == "device_target" else own(name)
    )
    yield chosen
    kernels.take_away()
    plugin.called.clear()


def works(plugin):
    x = np.zeros(8, np.float32)
    return plugin.select("float32", x, x, x, x, 8) == 0


needs_version = pytest.mark.skipif(VERSION != (2, 10), reason="the kernels of MindSpore 2.10 are replaced")


@needs_version
def test_patch(on_gpu, stand_ins):
    plugin, _ = stand_ins
    patch = msops.patch_mindspore(mint=False)
    assert works(plugin)
    assert kernels.Kernel("CalSelect", "", ("float32",)) in patch.kernels
    other = msops.patch_mindspore(mint=False, kernels=False)
    third = msops.patch_mindspore(mint=False)
    patch.undo()
    assert works(plugin)
    assert third.kernels == other.kernels != []
    third.undo()
    assert not works(plugin)
    assert other.kernels == []
    other.undo()
    with msops.patch_mindspore(mint=False):
        assert works(plugin)
    assert not works(plugin)
    assert on_gpu["prepared"] == 2


@needs_version
def test_patch_without_headers(on_gpu, stand_ins, monkeypatch):
    """The kernels are replaced, but reshaped tensors copied."""

    def prepare():
        raise RuntimeError("Python.h is missing")

    monkeypatch.setattr(kernels.fast_calls, "prepare", prepare)
    with msops.patch_mindspore(mint=False):
        assert works(stand_ins[0])


@needs_version
@pytest.mark.parametrize("choose", [lambda c: c.set_device_target_inner("GPU"), lambda c: c.set_param("target", "GPU")])
def test_device_chosen_after_the_patch(on_gpu, stand_ins, choose):
    plugin, _ = stand_ins
    on_gpu.update(device="CPU", plugin="not loaded yet")
    own = dict(vars(Context))
    with msops.patch_mindspore(mint=False) as patch:
        assert patch.kernels == []
        assert not works(plugin)
        assert Context().set_param("mode", 1) == ("mode", 1)
        assert not works(plugin)
        on_gpu.update(device="GPU", plugin=plugin.NAME)
        assert "GPU" in choose(Context())
        assert works(plugin)
        assert len(patch.kernels) > 200
        assert dict(vars(Context)) == own
    assert not works(plugin)


@needs_version
def test_patch_undone_before_the_device_is_chosen(on_gpu, stand_ins):
    on_gpu.update(device="CPU")
    own = dict(vars(Context))
    msops.patch_mindspore(mint=False).undo()
    assert dict(vars(Context)) == own
    on_gpu.update(device="GPU")
    Context().set_param("target", "GPU")
    assert not works(stand_ins[0])


@needs_version
@pytest.mark.parametrize("error", [RuntimeError("no g++"), OSError("no folder"), ImportError("no libstdc++")])
def test_patch_without_a_compiler(on_gpu, stand_ins, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(kernels, "build", fail)
    with msops.patch_mindspore(mint=False) as patch:
        assert patch.kernels == []
    assert not works(stand_ins[0])


@needs_version
def test_patch_with_libraries_for_the_cpu(on_gpu, stand_ins):
    on_gpu["entries"] = {}
    with msops.patch_mindspore(mint=False) as patch:
        assert patch.kernels == []


def test_patch_on_the_cpu(device_target):
    if device_target != "CPU":
        pytest.skip("is about the CPU")
    with msops.patch_mindspore(mint=False) as patch:
        assert patch.kernels == []


def test_addresses_without_gpu_code(stand_ins, monkeypatch, tmp_path):
    """Libraries that were built without nvcc fail on each call on a GPU."""
    names = stand_ins[1].entries
    own, found = kernels.of_package, kernels.addresses(names, on_cpu=True)
    assert {"BinaryForward", "SelectForward", "StridedCopyForward"} <= set(found)

    def of_package(name):
        library = own(name)
        library.path = tmp_path / "library"
        return library

    monkeypatch.setattr(kernels, "of_package", of_package)
    (tmp_path / "library").write_bytes(b"msops: C++ compiler 12")
    assert kernels.addresses(names) == {}
    (tmp_path / "library").write_bytes(b"... msops: nvcc 13.0, C++ compiler 12 ...")
    assert kernels.addresses(names) == found
