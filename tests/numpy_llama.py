"""A Llama and a Qwen2 in NumPy, in float64: what examples/llama.py is compared with. It shares no code with it."""

import numpy as np


def scores(file, tokens):
    """Returns the scores (T, vocabulary) that the model of a GGUF file gives for tokens (T,)."""
    kind = file.fields["general.architecture"]
    say = {key.removeprefix(f"{kind}."): value for key, value in file.fields.items()}
    heads, kv_heads = say["attention.head_count"], say["attention.head_count_kv"]
    size = say["embedding_length"] // heads
    eps, length = say["attention.layer_norm_rms_epsilon"], len(tokens)
    angles = np.arange(length)[:, None] / say["rope.freq_base"] ** (np.arange(size // 2) * 2 / size)
    if "rope_freqs.weight" in file.names:
        angles = angles / file.tensor("rope_freqs.weight")
    turn = np.exp(1j * angles)[:, None]
    # Neighbouring features of a Llama are a complex number; in a Qwen2, one of each half is.
    real, imaginary = (slice(0, None, 2), slice(1, None, 2)) if kind == "llama" else np.split(np.arange(size), 2)

    def weight(name):
        return file.tensor(f"{name}.weight")

    def product(x, name):
        bias = file.tensor(f"{name}.bias") if f"{name}.bias" in file.names else 0
        return x @ weight(name).T + bias

    def norm(x, name):
        return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps) * weight(name)

    def turned(x):
        of_heads = x.reshape(length, -1, size)
        pairs = (of_heads[..., real] + 1j * of_heads[..., imaginary]) * turn
        result = np.empty_like(of_heads)
        result[..., real], result[..., imaginary] = pairs.real, pairs.imag
        return result

    embedding = weight("token_embd")
    stream = embedding[tokens].astype(np.float64)
    for i in range(say["block_count"]):
        x = norm(stream, f"blk.{i}.attn_norm")
        q, k = (turned(product(x, f"blk.{i}.attn_{name}")) for name in "qk")
        v = product(x, f"blk.{i}.attn_v").reshape(length, kv_heads, size)
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
    head = weight("output") if "output.weight" in file.names else embedding
    return norm(stream, "output_norm") @ head.T
