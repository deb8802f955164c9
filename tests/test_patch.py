"""Tests when and where a patch replaces MindSpore's names, and that they come back."""

import ast
import functools
import inspect
import sys
import types

import mindspore
import numpy as np
import pytest
from mindspore import mint, nn, ops

import msops
from msops import compat
from msops.patch.table import FUNCTIONS
from test_mint_methods import cut
from test_patched_operators import GAMMA, X, call, close, rms_norm, swiglu

pytestmark = pytest.mark.skipif(not hasattr(ops, "rms_norm"), reason="this MindSpore has none of the names")


def names():
    """Returns what the names of the table stand for, by their places."""
    last = {name.split(".")[-1] for name in FUNCTIONS}
    modules = [(path, vars(module)) for path, module in sys.modules.items() if path.split(".")[0] == "mindspore"]
    found = {(path, name): values[name] for path, values in modules for name in last & values.keys()}
    return {place: value for place, value in found.items() if value is not nn.Dense}  # it has a primitive's name


def test_rows_of_operators_and_of_their_classes():
    """What stands for an object of MindSpore is an object of what stands for its class."""
    found = {
        name: functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), ops) for name in FUNCTIONS
    }
    classes = {own: FUNCTIONS[name] for name, own in found.items() if inspect.isclass(own)}
    objects = {name: put for name, put in FUNCTIONS.items() if not inspect.isroutine(put) and not inspect.isclass(put)}
    wrong = [name for name, put in objects.items() if type(put) is not classes.get(type(found[name]), type(put))]
    assert not wrong


def test_modules_that_imported_before_the_patch(monkeypatch):
    early = types.ModuleType("early")
    early.primitive, early.function, early.other = own = ops.auto_generate.Swiglu, ops.swiglu, np.exp
    monkeypatch.setitem(sys.modules, early.__name__, early)
    with msops.patch_mindspore():
        assert early.primitive is ops.auto_generate.Swiglu is not own[0]
        close(call(early.primitive(), X), swiglu(X))
        assert early.function is ops.swiglu
        early.later = ops.rms_norm
        kept = early.later
    assert (early.primitive, early.function, early.other, early.later) == (*own, kept)


@pytest.mark.parametrize(("make", "slope"), [(lambda: nn.Dropout(p=0.5), 1), (lambda: nn.Dense(4, 2, "ones"), 2)])
def test_gradient_of_a_cell_that_was_called(mode, make, slope):
    """Graph mode finds what it compiled of the Cell."""
    x = mindspore.Tensor(np.ones((3, 4), np.float32))
    with msops.patch_mindspore():
        net = make().set_train(False)

        def total(x):
            return net(x).sum()

        want = net(x).sum()
        got, gradient = mindspore.value_and_grad(total)(x)
    assert got == want
    assert gradient.asnumpy().tolist() == [[slope] * 4] * 3


def test_methods_are_back():
    names = [name for name in ("clone", "add_", "unflatten") if compat.VERSION >= (2, 7)]
    own = {name: vars(mindspore.Tensor).get(name) for name in names}
    with msops.patch_mindspore():
        patched = {name: vars(mindspore.Tensor)[name] for name in names}
    assert {name: vars(mindspore.Tensor).get(name) for name in names} == own
    assert all(patched[name] is not own[name] for name in names)


def test_patches_end_in_any_order():
    before = names()
    assert ("mindspore.ops", "rms_norm") in before
    first, second = msops.patch_mindspore(), msops.patch_mindspore()
    with msops.patch_mindspore() as third:
        during = names()
        assert all(during[place] is not before[place] for place in before)
        first.undo()
        first.undo()
        assert names() == during
    third.undo()
    assert names() == during
    second.undo()
    assert names() == before
    with pytest.raises(ZeroDivisionError), msops.patch_mindspore():
        _ = 1 / 0
    assert names() == before


def test_functions_after_the_patch(mode):
    """MindSpore's own operators are back: they have no kernel here."""
    with msops.patch_mindspore():
        call(ops.rms_norm, X, GAMMA)
    with pytest.raises(RuntimeError, match=r"RmsNorm|Kernel select failed"):
        call(ops.rms_norm, X, GAMMA)


def test_modules_that_are_imported_later(monkeypatch):
    """A module of MindSpore that takes a name during the patch gets MindSpore's own back."""
    own = ops.swiglu
    later = types.ModuleType("mindspore.later")
    monkeypatch.setitem(sys.modules, later.__name__, later)
    with msops.patch_mindspore():
        later.swiglu = ops.swiglu
    assert later.swiglu is own


def test_names_that_something_else_replaces_meanwhile(monkeypatch):
    with msops.patch_mindspore():
        other = lambda x: x  # noqa: E731
        monkeypatch.setattr(ops, "swiglu", other)
    assert ops.swiglu is other


def test_nothing_changes_on_ascend(monkeypatch):
    before = names()
    monkeypatch.setattr(mindspore, "get_context", {"device_target": "Ascend"}.get)
    with msops.patch_mindspore():
        assert names() == before
    assert names() == before


def test_a_version_that_lacks_names(monkeypatch):
    for path, name in names():
        if name.lower().startswith("swiglu"):
            monkeypatch.delattr(sys.modules[path], name)
    with msops.patch_mindspore():
        assert not hasattr(ops, "swiglu")
        close(call(ops.rms_norm, X, GAMMA), rms_norm(X, GAMMA))


def test_a_version_with_other_arguments(monkeypatch):
    def swiglu(x, axis):
        return x

    monkeypatch.setattr(ops, "swiglu", swiglu)
    before = names()
    with pytest.raises(NotImplementedError, match=r"ops\.swiglu takes \(x, axis\) in .*takes \(input, dim\)$"):
        msops.patch_mindspore()
    assert names() == before


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="older versions lack most of these methods")
def test_parser_is_restored():
    parser = pytest.importorskip("mindspore.graph._parse.parser", reason="older versions have it elsewhere")
    function = inspect.unwrap(cut)
    with msops.patch_mindspore():
        assert "__msops_chunk__(x, 2, dim=1)" in ast.unparse(parser.Parser(function).parse()[1])
    assert "x.chunk(2, dim=1)" in ast.unparse(parser.Parser(function).parse()[1])


def test_cached_primitives():
    """In PyNative mode, MindSpore's functions make each primitive once, also one that msops has replaced or refuses."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    ones = functools.partial(ops.ones, dtype=mindspore.float32)
    arguments = ones((2, 3, 5)), ones((4, 3, 3)), ops.arange(4).astype(mindspore.float32)
    want = ops.conv1d(*arguments).asnumpy()
    with msops.patch_mindspore():
        np.testing.assert_array_equal(ops.conv1d(*arguments).asnumpy(), want)
        np.testing.assert_array_equal(ops.baddbmm(*map(ones, ((2, 3, 4), (2, 3, 5), (2, 5, 4)))).asnumpy(), 6)
        with pytest.raises(NotImplementedError, match="SpeedFusionAttention: it has kernels on Ascend alone"):
            ops._primitive_cache._get_cache_prim(ops.auto_generate.SpeedFusionAttention)(4, "BSH")(ones((2, 3, 8)))
    np.testing.assert_array_equal(ops.conv1d(*arguments).asnumpy(), want)


class Scores(nn.Cell):
    """Calls a primitive and two functions that the patch replaces."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 3, mindspore.Tensor(np.eye(3, 4, dtype=np.float32)), bias_init="ones")

    def construct(self, x):
        return ops.softmax(mint.tanh(self.dense(x)), -1)


@pytest.mark.skipif(compat.VERSION < (2, 7), reason="docs/versions.md says it of newer versions")
def test_level_o1(monkeypatch, tmp_path, device_target):
    """MindSpore writes the Cell's source anew for this level, and calls what the patch put in place as it is."""
    if device_target == "GPU":
        pytest.skip("MindSpore's own softmax stays there, whose source it cannot write anew")
    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = mindspore.Tensor(np.arange(8, dtype=np.float32).reshape(2, 4))
    with msops.patch_mindspore():
        want = Scores()(x).asnumpy()
        got = mindspore.amp.auto_mixed_precision(Scores(), "O1")(x).asnumpy()
    np.testing.assert_allclose(got, want, 0, 2e-3)


def test_documents_stay():
    """help() shows MindSpore's words for what is replaced."""
    named = [
        (module, name)
        for module in (mindspore.mint, mindspore.mint.nn.functional)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name, None)) and getattr(module, name).__doc__
    ]
    with msops.patch_mindspore():
        assert [name for module, name in named if not getattr(module, name).__doc__] == []
