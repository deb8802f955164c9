"""Benchmarks the choice of experts. A size is (tokens, experts, choices); 256 experts are chosen as in DeepSeek-V3."""

from mindspore import ops

import msops
from test_topk_gating import DEEPSEEK, TestTopKGating, case

from ..benchmark import Benchmark, OfFunction, Sizes, by
from ..figures import Target, best_peer, share, times_faster

LITE, V3 = (65536, 64, 6), (65536, 256, 8)
LARGE = (by(LITE), by(V3))


def described(size):
    tokens, experts, k = size
    return case(tokens, experts, **(DEEPSEEK if experts == 256 else dict(k=k)))


class TopKGating(Benchmark):
    card = TestTopKGating()
    sizes = {
        "GPU": [
            Sizes(
                named=(LITE, V3),
                sweep=((16, 64, 6), (16, 256, 8), (65536, 8, 2), (4096, 1024, 8)),
                ragged={(65535, 63, 6): LITE},
            )
        ],
        "CPU": [
            Sizes(named=((4096, 64, 6), (4096, 256, 8)), sweep=((16, 64, 6),), ragged={(4095, 63, 6): (4096, 64, 6)})
        ],
    }
    targets = {
        "GPU": [
            Target("65536 tokens, forward", "share 0.5", 0.5,
                   share(lambda case: case in LARGE, direction="forward")),
            Target("65536 tokens, forward", "not slower than the best peer", 1,
                   best_peer(lambda case: case in LARGE, direction="forward")),
            Target("65536 tokens, forward", "4 times faster than torch", 4,
                   times_faster("torch", "kernel", direction="forward")),
        ],
        "CPU": [Target("whole Cells", "2 times faster than MindSpore", 2, times_faster("MindSpore", "graph"))],
    }  # fmt: skip

    def inputs(self, size):
        return described(size)[0]

    def settings(self, size):
        return described(size)[1]

    def index_below(self, size):
        return size[1]

    def cases(self, size):
        forward, backward = super().cases(size)
        return [forward, backward._replace(formula_results=("weights",))]

    def torch_formula(self, case):
        from torch import softmax

        is_gradient, (_, experts, k) = case.direction == "backward", case.size

        def choose(logits, bias=None):
            weights, chosen = grouped(logits, bias) if experts == 256 else softmax(logits, -1).topk(k)
            return (weights,) if is_gradient else (weights, chosen.int())

        return choose

    def library_formulas(self, case):
        if case.direction == "backward":
            return {}
        return {"vLLM": vllm_grouped if case.size[1] == 256 else lambda vllm, x: vllm_softmax(vllm, x, case.size[2])}

    def cell_inputs(self, size):
        return self.inputs(size)[:1]

    def networks(self, size, dtype, device):
        settings = {name: value for name, value in self.settings(size).items() if name != "bias"}
        if settings.get("score") == "sigmoid":
            return {"msops": msops.TopKGating(**settings), "MindSpore": OfFunction(composed_groups)}

        def composed(logits):
            return ops.topk(ops.softmax(logits, -1), size[2])

        return {"msops": msops.TopKGating(**settings), "MindSpore": OfFunction(composed)}


def grouped(logits, bias):
    """Chooses as DeepSeek-V3 does, in torch."""
    import torch

    scores = logits.float().sigmoid()
    keys = (scores if bias is None else scores + bias).view(len(scores), DEEPSEEK["groups"], -1)
    worths = keys.topk(DEEPSEEK["group_top"], -1).values.sum(-1)
    stay = torch.zeros_like(worths, dtype=torch.bool).scatter_(1, worths.topk(DEEPSEEK["top_groups"]).indices, True)
    experts = keys.masked_fill(~stay[:, :, None], float("-inf")).flatten(1).topk(DEEPSEEK["k"]).indices
    weights = scores.gather(1, experts)
    return (DEEPSEEK["scale"] * weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def composed_groups(logits):
    """Chooses as DeepSeek-V3 does without a bias, by MindSpore's operators."""
    scores = ops.sigmoid(logits)
    keys = scores.reshape(logits.shape[0], DEEPSEEK["groups"], -1)
    worths = ops.topk(keys, DEEPSEEK["group_top"])[0].sum(-1)
    least = ops.topk(worths, DEEPSEEK["top_groups"])[0][:, -1:]
    keys = ops.select((worths >= least).expand_dims(2).broadcast_to(keys.shape), keys, ops.zeros_like(keys) - 1)
    weights, experts = ops.topk(keys.reshape(scores.shape), DEEPSEEK["k"])
    return DEEPSEEK["scale"] * weights / weights.sum(-1, keepdims=True), experts


def vllm_softmax(vllm, logits, k):
    import torch

    weights = torch.empty(len(logits), k, device=logits.device)
    experts, places = torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights, dtype=torch.int32)
    vllm.topk_softmax(weights, experts, places, logits)
    return weights, experts


def vllm_grouped(vllm, logits, bias):
    groups, top_groups, k, scale = (DEEPSEEK[name] for name in ("groups", "top_groups", "k", "scale"))
    return vllm.grouped_topk(logits, groups, top_groups, k, True, scale, bias, 1)
