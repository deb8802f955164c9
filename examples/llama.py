"""A small Llama: a language model of rotary embeddings, grouped attention, gated layers and root mean square norms."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer


class Linear(nn.Cell):
    """A matrix without bias, whose initial values keep the size of what it multiplies."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = Parameter(initializer(Normal(inputs**-0.5), (outputs, inputs)), name="weight")

    def construct(self, x):
        rows = ops.matmul(x.reshape(-1, x.shape[-1]), self.weight.T)
        return rows.reshape(*x.shape[:-1], -1)


class Attention(nn.Cell):
    """Lets each position read itself and those before it. Several query heads share the keys and values of one head."""

    def __init__(self, operators, width, heads, kv_heads, length):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = Linear(width, width)
        self.key = Linear(width, kv_heads * self.size)
        self.value = Linear(width, kv_heads * self.size)
        self.output = Linear(width, width)
        self.rotary = operators.RotaryEmbedding(self.size, length)
        self.attend = operators.FlashAttention(causal=True)

    def split(self, x, heads):
        """Returns x (B, T, heads * size) as (B, heads, T, size)."""
        return x.reshape(x.shape[0], x.shape[1], heads, self.size).swapaxes(1, 2)

    def construct(self, x):
        batch, length, width = x.shape
        q = self.rotary(self.split(self.query(x), self.heads))
        k = self.rotary(self.split(self.key(x), self.kv_heads))
        mixed = self.attend(q, k, self.split(self.value(x), self.kv_heads)).swapaxes(1, 2)
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

    def __init__(self, operators, width, heads, kv_heads, length):
        super().__init__()
        self.attention = Attention(operators, width, heads, kv_heads, length)
        self.feed_forward = FeedForward(operators, width, 8 * width // 3)
        self.norm1, self.norm2 = operators.AddRMSNorm(width), operators.AddRMSNorm(width)

    def construct(self, x, h):
        x, h = self.norm1(self.attention(x), h)
        return self.norm2(self.feed_forward(x), h)


class Llama(nn.Cell):
    """Maps tokens (B, T), T at most `length`, to scores of the token after each, (B, T, vocabulary).

    `operators` is a module that has the Cells RMSNorm, AddRMSNorm, RotaryEmbedding, FlashAttention and SwiGLU: msops or
    composed.
    """

    def __init__(self, operators, vocabulary, layers=4, width=128, heads=8, kv_heads=2, length=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, embedding_table=Normal(1.0))
        self.norm = operators.RMSNorm(width)
        self.layers = nn.CellList([Layer(operators, width, heads, kv_heads, length) for _ in range(layers)])
        self.head = Linear(width, vocabulary)

    def construct(self, tokens):
        h = self.embedding(tokens)
        x = self.norm(h)
        for layer in self.layers:
            x, h = layer(x, h)
        return self.head(x)


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
