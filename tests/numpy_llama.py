"""A Llama in NumPy, in float64: what the model of examples/llama.py is compared with. It shares no code with it."""

import numpy as np


def scores(file, tokens):
    """Returns the scores (T, vocabulary) that the model of a GGUF file gives for tokens (T,)."""
    say = {key.removeprefix("llama."): value for key, value in file.fields.items()}
    heads, kv_heads = say["attention.head_count"], say["attention.head_count_kv"]
    size = say["embedding_length"] // heads
    eps, length = say["attention.layer_norm_rms_epsilon"], len(tokens)
    angles = np.arange(length)[:, None] / say["rope.freq_base"] ** (np.arange(size // 2) * 2 / size)
    turn = np.exp(1j * angles)[:, None]  # neighbouring features are a complex number

    def weight(name):
        return file.tensor(f"{name}.weight")

    def norm(x, name):
        return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps) * weight(name)

    def turned(x):
        pairs = x.reshape(length, -1, size // 2, 2)
        complex_pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([complex_pairs.real, complex_pairs.imag], -1).reshape(length, -1, size)

    embedding = weight("token_embd")
    stream = embedding[tokens].astype(np.float64)
    for i in range(say["block_count"]):
        x = norm(stream, f"blk.{i}.attn_norm")
        q, k = (turned(x @ weight(f"blk.{i}.attn_{name}").T) for name in "qk")
        v = (x @ weight(f"blk.{i}.attn_v").T).reshape(length, kv_heads, size)
        group = heads // kv_heads
        products = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) / np.sqrt(size)
        products[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        shares = np.exp(products - products.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(v, group, 1)).reshape(length, -1)
        stream = stream + mixed @ weight(f"blk.{i}.attn_output").T
        x = norm(stream, f"blk.{i}.ffn_norm")
        gate, up = (x @ weight(f"blk.{i}.ffn_{name}").T for name in ("gate", "up"))
        stream = stream + (gate / (1 + np.exp(-gate)) * up) @ weight(f"blk.{i}.ffn_down").T
    return norm(stream, "output_norm") @ embedding.T
