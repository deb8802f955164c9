"""Computes attention and its gradients in NumPy, and has what the cards and tests of attention share."""

import numpy as np
from mindspore import nn

import msops
from test_random import philox

DEFAULTS = dict(causal=False, scale=None, window=None, softcap=0.0, layout="BHTD", dropout_p=0.0)
OPTIONAL = ("kv_lengths", "mask", "bias", "alibi_slopes", "seed")


class Weights:
    """Holds the attention weights, with all that the gradient needs, in the dtype of q and in the layout BHTD."""

    def __init__(self, q, k, v, lengths, mask, bias, slopes, seed, causal, scale, window, softcap, dropout_p=0.0, **_):
        self.q, self.group, dtype = q, q.shape[1] // max(1, k.shape[1]), q.dtype.type
        self.k, self.v = (np.repeat(x, self.group, 1) for x in (k, v))
        self.scale = dtype(q.shape[-1] ** -0.5 if scale is None else scale)
        x = self.q @ self.k.swapaxes(-1, -2) * self.scale
        self.slope = np.ones_like(x) * self.scale
        if softcap:
            ratio = np.tanh(x / dtype(softcap))
            x, self.slope = dtype(softcap) * ratio, (1 - ratio * ratio) * self.scale
        if bias is not None:
            x = x + bias.astype(dtype)
        if slopes is not None:
            x = x - slopes[..., None, None].astype(dtype) * distances(x.shape, lengths)
        x = np.where(hidden(x.shape, lengths, mask, causal, window), dtype(-np.inf), x)
        most = x.max(-1, keepdims=True, initial=-np.inf)
        e = np.exp(x - np.where(most == -np.inf, dtype(0), most))
        total = e.sum(-1, keepdims=True)
        self.p = e / np.where(total == 0, dtype(1), total)
        self.kept = kept(x.shape, int(seed), dropout_p).astype(dtype) if dropout_p else dtype(1)
        with np.errstate(divide="ignore"):
            self.lse = (most + np.log(total))[..., 0]

    def of_keys(self, x):
        """Adds up the gradients of the heads that read the same keys."""
        return x.reshape(x.shape[0], x.shape[1] // self.group, self.group, *x.shape[2:]).sum(2)


def places(shape, lengths):
    """Returns the place of each query among the keys, in a column."""
    _, _, queries, keys = shape
    lengths = keys if lengths is None else np.clip(lengths, 0, keys)[:, None, None, None]
    return np.arange(queries)[:, None] + lengths - queries


def distances(shape, lengths):
    return np.abs(places(shape, lengths) - np.arange(shape[-1]))


def kept(shape, seed, dropout_p):
    """Returns what dropout multiplies each weight by: a word of Philox is for a key, and its counter for the sample,
    the head, the query and four keys."""
    batch, heads, queries, keys = (np.arange(size, dtype=np.uint64) for size in shape)
    counters = (queries[:, None] << np.uint64(32)) + keys // 4, (batch[:, None] << np.uint64(32)) + heads
    words = philox(np.int64(seed).view(np.uint64), counters[0], counters[1][..., None, None])
    words = np.take_along_axis(words, np.broadcast_to(keys % 4, shape).astype(np.int64)[..., None], -1)[..., 0]
    return np.where(words >= dropout_p * 2**32, 1 / (1 - dropout_p), 0)


def hidden(shape, lengths, mask, causal, window):
    """Returns which keys a query does not see."""
    queries, keys = shape[2:]
    left, right = (-1, -1) if window is None else window
    i, j = places(shape, lengths), np.arange(keys)
    hide = np.broadcast_to(j >= i[..., :1, :] + queries, shape)
    if causal or right >= 0:
        hide = hide | (j > i + (0 if causal else right))
    if left >= 0:
        hide = hide | (j < i - left)
    return hide if mask is None else hide | mask


def split(arrays, optional=(), **settings):
    """Returns q, k, v, each of OPTIONAL or None, then the other arrays, in the layout BHTD; and a function that gives
    results of their rank the layout of the settings."""
    rest = iter(arrays[3:])
    given = [next(rest) if name in optional else None for name in OPTIONAL]

    def turn(x):
        return x.swapaxes(1, 2) if x.ndim == 4 and settings["layout"] == "BTHD" else x

    return [*map(turn, arrays[:3]), *given, *map(turn, rest)], turn


def attention(*arrays, **settings):
    settings = {**DEFAULTS, **settings}
    inputs, turn = split(arrays, **settings)
    weights = Weights(*inputs, **settings)
    return turn(weights.p * weights.kept @ weights.v), weights.lse


def attention_backward(*arrays, **settings):
    settings = {**DEFAULTS, **settings}
    (*inputs, out, _, dout, dlse), turn = split(arrays, **settings)
    w = Weights(*inputs, **settings)
    dz = gradient_of_logits(w, out, dout, dlse) * w.slope
    dv = (w.p * w.kept).swapaxes(-1, -2) @ dout
    return tuple(map(turn, (dz @ w.k, w.of_keys(dz.swapaxes(-1, -2) @ w.q), w.of_keys(dv))))


def gradient_of_logits(w, out, dout, dlse):
    delta = (dout * out).sum(-1) - dlse
    return w.p * (dout @ w.v.swapaxes(-1, -2) * w.kept - delta[..., None])


def attention_bias_backward(*arrays, **settings):
    settings = {**DEFAULTS, **settings}
    (*inputs, out, _, dout, dlse), _ = split(arrays, **settings)
    dx = gradient_of_logits(Weights(*inputs, **settings), out, dout, dlse)
    shape = inputs[OPTIONAL.index("bias") + 3].shape
    dx = dx.sum(tuple(range(4 - len(shape))))
    return (dx.sum(tuple(i for i, size in enumerate(shape) if size != dx.shape[i]), keepdims=True),)


def case(sizes, width=8, value_width=None, mask=None, lengths=False, batch=2, bias=None, slopes=None, **settings):
    """Returns shapes and settings for sizes (heads, heads of keys, queries, keys)."""
    heads, kv_heads, queries, keys = sizes
    axes = [(batch, kv_heads, keys, features) for features in (width, value_width or width)]
    axes = [(batch, heads, queries, width), *axes]
    if settings.get("layout") == "BTHD":
        axes = [(b, t, h, d) for b, h, t, d in axes]
    shapes = [(batch,) if lengths else None, mask, bias, slopes, () if settings.get("dropout_p") else None]
    optional = tuple(name for name, shape in zip(OPTIONAL, shapes) if shape is not None)
    if optional:
        settings["optional"] = optional
    return [*axes, *(shape for shape in shapes if shape is not None)], settings


class Attend(nn.Cell):
    """Takes by position, after q, k and v, what `optional` names of OPTIONAL."""

    def __init__(self, optional=(), wide_bias=False, **settings):
        super().__init__()
        self.at = tuple(3 + optional.index(name) if name in optional else 0 for name in OPTIONAL)
        self.seed = settings.pop("seed", None)
        self.settings = settings

    def construct(self, *inputs):
        lengths, mask, bias, slopes, seed = [None if at == 0 else inputs[at] for at in self.at]
        if seed is None:
            seed = self.seed
        return msops.flash_attention(
            *inputs[:3], kv_lengths=lengths, mask=mask, bias=bias, alibi_slopes=slopes, seed=seed, **self.settings
        )
