"""Tests that attention which model libraries write out is computed by flash_attention while MindSpore is patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import written_attention

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
TEXT = """
import mindspore as ms
from mindspore import mint, nn, ops

def repeat_kv(x, n):
    batch, heads, length, size = x.shape
    if n == 1:
        return x
    x = x[:, :, None, :, :].{expand}
    return x.reshape(batch, heads * n, length, size)

def eager_attention_forward(module, query, key, value, attention_mask, {parameters}, **kwargs):
    {body}

class Attention(nn.Cell):
    def __init__(self, groups, p=0.0):
        super().__init__()
        self.num_key_value_groups, self.p, self.scaling, self.head_dim = groups, p, 0.3, 8

    def construct(self, query, key, value, mask, **kwargs):
        out, weights = eager_attention_forward(
            self, query, key, value, mask, dropout=self.p if self.training else 0.0, {scaling}**kwargs
        )
        return out, weights

class Layer(nn.Cell):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def construct(self, query, key, value, mask, output_attentions=False):
        hidden, weights = self.attention(query, key, value, mask)
        outputs = (hidden,)
        if output_attentions:
            outputs += (weights,)
        return outputs
"""
LLAMA = """keys = repeat_kv(key, module.num_key_value_groups)
    values = repeat_kv(value, module.num_key_value_groups)
    weights = mint.matmul(query, keys.swapaxes(2, 3)) * scaling
    if attention_mask is not None:
        seen = attention_mask[:, :, :, : keys.shape[-2]]
        weights = weights + seen
    weights = mint.nn.functional.softmax(weights, dim=-1, dtype=ms.float32).to(query.dtype)
    weights = mint.nn.functional.dropout(weights, p=dropout, training=module.training)
    out = mint.matmul(weights, values)
    out = out.swapaxes(1, 2).contiguous()
    return out, weights"""
BART = """if scaling is None:
        scaling = query.shape[-1] ** -0.5
    weights = mint.matmul(query, key.transpose(-1, -2)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = ops.softmax(weights, axis=-1)
    if head_mask is not None:
        weights = weights * head_mask.view(1, -1, 1, 1)
    weights = ops.dropout(weights, p=dropout, training=module.training)
    out = mint.matmul(weights, value)
    out = mint.transpose(out, 1, 2)
    return out, weights"""
GEMMA = """if scaling is None:
        scaling = module.head_dim**-0.5
    keys = repeat_kv(key, module.num_key_value_groups)
    weights = mint.matmul(query, keys.transpose(2, 3)) * scaling
    if softcap is not None:
        weights = weights / softcap
        weights = mint.tanh(weights)
        weights = weights * softcap
    if attention_mask is not None:
        weights = weights + attention_mask[:, :, :, : keys.shape[-2]]
    weights = mint.softmax(weights, dim=-1, dtype=ms.float32).to(query.dtype)
    weights = mint.nn.functional.dropout(weights, p=dropout, training=module.training)
    out = mint.matmul(weights, repeat_kv(value, module.num_key_value_groups))
    return out, weights"""
VIT = """weights = mint.matmul(query, key.transpose(-1, -2)) * scaling
    weights = mint.nn.functional.softmax(weights, dim=-1, dtype=ms.float32).to(query.dtype)
    weights = mint.nn.functional.dropout(weights, p=dropout, training=module.training)
    if attention_mask is not None:
        weights = weights * attention_mask
    return mint.matmul(weights, value).transpose(1, 2).contiguous(), weights"""
PARAMETERS = {
    LLAMA: "scaling, dropout=0.0",
    BART: "scaling=None, dropout=0.0, head_mask=None",
    GEMMA: "dropout=0.0, scaling=None, softcap=None",
    VIT: "scaling, dropout=0.0",
}
OWN = "scaling=self.scaling, "
FORMS = {  # a formula, what the Cell hands to it, and whether it repeats keys and takes a mask
    "llama": (LLAMA, OWN, True, True),
    "bart": (BART, "", False, True),
    "gemma": (GEMMA, "softcap=2.0, ", True, True),
    "gemma, no softcap": (GEMMA, OWN, True, True),
    "vit": (VIT, OWN, False, False),
}


def module_of(body, scaling=OWN, expand="expand((batch, heads, n, length, size))", of=None):
    return TEXT.format(body=body, parameters=PARAMETERS[of or body], scaling=scaling, expand=expand)


def inputs_of(dtype, repeats=True, has_mask=True):
    """Returns queries, keys, values and a mask of a key too many, in which the first text ends early and a row of the
    second one sees nothing."""
    heads = 2 if repeats else 4
    q = RNG.standard_normal((2, 4, 5, 8)).astype(dtype)
    k, v = (RNG.standard_normal((2, heads, 6, 8)).astype(dtype) for _ in range(2))
    mask = np.zeros((2, 1, 5, 7 if repeats else 6), dtype)
    mask[0, :, :, 4:], mask[1, :, 2] = np.finfo(dtype).min, np.finfo(dtype).min
    return (*map(Tensor, (q, k, v)), Tensor(mask) if has_mask else None)


@pytest.fixture(autouse=True)
def pynative(monkeypatch):
    """Lets flash_attention also compute what is so short that a GPU would compute it by the library's own code."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    monkeypatch.setattr(written_attention, "SHORT", 1)


@pytest.fixture
def computed(noted):
    """Counts the calls of flash_attention by the patch."""
    return noted(written_attention, "flash_attention")


def results(net, inputs):
    """Returns a layer's result and its gradients."""
    q, k, v, mask = inputs

    def total(q, k, v):
        out = net(q, k, v, mask)[0]
        return (out * out).sum()

    return (net(q, k, v, mask)[0], *mindspore.grad(total, (0, 1, 2))(q, k, v))


def assert_equal(got, want, dtype):
    for x, y in zip(got, want):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        wanted = y.asnumpy().astype(np.float64)
        most = (3e-3 if dtype == "float16" else 2e-6) * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(x.asnumpy().astype(np.float64), wanted, 0, most)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", FORMS)
def test_attention(load, computed, name, dtype):
    """A row that sees nothing has equal weights, as the library's own least number gives it."""
    body, scaling, repeats, has_mask = FORMS[name]
    module = load(module_of(body, scaling))
    layer = module.Layer(module.Attention(2 if repeats else 1))
    inputs = inputs_of(dtype, repeats, has_mask)
    want = results(layer, inputs)
    assert not computed
    with msops.patch_mindspore():
        got = results(layer, inputs)
    assert len(computed) == 2
    assert_equal(got, want, dtype)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_heads_of_views(load, computed, name):
    """Where queries, keys and values are views of what matrices gave, attention reads that, and returns such a view."""
    module = load(module_of(*FORMS[name][:2]))
    layer = module.Layer(module.Attention(1))
    q, k, v, mask = inputs_of("float16", False, FORMS[name][3])
    apart = [x.swapaxes(1, 2).contiguous() for x in (q, k, v)]

    def net(q, k, v, mask):
        out, *_ = layer(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
        return (out * 1.0,)

    want = results(net, (*apart, mask))
    with msops.patch_mindspore():
        got = results(net, (*apart, mask))
    assert [call[9] for call in computed] == ["BTHD"] * 2
    assert [call[0].shape for call in computed] == [apart[0].shape] * 2
    assert_equal(got, want, "float16")
    with msops.patch_mindspore():
        some = layer(apart[0].swapaxes(1, 2), k, v, mask)
    assert computed[2][9] == "BHTD"
    assert_equal(some, layer(q, k, v, mask), "float16")


@pytest.mark.parametrize("all_results", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_graph_mode(load, computed, all_results):
    inputs = inputs_of("float16")
    module = load(module_of(LLAMA))
    layer = module.Layer(module.Attention(2))

    def computed_by():
        return (*results(layer, inputs), layer(*inputs, True)[1]) if all_results else layer(*inputs)

    want = computed_by()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with msops.patch_mindspore():
        assert module.eager_attention_forward.__module__ != module.__name__
        got = computed_by()
    assert_equal(got, want, "float16")


def test_weights_that_are_asked_for(load, computed):
    """Weights are the library's, whoever asks for them."""
    with msops.patch_mindspore():
        module = load(module_of(LLAMA))
        inputs = inputs_of("float32")
        attention = module.Attention(2)
        layer = module.Layer(attention)
        _, wanted = module.eager_attention_forward(attention, *inputs, 0.3)
        asked = layer(*inputs, output_attentions=True)[1], attention(*inputs)[1], layer.attention(*inputs)[1]
        seen = []
        attention.register_forward_hook(lambda cell, arguments, out: seen.append(out[1]))
        layer(*inputs)
        assert not computed
    for each in (*asked, *seen):
        np.testing.assert_array_equal(each.asnumpy(), wanted.asnumpy())
    assert seen


def changed(old, new, of=LLAMA, **named):
    assert old in of
    return module_of(of.replace(old, new), of=of, **named)


def with_more(text, before="class Attention"):
    return module_of(LLAMA).replace(before, f"{text}\n{before}", 1)


WRAPPED = """
import functools
def wrapped(f):
    @functools.wraps(f)
    def g(*arguments, **named):
        out, weights = f(*arguments, **named)
        return out * 2, weights
    return g
"""
DROPOUT = "weights = mint.nn.functional.dropout"
SOFTMAX = "weights = mint.nn.functional.softmax"
OUT = "out = mint.matmul(weights, values)"
CAPPED = "softcap=2.0, "
OWN_SOFTMAX = """
class Mint:
    def __init__(self):
        self.nn, self.matmul, self.functional, self.dropout = self, mint.matmul, self, mint.nn.functional.dropout

    def softmax(self, x, dim, dtype):
        return ops.sigmoid(x)

mint = Mint()
"""
OTHERS = {
    "no softmax": changed("mint.nn.functional.softmax(weights, dim=-1, dtype=ms.float32)", "mint.sigmoid(weights)"),
    "another axis": changed("dim=-1", "dim=-2"),
    "softmax of float64": changed("dtype=ms.float32", "dtype=ms.float64"),
    "keys as values": changed("values = repeat_kv(value", "values = repeat_kv(key"),
    "values as keys": changed("keys = repeat_kv(key", "keys = repeat_kv(value"),
    "twice the keys": changed("keys.swapaxes(2, 3)", "(2 * keys).swapaxes(2, 3)"),
    "scaled twice": changed("* scaling", "* scaling * scaling"),
    "divided": changed("* scaling", "/ scaling"),
    "scaled after the mask": changed("weights + seen", "(weights + seen) * scaling"),
    "less the mask": changed("weights + seen", "weights - seen"),
    "mask twice": changed("weights + seen", "weights + seen + seen"),
    "other keys of the mask": changed(": keys.shape[-2]]", "-keys.shape[-2] :]"),
    "part of the weights": changed(DROPOUT, f"weights = mint.nn.functional.relu(weights - 0.2)\n    {DROPOUT}"),
    "twice the result": changed(OUT, f"{OUT} * 2"),
    "values are added": changed(OUT, f"{OUT} + values[:, :, :1]"),
    "other weights are returned": changed("return out, weights", "return out * 2, weights"),
    "other axes of the result": changed("out = out.swapaxes(1, 2)", "out = out.swapaxes(1, 3)"),
    "in place": changed("weights = weights + seen", "weights += seen"),
    "loop": changed(OUT, f"for _ in range(2):\n        weights = weights * 0.5\n    {OUT}"),
    "one more key": changed(SOFTMAX, f"weights = mint.cat([weights, weights[..., :1]], dim=-1)\n    {SOFTMAX}").replace(
        DROPOUT, f"weights = weights[..., :-1]\n    {DROPOUT}"
    ),
    "softcap outside": changed("* softcap", "* softcap * 2", GEMMA, scaling=CAPPED),
    "softcap of another function": changed("mint.tanh", "mint.sin", GEMMA, scaling=CAPPED),
    "another scale": changed("** -0.5", "** -1.0", BART, scaling=""),
    "heads are weighted": module_of(BART, "head_mask=ms.Tensor([1.0, 0.5, 2.0, 1.0]), "),
    "weights are masked": module_of(VIT),
    "repeated in another order": module_of(
        LLAMA, expand="reshape(batch, 1, heads, length, size).expand((batch, n, heads, length, size))"
    ),
    "wrapped": with_more(WRAPPED + "eager_attention_forward = wrapped(eager_attention_forward)"),
    "wrapped repeats": with_more(
        WRAPPED.replace("out, weights =", "out =").replace("2, weights", "2") + "repeat_kv = wrapped(repeat_kv)"
    ),
    "repeats of its own, later": module_of(LLAMA) + "\ndef repeat_kv(x, n):\n    return mint.cat([x] * n, dim=1)\n",
    "softmax of its own": with_more(OWN_SOFTMAX),
    "decorated": with_more(WRAPPED + "@wrapped", "def eager"),
}


def of_variants(load):
    found = {}
    for name, text in OTHERS.items():
        module = load(text)
        repeats = "repeat_kv(key" in text or "repeat_kv(value" in text
        rng = np.random.default_rng(1)
        q = Tensor(rng.standard_normal((2, 4, 5, 8)).astype(np.float32))
        k, v = (Tensor(rng.standard_normal((2, 2 if repeats else 4, 5, 8)).astype(np.float32)) for _ in range(2))
        mask = Tensor(rng.standard_normal((2, 1, 5, 7 if "keys.shape[-2]" in text else 5)).astype(np.float32))
        try:
            found[name] = module.Layer(module.Attention(2 if repeats else 1))(q, k, v, mask)[0]
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


def test_other_formulas_compute_as_without_the_patch(load, computed):
    want = of_variants(load)
    with msops.patch_mindspore():
        got = of_variants(load)
    assert not computed
    for name, wanted in want.items():
        np.testing.assert_allclose(got[name].asnumpy(), wanted.asnumpy(), 1e-5, 1e-5, err_msg=name)


def test_other_names_of_arguments_stay(load, computed):
    """A caller may use the library's names."""
    text = module_of(VIT.replace("query", "q"), of=VIT).replace("(module, query, key", "(module, q, key")
    text = text.replace(
        "self, query, key, value, mask, drop", "self, q=query, key=key, value=value, attention_mask=mask, drop"
    )
    x, (query, key, value, mask) = load(text), inputs_of("float32", False, False)
    net = x.Attention(1)
    want = net(query, key, value, mask)[0]
    with msops.patch_mindspore():
        got = net(query, key, value, mask)[0]
    assert not computed
    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), 1e-5, 1e-5)


def test_a_function_that_is_defined_after_a_cell(load, computed):
    text = module_of(LLAMA)
    begin, end = text.index("def repeat_kv"), text.index("def eager")
    with msops.patch_mindspore():
        module = load(text[:begin] + text[end:].replace("class Layer", text[begin:end] + "class Layer"))
        module.Layer(module.Attention(2))(*inputs_of("float32"))
    assert len(computed) == 1


EXPLAINED = """
class Inlined(Layer):
    def construct(self, query, key, value, mask):
        return mint.softmax(query, dim=-1)

def repeated(x):
    for _ in range(2):
        x = x * 2
    return x

class HalfNorm(nn.Cell):
    def construct(self, x):
        return repeated(x) * 0.5

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer, self.inlined, self.norm = Layer(Attention(2)), Inlined(Attention(2)), HalfNorm()

    def construct(self, *inputs):
        return self.layer(*inputs)
"""


def test_what_was_recognized_and_what_was_left(load):
    q, k, v, mask = inputs_of("float32")
    with msops.patch_mindspore() as patch:
        before = set(patch.recognized)
        module = load(module_of(LLAMA) + EXPLAINED)
        name = module.__name__
        assert set(patch.recognized) - before == {(f"{name}.eager_attention_forward", "msops.flash_attention")}
        net = module.Net()
        left = {
            f"{name}.HalfNorm.construct": "it does more than to assign: for _ in range(2):",
            f"{name}.Inlined.construct": "it computes a softmax, in a method that msops does not look at",
        }
        net(q, k, v, mask)
        assert dict(patch.explain(net)) == left
        net(*(each.astype(mindspore.float64) for each in (q, k, v)), None)
        left[f"{name}.eager_attention_forward"] = (
            "a call's dtypes or shapes do not fit flash_attention, or it would be slower"
        )
        assert dict(patch.explain(net)) == left
        net.layer.attention(q, k, v, mask)
        assert (f"{name}.eager_attention_forward", "a caller may use the weights") in patch.explain(net)
    assert patch.recognized == []
    assert {reason for _, reason in patch.explain(net)} == {left[f"{name}.Inlined.construct"]}


def test_a_name_that_changes_later(load, computed):
    q, k, v, mask = inputs_of("float32")
    with msops.patch_mindspore():
        module = load(module_of(LLAMA))
        layer = module.Layer(module.Attention(2))
        layer(q, k, v, mask)
        module.repeat_kv = lambda x, n: mindspore.mint.cat([x] * n, dim=1)
        out = layer(q, k, v, mask)[0]
        assert len(computed) == 1
    np.testing.assert_allclose(out.asnumpy(), layer(q, k, v, mask)[0].asnumpy(), 1e-5, 1e-5)


def test_inputs_that_stay(load, computed):
    """What the kernel does not take as the library does is the library's."""
    q, k, v, mask = inputs_of("float32")
    with msops.patch_mindspore():
        module = load(module_of(LLAMA))
        layer = module.Layer(module.Attention(2))
        for inputs in (
            (q, k, v, mask.astype(mindspore.float16)),
            (q, k, v, Tensor(np.ones((1, 1, 1, 6), bool))),
            tuple(each.astype(mindspore.float64) for each in (q, k, v, mask)),
        ):
            assert layer(*inputs)[0].shape == (2, 5, 4, 8)
        for scaling in ([Tensor(0.5)], [0.5]):  # more arguments by place than the form has are the library's, too
            first(module, layer.attention, q, k, v, mask, *scaling)
        first(module, layer.attention, q, k, v, mask, scaling=Tensor(0.5))
        assert not computed
        first(module, layer.attention, q, k, v, mask, scaling=0.5)
    assert len(computed) == 1


def first(module, *arguments, **named):
    return module.eager_attention_forward(*arguments, **named)[0]


def test_dropout(load, computed):
    """The weights sum to 1, and dropout divides those that it keeps by their probability. Other draws drop others."""
    q, k, _, _ = inputs_of("float32")
    q, k = (x.tile((1, 8, 1, 1)) for x in (q, k))
    v = mindspore.ops.ones_like(k)
    with msops.patch_mindspore():
        module = load(module_of(LLAMA))
        layer = module.Layer(module.Attention(2, 0.5))
        assert np.abs(layer(q, k, v, None)[0].asnumpy() - 1).max() < 1e-6
        layer.set_train()
        one, two = (layer(q, k, v, None)[0].asnumpy() for _ in range(2))
        assert len(computed) == 3
        assert abs(one.mean() - 1) < 0.15
        assert one.std() > 0.1
        assert not np.array_equal(one, two)
        module.Layer(module.Attention(2, 1.0)).set_train()(q, k, v, None)
        assert len(computed) == 3
