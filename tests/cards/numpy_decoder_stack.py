"""Computes the layers of a decoder in NumPy, and has what the card and the tests of it share."""

import numpy as np
from mindspore import nn

import msops

OPTIONAL = ("norm", "qkv_bias", "q_norm", "k_norm", "keys", "values", "lengths", "block_tables")
CACHE = OPTIONAL[4:7]
MATRICES = ("qkv", "out", "gate_up", "down")
NAMES = ("x", "cos", "sin", "norm1", "qkv", "out", "norm2", "gate_up", "down")


CODES = tuple(f"{name}_{what}" for what in ("scale", "zero_point") for name in MATRICES)


def names_of(optional=(), bits=0, zeros=None, **_):
    """Returns the names of a case's inputs. With `bits`, matrices are codes; `zeros` is the dtype of zero points."""
    given = (name for name in OPTIONAL if name in optional)
    return (*NAMES, *given, *(CODES[:4] if bits else ()), *(CODES[4:] if zeros else ()))


def random_codes(rng, name, codes, scales, bits, zeros, dtype):
    """Returns a matrix of such a shape with scales, and zero points of the dtype `zeros`, or "scale", of the scales.
    Its numbers have the size of those of other matrices."""
    half = 2 ** (bits - 1)
    found = {
        name: rng.integers(0, 256, codes).astype(np.uint8 if zeros else np.int8),
        f"{name}_scale": rng.uniform(1, 2, scales) / half / np.sqrt(max(1, codes[-1] * 8 // bits)),
        f"{name}_zero_point": half + rng.uniform(-2, 2, scales),
    }
    found[f"{name}_scale"] = found[f"{name}_scale"].astype("float32" if zeros == "float32" else dtype)
    zero = found.pop(f"{name}_zero_point")
    return found | ({f"{name}_zero_point": zero.astype(dtype if zeros == "scale" else zeros)} if zeros else {})


def decoded(codes, scale, zero, columns, bits, group):
    """Returns the matrices that codes stand for, in the dtype of scales, which is the widest one."""
    if bits == 4:
        halves = np.stack((codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4), -1).reshape(*codes.shape[:-1], -1)
        signed = codes.dtype == np.int8
        codes = ((halves.astype(np.int16) ^ 8) - 8 if signed else halves)[..., :columns]
    place = np.arange(columns) // (group or max(1, columns))
    numbers = codes.astype(scale.dtype) - (0 if zero is None else zero.astype(scale.dtype)[..., place])
    return numbers * scale[..., place]


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def turned(x, cos, sin, interleaved):
    """Rotates heads (B, T, heads, D) by angles (..., T, D/2)."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[..., None, :], sin[..., None, :]
    both = a * cos - b * sin, b * cos + a * sin
    return np.stack(both, -1).reshape(x.shape) if interleaved else np.concatenate(both, -1)


def attention(q, k, v, cached):
    """Attends to keys (rows, kv_heads, D), the first of which are cached; q is (T, heads, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    x = np.einsum("thd,jhd->htj", q, k) / np.sqrt(q.dtype.type(q.shape[-1]))
    x[:, np.arange(len(k)) > cached + np.arange(len(q))[:, None]] = -np.inf
    p = np.exp(x - x.max(-1, keepdims=True)) if x.size else x
    return np.einsum("htj,jhd->thd", p / p.sum(-1, keepdims=True), v)


def by_layer(cache, layers, batch):
    """Returns a view of a cache that has axes of layers and of texts, or of blocks where their axis has both."""
    if cache.ndim == 5:
        return cache
    rows = cache.shape[1:-2] if cache.ndim == 4 else (len(cache) // max(1, layers * batch),)
    return cache.reshape(layers, len(cache) // max(1, layers) if cache.ndim == 4 else batch, *rows, *cache.shape[-2:])


def cached_rows(cache, b, count, tables):
    """Returns the rows of a text that count in a layer's cache."""
    if tables is None:
        return cache[b, :count]
    j, size = np.arange(count), cache.shape[1]
    return cache[tables[b, j // size], j % size]


def decoder_stack(
    *inputs, heads=1, kv_heads=1, eps=1e-5, interleaved=False, optional=(), bits=0, group=None, zeros=None, **_
):
    t = dict(zip(names_of(optional, bits, zeros), inputs))
    if bits:
        size = t["qkv"].shape[1] // (heads + 2 * kv_heads)
        columns = t["x"].shape[2], heads * size, t["x"].shape[2], t["gate_up"].shape[1] // 2
        wide = np.result_type(t["x"], t["qkv_scale"], np.float32)
        for name, count in zip(MATRICES, columns):
            scale = t[f"{name}_scale"].astype(wide)
            t[name] = decoded(t[name], scale, t.get(f"{name}_zero_point"), count, bits, group).astype(t["x"].dtype)
    (batch, new, _), layers, h = t["x"].shape, len(t["qkv"]), t["x"]
    size = t["qkv"].shape[1] // (heads + 2 * kv_heads)
    found = np.zeros((2, layers, batch, new, kv_heads, size), h.dtype)
    for i in range(layers):
        rows = rms_norm(h, t["norm1"][i], eps) @ t["qkv"][i].T
        rows = rows + t["qkv_bias"][i] if "qkv_bias" in t else rows
        rows = rows.reshape(batch, new, heads + 2 * kv_heads, size)
        q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + kv_heads], rows[:, :, heads + kv_heads :]
        q, k = (rms_norm(x, t[n][i], eps) if n in t else x for n, x in (("q_norm", q), ("k_norm", k)))
        q, k = (turned(x, t["cos"], t["sin"], interleaved) for x in (q, k))
        found[:, i] = k, v
        o = np.zeros_like(q)
        for b in range(batch):
            count = int(t["lengths"][b]) if "lengths" in t else 0
            held = [k[b, :0], v[b, :0]]
            if "keys" in t:
                caches = (by_layer(t[name], layers, batch)[i] for name in CACHE[:2])
                held = [cached_rows(cache, b, count, t.get("block_tables")) for cache in caches]
            o[b] = attention(q[b], np.concatenate((held[0], k[b])), np.concatenate((held[1], v[b])), count)
        h = h + o.reshape(batch, new, heads * size) @ t["out"][i].T
        gate, up = np.split(rms_norm(h, t["norm2"][i], eps) @ t["gate_up"][i].T, 2, -1)
        h = h + (gate / (1 + np.exp(-gate)) * up) @ t["down"][i].T
    return rms_norm(h, t["norm"], eps) if "norm" in t else h, *found


def case(layers, batch, new, width, heads, kv_heads, size, hidden, room=None, optional=(), per_text=False, cut=False,
         block_size=0, bits=0, group=None, zeros=None, **settings):  # fmt: skip
    """Returns a card's case; with `room`, there is a cache, and the axis of its rows, or blocks, has those of all
    layers if `cut`. With `block_size`, it has blocks, and `room` counts those of a text. Angles may be of each text.
    With `bits`, matrices are codes."""
    given = [*optional, *(CACHE if room is not None else ()), *["block_tables"] * bool(block_size)]
    optional = tuple(name for name in OPTIONAL if name in given)
    rows = (heads + 2 * kv_heads) * size
    table = (*[batch] * per_text, new, size // 2)
    cache = (layers * batch * (room or 0),) if cut else (layers, batch, room)
    if block_size:
        blocks = batch * room + 2
        cache = (layers * blocks, block_size) if cut else (layers, blocks, block_size)
    shapes = dict(
        x=(batch, new, width), cos=table, sin=table, norm1=(layers, width), qkv=(layers, rows, width),
        out=(layers, width, heads * size), norm2=(layers, width), gate_up=(layers, 2 * hidden, width),
        down=(layers, width, hidden), norm=(width,), qkv_bias=(layers, rows), q_norm=(layers, size),
        k_norm=(layers, size), keys=(*cache, kv_heads, size), values=(*cache, kv_heads, size), lengths=(batch,),
        block_tables=(batch, room),
    )  # fmt: skip
    settings.update(heads=heads, kv_heads=kv_heads, optional=optional)
    if bits:
        settings.update(bits=bits, group=group, zeros=zeros)
        for name in MATRICES:
            *leading, columns = shapes[name]
            shapes[name] = (*leading, columns if bits == 8 else -(-columns // 2))
            groups = -(-columns // group) if group else 1
            shapes[f"{name}_scale"] = shapes[f"{name}_zero_point"] = (*leading, groups)
    return [shapes[name] for name in names_of(**settings)], settings


class Stack(nn.Cell):
    """Calls the function with the inputs and those optional ones that `optional` names, then what codes need."""

    def __init__(self, optional=(), zeros=None, **settings):
        super().__init__()
        self.inputs = len(NAMES) + len(optional)
        places = {name: len(NAMES) + i for i, name in enumerate(optional)}
        self.places, self.settings = tuple(places.get(name, -1) for name in OPTIONAL), settings

    def construct(self, *inputs):
        optional = ()
        for place in self.places:
            optional += (inputs[place] if place >= 0 else None,)
        x, cos, sin, norm1, qkv, out, norm2, gate_up, down = inputs[:9]
        norm, bias, q_norm, k_norm, keys, values, lengths, tables = optional
        matrices = (norm1, qkv, out, norm2, gate_up, down, norm, bias, q_norm, k_norm, keys, values, lengths)
        scales, zero_points = None, None
        if len(inputs) > self.inputs:
            scales = inputs[self.inputs : self.inputs + 4]
        if len(inputs) > self.inputs + 4:
            zero_points = inputs[self.inputs + 4 :]
        return msops.decoder_stack(
            *(x, cos, sin), *matrices, **self.settings, block_tables=tables, scales=scales, zero_points=zero_points
        )
