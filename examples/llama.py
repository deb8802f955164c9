"""A small Llama: a language model of rotary embeddings, grouped attention, gated layers and root mean square norms."""

from operator import attrgetter

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

import msops


class Linear(nn.Cell):
    """A matrix, whose initial values keep the size of what it multiplies, and a bias if asked for. It multiplies in the
    dtype of its input."""

    def __init__(self, inputs, outputs, bias=False):
        super().__init__()
        self.weight = Parameter(initializer(Normal(inputs**-0.5), (outputs, inputs)), name="weight")
        self.bias = Parameter(initializer("zeros", (outputs,)), name="bias") if bias else None
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        rows = self.matmul(x.reshape(-1, x.shape[-1]), self.weight.astype(x.dtype))
        if self.bias is not None:
            rows = rows + self.bias.astype(x.dtype)
        return rows.reshape(*x.shape[:-1], -1)


class Attention(nn.Cell):
    """Lets each position read itself and those before it. Several query heads share the keys and values of one head.

    With a cache, which is (keys, values, rows, lengths), the new keys and values go to these rows of the Parameters
    keys and values, shape (B * capacity, kv_heads, size), and each sample reads as many of its rows as lengths says.
    """

    def __init__(self, operators, width, heads, kv_heads, interleaved, bias):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = Linear(width, width, bias)
        self.key = Linear(width, kv_heads * self.size, bias)
        self.value = Linear(width, kv_heads * self.size, bias)
        self.output = Linear(width, width)
        self.turn, self.interleaved = operators.rotary_embedding, interleaved
        self.attend = operators.FlashAttention(causal=True, layout="BTHD")
        self.write = ops.ScatterUpdate()

    def project(self, x, cos, sin):
        """Returns queries, keys and values, (B, T, heads, size), turned by the angles of their places."""
        shape = *x.shape[:2], -1, self.size
        q = self.turn(self.query(x).reshape(shape), cos, sin, self.interleaved, "BTHD")
        k = self.turn(self.key(x).reshape(shape), cos, sin, self.interleaved, "BTHD")
        return q, k, self.value(x).reshape(shape)

    def construct(self, x, cos, sin, cache=None):
        batch, length, width = x.shape
        q, k, v = self.project(x, cos, sin)
        if cache is None:
            mixed = self.attend(q, k, v)
        else:
            keys, values, rows, lengths = cache
            k = self.write(keys, rows, k.reshape(-1, self.kv_heads, self.size))
            v = self.write(values, rows, v.reshape(-1, self.kv_heads, self.size))
            shape = (batch, -1, self.kv_heads, self.size)
            mixed = self.attend(q, k.reshape(shape), v.reshape(shape), lengths)
        return self.output(mixed.reshape(batch, length, width))


class FeedForward(nn.Cell):
    """Transforms each position by itself."""

    def __init__(self, operators, width, hidden):
        super().__init__()
        self.gate, self.up, self.down = Linear(width, hidden), Linear(width, hidden), Linear(hidden, width)
        self.swiglu = operators.SwiGLU()

    def construct(self, x):
        return self.down(self.swiglu(self.gate(x), self.up(x)))


class Layer(nn.Cell):
    """Adds attention, then a feed-forward network, to the stream h. Each norm gives what the next part reads."""

    def __init__(self, operators, width, heads, kv_heads, hidden, eps, interleaved, bias, feed_forward):
        super().__init__()
        self.attention = Attention(operators, width, heads, kv_heads, interleaved, bias)
        self.feed_forward = feed_forward(operators, width, hidden)
        self.norm1, self.norm2 = operators.AddRMSNorm(width, eps), operators.AddRMSNorm(width, eps)

    def construct(self, x, h, cos, sin, cache=None):
        x, h = self.norm1(self.attention(x, cos, sin, cache), h)
        return self.norm2(self.feed_forward(x), h)


class Llama(nn.Cell):
    """Maps tokens (B, T), T at most `length`, to scores of the token after each, (B, T, vocabulary).

    `operators` is a module that has RMSNorm, AddRMSNorm, rotary_embedding, FlashAttention and SwiGLU, as msops and
    composed do. `hidden` is the width inside the feed-forward networks, by default 8/3 of `width`. The angles of the
    rotary embedding are computed with `base`, and divided by `slower`, one number for each angle, as Llama 3.1 does;
    they turn neighbouring features if `interleaved`. If `bias`, queries, keys and values have one, as in Qwen2. If
    `tied`, the embedding is also the matrix that gives the scores. Everything is computed in `dtype`, whatever dtype
    the Parameters have. `feed_forward` makes the network of each layer.
    """

    def __init__(
        self,
        operators,
        vocabulary,
        layers=4,
        width=128,
        heads=8,
        kv_heads=2,
        length=128,
        hidden=None,
        eps=1e-6,
        base=10000.0,
        slower=1.0,
        interleaved=False,
        bias=False,
        tied=False,
        dtype=mindspore.float32,
        feed_forward=FeedForward,
    ):
        super().__init__()
        hidden = hidden or 8 * width // 3
        self.length, self.dtype = length, dtype
        scale = width**-0.5 if tied else 1.0
        self.embedding = Parameter(initializer(Normal(scale), (vocabulary, width)), name="embedding")
        self.norm = operators.RMSNorm(width, eps)
        layer = (operators, width, heads, kv_heads, hidden, eps, interleaved, bias, feed_forward)
        self.layers = nn.CellList([Layer(*layer) for _ in range(layers)])
        self.head = None if tied else Linear(width, vocabulary)
        self.matmul = ops.MatMul(transpose_b=True)
        size = width // heads
        angles = np.outer(np.arange(length), base ** (-np.arange(0, size, 2) / size) / slower)
        self.cos, self.sin = Tensor(np.cos(angles), mindspore.float32), Tensor(np.sin(angles), mindspore.float32)

    def embed(self, tokens):
        return ops.gather(self.embedding, tokens, 0).astype(self.dtype)

    def read(self, tokens, cos, sin, caches=None):
        """Returns what the scores are computed from, (B, T, width). `caches` has a cache for each layer's Attention."""
        h = self.embed(tokens)
        x = self.norm(h)
        for i, layer in enumerate(self.layers):
            x, h = layer(x, h, cos, sin, None if caches is None else caches[i])
        return x

    def score(self, x):
        if self.head is not None:
            return self.head(x)
        scores = self.matmul(x.reshape(-1, x.shape[-1]), self.embedding.astype(x.dtype))
        return scores.reshape(*x.shape[:-1], -1)

    def construct(self, tokens):
        length = tokens.shape[1]
        return self.score(self.read(tokens, self.cos[:length], self.sin[:length]))


def pack(net):
    """Returns an msops.DecoderStack with the weights of a Llama's layers. It computes from the embedded tokens what
    `read` returns, all layers in one operator, for inference."""
    first = net.layers[0].attention
    stack = msops.DecoderStack(
        *(len(net.layers), net.embedding.shape[1], first.heads, first.kv_heads),
        hidden=net.layers[0].feed_forward.gate.weight.shape[0],
        eps=net.norm.eps,
        interleaved=first.interleaved,
        qkv_bias=first.query.bias is not None,
        dtype=net.dtype,
    )

    def arrays(*paths, kind="weight"):
        """Returns these weights of each layer, with the rows of one matrix after those of another."""
        found = [[attrgetter(f"{path}.{kind}")(layer).asnumpy() for path in paths] for layer in net.layers]
        return np.stack([np.concatenate(each) for each in found])

    norms = np.concatenate((net.norm.weight.asnumpy()[None], arrays("norm2")))  # that after a layer is the next one's
    qkv = "attention.query", "attention.key", "attention.value"
    weights = dict(
        norm1=norms[:-1],
        norm=norms[-1],
        norm2=arrays("norm1"),
        qkv=arrays(*qkv),
        out=arrays("attention.output"),
        gate_up=arrays("feed_forward.gate", "feed_forward.up"),
        down=arrays("feed_forward.down"),
    )
    if stack.qkv_bias is not None:
        weights.update(qkv_bias=arrays(*qkv, kind="bias"))
    for name, value in weights.items():
        getattr(stack, name).set_data(Tensor(value, net.dtype))
    return stack


class NextTokenLoss(nn.Cell):
    """Compares scores (B, T, vocabulary) with the tokens that come next, (B, T)."""

    def __init__(self, operators):
        super().__init__()
        self.cross_entropy = operators.CrossEntropyLoss()

    def construct(self, scores, tokens):
        return self.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1))


def generate(net, tokens, amount, length, rng, temperature=0.8):
    """Returns tokens (N,), continued by `amount` samples from what `net`, whose greatest length is given, predicts."""
    tokens = list(tokens)
    for _ in range(amount):
        seen = tokens[-length:]
        window = np.zeros((1, length), np.int32)  # one shape for all calls; no position reads those after it
        window[0, : len(seen)] = seen
        scores = net(Tensor(window)).asnumpy()[0, len(seen) - 1]
        tokens.append(int(np.argmax(scores / temperature + rng.gumbel(size=scores.shape))))
    return tokens
