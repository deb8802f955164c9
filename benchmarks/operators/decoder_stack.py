"""Benchmarks all layers of a decoder, with the sizes of SmolLM2-135M and of Llama-3.2-1B. A size is (layers, texts, new
tokens of each, width, heads, heads of keys, features of a head, hidden, rows of the cache)."""

import numpy as np
from mindspore import nn, ops

import msops
from test_decoder_stack import NAMES, TestDecoderStack, case

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share

SMOLLM2, LLAMA = (576, 9, 3, 64, 1536), (2048, 32, 8, 64, 8192)


def of(layers, texts, new, model, room):
    return (layers, texts, new, *model, room)


ONE_TEXT = by(of(16, 1, 1, LLAMA, 2048))


class ByLayers(nn.Cell):
    """Computes what the operator does by MindSpore's own, a layer after another. Each text's cache is full."""

    def __init__(self, size):
        super().__init__()
        self.layers, self.texts, self.new, self.width, self.heads, self.kv_heads, self.size, *_ = size
        self.cut = self.heads * self.size, (self.heads + self.kv_heads) * self.size

    def norm(self, h, weight):
        return h * ops.rsqrt((h * h).mean(-1, keep_dims=True) + 1e-5) * weight

    def turn(self, x, heads, cos, sin):
        x = x.reshape(self.texts, self.new, heads, self.size)
        a, b = x[..., : self.size // 2], x[..., self.size // 2 :]
        return ops.concat((a * cos - b * sin, b * cos + a * sin), -1)

    def construct(self, x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm, keys, values, lengths):
        h, cos, sin = x, cos.expand_dims(-2), sin.expand_dims(-2)
        new_keys, new_values = (), ()
        group = self.heads // self.kv_heads
        for i in range(self.layers):
            rows = ops.matmul(self.norm(h, norm1[i]), qkv[i].T)
            q = self.turn(rows[..., : self.cut[0]], self.heads, cos, sin)
            k = self.turn(rows[..., self.cut[0] : self.cut[1]], self.kv_heads, cos, sin)
            v = rows[..., self.cut[1] :].reshape(k.shape)
            new_keys, new_values = (*new_keys, k), (*new_values, v)
            k, v = ops.concat((keys[i], k), 1), ops.concat((values[i], v), 1)
            k, v = (ops.repeat_elements(each.transpose(0, 2, 1, 3), group, 1) for each in (k, v))
            x = ops.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 1, 3, 2)) * self.size**-0.5
            o = ops.matmul(ops.softmax(x, -1), v).transpose(0, 2, 1, 3).reshape(self.texts, self.new, -1)
            h = h + ops.matmul(o, out[i].T)
            gate, up = ops.matmul(self.norm(h, norm2[i]), gate_up[i].T).split(gate_up.shape[1] // 2, -1)
            h = h + ops.matmul(gate * ops.sigmoid(gate) * up, down[i].T)
        return self.norm(h, norm), ops.stack(new_keys), ops.stack(new_values)


class Whole(nn.Cell):
    """Calls the operator with a full cache."""

    def __init__(self, size):
        super().__init__()
        self.heads, self.kv_heads = size[4], size[5]

    def construct(self, x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm, keys, values, lengths):
        matrices, cache = (norm1, qkv, out, norm2, gate_up, down, norm), dict(keys=keys, values=values, lengths=lengths)
        return msops.decoder_stack(x, cos, sin, *matrices, heads=self.heads, kv_heads=self.kv_heads, **cache)


class DecoderStack(Benchmark):
    card = TestDecoderStack()
    trains = False
    sizes = {
        "GPU": [
            Sizes(
                named=(of(30, 1, 1, SMOLLM2, 2048), of(16, 1, 1, LLAMA, 2048), of(30, 64, 1, SMOLLM2, 512),
                       of(30, 1, 2048, SMOLLM2, 0)),
                sweep=(of(30, 8, 1, SMOLLM2, 512),),
            )
        ],
        "CPU": [Sizes(named=(of(4, 1, 1, SMOLLM2, 512), of(4, 1, 128, SMOLLM2, 0)))],
    }  # fmt: skip
    cell_sizes = {"GPU": (of(30, 1, 1, SMOLLM2, 2048),), "CPU": (of(4, 1, 1, SMOLLM2, 512),)}
    targets = {
        "GPU": [
            Target(
                "sizes of Llama-3.2-1B, one text", "share 0.75 of a copy", 0.75, share(by(of(16, 1, 1, LLAMA, 2048)))
            )
        ]
    }
    compiled = False  # it compiles for minutes

    def inputs(self, size):
        return self.shapes_and_settings(size)[0]

    def settings(self, size):
        return self.shapes_and_settings(size)[1]

    def shapes_and_settings(self, size):
        layers, texts, new, width, heads, kv_heads, features, hidden, room = size
        return case(layers, texts, new, width, heads, kv_heads, features, hidden, room, optional=("norm",))

    def contents(self, name, size):
        """Returns lengths of full caches, and matrices that keep sizes."""
        shapes, settings = self.shapes_and_settings(size)
        shape = dict(zip((*NAMES, *settings["optional"]), shapes))[name]
        if name == "lengths":
            return np.full(shape, size[-1])
        if name in ("qkv", "out", "gate_up", "down"):
            layer = np.random.default_rng(0).standard_normal(shape[1:], np.float32) * shape[-1] ** -0.5
            return np.repeat(layer[None], shape[0], 0)
        return None

    def networks(self, size, dtype, device):
        return {"msops": Whole(size), "MindSpore": ByLayers(size)}

    def torch_formula(self, case):
        return None
