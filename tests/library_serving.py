"""Runs layers of libraries for serving as they are, after `patch_mindspore`, and compares them with NumPy: quantized
layers of golden-stick, mindformers' PagedAttentionMgr, and the attention and the quantized products of vllm-mindspore.

vllm-mindspore runs on Ascend alone, beside a vllm that it changes. Its layers are loaded from its files, with stand-ins
for what they import from vllm, which are classes of configurations.

python tests/library_serving.py [--device GPU]     `make test-libraries` runs it on the CPU
"""

import argparse
import importlib
import sys
import types
import warnings
from pathlib import Path

import numpy as np

import library_quantized
from library_quantized import halves

FOLDER = Path(__file__).resolve().parents[1] / ".libraries" / "vllm_mindspore" / "vllm_mindspore"
MOST, MOST_OF_CODES = 3e-3, 0.1  # of results in float16 beside NumPy, and of quantized layers beside those in float16
HEADS, KV_HEADS, WIDTH, ROWS, SCALE = 4, 2, 8, 4, 8**-0.5
# Two texts, the rows of blocks that their tokens have, and those of the tokens that come next.
LENGTHS, TABLES = np.int32([3, 5]), np.int32([[2, -1], [0, 3]])
SLOTS, NEXT_SLOTS = np.int32([8, 9, 10, 0, 1, 2, 3, 12]), np.int32([11, 13])


def attention(q, keys, values, is_causal=False, added=0):
    """Returns the attention of one text, (tokens, HEADS, WIDTH), to keys (keys, KV_HEADS, WIDTH)."""
    keys, values = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, 1) for x in (keys, values))
    x = np.einsum("nhd,jhd->hnj", q.astype(np.float64), keys) * SCALE + added
    weights = np.exp(np.where(is_causal & np.triu(np.ones(x.shape[1:], bool), 1), -np.inf, x))
    return np.einsum("hnj,jhd->nhd", weights / weights.sum(-1, keepdims=True), values)


class Texts:
    """Two texts, one behind the other, and a token more of each."""

    def __init__(self):
        self.first, self.next = ([halves(1, n, h * WIDTH) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in (8, 2))
        self.parts = slice(0, LENGTHS[0]), slice(*np.cumsum(LENGTHS))

    def heads(self, x):
        return x.reshape(-1, x.shape[-1] // WIDTH, WIDTH)

    def prefilled(self):
        q, k, v = map(self.heads, self.first)
        return np.concatenate([attention(q[part], k[part], v[part], True) for part in self.parts]).reshape(1, 8, -1)

    def decoded(self, added=(0, 0), as_held=lambda x: x):
        """Returns the attention of the next tokens. `as_held` makes of numbers what a cache holds."""
        q, *more = map(self.heads, self.next)
        outs = []
        for i, part in enumerate(self.parts):
            held = [as_held(np.concatenate((self.heads(x)[part], y[[i]]))) for x, y in zip(self.first[1:], more)]
            outs.append(attention(q[[i]], *held, added=added[i]))
        return np.concatenate(outs).reshape(1, 2, -1)


def managers():
    """Yields labels, and the results of mindformers' PagedAttentionMgr beside NumPy's."""
    from mindformers.modules.paged_attention_mgr import PagedAttentionMgr
    from mindspore import Tensor, nn

    class Attend(nn.Cell):
        def __init__(self, manager, way):
            super().__init__()
            self.manager, self.way = manager, way

        def construct(self, q, lengths, tables, mask, counts):
            if self.way == "in chunks":
                return self.manager.paged_attn(q, lengths, tables, mask, counts)
            if self.way == "with a mask of heads":
                return self.manager.paged_attn_with_alibi(q, lengths, tables, mask)
            return self.manager.paged_attn(q, lengths, tables)

    texts, one = Texts(), np.int32([1, 1])
    later = np.concatenate([np.triu(np.ones((n, 8), np.int8), 1) for n in LENGTHS])  # 1 hides a key
    alibi = halves(2, HEADS, 1, 8)
    of_texts = [alibi[i, :, :, : n + 1].astype(np.float64) for i, n in enumerate(LENGTHS)]
    for way, inputs, want in (
        ("in chunks", (texts.first[0], LENGTHS, TABLES, later, LENGTHS), texts.prefilled()),
        ("of next tokens", (texts.next[0], LENGTHS + 1, TABLES, later, one), texts.decoded()),
        ("with a mask of heads", (texts.next[0], LENGTHS + 1, TABLES, alibi, one), texts.decoded(of_texts)),
    ):
        shape = (5, ROWS, KV_HEADS, WIDTH)
        manager = PagedAttentionMgr(HEADS, WIDTH, KV_HEADS, shape, chunk_prefill=way == "in chunks")
        for (_, k, v), slots in ((texts.first, SLOTS), (texts.next, NEXT_SLOTS)):
            manager(Tensor(k), Tensor(v), Tensor(slots))
        yield f"PagedAttentionMgr {way}", Attend(manager, way)(*map(Tensor, inputs)).asnumpy(), want


def stand_in(name, folder=None, **names):
    """Puts a module of these names in the place of one that vllm-mindspore imports; its own modules are in `folder`."""
    module = types.ModuleType(name)
    module.__dict__.update(names, __path__=[] if folder is None else [str(folder)])
    sys.modules[name] = module


def load_vllm_mindspore():
    """Returns its modules of attention, of quantized attention, of quantized products, and of its settings."""
    base, layers = type("Base", (), {}), "model_executor.layers"
    packages = "model_executor", layers, f"{layers}.quantization"
    eager = types.SimpleNamespace(model_config=types.SimpleNamespace(enforce_eager=True))
    for name in ("vllm", *(f"vllm.{each}" for each in (*packages, "attention", "attention.backends"))):
        stand_in(name)
    stand_in("vllm.attention.backends.abstract", AttentionType=types.SimpleNamespace(DECODER="decoder"))
    stand_in("vllm.config", CacheConfig=base, get_current_vllm_config=lambda: eager)
    stand_in(f"vllm.{layers}.quantization.base_config", QuantizationConfig=base, QuantizeMethodBase=base)
    stand_in("vllm.model_executor.utils", set_weight_attrs=lambda weight, attributes: None)
    stand_in("vllm_mindspore", FOLDER)
    stand_in("vllm_mindspore.utils", is_310p=lambda: False)
    for name in packages:
        stand_in(f"vllm_mindspore.{name}", FOLDER / name.replace(".", "/"))
    quantization = "vllm_mindspore.model_executor.layers.quantization"
    names = "vllm_mindspore.v1.attention.layer", f"{quantization}.attention", f"{quantization}.quant_ops"
    return *map(importlib.import_module, names), importlib.import_module("vllm_mindspore.model_executor.utils")


def servers(modules):
    """Yields labels, and the results of vllm-mindspore's attention beside NumPy's."""
    import mindspore
    from mindspore import Parameter, Tensor, nn

    layer, quantized, _, settings = modules

    class OfCodes(nn.Cell):
        """Is what holds the parameters of its method for caches of 8 bits."""

        def __init__(self):
            super().__init__()
            self.method = quantized.KVCacheInt8Method()
            self.method.create_weights(self, HEADS, WIDTH, SCALE, KV_HEADS, params_dtype=mindspore.float16)
            for scale in (self.k_scale, self.v_scale):
                scale.set_data(Tensor(np.full(KV_HEADS * WIDTH, 2**-5, np.float16)))
            self.method.process_weights_after_loading(self)

        def construct(self, *inputs):
            return self.method.apply(self, *inputs)

    def of_codes(x):
        return np.clip(np.rint(x.astype(np.float32) * 32), -128, 127) / 32

    triangle = np.triu(np.full((128, 128), -10000, np.float16), 1)
    texts, nothing, one = Texts(), np.zeros((1, 1), np.float16), np.int32([1, 1])
    kinds = [("Attention", lambda: layer.Attention(HEADS, WIDTH, SCALE, KV_HEADS), np.float16, lambda x: x)]
    if mindspore.get_context("mode") == mindspore.PYNATIVE_MODE:  # graph mode does not compile the method's class
        kinds.append(("KVCacheInt8Method", OfCodes, np.int8, of_codes))
    for label, make, dtype, as_held in kinds:
        zeros = Tensor(np.zeros((5, ROWS, KV_HEADS, WIDTH), dtype))
        caches = [Parameter(zeros, name=name, requires_grad=False) for name in ("keys", "values")]
        first, more = (list(map(Tensor, each)) for each in (texts.first, texts.next))
        settings.set_model_context("is_prefill", True)
        rest = map(Tensor, (SLOTS, triangle, LENGTHS, LENGTHS, TABLES))
        yield f"{label}, prefill", make()(*first, *caches, *rest).asnumpy(), texts.prefilled()
        settings.set_model_context("is_prefill", False)
        rest = map(Tensor, (NEXT_SLOTS, nothing, LENGTHS + 1, one, TABLES))
        yield f"{label}, next tokens", make()(*more, *caches, *rest).asnumpy(), texts.decoded(as_held=as_held)


def products(modules):
    """Yields the label and the result of vllm-mindspore's product of int8 beside NumPy's."""
    import mindspore
    from mindspore import Tensor

    x, weight = halves(5, 16), np.random.default_rng(0).integers(-128, 128, (8, 16), np.int8)
    scale, zero, of_columns = np.float16([20]), np.float16([3]), np.float32(np.exp2(halves(8) - 10))
    bias = np.arange(-400, 400, 100, dtype=np.int32)
    rows = modules[2].Quant(mindspore.int8)(*map(Tensor, (x, scale, zero)))
    # Its Cell does not call Cell's __init__, so that a call of it would fail in MindSpore.
    matmul = modules[2].AclnnQuantBatchMatMul(mindspore.float16)
    got = matmul.construct(rows, *map(Tensor, (weight, of_columns, bias))).asnumpy()
    codes = np.clip(np.rint(x.astype(np.float32) * 20 + 3), -128, 127).astype(np.int64)
    yield "Quant and AclnnQuantBatchMatMul", got, (codes @ weight.T.astype(np.int64) + bias) * of_columns


def error(got, wanted):
    return np.abs(got - wanted).max() / np.abs(wanted).max()


def main(device):
    import mindspore

    import msops

    mindspore.set_device(device)
    msops.patch_mindspore()
    failed = []

    def report(library, label, got, want, whole=None):
        found = error(got, want)
        lost = 0 if whole is None else error(got, whole)
        print(f"{library}: {label}: error {found:.0e}{f', {lost:.1%} of what float16 gives' if lost else ''}")
        failed.extend([label] if not (found <= MOST and lost <= MOST_OF_CODES) else [])

    modules = load_vllm_mindspore()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    for result in (*library_quantized.layers(), *library_quantized.experts()):
        report("golden-stick", *result)
    for result in products(modules):
        report("vllm-mindspore", *result)
    for mode, name in ((mindspore.PYNATIVE_MODE, "PyNative"), (mindspore.GRAPH_MODE, "graph")):
        mindspore.set_context(mode=mode)
        for result in managers():
            report(f"mindformers, {name} mode", *result)
        for result in servers(modules):
            report(f"vllm-mindspore, {name} mode", *result)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    main(parser.parse_args().device)
