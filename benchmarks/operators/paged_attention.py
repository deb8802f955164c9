"""Benchmarks attention to keys in blocks. A size is (texts, new tokens of each, keys, Hq, Hk, D, rows of a block), and
perhaps "codes" or "Zipf": texts of 100 keys up to so many."""

import functools

import numpy as np
from mindspore import Tensor, nn, ops

import msops
from numpy_paged_attention import NAMES, case
from test_paged_attention import TestPagedAttention

from ..benchmark import Benchmark, Sizes
from ..figures import Target, best_peer, share, times_faster
from ..libraries import is_there

LLAMA = (32, 8, 128)
DECODING = tuple((64, 1, 4096, *LLAMA, rows) for rows in (16, 64, 128))
ONE_TEXT, ZIPF = (1, 1, 32768, *LLAMA, 16), (256, 1, 8192, *LLAMA, 16, "Zipf")
CODES, CHUNK, LATENT = (*DECODING[0], "codes"), (1, 2048, 8192, *LLAMA, 16), (64, 1, 4096, 128, 1, 576, 64)
SMALL = (4, 1, 1024, 8, 2, 64, 16)


def lengths_of(size):
    texts, _, keys, *_ = size
    if "Zipf" not in size:
        return (keys,) * texts
    return tuple(np.maximum(100, keys // np.arange(1, texts + 1)).tolist())


class InBlocks(nn.Cell):
    """Attends by the operator, to full blocks."""

    def __init__(self, tables, lengths):
        super().__init__()
        self.tables, self.lengths, self.attend = Tensor(tables), Tensor(lengths), msops.PagedAttention()

    def construct(self, q, keys, values):
        return self.attend(q, keys, values, self.tables, self.lengths)


class Gathered(nn.Cell):
    """Gathers the blocks, and attends by MindSpore's operators. Each text has one new token."""

    def __init__(self, tables, group):
        super().__init__()
        self.tables, self.group = Tensor(tables), group

    def construct(self, q, keys, values):
        texts, heads, width = q.shape
        k, v = (ops.gather(x, self.tables, 0) for x in (keys, values))
        k, v = (x.reshape(texts, -1, heads // self.group, width).transpose(0, 2, 1, 3) for x in (k, v))
        q = (q * width**-0.5).reshape(texts, heads // self.group, self.group, width)
        return ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(2, 3))), v).reshape(texts, heads, width)


def in_one_piece(cache, tables):
    """Returns the keys of each text as a tensor of torch (texts, heads, keys, features)."""
    return cache[tables.long()].flatten(1, 2).transpose(1, 2)


def of_pieces(case, q, k, v):
    from torch.nn.functional import scaled_dot_product_attention

    new = case.size[1]
    q, mask = q.unflatten(0, (-1, new)).transpose(1, 2), None
    if new > 1:
        mask = q.new_ones(new, k.shape[2]).tril(k.shape[2] - new).bool()
    return (scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(0, 1),)


def flashinfer(size, tensor_cores, q, keys, values, tables, *_):
    import flashinfer
    import torch

    _, new, _, heads, kv_heads, width, rows, *_ = size
    lengths = torch.tensor(lengths_of(size))
    blocks = -(-lengths // rows)
    begins, of_texts = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (blocks, lengths * 0 + new))
    ids = torch.cat([tables[b, :count].cpu() for b, count in enumerate(blocks.tolist())]).int()
    last, workspace = (lengths - (blocks - 1) * rows).int(), torch.empty(2**27, dtype=torch.uint8, device=q.device)
    if new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=tensor_cores)
        wrapper.plan(begins, ids, last, heads, kv_heads, width, rows, q_data_type=q.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(of_texts, begins, ids, last, heads, kv_heads, width, rows, causal=True, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (keys, values))


class PagedAttention(Benchmark):
    card = TestPagedAttention()
    trains = False
    compiled = False
    sizes = {
        "GPU": [Sizes(named=(*DECODING, ONE_TEXT, ZIPF, CHUNK), sweep=(CODES, LATENT, (1, 1, 512, *LLAMA, 16)))],
        "CPU": [Sizes(named=(SMALL,), sweep=((1, 64, 512, 8, 2, 64, 16),))],
    }
    cell_sizes = {"GPU": (DECODING[0],), "CPU": (SMALL,)}

    def describe(self, size):
        texts, new, keys, heads, kv_heads, width, rows, *more = size
        return " ".join((f"B{texts} H{heads} of {kv_heads} T{new} of {keys} D{width} S{rows}", *more))

    @property
    def targets(self):
        def of(*sizes):
            names = [self.describe(size) for size in sizes]
            return lambda case: case in names

        return {
            "GPU": [
                *(Target(f"64 texts in blocks of {size[6]}", f"share {least}", least,
                         share(of(size), dtype="float16"))
                  for size, least in zip(DECODING, (0.8, 0.85, 0.88))),
                Target("one text of 32768 keys", "share 0.75", 0.75, share(of(ONE_TEXT), dtype="float16")),
                Target("256 texts of 100 to 8192", "share 0.8", 0.8, share(of(ZIPF), dtype="float16")),
                Target("decoding, float16", "as fast as the best peer", 1,
                       best_peer(of(*DECODING, ONE_TEXT), dtype="float16")),
            ],
            "CPU": [Target("whole Cells", "as fast as MindSpore", 1, times_faster("MindSpore", "graph"))],
        }  # fmt: skip

    def shapes_and_settings(self, size):
        texts, new, _, heads, kv_heads, width, rows, *more = size
        lengths = lengths_of(size)
        blocks = sum(-(-length // rows) for length in lengths)
        own = dict(new=(new,) * texts) if new > 1 else {}
        own |= dict(value_size=512) if kv_heads == 1 else {}
        own |= dict(codes=(width, None)) if "codes" in more else {}
        return case(lengths, heads, kv_heads, width, rows, blocks, **own)

    def inputs(self, size):
        return self.shapes_and_settings(size)[0]

    def settings(self, size):
        return self.shapes_and_settings(size)[1]

    def contents(self, name, size):
        """Returns blocks in no order, each once."""
        (shapes, settings), lengths, rows = self.shapes_and_settings(size), lengths_of(size), size[6]
        given = [each for each in NAMES if each in ("q", "key_cache", "block_tables", "lengths", *settings["optional"])]
        shape = dict(zip(given, shapes))[name]
        if name == "lengths":
            return np.array(lengths, np.int32)
        if name == "cu_seqlens_q":
            return np.arange(size[0] + 1, dtype=np.int32) * size[1]
        if name == "block_tables":
            order, tables = iter(np.random.default_rng(0).permutation(self.blocks(size))), np.zeros(shape, np.int32)
            for b, length in enumerate(lengths):
                for m in range(-(-length // rows)):
                    tables[b, m] = next(order)
            return tables
        return None

    def blocks(self, size):
        return sum(-(-length // size[6]) for length in lengths_of(size))

    def index_below(self, size):
        return self.blocks(size)

    def torch_formula(self, case):
        """Gathers the blocks, and attends by torch's kernels, where texts have equal lengths and values."""
        if "Zipf" in case.size or "codes" in case.size or case.size[4] == 1:
            return None

        def attend(q, keys, values, tables, *_):
            return of_pieces(case, q, *(in_one_piece(x, tables) for x in (keys, values)))

        return attend

    def prepared_peers(self, case, like):
        """Attends by torch's kernels to keys that lie in one piece, which tells what the blocks cost, and by
        FlashInfer, with and without tensor cores."""
        peers = {}

        def prepare(q, keys, values, tables, *_):
            pieces = [in_one_piece(x, tables).contiguous() for x in (keys, values)]
            return lambda: of_pieces(case, q, *pieces)

        if self.torch_formula(case) is not None:
            peers["torch on one piece"] = prepare
        if is_there("FlashInfer", like.device) and case.size[4] > 1 and "codes" not in case.size:
            peers["FlashInfer"] = functools.partial(flashinfer, case.size, True)
            if case.size[1] == 1:
                peers["FlashInfer, plain"] = functools.partial(flashinfer, case.size, False)
        return peers

    def cell_inputs(self, size):
        return self.inputs(size)[:3]

    def networks(self, size, dtype, device):
        tables, lengths = (self.contents(name, size) for name in ("block_tables", "lengths"))
        return {"msops": InBlocks(tables, lengths), "MindSpore": Gathered(tables, size[3] // size[4])}
