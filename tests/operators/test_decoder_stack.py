import re

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import msops
from card import Card, chain, length, random, zeros
from msops.operators.decoder_stack import operators
from msops.testing.checks import Gradient, assert_near, run
from operator_test import wide_in_graph_mode

OPTIONAL = ("norm", "qkv_bias", "q_norm", "k_norm", "keys", "values", "lengths")
CACHE = OPTIONAL[4:]
MATRICES = ("qkv", "out", "gate_up", "down")
NAMES = ("x", "cos", "sin", "norm1", "qkv", "out", "norm2", "gate_up", "down")


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def turned(x, cos, sin, interleaved):
    """Rotates heads (B, T, heads, D) by angles (..., T, D/2)."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[..., None, :], sin[..., None, :]
    both = a * cos - b * sin, b * cos + a * sin
    return np.stack(both, -1).reshape(x.shape) if interleaved else np.concatenate(both, -1)


def attention(q, k, v, cached):
    """Attends to keys (rows, kv_heads, D), the first of which are cached; q is (T, heads, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    x = np.einsum("thd,jhd->htj", q, k) / np.sqrt(q.dtype.type(q.shape[-1]))
    x[:, np.arange(len(k)) > cached + np.arange(len(q))[:, None]] = -np.inf
    p = np.exp(x - x.max(-1, keepdims=True)) if x.size else x
    return np.einsum("htj,jhd->thd", p / p.sum(-1, keepdims=True), v)


def by_text(cache, layers, batch):
    """Returns a view of a cache that has axes of layers and texts."""
    rows = len(cache) // max(1, layers * batch)
    return cache if cache.ndim == 5 else cache.reshape(layers, batch, rows, *cache.shape[1:])


def decoder_stack(*inputs, heads=1, kv_heads=1, eps=1e-5, interleaved=False, optional=(), **_):
    t = dict(zip((*NAMES, *(name for name in OPTIONAL if name in optional)), inputs))
    (batch, new, _), layers, h = t["x"].shape, len(t["qkv"]), t["x"]
    size = t["qkv"].shape[1] // (heads + 2 * kv_heads)
    found = np.zeros((2, layers, batch, new, kv_heads, size), h.dtype)
    for i in range(layers):
        rows = rms_norm(h, t["norm1"][i], eps) @ t["qkv"][i].T
        rows = rows + t["qkv_bias"][i] if "qkv_bias" in t else rows
        rows = rows.reshape(batch, new, heads + 2 * kv_heads, size)
        q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + kv_heads], rows[:, :, heads + kv_heads :]
        q, k = (rms_norm(x, t[n][i], eps) if n in t else x for n, x in (("q_norm", q), ("k_norm", k)))
        q, k = (turned(x, t["cos"], t["sin"], interleaved) for x in (q, k))
        found[:, i] = k, v
        o = np.zeros_like(q)
        for b in range(batch):
            count = int(t["lengths"][b]) if "lengths" in t else 0
            held = [k[b, :0], v[b, :0]]
            if "keys" in t:
                held = [by_text(x, layers, batch)[i, b, :count] for x in (t["keys"], t["values"])]
            o[b] = attention(q[b], np.concatenate((held[0], k[b])), np.concatenate((held[1], v[b])), count)
        h = h + o.reshape(batch, new, heads * size) @ t["out"][i].T
        gate, up = np.split(rms_norm(h, t["norm2"][i], eps) @ t["gate_up"][i].T, 2, -1)
        h = h + (gate / (1 + np.exp(-gate)) * up) @ t["down"][i].T
    return rms_norm(h, t["norm"], eps) if "norm" in t else h, *found


def case(layers, batch, new, width, heads, kv_heads, size, hidden, room=None, optional=(), per_text=False, cut=False,
         **settings):  # fmt: skip
    """Returns a card's case; with `room`, there is a cache, of three axes if `cut`. Angles may be of each text."""
    optional = tuple(name for name in OPTIONAL if name in optional or (name in CACHE and room is not None))
    rows = (heads + 2 * kv_heads) * size
    table = (*[batch] * per_text, new, size // 2)
    cache = (layers * batch * (room or 0),) if cut else (layers, batch, room)
    shapes = dict(
        x=(batch, new, width), cos=table, sin=table, norm1=(layers, width), qkv=(layers, rows, width),
        out=(layers, width, heads * size), norm2=(layers, width), gate_up=(layers, 2 * hidden, width),
        down=(layers, width, hidden), norm=(width,), qkv_bias=(layers, rows), q_norm=(layers, size),
        k_norm=(layers, size), keys=(*cache, kv_heads, size), values=(*cache, kv_heads, size), lengths=(batch,),
    )  # fmt: skip
    settings.update(heads=heads, kv_heads=kv_heads, optional=optional)
    return [shapes[name] for name in (*NAMES, *optional)], settings


class Stack(nn.Cell):
    """Calls the function with the inputs and those optional ones that `optional` names."""

    def __init__(self, optional=(), **settings):
        super().__init__()
        places = {name: len(NAMES) + i for i, name in enumerate(optional)}
        self.places, self.settings = tuple(places.get(name, -1) for name in OPTIONAL), settings

    def construct(self, *inputs):
        optional = ()
        for place in self.places:
            optional += (inputs[place] if place >= 0 else None,)
        x, cos, sin, norm1, qkv, out, norm2, gate_up, down = inputs[:9]
        norm, bias, q_norm, k_norm, keys, values, lengths = optional
        matrices = (norm1, qkv, out, norm2, gate_up, down, norm, bias, q_norm, k_norm, keys, values, lengths)
        return msops.decoder_stack(x, cos, sin, *matrices, **self.settings)


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
    }
    small = "small"
    hostile = ("small", "all")
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

    def operators(self, shapes=(), optional=OPTIONAL, heads=1, kv_heads=1, eps=1e-5, interleaved=False, is_wide=False):
        if not shapes:
            optional = OPTIONAL
        operator = operators(heads, kv_heads, eps, interleaved)
        return chain(operator.without(*(name for name in OPTIONAL if name not in optional)))

    def inputs(self, shapes, dtype, seed=1, optional=(), is_wide=False, **settings):
        names = (*NAMES, *optional)
        t = dict(zip(names, random(seed, dtype, *shapes)))
        rng = np.random.default_rng(seed)
        angles = rng.uniform(0, 6, t["cos"].shape)
        t["cos"], t["sin"] = (f(angles).astype(dtype) for f in (np.cos, np.sin))
        for name in MATRICES:
            t[name] = np.asarray(t[name] / np.sqrt(max(1, t[name].shape[-1])), dtype)
        for name in names:  # in an order that does not depend on the process
            if "norm" in name:
                t[name] = rng.uniform(0.5, 1.5, t[name].shape).astype(dtype)
        if "lengths" in t:
            keys, values = (by_text(t[name], len(t["qkv"]), len(t["x"])) for name in CACHE[:2])
            room = keys.shape[2]
            t["lengths"] = rng.integers(0, room + 1, t["lengths"].shape).astype(np.int64 if is_wide else np.int32)
            for b, count in enumerate(t["lengths"]):
                keys[:, b, count:] = values[:, b, count:] = np.nan
        for name in names if is_wide else ():
            if "norm" in name or name in ("cos", "sin"):
                t[name] = t[name].astype(np.float32)
        return [t[name] for name in names]

    def scratch_of_parts(self, inputs, shape, parts):
        return shape

    def random_case(self, random):
        group, kv_heads = 1 + length(random) % 3, 1 + length(random) % 3
        size, optional = 2 * (1 + length(random) % 12), [name for name in ALL if random.random() < 0.4]
        room = length(random) if random.random() < 0.5 else None
        sizes = 1 + length(random) % 3, length(random) % 4, length(random), 1 + length(random)
        interleaved = random.random() < 0.5
        return case(*sizes, group * kv_heads, kv_heads, size, 1 + length(random), room, optional,
                    per_text=random.random() < 0.3, cut=random.random() < 0.5, interleaved=interleaved)  # fmt: skip


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
