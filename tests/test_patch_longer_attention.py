"""Tests that attention among other statements of a library's method is computed by flash_attention while MindSpore is
patched."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import written_attention

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
HEAD = """
import math
import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

def least_of(dtype):
    return ms.Tensor({ms.float16: -65504, ms.float32: np.finfo(np.float32).min, ms.float64: -1e300}[dtype], dtype)

def min_of(dtype):
    return least_of(dtype)

class Attention(nn.Cell):
    def __init__(self, p=0.0):
        super().__init__()
        self.heads, self.size, self.p, self.pruned, self.kind, self.turn = 4, 8, p, [], "absolute", 2.0
        self.drop, self.scale, self.other = nn.Dropout(p=p), ms.Tensor(3.0), nn.Sigmoid()
        self.seen = ms.Tensor(np.tril(np.ones((1, 1, 9, 9), bool)))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, self.size).swapaxes(1, 2)

    def added(self, x):
        ops.assign_add(x, ops.ones_like(x))
        return x

    def merge(self, x):
        return x.swapaxes(1, 2).reshape(x.shape[0], -1, self.heads * self.size)

"""
BERT = """
    def construct(self, x, k, v, mask=None, head_mask=None, output_attentions=False):
        query, key, value = self.split(x), self.split(k), self.split(v)
        scores = mint.matmul(query, key.transpose(-1, -2))
        if self.kind == "relative":
            places = ops.arange(key.shape[2]) - ops.arange(query.shape[2])[:, None]
            scores = scores + places.to(scores.dtype)
        scores = scores / math.sqrt(self.size)
        if mask is not None:
            scores = scores + mask
        weights = mint.nn.functional.softmax(scores, dim=-1)
        weights = self.drop(weights)
        if head_mask is not None:
            weights = weights * head_mask
        context = mint.matmul(weights, value)
        context = self.merge(context)
        outputs = (context, weights) if output_attentions else (context,)
        return outputs
"""
GPT = """
    def attend(self, query, key, value, mask=None, head_mask=None):
        weights = mint.matmul(query, key.swapaxes(-1, -2))
        if self.turn:
            weights = weights / mint.sqrt(ms.tensor(value.shape[-1])).to(weights.dtype)
        if self.kind != "cross":
            rows, keys = query.shape[-2], key.shape[-2]
            seen = self.seen[:, :, keys - rows : keys, :keys]
            least = min_of(weights.dtype)
            least = ops.full([], least, dtype=weights.dtype)
            weights = ops.where(seen, weights.to(weights.dtype), least)
        if mask is not None:
            seen = mask[:, :, :, : key.shape[-2]]
            weights = weights + seen
        weights = mint.softmax(weights, dim=-1)
        weights = weights.type(value.dtype)
        weights = self.drop(weights)
        if head_mask is not None:
            weights = weights * head_mask
        out = mint.matmul(weights, value)
        return out, weights

    def construct(self, x, k, v, mask=None, head_mask=None, output_attentions=False):
        out, weights = self.attend(self.split(x), self.split(k), self.split(v), mask, head_mask)
        outputs = (self.merge(out), None)
        if output_attentions:
            outputs += (weights,)
        return outputs
"""
T5 = """
    def construct(self, x, k, v, mask=None, bias=None, output_attentions=False):
        query, key, value = self.split(x), self.split(k), self.split(v)
        scores = mint.matmul(query, key.swapaxes(3, 2))
        if bias is None:
            bias = mint.zeros((1, self.heads, 1, key.shape[-2]), dtype=scores.dtype)
        if mask is not None:
            mask = mask[:, :, :, : key.shape[-2]]
            bias = bias + mask
        if self.pruned:
            left = mint.ones(bias.shape[1])
            left[list(self.pruned)] = 0
            bias = bias[:, left.bool()]
        scores += bias
        weights = mint.softmax(scores.float(), dim=-1).type_as(scores)
        weights = ops.dropout(weights, p=self.p, training=self.training)
        out = self.merge(mint.matmul(weights, value))
        outputs = (out, bias)
        if output_attentions:
            outputs = outputs + (weights,)
        return outputs
"""
CLIP = """
    def construct(self, x, k, v, mask=None, causal_mask=None, output_attentions=False):
        batch, rows, _ = x.shape
        shape = (batch * self.heads, -1, self.size)
        query = (self.split(x) * self.size**-0.5).reshape(*shape)
        key, value = self.split(k).reshape(shape), self.split(v).reshape(shape)
        keys = key.shape[1]
        scores = ops.bmm(query, key.swapaxes(1, 2))
        if scores.shape != (batch * self.heads, rows, keys):
            raise ValueError(f"scores of {scores.shape}")
        if causal_mask is not None:
            scores = scores.view(batch, self.heads, rows, keys) + causal_mask
            scores = scores.view(batch * self.heads, rows, keys)
        if mask is not None:
            if mask.shape[0] != batch:
                raise ValueError(f"a mask of {mask.shape}")
            scores = scores.view(batch, self.heads, rows, keys) + mask
            scores = scores.view(batch * self.heads, rows, keys)
        scores = ops.softmax(scores, axis=-1)
        if output_attentions:
            returned = scores.view(batch, self.heads, rows, keys)
            scores = returned.view(batch * self.heads, rows, keys)
        else:
            returned = None
        weights = ops.dropout(scores, p=self.p, training=self.training)
        out = ops.bmm(weights, value)
        out = out.view(batch, self.heads, rows, self.size)
        return self.merge(out), returned
"""
DISTIL = """
    def construct(self, x, k, v, mask, output_attentions=False):
        query = self.split(x) / self.turn
        key, value = self.split(k).to(query.dtype), self.split(v)
        scores = mint.matmul(query, key.permute(0, 1, 3, 2))
        scores = scores / self.scale
        mask = (mask[:, :1, :1] != 0).expand_as(scores)
        scores = scores.masked_fill(mask, min_of(query.dtype))
        weights = scores.softmax(-1).to(k.dtype)
        out = mint.matmul(self.drop(weights), value.to(weights.dtype))
        return (self.merge(out), weights) if output_attentions else (self.merge(out),)
"""
FORMS = {"bert": BERT, "gpt": GPT, "t5": T5, "clip": CLIP, "distil": DISTIL}


def inputs_of(dtype, rows=5, keys=5):
    """Returns queries, keys, values and a mask, in which the first text ends early and a row sees nothing."""
    x, k, v = (RNG.standard_normal((2, n, 32)).astype(dtype) for n in (rows, keys, keys))
    mask = np.zeros((2, 1, rows, keys), dtype)
    mask[0, :, :, 4:], mask[1, :, 2] = np.finfo(dtype).min, np.finfo(dtype).min
    return tuple(map(Tensor, (x, k, v, mask)))


@pytest.fixture(autouse=True)
def pynative(monkeypatch):
    """Lets flash_attention also compute what is so short that a GPU would compute it by the library's own code."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    monkeypatch.setattr(written_attention, "SHORT", 1)


@pytest.fixture
def computed(noted):
    """Counts the calls of flash_attention for what longer functions hold."""
    return noted(written_attention, "flash_attention")


def results(net, inputs, more=(), count=3):
    """Returns the result and the gradients of the first inputs."""

    def total(*inputs):
        out = net(*inputs, *more)[0]
        return (out * out).sum()

    return (net(*inputs, *more)[0], *mindspore.grad(total, tuple(range(count)))(*inputs))


def assert_equal(got, want, dtype="float32"):
    for x, y in zip(got, want, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        wanted = y.asnumpy().astype(np.float64)
        most = (6e-3 if dtype == "float16" else 4e-6) * max(1, np.abs(wanted).max())
        np.testing.assert_allclose(x.asnumpy().astype(np.float64), wanted, 0, most)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", ["distil", *(pytest.param(each, marks=pytest.mark.wide) for each in list(FORMS)[:-1])])
def test_attention(load, computed, name, dtype):
    """A row that sees nothing has the weights that the library's own least number gives it."""
    module, inputs = load(HEAD + FORMS[name]), inputs_of(dtype)
    net = module.Attention()
    net.scale = net.scale.astype(dtype)
    want = results(net, inputs)
    assert not computed
    with msops.patch_mindspore():
        got = results(net, inputs)
        assert len(computed) == 2
    assert_equal(got, want, dtype)
    assert_equal(results(net, inputs), want, dtype)
    assert len(computed) == 2


def test_more_inputs(load, computed):
    """A bias has its gradient, masks are added up, and other branches of conditions give other formulas."""
    inputs = inputs_of("float32", 5, 7)
    x, k, v, mask = inputs
    bias, more = (Tensor(RNG.standard_normal(shape).astype(np.float32)) for shape in ((1, 4, 5, 7), (2, 1, 5, 7)))
    modules = {name: load(HEAD + text) for name, text in FORMS.items()}

    def all_results():
        cross = modules["gpt"].Attention()
        cross.kind, cross.turn = "cross", 0
        return (
            *results(modules["t5"].Attention(), (x, k, v, mask, bias), count=5),
            *results(modules["clip"].Attention(), (x, k, v, mask, more)),
            *results(modules["bert"].Attention(), inputs),
            *results(modules["gpt"].Attention(), inputs),
            modules["bert"].Attention()(x, k, v)[0],
            modules["clip"].Attention()(x, k, v)[0],
            cross(*inputs)[0],
        )

    want = all_results()
    with msops.patch_mindspore():
        got = all_results()
    assert len(computed) == 11
    assert_equal(got, want)


def test_calls_that_stay(load, computed):
    """Whoever asks for weights, or gives what the kernel does not take, gets what the library computes."""
    inputs = inputs_of("float32")
    x, k, v, mask = inputs
    head_mask = Tensor(np.array([1, 0.5, 0, 2], np.float32)).reshape(1, 4, 1, 1)
    modules = {name: load(HEAD + text) for name, text in FORMS.items()}

    def all_results():
        nets = {name: module.Attention() for name, module in modules.items()}
        found = [each for net in nets.values() for each in net(*inputs, output_attentions=True)]
        found += [*nets["bert"](*inputs, head_mask), *nets["gpt"](*inputs, head_mask)]
        found += modules["gpt"].Attention().attend(*(nets["gpt"].split(each) for each in (x, k, v)), mask)
        found += nets["bert"](*(each.astype(mindspore.float64) for each in inputs))
        found += nets["gpt"](*(each.astype(mindspore.float64) for each in inputs))
        found += [*nets["bert"](x, k, v, (mask < 0).astype(mindspore.float16)), *nets["bert"](x, k, v, -1.0)]
        nets["bert"].kind = "relative"
        nets["distil"].scale = Tensor(3.0, mindspore.float16)
        found += [*nets["bert"](*inputs), *nets["distil"](*inputs)]
        nets["distil"].scale = Tensor(3.0)
        found += nets["distil"](x, k.astype(mindspore.float16), v, mask)
        with pytest.raises(ValueError, match="a mask of") as raised:
            nets["clip"](x, k, v, mask.tile((2, 1, 1, 1)))
        assert "raise ValueError" in str(raised.traceback[-1].statement)  # the library's line
        return [each for each in found if each is not None]

    want = all_results()
    with msops.patch_mindspore():
        got = all_results()
        assert not computed
    assert_equal(got, want, "float16")


def changed(old, new, of=BERT):
    assert old in of
    return HEAD + of.replace(old, new)


CONTEXT = "context = mint.matmul(weights, value)"
SOFTMAX = "weights = mint.nn.functional.softmax(scores, dim=-1)"
SCALED = "scores = scores / math.sqrt(self.size)"
LEAST = "least = min_of(weights.dtype)"
OTHERS = {
    "another axis": changed("dim=-1", "dim=-2"),
    "another function": changed("mint.nn.functional.softmax(scores, dim=-1)", "mint.sigmoid(scores)"),
    "scaled after the mask": changed(SOFTMAX, f"scores = scores * 0.5\n        {SOFTMAX}").replace(
        "if mask is not None:\n            scores = scores + mask", "scores = scores + mask"
    ),
    "less the mask": changed("scores + mask", "scores - mask"),
    "times the mask": changed("scores + mask", "scores * mask"),
    "divides by scores": changed(SCALED, "scores = math.sqrt(self.size) / (scores + 9.0)"),
    "scores twice": changed(SCALED, "scores = scores + scores"),
    "weights are changed": changed(CONTEXT, f"weights = weights * 0.5\n        {CONTEXT}"),
    "weights are changed in place": changed(CONTEXT, f"weights *= 0.5\n        {CONTEXT}"),
    "weights in the result": changed("context = self.merge(context)", "context = self.merge(context) + weights.mean()"),
    "weights beside the product": changed(CONTEXT, f"{CONTEXT} + weights.mean()"),
    "other keys": changed(SCALED, f"key = key * 2\n        {SCALED}").replace(
        "context = self.merge(context)", "context = self.merge(context + key.mean())"
    ),
    "other queries in place": changed(SCALED, f"query[0] = 0\n        {SCALED}").replace(
        "context = self.merge(context)", "context = self.merge(context + query)"
    ),
    "other queries by a method": changed(SCALED, f"other = self.added(query)\n        {SCALED}")
    .replace("query, key, value = self.split(x)", "query, key, value = ops.abs(self.split(x))")
    .replace("context = self.merge(context)", "context = self.merge(context + other)"),
    "other queries by a function of MindSpore's": changed(
        SCALED, f"other = ops.assign_add(query, query)\n        {SCALED}"
    )
    .replace("query, key, value = self.split(x)", "query, key, value = ops.abs(self.split(x))")
    .replace("context = self.merge(context)", "context = self.merge(context + other)"),
    "mask after it is added": changed(SOFTMAX, f"mask = mask * 2\n        {SOFTMAX}").replace(
        "context = self.merge(context)", "context = self.merge(context + mask.mean())"
    ),
    "keys are not turned": changed("key.transpose(-1, -2)", "key"),
    "no product of values": changed(CONTEXT, "context = mint.matmul(mint.abs(weights), value)"),
    "a Cell in place of dropout": changed("self.drop(weights)", "self.other(weights)"),
    "drops twice": changed("self.drop(weights)", "self.drop(self.drop(weights))"),
    "a loop": changed(SCALED, f"for _ in range(2):\n            scores = scores * 0.5\n        {SCALED}"),
    "reads all variables": changed(SCALED, f"locals()\n        {SCALED}"),
    "hides by another number": changed("min_of(weights.dtype)", "-1.0", GPT),
    "hides by a tenth": changed("min_of(weights.dtype)", "min_of(weights.dtype) * 0.1", GPT),
    "hides by another least number": HEAD.replace("return least_of", "return -5 + 0 * least_of") + GPT,
    "hides others": changed(
        "ops.where(seen, weights.to(weights.dtype), least)", "ops.where(seen, least, weights)", GPT
    ),
    "casts to float16": changed("scores.float()", "scores.half()", T5),
    "no softmax of scores": changed("mint.softmax(scores.float(), dim=-1).type_as(scores)", "scores", T5)
    .replace("ops.dropout(weights, p=self.p, training=self.training)", "weights")
    .replace("(out, bias)", "(out, mint.softmax(bias, dim=-1))"),
    "a least number of some calls": changed(
        "        if self.turn:\n", f"        least = -5.0\n        if self.turn:\n            {LEAST}\n", GPT
    ).replace(f"            {LEAST}\n            least = ops.full([], least, dtype=weights.dtype)\n", ""),
    "stays in float32": changed(".type_as(scores)", "", T5),
    "changes a bias that is an input": changed("scores += bias", "scores += bias\n        bias[0] = 0", T5),
    "views other axes": changed("scores.view(batch * self.heads, rows, keys)", "scores.view(-1, keys, rows)", CLIP),
    "casts to float32 by the scores": changed(
        SOFTMAX, "scores = scores.float()\n        weights = mint.softmax(scores, dim=-1).to(scores.dtype)"
    ).replace("weights, value)", "weights, value.float())"),
    "divides by a whole number": changed(SCALED, "scores = scores / mint.sqrt(ms.tensor(self.size)).to(ms.int32)"),
    "weights of another function": changed(CONTEXT, f"{CONTEXT}\n        context = context + total()").replace(
        "query, key, value = ", "total = lambda: weights.sum()\n        query, key, value = "
    ),
    "weights for other functions": changed(
        "query, key, value = ", "global weights\n        query, key, value = "
    ).replace("context = self.merge(context)", "context = self.merge(context) + total()")
    + "\ndef total():\n    return weights.sum()\n",
    "weights are changed later": changed(CONTEXT, f"{CONTEXT}\n        weights += 1"),
    "scores in the queries' variable": changed(CONTEXT, f"{CONTEXT}.reshape(weights.shape[0], 4, -1, 8)")
    .replace("scores = mint.matmul", "query = mint.matmul")
    .replace("scores = scores / ", "query = query / ")
    .replace("if mask is not None:\n            scores = scores + mask", "query = query + mask")
    .replace("softmax(scores", "softmax(query"),
    "weights of a part": changed(CONTEXT, "context = mint.matmul(weights[..., :-1], value[:, :, 1:])"),
}


def of_variants(load, names, inputs, computed):
    found = {}
    for name in names:
        try:
            found[name] = load(OTHERS[name]).Attention()(*(each.copy() for each in inputs))[0]
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
        assert not computed, name
    return found


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.wide) for each in (1, 2))])
def test_other_formulas_compute_as_without_the_patch(load, computed, first):
    """Every third of them is tested each time."""
    names, inputs = list(OTHERS)[first::3], inputs_of("float32", 8, 8)
    want = of_variants(load, names, inputs, computed)
    with msops.patch_mindspore():
        got = of_variants(load, names, inputs, computed)
    for name, wanted in want.items():
        np.testing.assert_allclose(got[name].asnumpy(), wanted.asnumpy(), 0, 3e-3, err_msg=name)


TOLD = """
    def construct(self, q, k, v, mask, guarded=False):
        scores = ops.matmul(q, k.swapaxes(-1, -2))
        scores = scores * self.scale
        if guarded:
            scores = mint.abs(scores.float())
        {before}
        more = (self.turn * 1e5 + ops.arange(mask.shape[-1])).to(scores.dtype)
        batch = scores.shape[0]
        {after}
        weights = ops.softmax(scores + more, -1).to(v.dtype)
        out = ops.matmul(weights, v).reshape(batch, 4, -1, 8)
        return (out,)
"""


@pytest.mark.parametrize("is_before", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_statements_that_read_the_dtype_and_the_shape_of_scores(load, computed, is_before, device_target):
    """They run before the scores where queries and keys tell both, and else where they stand."""
    if device_target == "GPU":
        pytest.skip("MindSpore has no product of float16 and float32 there")
    lines = ("scores = scores + mask", "rows = 0")
    module = load(HEAD + TOLD.format(before=lines[1 - is_before], after=lines[is_before]))
    rng = np.random.default_rng(1)  # its own, so that float16's errors do not depend on which tests run before
    q, k, v = (Tensor(rng.standard_normal((2, 4, 5, 8)).astype(np.float32)) for _ in range(3))
    mask = Tensor(rng.standard_normal((2, 1, 5, 5)).astype(np.float32))
    half = [each.astype(mindspore.float16) for each in (q, k, v)]

    def all_results():
        net = module.Attention()
        found = [net(q[:1], k, v, mask[:1]), net(*half, mask), net(q, k, v, mask, True)]
        if is_before:
            found.append(net(q[:1], k[:1], v[:1], mask))
        return [each[0] for each in found], module.Attention()(q, k, v, mask)

    want = all_results()
    with msops.patch_mindspore():
        got = all_results()
    assert len(computed) == 1
    assert_equal([*got[0], *got[1]], [*want[0], *want[1]], "float16")


def test_a_factor_of_more_axes_than_the_scores(load, computed):
    text = "def construct(self, q, k, v):\n        scores = ops.matmul(q, k.swapaxes(-1, -2)) * self.scale\n"
    text += "        weights = ops.softmax(scores, -1)\n        out = ops.matmul(weights, v)\n        return out\n"
    net = load(f"{HEAD}    {text}").Attention()
    inputs = [Tensor(RNG.standard_normal((2, 5, 8)).astype(np.float32)) for _ in range(3)]

    def all_results():
        net.scale = Tensor(3.0)
        one = net(*inputs)
        net.scale = Tensor(np.full((1, 1, 1, 1), 3.0, np.float32))
        return one, net(*inputs)

    want = all_results()
    with msops.patch_mindspore():
        net = type(net)()
        got = all_results()
    assert len(computed) == 1
    assert_equal(got, want)


def test_graph_mode(load, computed):
    """Graph mode compiles the library's own code."""
    inputs = inputs_of("float32")
    module = load(HEAD + BERT)
    want = module.Attention()(*inputs)[0]
    with msops.patch_mindspore():
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        got = module.Attention()(*inputs)[0]
    assert not computed
    assert_equal([got], [want])


CALLER = """
class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def construct(self, x, k, v, mask):
        out, weights = self.attention.attend(*(self.attention.split(each) for each in (x, k, v)), mask)
        return out{more}
"""


def test_callers_of_a_function_that_returns_weights(load, computed):
    inputs = inputs_of("float32")
    with msops.patch_mindspore() as patch:
        layer = load(HEAD + GPT + CALLER.format(more="")).Layer()
        layer(*inputs)
        assert len(computed) == 1
        layer = load(HEAD + GPT + CALLER.format(more=" + weights.sum()")).Layer()
        layer(*inputs)
        assert len(computed) == 1
        assert [reason for name, reason in patch.explain(layer) if name.endswith("attend")] == [
            "a caller may use the weights"
        ]


def test_what_was_recognized_and_what_was_left(load, computed):
    inputs = inputs_of("float32")
    with msops.patch_mindspore() as patch:
        before = set(patch.recognized)
        module = load(HEAD + BERT)
        own = module.Attention.construct
        name = f"{module.__name__}.Attention.construct"
        assert set(patch.recognized) - before == {(name, "msops.flash_attention")}
        net = module.Attention()
        net(*inputs)
        assert (patch.explain(net), len(computed)) == ([], 1)
        net(*inputs, output_attentions=True)
        net(*(each.astype(mindspore.float64) for each in inputs))
        net.turn = net.drop.register_forward_hook(lambda cell, arguments, out: out)
        net(*inputs)
        assert patch.explain(net) == [
            (name, "a call asks for more than the result of the attention"),
            (name, "a call's dtypes or shapes do not fit flash_attention, or it would be slower"),
            (name, "a call's scale or dropout is no number that flash_attention takes"),
        ]
        module.mint = mindspore.ops  # a name that changes later
        module.mint.nn = mindspore.mint.nn
        net.turn.remove()
        net(*inputs)
        assert len(computed) == 1
        other = load(OTHERS["another axis"])
        assert [reason for _, reason in patch.explain(other.Attention())] == [
            "it has among its scores: mint.nn.functional.softmax(scores, dim=-2)"
        ]
    assert module.Attention.construct is own.__wrapped__


def test_dropout(load, computed):
    """The weights sum to 1, and dropout divides those that it keeps by their probability. Other draws drop others."""
    x, k, _, _ = inputs_of("float32", 40, 40)
    v = mindspore.ops.ones_like(k)
    with msops.patch_mindspore():
        for text in (BERT, CLIP):
            net = load(HEAD + text).Attention(0.5)
            assert np.abs(net(x, k, v)[0].asnumpy() - 1).max() < 1e-6
            net.set_train()
            one, two = (net(x, k, v)[0].asnumpy() for _ in range(2))
            assert abs(one.mean() - 1) < 0.1
            assert one.std() > 0.1
            assert not np.array_equal(one, two)
    assert len(computed) == 6
