"""The operators of a language model, composed of MindSpore's own. Each is called as msops' operator of its name.

Statistics and losses are computed in float32, as msops does.
"""

import mindspore
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import One, initializer


class RMSNorm(nn.Cell):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = Parameter(initializer(One(), (hidden_size,)), name="weight")
        self.eps = eps

    def construct(self, x):
        wide = x.astype(mindspore.float32)
        wide = wide * ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + self.eps)
        return wide.astype(x.dtype) * self.weight.astype(x.dtype)


class AddRMSNorm(RMSNorm):
    def construct(self, x, residual):
        total = x + residual
        wide = total.astype(mindspore.float32)
        wide = wide * ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + self.eps)
        return wide.astype(x.dtype) * self.weight.astype(x.dtype), total


def rotary_embedding(x, cos, sin, interleaved=False, layout="BHTD"):
    axis = -3 if layout == "BHTD" else -2  # where the heads are, which share the angles
    cos, sin = ops.expand_dims(cos, axis).astype(x.dtype), ops.expand_dims(sin, axis).astype(x.dtype)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return ops.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
    a, b = ops.split(x, x.shape[3] // 2, axis=3)
    return ops.concat((a * cos - b * sin, b * cos + a * sin), 3)


class FlashAttention(nn.Cell):
    """Attention with the matrix of its weights in memory."""

    def __init__(self, causal, layout):
        super().__init__()
        self.causal, self.layout = causal, layout

    def construct(self, q, k, v, kv_lengths=None):
        if self.layout == "BTHD":
            q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
        batch, heads, queries, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        q = (q * size**-0.5).reshape(batch, kv_heads, -1, size)  # the heads of a group one after the other
        scores = ops.matmul(q, k.swapaxes(2, 3)).reshape(batch, heads, queries, keys).astype(mindspore.float32)
        lengths = ops.full((batch,), keys, dtype=mindspore.int32) if kv_lengths is None else kv_lengths
        first = lengths - (queries if self.causal else 1)  # the last key that the first query sees
        rows = ops.arange(queries) if self.causal else ops.zeros(queries, mindspore.int64)
        hidden = ops.arange(keys) > first.reshape(-1, 1, 1, 1) + rows.reshape(1, 1, -1, 1)
        weights = ops.softmax(scores.masked_fill(hidden, -1e9)).astype(q.dtype)
        mixed = ops.matmul(weights.reshape(batch, kv_heads, -1, keys), v).reshape(batch, heads, queries, -1)
        return mixed.swapaxes(1, 2) if self.layout == "BTHD" else mixed


class SwiGLU(nn.Cell):
    def construct(self, gate, up):
        return ops.silu(gate) * up


class CrossEntropyLoss(nn.Cell):
    def construct(self, logits, labels):
        return ops.cross_entropy(logits.astype(mindspore.float32), labels)
