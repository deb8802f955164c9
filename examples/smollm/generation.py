"""Continues texts token by token. What the model has read stays in a cache of keys and values of a fixed size."""

from collections import deque

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

import msops
from llama import pack
from program import finished

CHUNKS = (64, 256)  # how many tokens are read at once: few numbers, since MindSpore compiles a graph for each


class TextError(ValueError):
    """Says why a text cannot be read or continued."""


class CachedLlama(nn.Cell):
    """Reads tokens (B, T) that stand at the places from `start` on, shape (1,), and returns the scores (B, vocabulary)
    of the token after the one at column `last`, shape (1,). What stands before `start` was read by earlier calls.

    ScatterUpdate writes into the caches in place.
    """

    def __init__(self, net, batch=1):
        super().__init__()
        self.net, self.batch, self.capacity = net, batch, net.length
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
        self.best = ops.ArgMaxWithValue(axis=-1)  # ops.Argmax has one thread of a GPU for each row

    def construct(self, tokens, start, last):
        return self.choose(tokens, start, last)[0]

    def choose(self, tokens, start, last):
        """Also returns the best tokens (B,)."""
        length = tokens.shape[1]
        places = start + self.columns[:length]
        rows = (self.samples + places).reshape(-1)
        lengths = (start + length) * self.ones
        caches = [(self.keys[i], self.values[i], rows, lengths) for i in range(len(self.keys))]
        x = self.net.read(tokens, ops.gather(self.net.cos, places, 0), ops.gather(self.net.sin, places, 0), caches)
        scores = self.net.score(ops.gather(x, last, 1))[:, 0]
        return scores, self.best(scores)[0]


class StackedLlama(nn.Cell):
    """Does the same, with all layers in one operator. One write each takes the new keys and values of all layers.

    `start` may also have a number for each text. With `text`, shape (1,), it reads tokens (1, T) of that text alone.
    """

    def __init__(self, net, batch=1):
        super().__init__()
        self.embedding, self.cos, self.sin = net.embedding, net.cos, net.sin
        self.head = net.embedding if net.head is None else net.head.weight
        self.stack, self.dtype, self.batch, self.capacity = pack(net), net.dtype, batch, net.length
        self.cache = len(net.layers), batch, net.length, self.stack.kv_heads, self.stack.head_size
        self.rows, caches = (-1, *self.cache[3:]), len(net.layers) * batch
        self.keys, self.values = (
            Parameter(initializer(Zero(), (caches * net.length, *self.cache[3:]), net.dtype), name, requires_grad=False)
            for name in ("cached_keys", "cached_values")
        )
        self.first_rows = Tensor(np.arange(caches).reshape(-1, batch, 1) * net.length, mindspore.int32)
        self.columns = Tensor(np.arange(net.length), mindspore.int32)
        self.ones = Tensor(np.ones(batch), mindspore.int32)
        self.write = ops.ScatterUpdate()

    def construct(self, tokens, start, last, text=None):
        return self.choose(tokens, start, last, text)[0]

    def choose(self, tokens, start, last, text=None):
        """Also returns the best tokens (B,)."""
        count, length = tokens.shape
        lengths = start if start.shape[0] == count else start * self.ones
        places = lengths.reshape(-1, 1)
        if length > 1:
            places = places + self.columns[:length]
        keys, values, first_rows = self.keys, self.values, self.first_rows
        if text is not None:
            keys, values = [ops.gather(each.reshape(self.cache), text, 1) for each in (keys, values)]
            first_rows = ops.gather(first_rows, text, 1)
        cos, sin = ops.gather(self.cos, places, 0), ops.gather(self.sin, places, 0)
        return self.read(tokens, last, lengths, cos, sin, (first_rows + places).reshape(-1), keys, values)[:2]

    def several(self, tokens, start, last, steps):
        """Reads tokens (B, 1) and then the best ones, as many in all as `steps` (n, 1) has numbers from 0 on. Returns
        the best tokens (B, n). What comes after a full cache is of no use."""
        starts = ops.minimum(start + steps, self.capacity - 1) * self.ones
        places = starts.expand_dims(-1)
        rows = (self.first_rows + places.expand_dims(1)).reshape(len(steps), -1)
        cos, sin = ops.gather(self.cos, places, 0), ops.gather(self.sin, places, 0)
        found, keys, values = (), self.keys, self.values
        for each in zip(*[ops.unstack(x) for x in (starts, cos, sin, rows)]):
            _, best, keys, values = self.read(tokens, last, *each, keys, values)
            tokens = best.reshape(-1, 1)
            found += (tokens,)
        return ops.concat(found, 1)

    def read(self, tokens, last, lengths, cos, sin, rows, keys, values):
        """Returns scores, the best tokens, and the caches, in which the new rows are written. Where a graph reads on,
        it does so with these: MindSpore would copy Parameters."""
        x = ops.gather(self.embedding, tokens, 0).astype(self.dtype)
        x, k, v = self.stack(x, cos, sin, keys, values, lengths)
        keys = self.write(self.keys, rows, k.reshape(self.rows))
        values = self.write(self.values, rows, v.reshape(self.rows))
        x = x.reshape(len(tokens), -1) if tokens.shape[1] == 1 else ops.gather(x, last, 1)[:, 0]
        scores, best = msops.linear_argmax(x, self.head.astype(self.dtype))
        return scores, best, keys, values


class Greedy(nn.Cell):
    """Returns the best tokens (B, 1) by the scores of one of these, so that scores need not leave the device.

    With `steps`, it continues single tokens (B, 1) by so many, (B, steps), in one graph of a StackedLlama: to begin a
    graph takes longer than to compute a token.
    """

    def __init__(self, net, steps=1):
        super().__init__()
        self.net, self.batch, self.capacity = net, net.batch, net.capacity
        self.steps = Tensor(np.arange(steps)[:, None], mindspore.int32)

    def construct(self, tokens, start, last, text=None):
        if text is not None:
            return self.net.choose(tokens, start, last, text)[1].reshape(-1, 1)
        if len(self.steps) == 1:
            return self.net.choose(tokens, start, last)[1].reshape(-1, 1)
        return self.net.several(tokens, start, last, self.steps)


class Reader:
    """A text that grows: `extend` reads more tokens by one of these, and returns the scores of the one after them."""

    def __init__(self, net, chunks=CHUNKS):
        self._net, self.capacity, self._chunks = net, net.capacity, chunks
        self.tokens = []

    @property
    def room(self):
        return self.capacity - len(self.tokens)

    def go_back(self, tokens):
        """Forgets what is not the beginning of `tokens`, and returns how many tokens it keeps."""
        pairs = enumerate(zip(self.tokens, tokens))
        kept = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(self.tokens), len(tokens)))
        del self.tokens[kept:]
        return kept

    def extend(self, tokens):
        if not 0 < len(tokens) <= self.room:
            raise TextError(f"There is room for 1 to {self.room} tokens, got {len(tokens)}")
        start = len(self.tokens)
        self.tokens += [int(token) for token in tokens]
        return _read(self._net, self.tokens, start, self._chunks)


def _read(net, tokens, start, chunks, *text):
    """Reads tokens from `start` on, in chunks, and returns the scores after the last one."""
    while start < len(tokens):
        left = len(tokens) - start
        size = 1 if left == 1 else next((size for size in chunks if size >= left), chunks[-1])
        size = min(size, net.capacity)
        start = min(start, net.capacity - size)  # near the end, tokens before `start` are read once more
        piece = tokens[start : start + size]
        padded = np.zeros((1, size), np.int32)  # no token sees the padding, which later tokens overwrite in the cache
        padded[0, : len(piece)] = piece
        with finished():
            scores = net(Tensor(padded), _index(start), _index(len(piece) - 1), *text)
        start += len(piece)
    return scores.asnumpy()[0]


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
    # Tokens with less than an equal part of 1 - top_p have less than that together, and come after the others.
    likely = np.flatnonzero(shares * shares.size >= min(1 - top_p, shares.max()))
    order = likely[np.argsort(-shares[likely], kind="stable")]
    before = np.cumsum(shares[order]) - shares[order]
    kept = order[: max(1, np.count_nonzero(before < top_p))]
    return int(rng.choice(kept, p=shares[kept] / shares[kept].sum()))


def continue_text(reader, tokens, amount, choose, ends=()):
    """Reads tokens, then yields up to `amount` that `choose(scores)` finds, until one is in `ends` or the cache is
    full."""
    for _ in range(amount):
        if len(tokens) > reader.room:
            return
        token = choose(reader.extend(tokens))
        if token in ends:
            return
        yield token
        tokens = [token]


def continue_texts(net, texts, amount, choose, ends=(), chunks=CHUNKS):
    """Does so for many texts, each a list of tokens. A StackedLlama continues as many at once as its cache has room
    for; where a text ends, the next one begins. Yields (which text, token) as they come. `choose` may also return
    several tokens, as `list` does of what a Greedy finds."""
    for i, text in enumerate(texts):
        if not 0 < len(text) <= net.capacity:
            raise TextError(f"Text {i} must have 1 to {net.capacity} tokens, got {len(text)}")
    waiting, running, free = deque(enumerate(texts)), {}, [*range(net.batch)]
    tokens, starts = np.zeros((net.batch, 1), np.int32), np.zeros(net.batch, np.int32)
    while amount and (waiting or running):
        if waiting and free:
            place = free.pop()
            i, text = waiting.popleft()
            running[place], starts[place] = (i, amount), len(text)
            found, read = {place: _read(net, text, 0, chunks, _index(place))}, 0
        else:  # places without a text write into rows of the cache that nobody reads
            with finished():
                scores = net(Tensor(tokens), Tensor(starts), _index(0)).asnumpy()
            found, read = {place: scores[place] for place in running}, 1
        for place, scores in found.items():
            i, left = running[place]
            for token in np.atleast_1d(choose(scores)).tolist():
                left, tokens[place], starts[place] = left - 1, token, starts[place] + read
                if token not in ends:
                    yield i, token
                if token in ends or left == 0 or starts[place] == net.capacity:
                    del running[place]
                    free.append(place)
                    starts[place] = 0
                    break
            else:
                running[place] = i, left
