"""Runs a language model in MindSpore, with msops' operators or with its own, as examples/smollm does in graph mode, or
as CUDA graphs of PyNative mode, which needs no compilation."""

import sys
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

import msops

from . import GRAPH, STACK, TURN, main

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(_EXAMPLES), str(_EXAMPLES / "smollm")]

import composed  # noqa: E402
from generation import CachedLlama, Greedy, StackedLlama  # noqa: E402
from llama import Llama, NextTokenLoss  # noqa: E402
from training import Trainer  # noqa: E402

OPERATORS = {"msops": msops, GRAPH: msops, STACK: msops, "MindSpore": composed}


def network(job):
    """Returns a Llama of random weights. In training, its Parameters are float32."""
    dtype = getattr(mindspore, job.dtype)
    kept = mindspore.float32 if job.kind == "training" else dtype
    with no_init_parameters():
        net = Llama(OPERATORS[job.by], **job.sizes, length=job.length, tied=True, dtype=dtype)
    rng = np.random.default_rng(0)
    for parameter in net.get_parameters():
        shape = parameter.shape
        value = np.ones(shape) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
        parameter.set_dtype(kept)  # set_data alone would keep float32
        parameter.set_data(Tensor(value, kept))
    return net


def training(job, tokens):
    net = network(job)
    loss, rates = NextTokenLoss(OPERATORS[job.by]), dict(highest=1e-4, warmup=10, steps=1000)
    trainer = Trainer(net, loss, **rates, record=job.by == GRAPH)

    def run(count):
        for _ in range(count):
            while not np.isfinite(trainer.train([(tokens[:, :-1], tokens[:, 1:])])[1].asnumpy()):
                pass  # The gradients overflowed, so that nothing was updated: the loss scale is lower now.

    return run


def cached(job):
    return (StackedLlama if job.by == STACK else CachedLlama)(network(job), job.texts)


def recorded(job, net):
    return msops.cuda_graph(net) if job.by == GRAPH else net


def prefill(job, tokens):
    net = recorded(job, cached(job))
    inputs = Tensor(tokens[:, :-1]), Tensor([0], mindspore.int32), Tensor([job.length - 1], mindspore.int32)

    def run(count):
        for _ in range(count):
            scores = net(*inputs)
        scores.asnumpy()

    return run


class Step(nn.Cell):
    """Reads tokens (B, 1) at a place (1,), and returns the best tokens after them, and the next place. A stack, whose
    graph is small, does so for all tokens of a turn."""

    def __init__(self, job):
        super().__init__()
        self.steps = TURN["decoding"] if job.by == STACK else 1
        self.net, self.last = Greedy(cached(job), self.steps), Tensor([0], mindspore.int32)

    def construct(self, tokens, place):
        return self.net(tokens, place, self.last)[:, -1:], place + self.steps


def decoding(job, tokens):
    net = Step(job)
    step = recorded(job, net)

    def run(count):
        written, place = Tensor(tokens[:, :1]), Tensor([job.length - count], mindspore.int32)
        for _ in range(0, count, net.steps):
            written, place = step(written, place)
        written.asnumpy()

    return run


def prepare(job):
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE if job.by == GRAPH else mindspore.GRAPH_MODE)
    mindspore.set_device(job.device)
    tokens = np.random.default_rng(1).integers(0, job.sizes["vocabulary"], (job.texts, job.length + 1), np.int32)
    kinds = dict(training=training, prefill=prefill, decoding=decoding)
    return kinds[job.kind](job, tokens), mindspore.runtime.max_memory_allocated


if __name__ == "__main__":
    main(prepare)
