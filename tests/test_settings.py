"""Tests the settings that operators refuse, in whatever way they are wrong."""

import functools
import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

import msops
from msops.operators.rms_norm import operators
from msops.testing.checks import Net, assert_equal, run, run_gradient

LABELS = Tensor(np.zeros(3, np.int32))


def attend(x, **settings):
    heads = x.reshape(1, 1, 3, 4)
    return msops.flash_attention(heads, heads, heads, **settings)


NUMBERS = [
    (attend, "flash_attention: softcap"),
    (attend, "flash_attention: scale"),
    (msops.rms_norm, "rms_norm: eps"),
    (msops.rms_norm, "rms_norm: offset"),
    (lambda x, **settings: msops.add_rms_norm(x, x, **settings)[0], "add_rms_norm: eps"),
    (msops.layer_norm, "layer_norm: eps"),
    (functools.partial(msops.cross_entropy, labels=LABELS), "cross_entropy: softcap"),
    (functools.partial(msops.cross_entropy, labels=LABELS), "cross_entropy: z_loss"),
    (functools.partial(msops.cross_entropy, labels=LABELS), "cross_entropy: label_smoothing"),
]
BOUNDS = "must be 0 or have a magnitude from 1.2e-38 to 3.4e+38, as float32 holds it, for inputs of"


@pytest.mark.parametrize(("function", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_numbers_that_float32_does_not_hold(function, name):
    """They would become 0 or infinity in kernels that compute in float32. Those that compute in float64 take them."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x, setting = np.random.default_rng(0).standard_normal((3, 4)), name.partition(": ")[2]
    tiny, smallest = 1e-46, float(np.finfo(np.float32).tiny)
    for number in (tiny, smallest / 2, 1e39)[: 2 if setting == "label_smoothing" else 3]:
        for dtype in (np.float16, np.float32):
            with pytest.raises(ValueError, match=f"^{re.escape(f'{name} {BOUNDS} {np.dtype(dtype)}, got {number}')}$"):
                function(Tensor(x.astype(dtype)), **{setting: number})
        assert np.isfinite(function(Tensor(x), **{setting: number}).asnumpy()).all()
    for number in (0.0, smallest, 0.5):
        assert np.isfinite(function(Tensor(x.astype(np.float32)), **{setting: number}).asnumpy()).all()


def test_radius_of_any_size():
    """The squares of radii are rounded, and 0 and infinity are such squares as others."""
    points = Tensor(np.zeros((1, 2, 3), np.float32))
    for radius, count in ((1e-30, 0), (1e39, 2)):
        _, counts = msops.ball_query(radius, 2, points, points, return_counts=True)
        assert (counts.asnumpy() == count).all()


@pytest.mark.parametrize("number", [10**400, -(10**5000)], ids=["large", "of more digits than Python prints"])
def test_ints_that_no_float_holds(number):
    infinity = "inf" if number > 0 else "-inf"
    with pytest.raises(ValueError, match=f"^rms_norm: eps must be finite and at least 0, got {infinity}$"):
        msops.rms_norm(Tensor(np.ones(3, np.float32)), eps=number)
    with pytest.raises(ValueError, match=f"^RotaryEmbedding: base must be finite, got {infinity}$"):
        msops.RotaryEmbedding(4, 8, base=number)


def test_settings_of_other_types():
    """What is kept for 1 is not taken for True, alone or in a tuple."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = Tensor(np.ones((3, 4), np.float32))
    assert np.isfinite(attend(x, window=(1, 1), softcap=1).asnumpy()).all()
    for settings, words in (
        (dict(window=(True, True)), r"window must be an int or a tuple of ints, got \(True, True\)"),
        (dict(window=(1.0, 1.0)), r"window must be an int or a tuple of ints, got \(1.0, 1.0\)"),
        (dict(window=(1, 1), softcap=True), "softcap must be a number, got bool"),
    ):
        with pytest.raises(TypeError, match=f"^flash_attention: {words}"):
            attend(x, **settings)


def test_function_and_cell_share_a_primitive():
    operator = operators(1e-6, 0.0, "llama").without("bias")
    assert msops.RMSNorm(4).forward_op is operator.primitive is operators.primitive(1e-6, 0.0, "llama", True, False)
    assert msops.RMSNorm(4, has_weight=False).forward_op is operator.without("weight").primitive


UNHASHABLE = [
    (lambda x: msops.softmax(x, [1]), "softmax: axis must be an int, got list"),
    (lambda x: msops.Softmax([1])(x), "softmax: axis must be an int, got list"),
    (
        lambda x: msops.RotaryEmbedding(4, 8)(x.reshape(1, 1, 3, 4), [0]),
        "RotaryEmbedding: start must be an int, got list",
    ),
    (lambda x: attend(x, window={1: 1}), r"flash_attention: window must be an int or a tuple of ints, got \{1: 1\}"),
    (lambda x: ops.swiglu(x, [0]), "swiglu: dim must be an int, got list"),
]


@pytest.mark.parametrize(("call", "message"), UNHASHABLE, ids=[message for _, message in UNHASHABLE])
def test_settings_without_a_hash(call, message):
    """What is kept for equal settings is looked up by their hashes, which lists do not have."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    x = Tensor(np.ones((3, 4), np.float32))
    if call is UNHASHABLE[-1][0] and not hasattr(ops, "swiglu"):
        pytest.skip("this MindSpore does not have swiglu")
    with msops.patch_mindspore(), pytest.raises(TypeError, match=f"^{message}"):
        call(x)


def attend_keys(x, lengths):
    return msops.flash_attention(x, x, x, kv_lengths=lengths)


def attend_sequences(x, starts):
    rows = x.reshape(6, 2, 4)
    return msops.flash_attention_varlen(rows, rows, rows, starts, starts, 6, 6)


def sample(x, lengths):
    return msops.furthest_point_sample(x.reshape(2, 8, 3), 3, lengths)


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(attend_keys, [1, 2]), (attend_keys, [-1, 2**40]), (attend_sequences, [0, 2, 6]), (sample, [3, 8])],
)
def test_lengths_of_int64(mode, function, numbers):
    """They give what those of int32 give. Numbers that int32 does not hold stay too large."""
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 4)).astype(np.float32)
    wide = np.array(numbers, np.int64)
    narrow = np.clip(wide, -1, 100).astype(np.int32)
    (out,) = run(Net(function), x, wide)
    assert_equal([out], run(Net(function), x, narrow))
    if function is not sample:
        gradients = [run_gradient(Net(function), [x, lengths], [np.ones_like(out)])[0] for lengths in (wide, narrow)]
        assert_equal(gradients[:1], gradients[1:])
