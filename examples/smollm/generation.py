"""Continues texts token by token. What the model has read stays in a cache of keys and values of a fixed size."""

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from llama import pack
from program import finished

CHUNKS = (32, 256)  # how many tokens are read at once: few numbers, since MindSpore compiles a graph for each


class TextError(ValueError):
    """Says why a text cannot be read or continued."""


class CachedLlama(nn.Cell):
    """Reads tokens (B, T) that stand at the places from `start` on, shape (1,), and returns the scores (B, vocabulary)
    of the token after the one at column `last`, shape (1,). What stands before `start` was read by earlier calls.

    ScatterUpdate writes into the caches in place, since a custom operator cannot.
    """

    def __init__(self, net, batch=1):
        super().__init__()
        self.net, self.capacity = net, net.length
        attention = net.layers[0].attention
        shape = batch * net.length, attention.kv_heads, attention.size
        self.keys, self.values = (
            ParameterTuple(
                Parameter(initializer(Zero(), shape, net.dtype), name=f"{name}{i}", requires_grad=False)
                for i in range(len(net.layers))
            )
            for name in ("cached_keys", "cached_values")
        )
        self.samples = Tensor(np.arange(batch)[:, None] * net.length, mindspore.int32)
        self.columns = Tensor(np.arange(net.length), mindspore.int32)
        self.ones = Tensor(np.ones(batch), mindspore.int32)

    def construct(self, tokens, start, last):
        length = tokens.shape[1]
        places = start + self.columns[:length]
        rows = (self.samples + places).reshape(-1)
        lengths = (start + length) * self.ones
        caches = [(self.keys[i], self.values[i], rows, lengths) for i in range(len(self.keys))]
        x = self.net.read(tokens, ops.gather(self.net.cos, places, 0), ops.gather(self.net.sin, places, 0), caches)
        return self.net.score(ops.gather(x, last, 1))[:, 0]


class StackedLlama(nn.Cell):
    """Does the same, with all layers in one operator. One write each takes the new keys and values of all layers."""

    def __init__(self, net, batch=1):
        super().__init__()
        self.embedding, self.score, self.cos, self.sin = net.embedding, net.score, net.cos, net.sin
        self.stack, self.dtype, self.capacity = pack(net), net.dtype, net.length
        self.cache = len(net.layers), batch, net.length, self.stack.kv_heads, self.stack.head_size
        rows = (-1, *self.cache[3:])
        self.rows, shape = rows, (self.cache[0] * batch * net.length, *rows[1:])
        self.keys, self.values = (
            Parameter(initializer(Zero(), shape, net.dtype), name=name, requires_grad=False)
            for name in ("cached_keys", "cached_values")
        )
        self.first_rows = Tensor(np.arange(self.cache[0] * batch)[:, None] * net.length, mindspore.int32)
        self.columns, self.ones = (
            Tensor(np.arange(net.length), mindspore.int32),
            Tensor(np.ones(batch), mindspore.int32),
        )
        self.write = ops.ScatterUpdate()

    def construct(self, tokens, start, last):
        places = start + self.columns[: tokens.shape[1]]
        x = ops.gather(self.embedding, tokens, 0).astype(self.dtype)
        cos, sin = ops.gather(self.cos, places, 0), ops.gather(self.sin, places, 0)
        keys, values = self.keys.reshape(self.cache), self.values.reshape(self.cache)
        x, k, v = self.stack(x, cos, sin, keys, values, start * self.ones)
        rows = (self.first_rows + places).reshape(-1)
        self.write(self.keys, rows, k.reshape(self.rows))
        self.write(self.values, rows, v.reshape(self.rows))
        return self.score(ops.gather(x, last, 1))[:, 0]


class Reader:
    """A text that grows: `extend` reads more tokens by one of these, and returns the scores of the one after them."""

    def __init__(self, net, chunks=CHUNKS):
        self._net, self.capacity, self._chunks = net, net.capacity, chunks
        self.tokens = []

    @property
    def room(self):
        return self.capacity - len(self.tokens)

    def extend(self, tokens):
        start = len(self.tokens)
        if not 0 < len(tokens) <= self.room:
            raise TextError(f"There is room for 1 to {self.room} tokens, got {len(tokens)}")
        self.tokens += [int(token) for token in tokens]
        while start < len(self.tokens):
            start, scores = self._read(start)
        return scores

    def _read(self, start):
        """Reads some of the tokens from `start` on, and returns where the next ones start, and the scores."""
        left = len(self.tokens) - start
        size = 1 if left == 1 else next((size for size in self._chunks if size >= left), self._chunks[-1])
        size = min(size, self.capacity)
        start = min(start, self.capacity - size)  # near the end, tokens before `start` are read once more
        piece = self.tokens[start : start + size]
        padded = np.zeros((1, size), np.int32)  # no token sees the padding, which later tokens overwrite in the cache
        padded[0, : len(piece)] = piece
        with finished():
            scores = self._net(Tensor(padded), _index(start), _index(len(piece) - 1))
        return start + len(piece), scores.astype(mindspore.float32).asnumpy()[0]


def _index(number):
    return Tensor([number], mindspore.int32)


def sample(scores, rng, temperature=0.0, top_p=1.0):
    """Returns the best token if `temperature` is 0, else a random one of the best that have `top_p` of the probability
    together. A `top_p` of 0 leaves the best one."""
    if not np.isfinite(scores).all():
        raise TextError(
            "The scores of the next token are not finite: the weights are damaged, or their dtype too narrow."
        )
    if temperature == 0:
        return int(scores.argmax())
    shares = np.exp((np.float64(scores) - scores.max()) / temperature)
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    before = np.cumsum(shares[order]) - shares[order]
    kept = order[: max(1, np.count_nonzero(before < top_p))]
    return int(rng.choice(kept, p=shares[kept] / shares[kept].sum()))


def continue_text(reader, tokens, amount, choose, end=None):
    """Reads tokens, then yields up to `amount` that `choose(scores)` finds, until `end` or until the cache is full."""
    for _ in range(amount):
        if len(tokens) > reader.room:
            return
        token = choose(reader.extend(tokens))
        if token == end:
            return
        yield token
        tokens = [token]
