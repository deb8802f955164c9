import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from card import Card, chain, length, random, zeros
from msops.shared.decoder_stack import operators
from msops.testing.checks import Gradient, assert_near, run
from numpy_decoder_stack import (
    CACHE,
    MATRICES,
    NAMES,
    OPTIONAL,
    Stack,
    by_layer,
    case,
    decoder_stack,
    names_of,
    random_codes,
)
from numpy_paged_attention import random_tables
from operator_test import wide_in_graph_mode

ALL = OPTIONAL[:4]


class TestDecoderStack(Card):
    function = msops.decoder_stack
    formulas = (decoder_stack,)
    cases = {
        "small": case(2, 1, 2, 6, 2, 1, 4, 5, optional=("norm",)),
        "cache": case(2, 2, 1, 16, 4, 2, 8, 24, room=9, optional=("norm",)),
        "all": case(2, 3, 2, 16, 4, 2, 8, 24, room=7, optional=ALL, per_text=True, interleaved=True),
        "cache of three axes": case(2, 3, 2, 16, 4, 2, 8, 24, room=9, optional=("norm",), cut=True),
        "prefill": case(1, 2, 37, 24, 3, 1, 8, 16, optional=("k_norm",)),
        "prefill after a cache": case(2, 2, 19, 16, 2, 2, 8, 24, room=40, optional=("q_norm", "norm")),
        "odd": case(3, 2, 5, 13, 3, 3, 2, 7, room=3, eps=0.1),
        "no tokens": case(1, 1, 0, 8, 2, 1, 4, 6, room=3, optional=("norm",)),
        "no texts": case(2, 0, 3, 8, 2, 1, 4, 6, optional=("norm",)),
        "no texts, three axes": case(2, 0, 3, 8, 2, 1, 4, 6, room=5, cut=True),
        "no room": case(1, 2, 3, 8, 2, 1, 4, 6, room=0),
        "no layers": case(0, 2, 3, 8, 2, 1, 4, 6, optional=("norm",)),
        "blocks": case(2, 3, 2, 16, 4, 2, 8, 24, room=3, block_size=4, optional=("norm",)),
        "prefill after blocks": case(2, 2, 19, 16, 2, 2, 8, 24, room=9, block_size=5, cut=True),
        "no blocks": case(1, 2, 3, 8, 2, 1, 4, 6, room=0, block_size=3),
        "4 bits": case(2, 1, 2, 16, 2, 1, 8, 24, optional=("norm",), bits=4, group=8, zeros="uint8"),
        "8 bits": case(2, 3, 2, 10, 2, 2, 6, 14, room=4, bits=8, zeros="float32"),
        "odd groups of 4 bits": case(1, 2, 5, 13, 3, 1, 6, 7, bits=4, group=5),
        "whole runs of 4 bits": case(2, 1, 1, 64, 4, 2, 16, 96, room=5, optional=ALL, bits=4, group=32, zeros="uint8"),
        "whole runs of 8 bits": case(1, 1, 1, 64, 4, 2, 16, 32, bits=8),
        "blocks, no layers": case(0, 2, 3, 8, 2, 1, 4, 6, room=2, block_size=3),
    }
    further = {
        "16 tokens": case(2, 4, 4, 64, 4, 1, 64, 128, room=100, optional=("q_norm",)),
        "17 texts": case(1, 17, 1, 32, 4, 2, 16, 48, room=20, optional=("norm",)),
        "128 features": case(1, 1, 1, 128, 14, 2, 128, 64, room=70, optional=("qkv_bias", "norm")),
        "200 features": case(1, 2, 3, 40, 2, 1, 200, 24, room=5, optional=("norm",)),
        "400 features": case(1, 1, 2, 8, 1, 1, 400, 8),
        "a long prefill": case(1, 1, 150, 32, 4, 2, 64, 40, optional=("norm",)),
        "a long prefill after a cache": case(1, 2, 70, 24, 2, 1, 128, 40, room=90),
        "24 texts with caches": case(1, 24, 1, 24, 6, 2, 64, 16, room=300),
        "7 tokens of 5 texts": case(2, 5, 7, 16, 4, 1, 40, 24, room=600, optional=("norm",)),
        "20 texts, 128 features": case(1, 20, 1, 16, 2, 1, 128, 16, room=130, is_wide=True),
        "5 texts, long rows": case(1, 5, 1, 136, 4, 2, 16, 1096, room=40),
        "one token": case(3, 1, 1, 40, 6, 2, 64, 72, room=210, optional=ALL, interleaved=True),
        "one token, wide": case(2, 1, 1, 72, 10, 1, 40, 1088, room=90, optional=("k_norm", "norm"), is_wide=True),
        "one token, a long row": case(2, 1, 1, 2056, 4, 1, 8, 16, room=30, optional=("q_norm",)),
        "wide tables": case(2, 2, 2, 16, 2, 1, 8, 24, room=5, optional=ALL, is_wide=True),
        "16 tokens after blocks": case(2, 4, 4, 64, 4, 1, 64, 128, room=9, block_size=16, optional=("q_norm",)),
        "one token after blocks": case(3, 1, 1, 40, 6, 2, 64, 72, room=300, block_size=1, is_wide=True),
        "a long prefill after blocks": case(1, 2, 70, 24, 2, 1, 128, 40, room=7, block_size=13),
        "24 texts with blocks": case(1, 24, 1, 24, 6, 2, 64, 16, room=30, block_size=16),
        "9 tokens of 3 texts with blocks": case(2, 3, 9, 16, 4, 1, 40, 24, room=40, block_size=16, cut=True),
        "18 texts with blocks, 128 features": case(1, 18, 1, 16, 2, 1, 128, 16, room=9, block_size=32),
        "one token, 4 bits": case(3, 1, 1, 64, 4, 2, 64, 96, room=40, optional=ALL, bits=4, group=32, zeros="uint8"),
        "one token, 8 bits": case(2, 1, 1, 160, 4, 4, 32, 1056, optional=("norm",), bits=8, zeros="float32"),
        "one token, signed 4 bits": case(1, 1, 1, 320, 2, 1, 32, 4448, bits=4, group=128),
        "4 tokens, signed 8 bits": case(2, 2, 2, 32, 3, 1, 32, 64, room=9, bits=8, group=32),
        "4 tokens, 4 bits": case(1, 1, 4, 96, 4, 1, 40, 288, bits=4, zeros="scale"),
        "16 tokens, 4 bits, blocks": case(
            2, 4, 4, 256, 4, 1, 64, 672, room=5, block_size=8, bits=4, group=64, zeros="float32"
        ),
        "16 tokens, 8 bits": case(1, 16, 1, 64, 4, 2, 32, 320, optional=("norm",), bits=8, group=256, zeros="uint8"),
        "40 tokens, 4 bits": case(2, 2, 20, 32, 4, 2, 8, 40, bits=4, group=16, zeros="uint8"),
        "20 tokens, 8 bits": case(2, 20, 1, 32, 2, 1, 16, 48, bits=8, group=16, zeros="float32"),
        "20 features after blocks": case(1, 3, 7, 40, 2, 1, 20, 24, room=3, block_size=7),
        "300 blocks of 2 texts": case(1, 2, 1, 16, 2, 1, 8, 8, room=300, block_size=1),
    }
    small = "small"
    hostile = ("small", "all", "blocks", "4 bits")
    # float16 is rounded after each step, by 2^12 units of float32. test_results is stricter with the other dtypes.
    roundings = 2**15
    wrong = (
        ("x", (2, 6), {}, ValueError, "decoder_stack: x must have shape (B, T, C)"),
        ("cos", (3, 2), {}, ValueError, "decoder_stack: sin must have shape"),
        ("qkv", (2, 15, 6), {}, ValueError, "qkv must have a multiple of heads + 2 kv_heads = 4 rows, got 15"),
        ("qkv", (2, 12, 6), {}, ValueError, "qkv must have an even number of 2 to 512 rows for each head, got 3"),
        ("out", (2, 6, 7), {}, ValueError, "out must have heads D = 8 columns, got 7"),
        ("gate_up", (2, 10, 5), {}, ValueError, "decoder_stack: gate_up must have shape"),
        ("norm", (5,), {}, ValueError, "decoder_stack: norm must have shape (C,) = (6,), got (5,)"),
        (None, (), dict(heads=4.0), TypeError, "decoder_stack: heads must be an int, got float"),
        (None, (), dict(heads=3, kv_heads=2), ValueError, "kv_heads must divide heads = 3, got 2"),
        (None, (), dict(eps=-1.0), ValueError, "eps must be finite and at least 0, got -1.0"),
        (None, (), dict(interleaved="yes"), TypeError, "interleaved must be a bool, got str"),
    )

    def operators(self, shapes=(), optional=OPTIONAL, heads=1, kv_heads=1, eps=1e-5, interleaved=False, bits=0,
                  group=None, zeros=None, **_):  # fmt: skip
        if not shapes:
            optional = OPTIONAL
        operator = operators(heads, kv_heads, eps, interleaved, bits, group, zeros is not None)
        return chain(operator.without(*(name for name in OPTIONAL if name not in optional)))

    def inputs(self, shapes, dtype, seed=1, optional=(), is_wide=False, bits=0, zeros=None, **settings):
        names = names_of(optional, bits, zeros)
        t = dict(zip(names, random(seed, dtype, *shapes)))
        rng = np.random.default_rng(seed)
        angles = rng.uniform(0, 6, t["cos"].shape)
        t["cos"], t["sin"] = (f(angles).astype(dtype) for f in (np.cos, np.sin))
        for name in MATRICES:
            t[name] = np.asarray(t[name] / np.sqrt(max(1, t[name].shape[-1])), dtype)
            if bits:
                t.update(random_codes(rng, name, t[name].shape, t[f"{name}_scale"].shape, bits, zeros, dtype))
        for name in names:  # in an order that does not depend on the process
            if "norm" in name:
                t[name] = rng.uniform(0.5, 1.5, t[name].shape).astype(dtype)
        if "lengths" in t:
            keys, values = (by_layer(t[name], len(t["qkv"]), len(t["x"])) for name in CACHE[:2])
            columns, room, index = 1, keys.shape[2], np.int64 if is_wide else np.int32
            if "block_tables" in t:
                columns = t["block_tables"].shape[1]
            t["lengths"] = rng.integers(0, columns * room + 1, t["lengths"].shape).astype(index)
            if "block_tables" in t:
                tables, unused = random_tables(rng, t["lengths"], columns, *keys.shape[1:3])
                t["block_tables"] = tables.astype(index)
                keys[:, unused] = values[:, unused] = np.nan
            for b, count in enumerate(t["lengths"] if "block_tables" not in t else ()):
                keys[:, b, count:] = values[:, b, count:] = np.nan
        for name in names if is_wide else ():
            if "norm" in name or name in ("cos", "sin"):
                t[name] = t[name].astype(np.float32)
        return [t[name] for name in names]

    def entry_calls(self, shapes, settings, dtype, seed=1, scale=1, parts=0):
        """Factors of norms and of codes above 1 make large numbers, whose roundings in float16 later steps amplify."""
        return super().entry_calls(shapes, settings, dtype, seed, 1 if settings.get("bits") else min(scale, 1), parts)

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        group, kv_heads = 1 + length(random) % 3, 1 + length(random) % 3
        size, optional = 2 * (1 + length(random) % 12), [name for name in ALL if random.random() < 0.4]
        room = length(random) if random.random() < 0.5 else None
        sizes = 1 + length(random) % 3, length(random) % 4, length(random), 1 + length(random)
        interleaved, block_size = random.random() < 0.5, 0
        if room is not None and random.random() < 0.5:
            room, block_size = room % 5, random.choice((1, 2, 7, 16))
        codes = {}
        if random.random() < 0.3:
            codes = dict(bits=random.choice((4, 8)), group=random.choice((None, 3, 32)))
            codes["zeros"] = random.choice((None, "uint8", "float32", "scale"))
        return case(*sizes, group * kv_heads, kv_heads, size, 1 + length(random), room, optional,
                    per_text=random.random() < 0.3, cut=random.random() < 0.5, block_size=block_size,
                    interleaved=interleaved, **codes)  # fmt: skip


CARD = TestDecoderStack()


def by_reference(inputs, settings):
    """Computes in float64."""
    return decoder_stack(*(x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs), **settings)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", CARD.cases)
def test_results(mode, name, dtype):
    shapes, settings = CARD.cases[name]
    inputs = CARD.inputs(shapes, dtype, **settings)
    arguments = {key: value for key, value in settings.items() if key != "optional"}
    got = run(Stack(settings["optional"], **arguments), *inputs)
    for result, want in zip(got, by_reference(inputs, settings)):
        assert result.dtype == dtype
        assert result.shape == want.shape
        largest = max(1.0, np.abs(want).max(initial=0))
        assert_near(result, want, 64 * np.finfo(dtype).eps * largest / (8 if dtype == "float16" else 1), name)


def small(**changes):
    shapes, settings = CARD.cases["small"]
    inputs = dict(zip((*NAMES, *settings["optional"]), CARD.inputs(shapes, np.float32, **settings)))
    arguments = {key: value for key, value in settings.items() if key != "optional"}
    return {**inputs, **changes}, arguments


@pytest.mark.parametrize(("name", "shape", "changes", "error", "words"), CARD.wrong, ids=lambda x: str(x)[:40])
def test_wrong_arguments(mode, name, shape, changes, error, words):
    inputs, arguments = small(**({name: zeros(shape)[0]} if name else {}))
    with pytest.raises(error) as caught:
        run(Stack(list(inputs)[len(NAMES) :], **{**arguments, **changes}), *inputs.values())
    assert words in str(caught.value)


@pytest.mark.parametrize("missing", CACHE)
def test_a_cache_is_given_as_a_whole(mode, missing):
    shapes, settings = CARD.cases["cache"]
    optional = [name for name in settings["optional"] if name != missing]
    inputs = dict(zip((*NAMES, *settings["optional"]), CARD.inputs(shapes, np.float32, **settings)))
    del inputs[missing]
    with pytest.raises(ValueError, match=f"keys, values and lengths must be given together, {missing} is missing"):
        run(Stack(optional, heads=4, kv_heads=2), *inputs.values())


@pytest.mark.parametrize("shape", [(2, 2, 9, 2, 7), (2, 3, 9, 2, 8), (2, 9, 2, 8), (37, 2, 8), (36, 1, 8)], ids=str)
def test_caches_of_other_shapes(mode, shape):
    shapes, settings = CARD.cases["cache"]
    inputs = CARD.inputs(shapes, np.float32, **settings)
    inputs[-3] = inputs[-2] = zeros(shape)[0]
    words = "keys must have shape (L, B, S, kv_heads, D) = (2, 2, S, 2, 8) or (L B S, kv_heads, D), got "
    with pytest.raises(ValueError, match=re.escape(f"{words}{shape}")):
        run(Stack(settings["optional"], heads=4, kv_heads=2), *inputs)


@wide_in_graph_mode
def test_lengths_outside_of_the_cache(mode):
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("a GPU clamps them")
    shapes, settings = CARD.cases["cache"]
    inputs = CARD.inputs(shapes, np.float32, **settings)
    inputs[-1] = np.array([3, 10], np.int32)
    with pytest.raises(RuntimeError, match="decoder_stack: lengths has 10, expected 0 to 9"):
        run(Stack(settings["optional"], heads=4, kv_heads=2), *inputs)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(scales=1.0), TypeError, "scales must be a tuple of tensors, or None"),
        (
            dict(scales=(None,) * 3),
            ValueError,
            "scales must have one tensor for each of qkv, out, gate_up, down, got 3",
        ),
        (dict(scales=None), ValueError, "scales must be given with zero_points, got None"),
        (dict(bits=5), ValueError, "bits must be 4 or 8, got 5"),
        (dict(group=0), ValueError, "group must be at least 1, got 0"),
        (dict(group=7), ValueError, "qkv_scale must have shape (L, R, (C + 6) // 7) = (2, 32, 3), got (2, 32, 2)"),
        (dict(bits=8), ValueError, "qkv must have shape (L, R, C) = (2, 32, 16), got (2, 32, 8)"),
        (dict(out=(2, 16, 7)), ValueError, "out must have 8 bytes for heads D = 16 columns, got 7"),
        (dict(down=(2, 16, 13)), ValueError, "down must have 12 bytes for F = 24 columns, got 13"),
        (dict(gate_up=(2, 47, 8)), ValueError, "gate_up must have an even number of rows, got 47"),
        (
            dict(out_scale=(2, 16, 3)),
            ValueError,
            "out_zero_point must have shape (L, C, U) = (2, 16, 3), got (2, 16, 2)",
        ),
        (
            dict(down_zero_point=(2, 16, 4), down_scale=(2, 16, 4)),
            ValueError,
            "down_scale must have 3 groups of columns, got 4",
        ),
    ],
    ids=str,
)
def test_wrong_codes(changes, error, words):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    shapes, settings = CARD.cases["4 bits"]
    names = names_of(**settings)
    t = dict(zip(names, map(Tensor, CARD.inputs(shapes, np.float32, **settings))))
    for name in changes.keys() & t.keys():
        t[name] = Tensor(np.zeros(changes[name], t[name].asnumpy().dtype))
    if "gate_up" in changes:
        for name in ("gate_up_scale", "gate_up_zero_point"):
            t[name] = t[name][:, :-1]
    given = dict(scales=tuple(t[f"{name}_scale"] for name in MATRICES), bits=4, group=8, heads=2, kv_heads=1)
    given["zero_points"] = tuple(t[f"{name}_zero_point"] for name in MATRICES)
    given.update((name, x) for name, x in changes.items() if name not in t)
    with pytest.raises(error, match="decoder_stack: ") as caught:
        msops.decoder_stack(*(t[name] for name in NAMES), **given)
    assert words in str(caught.value)


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 8, mindspore.float16), (8, None, mindspore.float32)])
def test_cell_of_codes(mode, bits, group, dtype):
    """It gives what one with the matrices that the codes stand for gives."""
    settings = dict(layers=2, width=16, heads=4, kv_heads=2, hidden=24, qkv_bias=True)
    stack = msops.DecoderStack(**settings, bits=bits, group=group, dtype=dtype)
    assert {p.name for p in stack.trainable_params()} == {"norm1", "norm2", "norm", "qkv_bias"}
    assert f"bits={bits}, group={group}" in str(stack)
    whole = msops.DecoderStack(**settings, dtype=mindspore.float32)
    for name in MATRICES:
        codes, scale, zero = msops.quantize_weight(getattr(whole, name), bits, group)
        getattr(stack, name).set_data(codes)
        getattr(stack, f"{name}_scale").set_data(scale.astype(dtype))
        getattr(stack, f"{name}_zero_point").set_data(zero)
        rounded = scale.astype(dtype).astype(mindspore.float32)
        getattr(whole, name).set_data(msops.dequantize_weight(codes, rounded, zero, bits, group))
    x, angles = np.random.default_rng(0).standard_normal((2, 5, 16)), np.outer(np.arange(5), [1, 0.1])
    tables = [Tensor(f(angles), mindspore.float32) for f in (np.cos, np.sin)]
    near = 2e-2 if dtype == mindspore.float16 else 1e-5
    for got, want in zip(stack(Tensor(x, dtype), *tables), whole(Tensor(x, mindspore.float32), *tables)):
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), near, near)


def test_no_gradient(mode):
    inputs, arguments = small()
    net = Stack(("norm",), **arguments)
    douts = [np.ones_like(out) for out in run(net, *inputs.values())]
    with pytest.raises(ValueError, match="decoder_stack: it is for inference and has no gradient"):
        run(Gradient(net, len(inputs)), *inputs.values(), *douts)


def test_tables_of_another_length(mode):
    inputs, arguments = small(**dict(zip(("cos", "sin"), zeros((3, 2), (3, 2)))))
    words = re.escape("cos must have shape (T, D/2) = (2, 2) or (B, T, D/2) = (1, 2, 2), got (3, 2)")
    with pytest.raises(ValueError, match=words):
        run(Stack(("norm",), **arguments), *inputs.values())


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float32])
def test_tokens_one_by_one(mode, dtype):
    """Equal all tokens at once, except for rounding; so does prefill in two parts."""
    stack = msops.DecoderStack(3, 32, 4, 2, 48, qkv_bias=True, qk_norm=True, dtype=dtype)
    rng, total, room = np.random.default_rng(0), 21, 24
    x = Tensor(rng.standard_normal((2, total, 32)), dtype)
    angles = np.outer(np.arange(total), 0.5 ** np.arange(4))
    cos, sin = Tensor(np.cos(angles), mindspore.float32), Tensor(np.sin(angles), mindspore.float32)
    whole, *_ = stack(x, cos, sin)
    keys, values = (np.full((3, 2, room, 2, 8), np.nan, mindspore.dtype_to_nptype(dtype)) for _ in range(2))
    parts, begin = [], 0
    for new in (9, 1, 1, 2, 8):
        at = slice(begin, begin + new)
        count = Tensor(np.full(2, begin), mindspore.int32)
        y, k, v = stack(x[:, at], cos[at], sin[at], Tensor(keys), Tensor(values), count)
        keys[:, :, at], values[:, :, at] = k.asnumpy(), v.asnumpy()
        parts.append(y.asnumpy())
        begin += new
    tolerance = 2e-2 if dtype == mindspore.float16 else 1e-5
    np.testing.assert_allclose(np.concatenate(parts, 1), whole.asnumpy(), tolerance, tolerance)


def test_cell():
    stack = msops.DecoderStack(2, 24, 3, 1, 40)
    assert {p.name for p in stack.get_parameters()} == {"norm1", "qkv", "out", "norm2", "gate_up", "down", "norm"}
    assert stack.qkv.shape == (2, 40, 24)
    for settings, words in (
        (dict(width=25), "heads must divide width = 25 where head_size is not given"),
        (dict(head_size=7), "head_size must be even and at most 512"),
        (dict(kv_heads=2), "kv_heads must divide heads = 3"),
        (dict(hidden=0), "hidden must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            msops.DecoderStack(**{**dict(layers=2, width=24, heads=3, kv_heads=1, hidden=40), **settings})
