"""Tests that causal masks which a library makes in each layer become `causal` of flash_attention."""

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from msops.patch import causal_masks

pytestmark = pytest.mark.skipif(not hasattr(mindspore, "mint"), reason="this MindSpore has no mint")
RNG = np.random.default_rng(0)
TEXT = """
import mindspore as ms
from mindspore import mint, nn, ops

def _flash_attention_forward(
    query_states, key_states, value_states, attention_mask, query_length=None, is_causal=None, dropout=0.0,
    softmax_scale=None, sliding_window=None, use_top_left_mask=False, softcap=None, deterministic=None,
    cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None, target_dtype=None,
    input_layout="BSND", **kwargs,
):
    if max_length_q is not None or max_length_k is not None:
        raise RuntimeError("lengths")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        raise ValueError("lengths")
    if sliding_window is not None:
        raise NotImplementedError("window")
    if use_top_left_mask:
        raise NotImplementedError("top left")
    if softcap is not None:
        raise NotImplementedError("softcap")
    if deterministic:
        raise NotImplementedError("deterministic")
    if input_layout == "TND":
        raise ValueError("layout")
    if softmax_scale is None:
        raise ValueError("scale")
    num_head = query_states.shape[2] if input_layout == "BSND" else query_states.shape[1]
    if attention_mask is not None:
        attention_mask = mint.logical_not(attention_mask) if attention_mask.dtype == ms.bool_ else attention_mask.bool()
    seq_len_q = query_states.shape[1] if input_layout == "BSND" else query_states.shape[2]
    seq_len_k = key_states.shape[1] if input_layout == "BSND" else key_states.shape[2]
    if is_causal and seq_len_q > 1:
        if attention_mask is None:
            attention_mask = mint.triu(mint.ones((seq_len_q, seq_len_k), dtype=ms.bool_), diagonal=1)
        else:
            causal_mask = mint.triu(mint.ones_like(attention_mask, dtype=ms.bool_), diagonal=1)
            attention_mask = attention_mask | causal_mask
    origin_dtype = query_states.dtype
    if target_dtype in (ms.float16, ms.bfloat16):
        query_states = query_states.to(target_dtype)
        key_states = key_states.to(target_dtype)
        value_states = value_states.to(target_dtype)
    elif origin_dtype not in (ms.float16, ms.bfloat16):
        query_states = query_states.to(ms.float16)
        key_states = key_states.to(ms.float16)
        value_states = value_states.to(ms.float16)
    out = ops.flash_attention_score(
        query_states, key_states, value_states, head_num=num_head, attn_mask=attention_mask,
        keep_prob=1.0 - dropout, scalar_value=softmax_scale, input_layout=input_layout,
    )
    out = out.to(origin_dtype)
    return out

def flash_attention_forward(query, key, value, attention_mask, **named):
    return _flash_attention_forward(query, key, value, attention_mask, **named)

class Attention(nn.Cell):
    def construct(self, query, key, value, mask=None):
        return flash_attention_forward(query, key, value, mask, is_causal=True, softmax_scale=0.3, dropout=0.0)
"""


@pytest.fixture(autouse=True)
def computed(noted):
    """Counts the calls of flash_attention in place of the function."""
    return noted(causal_masks, "flash_attention")


def inputs_of(dtype="float16", rows=5, keys=5):
    shapes = (2, rows, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8)
    return [Tensor(RNG.standard_normal(shape).astype(dtype)) for shape in shapes]


def results(function, inputs, mask):
    def total(q, k, v):
        out = function(q, k, v, mask)
        return (out * out).sum()

    return function(*inputs, mask), *mindspore.grad(total, (0, 1, 2))(*inputs)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", [None, "bool", "int32"])
def test_causal_masks(load, computed, kind, dtype):
    mask = None if kind is None else Tensor(RNG.integers(0, 2, (2, 1, 5, 5)).astype(kind))
    inputs = inputs_of(dtype)
    module = load(TEXT)
    own = module._flash_attention_forward
    with msops.patch_mindspore() as patch:
        assert (f"{module.__name__}._flash_attention_forward", "msops.flash_attention") in patch.recognized
        want = results(lambda *given: own(*given, is_causal=True, softmax_scale=0.3), inputs, mask)
        assert not computed
        got = results(module.Attention(), inputs, mask)
    assert len(computed) == 2
    assert module._flash_attention_forward is own
    for x, y in zip(got, want):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 1e-3, 1e-3)


def test_names_of_arguments(load, computed):
    """A caller may use the library's names."""
    module, inputs = load(TEXT), inputs_of()
    given = dict(zip(("query_states", "key_states", "value_states"), inputs), attention_mask=None)
    with msops.patch_mindspore():
        want = module.flash_attention_forward(*inputs, None, is_causal=True, softmax_scale=0.3)
        got = module._flash_attention_forward(**given, is_causal=True, softmax_scale=0.3)
    assert len(computed) == 2
    np.testing.assert_array_equal(got.asnumpy(), want.asnumpy())


@pytest.mark.wide
def test_graph_mode(load, computed):
    inputs, module = inputs_of(), load(TEXT)
    with msops.patch_mindspore():
        want = results(module.Attention(), inputs, None)
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        got = results(module.Attention(), inputs, None)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x.asnumpy(), y.asnumpy(), 1e-3, 1e-3)


OTHERS = {
    "with the diagonal": ("diagonal=1)\n        else", "diagonal=0)\n        else"),
    "without the mask": ("attention_mask | causal_mask", "causal_mask"),
    "both": ("attention_mask | causal_mask", "attention_mask & causal_mask"),
    "lower triangle": ("mint.triu(mint.ones_like", "mint.tril(mint.ones_like"),
    "keys that are not hidden": ("mint.logical_not(attention_mask) if", "attention_mask if"),
    "another scale": ("scalar_value=softmax_scale", "scalar_value=softmax_scale * 2"),
    "keys as values": ("value_states = value_states.to(ms.float16)", "value_states = key_states.to(ms.float16)"),
    "half the result": ("out = out.to(origin_dtype)", "out = 0.5 * out.to(origin_dtype)"),
    "fewer rows": None,
    "not causal": ("is_causal=True", "is_causal=False"),
    "another layout": ("dropout=0.0)\n", 'dropout=0.0, input_layout="BNSD")\n'),
}  # fmt: skip


def of_variants(load):
    rng, found = np.random.default_rng(1), {}
    for name, change in OTHERS.items():
        text = TEXT.replace(*change) if change else TEXT
        assert bool(change) == (text != TEXT)
        rows = 3 if name == "fewer rows" else 4
        shape = (2, 4, rows, 4)
        q = Tensor(rng.standard_normal((2, rows, 4, 8)).astype(np.float32))
        k, v = (Tensor(rng.standard_normal((2, 4, 4, 8)).astype(np.float32)) for _ in range(2))
        for mask in (None, Tensor(rng.integers(0, 2, shape).astype(bool))):
            found[name, mask is None] = load(text).Attention()(q, k, v, mask).asnumpy()
    return found


def test_other_formulas_compute_as_by_the_library(load, computed, monkeypatch):
    with msops.patch_mindspore():
        got = of_variants(load)
    assert not computed
    monkeypatch.setattr(causal_masks, "FLASH", "none")
    monkeypatch.setattr("msops.patch.models.FLASH", "none")
    with msops.patch_mindspore():
        want = of_variants(load)
    for name, wanted in want.items():
        np.testing.assert_allclose(got[name], wanted, 1e-5, 1e-5, err_msg=str(name))


def test_masks_of_one_row_and_single_tokens_stay(load, computed):
    with msops.patch_mindspore():
        net = load(TEXT).Attention()
        assert net(*inputs_of(), Tensor(np.ones((2, 1, 1, 5), bool))).shape == (2, 5, 4, 8)
        assert net(*inputs_of(rows=1, keys=1)).shape == (2, 1, 4, 8)
    assert not computed
