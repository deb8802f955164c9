"""Times a layer of experts, msops.MixtureOfExperts, beside the same of PyTorch's operators.

python -m benchmarks.experts [--device GPU] [--quick] [--csv FILE]

Each run is a process of its own. Numbers are random, and float16 (float32 on the CPU; PyTorch's products of groups are
of bfloat16). "torch, loop" takes the rows of each expert and multiplies them, as models of transformers do; "torch,
groups" sorts the rows and calls torch._grouped_mm; "vLLM" is its fused_experts, if it is installed. A gradient is a
forward pass and the gradients of the tokens and all weights. Inputs stay the same, and are larger than the cache from
32 tokens on.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .jobs import rows_of_job
from .llm import median

FAST, GRAPH = "msops, fast calls", "msops, CUDA graph"
PEERS = "torch, loop", "torch, groups", "vLLM", "msops", FAST, GRAPH
TURN = {"GPU": 8, "CPU": 1}  # steps between two looks at the clock
LIMIT = 200  # s after which a run is given up


class Size(NamedTuple):
    """The sizes of a layer, and numbers of tokens."""

    width: int
    hidden: int
    experts: int
    chosen: int
    tokens: tuple


SIZES = {
    "DeepSeek-V2-Lite": Size(2048, 1408, 64, 6, (1, 32, 4096)),
    "Mixtral": Size(4096, 14336, 8, 2, (1, 32, 4096)),
}
QUICK = {"tiny": Size(32, 48, 8, 2, (1, 20))}


def of_torch(size, tokens, device, by):
    """Returns functions that run a layer n times, forward and with gradients."""
    import torch
    from torch.nn.functional import one_hot, silu

    place = "cuda" if device == "GPU" else "cpu"
    dtype = torch.bfloat16 if by == "torch, groups" else torch.float16 if device == "GPU" else torch.float32
    gate = torch.randn(size.experts, size.width, device=place)
    gate_up = torch.randn(size.experts, 2 * size.hidden, size.width, device=place, dtype=dtype) / size.width**0.5
    down = torch.randn(size.experts, size.width, size.hidden, device=place, dtype=dtype) / size.hidden**0.5
    x = torch.randn(tokens, size.width, device=place, dtype=dtype)
    leaves = [x, gate, gate_up, down]

    def route():
        weights, experts = torch.softmax(x.float() @ gate.T, -1).topk(size.chosen)
        return (weights / weights.sum(-1, keepdim=True)).to(dtype), experts

    def gated(product):
        first, second = product.chunk(2, -1)
        return silu(first) * second

    def loop():
        weights, experts = route()
        y, mask = torch.zeros_like(x), one_hot(experts, size.experts).permute(2, 1, 0)
        for expert in range(size.experts):
            choice, token = torch.where(mask[expert])
            rows = gated(x[token] @ gate_up[expert].T) @ down[expert].T
            y = y.index_add(0, token, rows * weights[token, choice, None])
        return y

    def groups():
        weights, experts = route()
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=size.experts).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(x[order // size.chosen], gate_up.transpose(1, 2), ends)
        rows = torch._grouped_mm(gated(rows), down.transpose(1, 2), ends)
        return torch.zeros_like(x).index_add(0, order // size.chosen, rows * weights.flatten()[order, None])

    def fused():
        from vllm.model_executor.layers.fused_moe import fused_experts

        weights, experts = route()
        return fused_experts(x, gate_up, down, weights.float(), experts.to(torch.int32))

    layer = {"torch, loop": loop, "torch, groups": groups, "vLLM": fused}[by]

    def forward(count):
        with torch.no_grad():
            for _ in range(count):
                layer()
        if device == "GPU":
            torch.cuda.synchronize()

    def gradient(count):
        for each in leaves:
            each.requires_grad_()
        for _ in range(count):
            torch.autograd.grad(layer().sum(), leaves)
        if device == "GPU":
            torch.cuda.synchronize()

    return {"forward": forward, **({} if by == "vLLM" else {"gradient": gradient})}


def of_msops(size, tokens, device, by):
    """Does as of_torch."""
    import mindspore
    from mindspore import Tensor

    import msops

    mindspore.set_device(device)
    if by == FAST:
        msops.use_fast_calls()
    dtype = mindspore.float16 if device == "GPU" else mindspore.float32
    layer = msops.MixtureOfExperts(size.width, size.hidden, size.experts, size.chosen, dtype=dtype)
    x = Tensor(np.random.default_rng(0).standard_normal((tokens, size.width)), dtype)
    functions = layer, mindspore.grad(lambda x: layer(x).sum(), 0, layer.trainable_params())
    if by == GRAPH:
        functions = tuple(msops.cuda_graph(each, copy_outputs=False) for each in functions)

    def run(function):
        def repeat(count):
            for _ in range(count):
                results = function(x)
            if device == "GPU":
                mindspore.runtime.synchronize()
            else:
                (results[0] if isinstance(results, tuple) else results).asnumpy()

        return repeat

    return dict(zip(("forward", "gradient"), map(run, functions)))


def job(size, tokens, device, by):
    """Runs a layer, and prints its rows in JSON."""
    for kind, run in (of_msops if by.startswith("msops") else of_torch)(size, tokens, device, by).items():
        run(3)  # of which the third is recorded, by a CUDA graph
        print(json.dumps(dict(kind=kind, us=median(run, TURN[device]).us)), flush=True)


def rows_of(name, tokens, options):
    """Runs a layer by each peer, and yields the rows."""
    for by in PEERS:
        words = [name, str(tokens), options.device, by, *(["--quick"] if options.quick else [])]
        row, of_torch = dict(layer=name, tokens=tokens, by=by), not by.startswith("msops")
        yield from rows_of_job("benchmarks.experts", words, row, LIMIT, of_torch=of_torch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--job", nargs=4, metavar=("LAYER", "TOKENS", "DEVICE", "BY"), help="run one, for the first command"
    )
    options = parser.parse_args()
    sizes = QUICK if options.quick else SIZES
    if options.job:
        name, tokens, device, by = options.job
        job(sizes[name], int(tokens), device, by)
        return
    rows = []
    for name, size in sizes.items():
        for tokens in size.tokens:
            for row in rows_of(name, tokens, options):
                rows.append(row)
                told = row.get("why") or f"{row['us']:.4g} µs"
                print(f"{name}, {tokens} tokens, {row.get('kind', '')} by {row['by']}: {told}", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("layer", "tokens", "kind", "by", "us", "why"))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
