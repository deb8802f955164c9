"""Benchmarks all layers of a decoder, with the sizes of SmolLM2-135M and of Llama-3.2-1B, and four layers with those of
Llama-3.1-8B. A size is (layers, texts, new tokens of each, width, heads, heads of keys, features of a head, hidden,
rows of the cache), and perhaps one of FORMS."""

import numpy as np
from mindspore import Tensor, nn, ops

import msops
from numpy_decoder_stack import MATRICES, case, names_of, random_codes
from test_decoder_stack import TestDecoderStack

from ..benchmark import Benchmark, Sizes, by
from ..figures import Target, share, without

FORMS = {  # of matrices and of caches
    "4 bits": dict(bits=4, group=128, zeros="uint8"),
    "8 bits": dict(bits=8, group=128, zeros="uint8"),
    "blocks": dict(block_size=16),
}
SMOLLM2, LLAMA, LLAMA_8B = (576, 9, 3, 64, 1536), (2048, 32, 8, 64, 8192), (4096, 32, 8, 128, 14336)


def of(layers, texts, new, model, room, *form):
    return (layers, texts, new, *model, room, *form)


OF_8B = {"one text": of(4, 1, 1, LLAMA_8B, 2048), "64 texts": of(4, 64, 1, LLAMA_8B, 512)}


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

    def construct(self, x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm, keys, values):
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
        self.lengths = Tensor(np.full(size[1], size[8], np.int32))

    def construct(self, x, cos, sin, norm1, qkv, out, norm2, gate_up, down, norm, keys, values):
        matrices = norm1, qkv, out, norm2, gate_up, down, norm
        cache = dict(keys=keys, values=values, lengths=self.lengths)
        return msops.decoder_stack(x, cos, sin, *matrices, heads=self.heads, kv_heads=self.kv_heads, **cache)


class DecoderStack(Benchmark):
    card = TestDecoderStack()
    trains = False
    sizes = {
        "GPU": [
            Sizes(
                named=(of(30, 1, 1, SMOLLM2, 2048), of(16, 1, 1, LLAMA, 2048), of(30, 64, 1, SMOLLM2, 512),
                       of(30, 1, 2048, SMOLLM2, 0), of(16, 1, 1, LLAMA, 2048, "4 bits"), *OF_8B.values(),
                       *((*size, "4 bits") for size in OF_8B.values())),
                sweep=(of(30, 8, 1, SMOLLM2, 512), of(16, 1, 1, LLAMA, 2048, "8 bits"),
                       of(16, 1, 1, LLAMA, 2048, "blocks"), of(30, 64, 1, SMOLLM2, 512, "blocks"),
                       of(30, 64, 1, SMOLLM2, 512, "4 bits")),
            )
        ],
        "CPU": [
            Sizes(
                named=(of(4, 1, 1, SMOLLM2, 512), of(4, 1, 128, SMOLLM2, 0), of(4, 1, 1, SMOLLM2, 512, "4 bits")),
                sweep=(of(4, 1, 1, SMOLLM2, 512, "8 bits"), of(4, 1, 1, SMOLLM2, 512, "blocks")),
            )
        ],
    }  # fmt: skip
    cell_sizes = {"GPU": (of(30, 1, 1, SMOLLM2, 2048),), "CPU": (of(4, 1, 1, SMOLLM2, 512),)}
    targets = {
        "GPU": [
            Target(
                "sizes of Llama-3.2-1B, one text", "share 0.75 of a copy", 0.75, share(by(of(16, 1, 1, LLAMA, 2048)))
            ),
            *(
                Target(
                    f"sizes of Llama-3.1-8B in 4 bits, {texts}",
                    f"{least} times as fast as float16",
                    least,
                    without("4 bits", by(OF_8B[texts]), dtype="float16"),
                )
                for texts, least in (("one text", 2.8), ("64 texts", 1.2))
            ),
        ]
    }
    compiled = False  # it compiles for minutes

    def describe(self, size):
        return ", ".join((by(size[:9]), *size[9:]))

    def inputs(self, size):
        return self.shapes_and_settings(size)[0]

    def settings(self, size):
        return self.shapes_and_settings(size)[1]

    def shapes_and_settings(self, size):
        *sizes, room, form = size if len(size) > 9 else (*size, None)
        own = FORMS.get(form, {})
        return case(*sizes, room // own.get("block_size", 1), optional=("norm",), **own)

    def contents(self, name, size):
        """Returns full caches, whose blocks lie in order, and matrices that keep sizes."""
        shapes, settings = self.shapes_and_settings(size)
        shapes, bits, rng = dict(zip(names_of(**settings), shapes)), settings.get("bits"), np.random.default_rng(0)
        if name == "lengths":
            return np.full(shapes[name], size[8])
        if name == "block_tables":
            return np.arange(np.prod(shapes[name]), dtype=np.int32).reshape(shapes[name])
        matrix = next((each for each in MATRICES if name in (each, f"{each}_scale", f"{each}_zero_point")), None)
        if matrix is None:
            return None
        codes = shapes[matrix][1:]
        if bits:
            scales = shapes[f"{matrix}_scale"][1:]
            layer = random_codes(rng, matrix, codes, scales, bits, settings["zeros"], "float32")[name]
        else:
            layer = rng.standard_normal(codes, np.float32) * codes[-1] ** -0.5
        return np.repeat(layer[None], size[0], 0)

    def cell_inputs(self, size):
        return self.inputs(size)[:-1]  # all but the lengths

    def networks(self, size, dtype, device):
        return {"msops": Whole(size), "MindSpore": ByLayers(size)}

    def torch_formula(self, case):
        return None
