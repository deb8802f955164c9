"""Continues many texts at once, whose keys and values lie in blocks of one pool.

A text gets a block when it needs one, and gives it back when it ends. Texts that begin alike name the same blocks.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

import msops
from generation import TextError
from program import finished


class BlockAttention(nn.Cell):
    """Does what a Llama's Attention does, with keys and values in blocks. `cache` says where the new ones go, and where
    each text has its own: (slots, tables, lengths, starts)."""

    def __init__(self, attention, blocks, block_size, dtype):
        super().__init__()
        self.attention, self.attend = attention, msops.PagedAttention()
        shape = blocks, block_size, attention.kv_heads, attention.size
        self.keys, self.values = (
            Parameter(initializer(Zero(), shape, dtype), name=name, requires_grad=False) for name in ("keys", "values")
        )

    def construct(self, x, cos, sin, cache):
        slots, tables, lengths, starts = cache
        q, k, v = [each[0] for each in self.attention.project(x, cos, sin)]
        keys = msops.write_cache(self.keys, k, slots)
        values = msops.write_cache(self.values, v, slots)
        mixed = self.attend(q, keys, values, tables, lengths, starts)
        return self.attention.output(mixed.reshape(x.shape))


class BlockLlama(nn.Cell):
    """Reads new tokens (1, T) of B texts, one text after another; `starts` (B + 1,) says where. Returns the best token
    after each text's last one, and its score, both (B,). It changes the layers of `net`."""

    def __init__(self, net, blocks, block_size):
        super().__init__()
        self.net, self.capacity = net, net.length
        for layer in net.layers:
            layer.attention = BlockAttention(layer.attention, blocks, block_size, net.dtype)
        self.best = ops.ArgMaxWithValue(axis=-1)  # as in CachedLlama

    def construct(self, tokens, places, slots, tables, lengths, starts):
        cos, sin = ops.gather(self.net.cos, places, 0), ops.gather(self.net.sin, places, 0)
        cache = slots, tables, lengths, starts
        x = self.net.read(tokens, cos, sin, [cache] * len(self.net.layers))[0]
        return self.best(self.net.score(ops.gather(x, ops.maximum(starts[1:] - 1, 0), 0)))


class Pool:
    """Blocks of `size` tokens each. `users` says how many texts have a block; it is free when none has."""

    def __init__(self, blocks, size):
        self.size, self.users, self.free = size, [0] * blocks, deque(range(blocks))
        self._blocks, self._beginnings = {}, {}  # the block that ends with this beginning of a text, and the reverse

    def take(self):
        block = self.free.popleft()
        self.users[block] = 1
        return block

    def share(self, tokens):
        """Returns the blocks that hold the beginning of these tokens, but not the last one, since what follows it is
        to be found."""
        found = []
        for end in range(self.size, len(tokens), self.size):
            block = self._blocks.get(tuple(tokens[:end]))
            if block is None:
                break
            self.users[block] += 1
            found.append(block)
        return found

    def fill(self, block, tokens):
        """Lets others share a block, which ends with the last of these tokens."""
        beginning = tuple(tokens)
        if beginning not in self._blocks:
            self._blocks[beginning], self._beginnings[block] = block, beginning

    def give_back(self, blocks):
        for block in blocks:
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
                self._blocks.pop(self._beginnings.pop(block, None), None)


@dataclass(eq=False)
class Text:
    """A text that is served. The keys of its first `read` tokens are in its blocks."""

    number: int
    tokens: list
    begin: int  # where the answer begins
    read: int = 0
    blocks: list = field(default_factory=list)


class Server:
    """Continues texts, up to `texts` at once, by up to `most` best tokens each. A call of the network reads one token
    of each text that is being written and, up to `chunk` tokens in all, the next ones of those that are not read yet.

    MindSpore compiles a graph for `chunk` tokens, at least `texts`, and one for a token of each text.
    """

    def __init__(self, net, pool, texts, chunk, most, ends=()):
        self.pool, self.waiting, self.running = pool, deque(), []
        self._net, self._texts, self._most, self._ends = net, texts, most, ends
        self._sizes = sorted({texts, max(texts, chunk)})
        self._room = min(net.capacity, len(pool.users) * pool.size)

    def add(self, number, tokens):
        """Puts a text in the queue."""
        if not 0 < len(tokens) <= self._room:
            raise TextError(f"Text {number} must have 1 to {self._room} tokens, got {len(tokens)}")
        self.waiting.append(Text(number, list(tokens), len(tokens)))

    def prepare(self):
        """Compiles the graphs."""
        for size in self._sizes:
            self._read([], size)

    def step(self):
        """Reads some tokens. Returns how many, and (text, token, score) for each new token."""
        parts = self._plan()
        total = sum(count for _, count in parts)
        answers = self._read(parts, next(size for size in self._sizes if size >= total))
        found = []
        for (text, count), token, score in zip(parts, *answers):
            text.read += count
            if text.read < len(text.tokens):
                continue  # the next call reads on
            text.tokens.append(token)
            found.append((text, token, score))
            if token in self._ends or len(text.tokens) >= self._longest(text):
                self.running.remove(text)
                self.pool.give_back(text.blocks)
        return total, found

    def _longest(self, text):
        """Returns how many tokens a text may have, the last of which is not read."""
        return min(text.begin + self._most, self._room + 1)

    def _plan(self):
        """Returns (text, how many of its tokens are read) for the next call, with blocks for these tokens."""
        parts, room = [], self._sizes[-1]
        for text in self.running:  # all but the last one need one token each
            room -= self._take(text, room, parts)
        while self.waiting and room and len(self.running) < self._texts:
            text = self.waiting[0]
            text.blocks = self.pool.share(text.tokens)
            promised = sum(self._missing(other) for other in [*self.running, text])
            if promised > len(self.pool.free):  # it waits until others end
                self.pool.give_back(text.blocks)
                break
            text.read = len(text.blocks) * self.pool.size
            self.running.append(self.waiting.popleft())
            room -= self._take(text, room, parts)
        return parts

    def _missing(self, text):
        """Returns how many more blocks a text may need."""
        return -(-(self._longest(text) - 1) // self.pool.size) - len(text.blocks)

    def _take(self, text, room, parts):
        """Gives a text blocks for its next tokens, `room` at most. Others may share full ones at once, since each layer
        writes all keys of a call before it reads any."""
        count, size = min(len(text.tokens) - text.read, room), self.pool.size
        end = text.read + count
        while len(text.blocks) * size < end:
            text.blocks.append(self.pool.take())
        for i in range(text.read // size, end // size):
            self.pool.fill(text.blocks[i], text.tokens[: (i + 1) * size])
        if count:
            parts.append((text, count))
        return count

    def _read(self, parts, size):
        """Calls the network for `size` tokens. Those that are missing belong to one more text without keys."""
        tokens, places = np.zeros((1, size), np.int32), np.zeros(size, np.int32)
        slots, starts = np.full(size, -1, np.int32), np.zeros(self._texts + 2, np.int32)
        tables = np.full((self._texts + 1, -(-self._room // self.pool.size)), -1, np.int32)
        lengths, end = np.zeros(self._texts + 1, np.int32), 0
        for i, (text, count) in enumerate(parts):
            begin, end = end, end + count
            own = np.arange(text.read, text.read + count)
            blocks = np.array(text.blocks)
            tokens[0, begin:end], places[begin:end] = text.tokens[text.read :][:count], own
            slots[begin:end] = blocks[own // self.pool.size] * self.pool.size + own % self.pool.size
            tables[i, : len(blocks)], lengths[i], starts[i + 1] = blocks, text.read + count, end
        starts[len(parts) + 1 :], starts[-1] = end, size
        with finished():
            best, scores = self._net(*map(Tensor, (tokens, places, slots, tables, lengths, starts)))
            return best.asnumpy().tolist(), scores.asnumpy().tolist()
