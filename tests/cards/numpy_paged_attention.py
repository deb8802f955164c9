"""Computes attention to keys in blocks in NumPy, and has what the card and the tests of it share."""

import numpy as np
from mindspore import nn

import msops

NAMES = (
    *("q", "key_cache", "value_cache", "block_tables", "lengths", "cu_seqlens_q", "mask", "bias", "alibi_slopes"),
    *("key_scale", "value_scale", "key_zero_point", "value_zero_point"),
)
ALWAYS = ("q", "key_cache", "block_tables", "lengths")
DEFAULTS = dict(causal=True, scale=None, window=None, softcap=0.0, value_size=None)


def decoded(cache, scale, zero, dtype):
    """Returns the numbers of a cache, which may hold codes."""
    if cache.dtype != np.int8:
        return cache
    return ((cache.astype(dtype) - (0 if zero is None else zero.astype(dtype))) * scale.astype(dtype)).astype(dtype)


def attend(q, k, v, s, causal, scale, window, softcap, bias=None, mask=None, slopes=None):
    """Attends to keys (keys, Hq, D); q is (n, Hq, D). `s` is the last of these arguments' lengths."""
    n, keys, width = len(q), len(k), q.shape[-1]
    x = np.einsum("nhd,jhd->hnj", q, k) * q.dtype.type(width**-0.5 if scale is None and width else scale or 1)
    if softcap:
        x = softcap * np.tanh(x / q.dtype.type(softcap))
    place, j = np.arange(n)[:, None] + keys - n, np.arange(keys)
    if bias is not None:
        x[..., :s] += np.moveaxis(np.broadcast_to(bias, (n, q.shape[1], s)), 1, 0)
    if slopes is not None:
        x = x - slopes.astype(q.dtype)[:, None, None] * np.abs(place - j)
    left, right = (-1, -1) if window is None else window
    hide = np.broadcast_to(j >= s, (n, keys))
    if causal or right >= 0:
        hide = hide | (j > place + (0 if causal else right))
    if left >= 0:
        hide = hide | (j < place - left)
    x = np.where(hide, q.dtype.type(-np.inf), x)
    if mask is not None:
        x[..., :s][np.moveaxis(np.broadcast_to(mask, (n, q.shape[1], s)), 1, 0)] = -np.inf
    most = x.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(x - np.where(most == -np.inf, q.dtype.type(0), most))
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (most + np.log(total))[..., 0]
    return np.einsum("hnj,jhd->nhd", e / np.where(total == 0, 1, total), v), lse


def paged(*inputs, optional=(), **settings):
    """Attends to the keys of a sequence after another."""
    t = dict(zip((name for name in NAMES if name in (*ALWAYS, *optional)), inputs))
    own = {name: settings.get(name, value) for name, value in DEFAULTS.items()}
    q, tables, value_size = t["q"], t["block_tables"], own.pop("value_size")
    (tokens, heads, _), (_, size, kv_heads, _) = q.shape, t["key_cache"].shape
    k = decoded(t["key_cache"], t.get("key_scale"), t.get("key_zero_point"), q.dtype)
    v = k[..., :value_size]
    if "value_cache" in t:
        v = decoded(t["value_cache"], t.get("value_scale"), t.get("value_zero_point"), q.dtype)
    starts = t.get("cu_seqlens_q", np.arange(len(tables) + 1))
    group = heads // max(1, kv_heads)
    out, lse = np.zeros((tokens, heads, v.shape[-1]), q.dtype), np.full((heads, tokens), -np.inf, q.dtype)
    for b, length in enumerate(t["lengths"]):
        rows = np.arange(length)
        blocks = tables[b, rows // size]
        own_k, own_v = (np.repeat(x[blocks, rows % size], group, 1) for x in (k, v))
        part = slice(starts[b], starts[b + 1])
        terms, last = {}, length
        for name in ("mask", "bias"):
            if name in t:
                x = t[name].reshape((1,) * (3 - t[name].ndim) + t[name].shape)
                x = x[part] if len(x) > 1 or tokens == 1 else x
                last = min(last, x.shape[-1] if x.shape[-1] != 1 else length)
                terms[name] = x
        terms = {name: x[..., :last] for name, x in terms.items()}
        slopes = t.get("alibi_slopes")
        slopes = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        found = attend(q[part], own_k, own_v, last, **own, **terms, slopes=slopes)
        out[part], lse[:, part] = found
    return out, lse


def case(lengths, heads=4, kv_heads=2, width=8, block_size=4, blocks=12, columns=None, new=None, value_width=None,
         value_size=None, codes=None, mask=None, bias=None, slopes=None, **settings):  # fmt: skip
    """Returns a card's case: `new` are the tokens of each sequence, or None for one each; `codes` are the axis of
    features of scales and of zero points, each (width, 1 or None)."""
    tokens = len(lengths) if new is None else sum(new)
    columns = -(-max([*lengths, 0]) // block_size) if columns is None else columns
    scale, zero = codes or (None, None)
    value_width = None if value_size is not None else value_width or width
    of_values = [None if value_width is None or x is None else min(x, value_width) for x in (scale, zero)]
    axes = dict(
        q=(tokens, heads, width),
        key_cache=(blocks, block_size, kv_heads, width),
        value_cache=None if value_width is None else (blocks, block_size, kv_heads, value_width),
        block_tables=(len(lengths), columns),
        lengths=(len(lengths),),
        cu_seqlens_q=None if new is None else (len(lengths) + 1,),
        mask=mask,
        bias=bias,
        alibi_slopes=slopes,
        key_scale=scale and (kv_heads, scale),
        value_scale=of_values[0] and (kv_heads, of_values[0]),
        key_zero_point=zero and (kv_heads, zero),
        value_zero_point=of_values[1] and (kv_heads, of_values[1]),
    )
    optional = tuple(name for name in NAMES if name not in ALWAYS and axes[name] is not None)
    own = {k: v for k, v in dict(value_size=value_size, codes=codes, new=new).items() if v is not None}
    settings = dict(settings, lengths=tuple(lengths), optional=optional, **own)
    return [axes[name] for name in NAMES if axes[name] is not None], settings


def random_tables(rng, lengths, columns, blocks, size):
    """Returns a table whose entries beyond the keys lead nowhere, and which rows (blocks, size) are no keys."""
    tables = rng.integers(0, max(1, blocks), (len(lengths), columns))
    unused = np.ones((blocks, size), bool)
    for b, length in enumerate(lengths):
        tables[b, -(-length // size) :] = rng.choice((-1, blocks, 2**31 - 1), columns + -length // size)
        rows = np.arange(length)
        unused[tables[b, rows // size], rows % size] = False
    return tables.astype(np.int32), unused


class Attend(nn.Cell):
    """Calls the function with the inputs and those optional ones that `optional` names."""

    def __init__(self, optional=("value_cache",), **settings):
        super().__init__()
        given = [name for name in NAMES if name in (*ALWAYS, *optional)]
        self.places = tuple(given.index(name) if name in given else -1 for name in NAMES)
        self.settings = tuple(settings.get(name, value) for name, value in DEFAULTS.items())

    def construct(self, *inputs):
        given = ()
        for place in self.places:
            given += (inputs[place] if place >= 0 else None,)
        inputs, (mask, bias, slopes), codes = given[:6], given[6:9], given[9:]
        causal, scale, window, softcap, value_size = self.settings
        terms = (causal, scale, window, mask, softcap, bias, slopes)
        return msops.paged_attention(*inputs, *terms, *codes, value_size, True)
