"""The operators of a language model, composed of MindSpore's own. Each Cell is called as msops' Cell of its name."""

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import One, initializer


class RMSNorm(nn.Cell):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = Parameter(initializer(One(), (hidden_size,)), name="weight")
        self.eps = eps

    def construct(self, x):
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps) * self.weight


class AddRMSNorm(RMSNorm):
    def construct(self, x, residual):
        total = x + residual
        return total * ops.rsqrt((total * total).mean(-1, keep_dims=True) + self.eps) * self.weight, total


class RotaryEmbedding(nn.Cell):
    def __init__(self, dim, max_length, base=10000.0):
        super().__init__()
        angles = np.outer(np.arange(max_length), base ** (-np.arange(0, dim, 2) / dim))
        self.cos, self.sin = Tensor(np.cos(angles), mindspore.float32), Tensor(np.sin(angles), mindspore.float32)

    def construct(self, x):
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = ops.split(x, x.shape[3] // 2, axis=3)
        return ops.concat((a * cos - b * sin, b * cos + a * sin), 3)


@ops.constexpr
def later(length):
    """Returns what hides from each query the keys after it."""
    return Tensor(np.triu(np.full((length, length), -1e9), 1), mindspore.float32)


class FlashAttention(nn.Cell):
    """Causal attention of q (B, heads, T, size) to k and v (B, kv_heads, T, size)."""

    def __init__(self, causal):
        super().__init__()
        self.softmax = nn.Softmax()

    def construct(self, q, k, v):
        batch, heads, length, size = q.shape
        grouped = (q * size**-0.5).reshape(batch, k.shape[1], -1, size)  # the heads of a group one after the other
        scores = ops.matmul(grouped, k.swapaxes(2, 3)).reshape(batch, heads, length, length)
        weights = self.softmax(scores + later(length)).reshape(batch, k.shape[1], -1, length)
        return ops.matmul(weights, v).reshape(batch, heads, length, size)


class SwiGLU(nn.Cell):
    def construct(self, gate, up):
        return ops.silu(gate) * up


class CrossEntropyLoss(nn.Cell):
    def construct(self, logits, labels):
        return ops.cross_entropy(logits, labels)
