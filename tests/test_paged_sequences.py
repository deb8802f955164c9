"""Tests that paged_attention computes each sequence as if it were alone, and steps of texts whose caches grow."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import msops
from msops.testing.checks import run
from numpy_paged_attention import Attend
from operator_test import wide_in_graph_mode


def numbers(seed, sequences, dtype="float32", heads=4, kv_heads=2, width=16, block_size=4, blocks=200):
    """Returns (q, keys, values) of sequences (new tokens, keys), each by itself, and writes them into blocks in no
    order: (caches, tables)."""
    rng = np.random.default_rng(seed)
    of_each = [
        [np.asarray(rng.standard_normal((n, h, width)), dtype) for n, h in ((new, heads), (k, kv_heads), (k, kv_heads))]
        for new, k in sequences
    ]
    caches = [np.full((blocks, block_size, kv_heads, width), np.nan, dtype) for _ in range(2)]
    free = list(rng.permutation(blocks))
    tables = np.full((len(sequences), max(-(-k // block_size) for _, k in sequences) + 2), -1, np.int32)
    for b, (_, k, v) in enumerate(of_each):
        for j in range(len(k)):
            if j % block_size == 0:
                tables[b, j // block_size] = free.pop()
            block = tables[b, j // block_size]
            caches[0][block, j % block_size], caches[1][block, j % block_size] = k[j], v[j]
    return of_each, caches, tables


def call(q, caches, tables, sequences, **settings):
    starts = np.cumsum([0, *(new for new, _ in sequences)]).astype(np.int32)
    lengths = np.array([keys for _, keys in sequences], np.int32)
    net = Attend(("value_cache", "cu_seqlens_q"), **settings)
    return run(net, q, *caches, tables, lengths, starts)


SEQUENCES = [(1, 30), (7, 19), (1, 1), (0, 5), (20, 20), (3, 70)]


@wide_in_graph_mode
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sequences_alone(mode, dtype):
    """A sequence's bits are those that it has alone, in other blocks, of other caches, with a wider table."""
    of_each, caches, tables = numbers(1, SEQUENCES, dtype)
    out, lse = call(np.concatenate([q for q, _, _ in of_each]), caches, tables, SEQUENCES)
    first = 0
    for b, (new, keys) in enumerate(SEQUENCES):
        _, other, moved = numbers(b + 5, SEQUENCES[b : b + 1], dtype, blocks=40)
        for j in range(keys):
            block, row = moved[0, j // 4], j % 4
            other[0][block, row], other[1][block, row] = of_each[b][1][j], of_each[b][2][j]
        alone = call(of_each[b][0], other, np.pad(moved, ((0, 0), (0, 9)), constant_values=7), SEQUENCES[b : b + 1])
        np.testing.assert_array_equal(alone[0], out[first : first + new])
        np.testing.assert_array_equal(alone[1], lse[:, first : first + new])
        first += new


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shared_blocks(mode, dtype):
    """Sequences that share blocks, and a block that stands twice in a table, give what copies of them give."""
    rng = np.random.default_rng(3)
    q, k, v = (np.asarray(rng.standard_normal(shape), dtype) for shape in ((3, 4, 16), *[(6, 4, 2, 16)] * 2))
    tables, lengths = np.int32([[0, 1, 2], [0, 1, 5], [3, 3, 0]]), np.int32([10, 12, 9])
    net = Attend()
    copies = [x[tables.ravel()] for x in (k, v)]
    want = run(net, q, *copies, np.arange(9, dtype=np.int32).reshape(3, 3), lengths)
    for got, each in zip(run(net, q, k, v, tables, lengths), want):
        np.testing.assert_array_equal(got, each)


@wide_in_graph_mode
@pytest.mark.parametrize("settings", [{}, dict(window=(9, 0), softcap=3.0), dict(causal=False, scale=0.3)], ids=str)
def test_agrees_with_flash_attention(mode, settings):
    """On equal keys, each sequence is what flash_attention computes of it."""
    of_each, caches, tables = numbers(2, SEQUENCES)
    out, lse = call(np.concatenate([q for q, _, _ in of_each]), caches, tables, SEQUENCES, **settings)
    most, room = 20, 70
    padded = [np.zeros((len(SEQUENCES), n, h, 16), np.float32) for n, h in ((most, 4), (room, 2), (room, 2))]
    for b, arrays in enumerate(of_each):
        for to, x in zip(padded, arrays):
            to[b, : len(x)] = x
    first = 0
    for b, (new, keys) in enumerate(SEQUENCES):
        q, k, v = (Tensor(x[b : b + 1, :n]) for x, n in zip(padded, (new, room, room)))
        lengths = Tensor(np.array([keys], np.int32))
        own = dict(causal=True) | settings
        if new:
            want = msops.flash_attention(q, k, v, kv_lengths=lengths, layout="BTHD", return_lse=True, **own)
            np.testing.assert_allclose(out[first : first + new], want[0][0].asnumpy(), 1e-5, 1e-6)
            np.testing.assert_allclose(lse[:, first : first + new], want[1][0].asnumpy(), 1e-5, 1e-6)
        first += new


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_chunk_equals_steps(mode, dtype):
    """A token gives in a chunk what it gives in a step of its own, to rounding."""
    of_each, caches, tables = numbers(4, [(20, 50)], dtype)
    out, lse = call(of_each[0][0], caches, tables, [(20, 50)])
    for i in range(20):
        step = run(Attend(), of_each[0][0][i : i + 1], *caches, tables, np.int32([31 + i]))
        np.testing.assert_allclose(step[0][0], out[i], *[2e-3 if dtype == "float16" else 1e-6] * 2)
        np.testing.assert_allclose(step[1][:, 0], lse[:, i], 1e-5, 1e-6)


class Step(nn.Cell):
    """Writes new rows into caches, and attends to them in the same graph."""

    def __init__(self, blocks, block_size, kv_heads, width):
        super().__init__()
        room = np.full((blocks, block_size, kv_heads, width), np.nan, np.float32)
        self.keys, self.values = (
            Parameter(Tensor(room), requires_grad=False, name=name) for name in ("keys", "values")
        )
        self.attend = msops.PagedAttention()

    def construct(self, q, k, v, slots, tables, lengths, starts):
        keys = msops.write_cache(self.keys, k, slots)
        values = msops.write_cache(self.values, v, slots)
        return self.attend(q, keys, values, tables, lengths, starts)


def test_steps_with_write_cache(mode):
    """Two texts, read in a chunk and then token by token, give what flash_attention gives of the whole."""
    rng = np.random.default_rng(7)
    q, k, v = (np.asarray(rng.standard_normal((2, 9, h, 16)), np.float32) for h in (4, 2, 2))
    tables = np.int32([[5, 0, 3, -1], [1, 4, 2, -1]])
    net, found = Step(6, 4, 2, 16), np.zeros_like(q)
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
        new, places = end - begin, np.arange(begin, end)
        slots = np.concatenate([tables[b, places // 4] * 4 + places % 4 for b in range(2)]).astype(np.int32)
        rows = [Tensor(x[:, begin:end].reshape(2 * new, *x.shape[2:])) for x in (q, k, v)]
        starts, lengths = np.int32([0, new, 2 * new]), np.int32([end, end])
        out = net(*rows, *map(Tensor, (slots, tables, lengths, starts)))
        found[:, begin:end] = out.asnumpy().reshape(2, new, 4, 16)
    want = msops.flash_attention(*map(Tensor, (q, k, v)), causal=True, layout="BTHD").asnumpy()
    np.testing.assert_allclose(found, want, 1e-5, 1e-6)
