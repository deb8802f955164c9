"""Blocks of GGUF files in NumPy, after ggml's definition (ggml-quants.c): what they mean, and random ones."""

import numpy as np

KINDS = {
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q8_0": (34, 32),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
}
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_STEPS = {"Q4_0": 0.2, "Q4_1": 0.2, "Q8_0": 0.02, "Q4_K": 0.01, "Q5_K": 0.005, "Q6_K": 0.001}  # of numbers around 1


def row_bytes(kind, columns):
    size, numbers = KINDS[kind]
    return columns // numbers * size


def random_blocks(seed, kind, rows, columns):
    """Returns blocks whose numbers have sizes around 1, and scales of both signs."""
    rng, (size, _) = np.random.default_rng(seed), KINDS[kind]
    blocks = rng.integers(0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8)
    of_each = blocks.reshape(-1, size)
    for at in _HALVES[kind]:
        scales = _STEPS[kind] * rng.uniform(0.5, 1, (len(of_each), 1)) * rng.choice((-1, 1), (len(of_each), 1))
        if kind == "Q4_1" and at == 2:
            scales = -8 * of_each[:, :2].copy().view(np.float16).astype(float)
        of_each[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks


def _half(blocks, at):
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(codes):
    """Returns the lower halves of some bytes, then the upper halves."""
    return np.concatenate([codes & 15, codes >> 4], -1)


def _six_bits(blocks):
    """Returns the eight scales and the eight minima of Q4_K and Q5_K, which have six bits each in 12 bytes."""
    low, high, more = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (more & 15) | (low >> 6 << 4)], 1)
    minima = np.concatenate([high & 63, (more >> 4) | (high >> 6 << 4)], 1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _with_minima(blocks, codes):
    d, dmin = _half(blocks, 0)[:, :, None], _half(blocks, 2)[:, :, None]
    scales, minima = _six_bits(blocks)
    return d * scales * codes.reshape(-1, 8, 32).astype(np.float32) - dmin * minima


def _q6(blocks):
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    upper = high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = _nibbles(low).reshape(-1, 2, 4, 32) | upper << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[:, :, None] * (codes.reshape(-1, 16, 16).astype(np.float32) - 32)


def _q5(blocks):
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_minima(blocks, codes | fifth << 4)


_FORMULAS = {
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2),
    "Q8_0": lambda b: _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32),
    "Q4_K": lambda b: _with_minima(b, _nibbles(b[:, 16:].reshape(-1, 4, 32))),
    "Q5_K": _q5,
    "Q6_K": _q6,
}


def dequantized(blocks, kind):
    """Returns the numbers of rows of blocks in float32."""
    size, numbers = KINDS[kind]
    shape = *blocks.shape[:-1], blocks.shape[-1] // size * numbers
    return np.asarray(_FORMULAS[kind](np.ascontiguousarray(blocks).reshape(-1, size)), np.float32).reshape(shape)
