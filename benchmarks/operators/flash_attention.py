"""Benchmarks attention. A size is (B, Hq, Hk, Tq, Tk, D, causal), where causal is 0 or 1, and perhaps one of TERMS."""

import contextlib

from mindspore import ops

import msops
from test_flash_attention import TestFlashAttention

from ..benchmark import Benchmark, OfFunction, Sizes
from ..figures import Target, best_peer, times_faster, without

TORCH = ("torch flash", "torch cuDNN", "torch efficient")
DROPOUT_P = 0.1
TERMS = {  # name -> the input of the card, and its shape
    "mask": ("mask", lambda heads, queries, keys: (queries, keys)),
    "bias": ("bias", lambda heads, queries, keys: (heads, queries, keys)),
    "ALiBi": ("alibi_slopes", lambda heads, queries, keys: (heads,)),
    "dropout": ("seed", lambda heads, queries, keys: ()),
}


def composed(q, k, v):
    """Computes attention by MindSpore's operators, for heads of keys that serve one head of queries each."""
    scores = ops.matmul(q * q.shape[-1] ** -0.5, k.swapaxes(2, 3))
    return ops.matmul(ops.softmax(scores), v)


def composed_causal(q, k, v):
    scores = ops.matmul(q * q.shape[-1] ** -0.5, k.swapaxes(2, 3))
    later = ops.arange(k.shape[2]).expand_dims(0) > ops.arange(q.shape[2]).expand_dims(1)
    return ops.matmul(ops.softmax(ops.masked_fill(scores, later, -60000.0)), v)


def flash_causal(q, k, v):
    return msops.flash_attention(q, k, v, causal=True)


class FlashAttention(Benchmark):
    card = TestFlashAttention()
    sizes = {
        "GPU": [
            Sizes(
                named=(
                    (8, 16, 16, 2048, 2048, 64, 1),
                    (4, 16, 16, 4096, 4096, 128, 1),
                    (4, 16, 16, 4096, 4096, 128, 0),
                    (2, 32, 8, 8192, 8192, 128, 1),
                    (1, 16, 16, 16384, 16384, 128, 1),
                    (64, 12, 12, 512, 512, 64, 0),
                ),
                sweep=(
                    (64, 32, 8, 1, 8192, 128, 0),
                    (8, 32, 8, 1, 2048, 128, 0),
                    (64, 9, 3, 1, 2048, 64, 0),
                    (1, 9, 3, 1, 2048, 64, 0),
                    (1, 32, 8, 16, 8192, 128, 0),
                    (2, 8, 8, 1024, 1024, 256, 1),
                    *((4, 16, 16, 4096, 4096, 128, 0, term) for term in TERMS),
                    *((8, 16, 16, 2048, 2048, 64, 1, term) for term in ("mask", "ALiBi", "dropout")),
                    (64, 12, 12, 512, 512, 64, 0, "mask"),
                ),
                ragged={(4, 16, 16, 4095, 4095, 126, 1): (4, 16, 16, 4096, 4096, 128, 1)},
            )
        ],
        "CPU": [
            Sizes(
                named=((1, 4, 4, 512, 512, 64, 1), (1, 4, 4, 512, 512, 64, 0)),
                sweep=(
                    (2, 4, 4, 128, 128, 64, 1),
                    (1, 8, 2, 1, 2048, 64, 0),
                    (1, 4, 4, 512, 512, 64, 0, "mask"),
                    (2, 8, 8, 1024, 1024, 64, 0),
                    (2, 8, 8, 1024, 1024, 64, 0, "mask"),
                ),
                ragged={(1, 4, 4, 511, 511, 63, 1): (1, 4, 4, 512, 512, 64, 1)},
            )
        ],
    }
    cell_sizes = {
        "GPU": [(8, 16, 16, 2048, 2048, 64, 1), (4, 16, 16, 4096, 4096, 128, 1)],
        "CPU": [(1, 4, 4, 128, 128, 64, 1), (1, 4, 4, 1024, 1024, 64, 1)],
    }
    headline = (
        ("B4 H16 T4096 D128 causal", "float16"),
        ("B8 H16 T2048 D64 causal", "float16"),
        ("B4 H16 T4096 D128 causal", "float32"),
    )
    targets = {
        "GPU": [
            Target("float16, forward", "not slower than the best peer", 1,
                   best_peer(lambda case: True, dtype="float16", direction="forward", named=True)),
            Target("float16, backward", "0.95 of the best peer's speed", 0.95,
                   best_peer(lambda case: True, dtype="float16", direction="backward", named=True)),
            Target("float32", "not slower than the best peer", 1,
                   best_peer(lambda case: True, dtype="float32", named=True)),
            Target("float16 with a mask", "1 / 1.15 of the speed without", 1 / 1.15, without("mask", dtype="float16")),
        ],
        "CPU": [
            Target("whole Cells", "faster than MindSpore's operators", 1, times_faster("MindSpore", "graph")),
            Target("float32 with a mask", "1 / 1.15 of the speed without", 1 / 1.15, without("mask", dtype="float32")),
        ],
    }  # fmt: skip

    def describe(self, size):
        batch, heads, kv_heads, queries, keys, width, causal, *terms = size
        lengths = f"T{queries}" if queries == keys else f"T{queries} of {keys}"
        grouped = f"H{heads}" if heads == kv_heads else f"H{heads} of {kv_heads}"
        return " ".join((f"B{batch} {grouped} {lengths} D{width}{' causal' * causal}", *terms))

    def flops(self, case, direction):
        """Counts the two products of the forward pass and the five of the backward pass, halved where causal."""
        batch, heads, _, queries, keys, width, causal, *_ = self.size_of(case)
        products = {"forward": 2, "backward": 5}[direction]
        return 2 * products * batch * heads * queries * keys * width / (2 if causal else 1)

    def inputs(self, size):
        batch, heads, kv_heads, queries, keys, width, _, *terms = size
        more = [TERMS[term][1](heads, queries, keys) for term in terms]
        return [(batch, heads, queries, width), *[(batch, kv_heads, keys, width)] * 2, *more]

    def index_below(self, size):
        return 2**31

    def settings(self, size):
        causal, *terms = size[6:]
        dropout_p = DROPOUT_P if "dropout" in terms else 0.0
        return {"causal": bool(causal), "optional": tuple(TERMS[term][0] for term in terms), "dropout_p": dropout_p}

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("out",))]

    def torch_formulas(self, case, dtype):
        """Returns torch's attention by each of its kernels for a GPU, or as it is where there is none. Which of them
        take a term is up to torch, whose mask is True where a key is seen, and which adds ALiBi as a tensor."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        _, heads, kv_heads, queries, keys, _, causal, *terms = case.size
        settings = dict(enable_gqa=heads != kv_heads, dropout_p=DROPOUT_P if "dropout" in terms else 0.0)
        made = []

        def added(k, term):
            """Returns what SDPA adds to the logits, which must hold the causal mask, too. It is made once."""
            if not made:
                i, j = (torch.arange(n, device=k.device) for n in (queries, keys))
                distances = i[:, None] + keys - queries - j
                if terms == ["ALiBi"]:
                    made.append((-term.detach()[:, None, None] * distances.abs()).to(k.dtype))
                else:
                    made.append(~term if terms == ["mask"] else term.detach())
                if causal:
                    made[0] = made[0].masked_fill(distances < 0, float("-inf"))
            return made[0]

        def attend(q, k, v, *term):
            if terms in ([], ["dropout"]):
                return scaled_dot_product_attention(q, k, v, is_causal=bool(causal), **settings)
            return scaled_dot_product_attention(q, k, v, attn_mask=added(k, *term), **settings)

        def by_kernel(kernel):
            def formula(q, *others):
                with sdpa_kernel(kernel) if q.is_cuda else contextlib.nullcontext():
                    return attend(q, *others)

            return formula

        if not torch.cuda.is_available():
            return {"torch": attend}
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if case.direction == "backward" and terms == ["dropout"]:
            kernels.pop()  # in PyTorch 2.11, the last one makes an illegal memory access, which ends the run
        return dict(zip(TORCH, map(by_kernel, kernels)))

    def networks(self, size, dtype, device):
        ours, theirs = (flash_causal, composed_causal) if size[6] else (msops.flash_attention, composed)
        return {"msops": OfFunction(ours), "MindSpore": OfFunction(theirs)}
