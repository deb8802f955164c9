"""Runs a language model in torch: transformers' LlamaForCausalLM with scaled_dot_product_attention, eager or compiled.

A training step does what examples/smollm/training.py does. In float16 the network has float16 weights, which are copies
of float32 ones; the loss is scaled; gradients become float32, and are clipped; AdamW updates the float32 weights.
"""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from . import main

GROWTH = 1000  # the loss scale doubles after so many steps without an overflow


def network(job):
    """Returns a model of random weights."""
    sizes = job.sizes
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=job.length,
        rms_norm_eps=sizes["eps"],
        rope_theta=sizes["base"],
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with device(job):
        return LlamaForCausalLM(config)


def device(job):
    return torch.device("cuda" if job.device == "GPU" else "cpu")


class Trainer:
    """Trains a model as the Trainer of examples/smollm does."""

    def __init__(self, model, dtype, compiled, clip=1.0, decay=0.1):
        self.masters = list(model.parameters())
        if dtype != torch.float32:
            self.masters = [p.detach().clone() for p in self.masters]
            model.to(dtype)
        self.parameters = list(model.parameters())
        groups = [
            dict(params=[p for p in self.masters if p.dim() > 1], weight_decay=decay),
            dict(params=[p for p in self.masters if p.dim() == 1], weight_decay=0.0),
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.clip, self.scale, self.good = clip, 2.0**15 if dtype == torch.float16 else 1.0, 0

        def loss(tokens, following):
            scores = model(tokens, use_cache=False).logits
            return cross_entropy(scores.float().flatten(0, 1), following.flatten())

        self.loss = torch.compile(loss, dynamic=False) if compiled else loss

    def train(self, tokens, following):
        """Trains a step, and returns the loss and the gradients' norm. If it is not finite, only the scale changes."""
        loss = self.loss(tokens, following)
        (loss * self.scale).backward()
        gradients = [p.grad.float() for p in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item() / self.scale
        if math.isfinite(norm):
            torch._foreach_mul_(gradients, min(1.0, self.clip / max(norm, 1e-12)) / self.scale)
            for master, gradient in zip(self.masters, gradients):
                master.grad = gradient
            self.optimizer.step()
            if self.masters[0] is not self.parameters[0]:
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters, self.masters)
            self.good += 1
            if self.scale > 1 and self.good % GROWTH == 0:
                self.scale *= 2
        else:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
        for parameter in self.parameters:
            parameter.grad = None
        return loss.item(), norm


class Reader:
    """Reads tokens (B, T) from a place on into a cache of a fixed size, and returns the scores after the last one."""

    def __init__(self, job, compiled):
        self.model = network(job).to(getattr(torch, job.dtype)).eval()
        self.cache = StaticCache(config=self.model.config, max_cache_len=job.length)
        self.places = torch.arange(job.length, device=device(job))
        self.call = self._call
        # The layers of the cache must exist before the compilation; newer versions of transformers count there.
        self._call(torch.zeros(job.texts, 1, dtype=torch.long, device=device(job)), self.places[:1])
        layers = [layer for layer in self.cache.layers if hasattr(layer, "cumulative_length")]
        self.counters = [layer.cumulative_length for layer in layers]
        if compiled:
            mode = dict(mode="reduce-overhead") if job.device == "GPU" else {}  # with CUDA graphs
            self.call = torch.compile(self._call, dynamic=False, **mode)

    def _call(self, tokens, places):
        found = self.model(tokens, past_key_values=self.cache, cache_position=places, use_cache=True, logits_to_keep=1)
        return found.logits[:, -1]

    def go_to(self, place):
        """Lets the next tokens stand at a place."""
        if self.counters:
            torch._foreach_zero_(self.counters)
            torch._foreach_add_(self.counters, place)

    def read(self, tokens, place):
        torch.compiler.cudagraph_mark_step_begin()
        return self.call(tokens, self.places[place : place + tokens.shape[1]].clone())


def training(job, tokens, compiled):
    trainer = Trainer(network(job).train(), getattr(torch, job.dtype), compiled)

    def run(count):
        for _ in range(count):
            batch = torch.from_numpy(tokens).to(device(job))
            while not math.isfinite(trainer.train(batch[:, :-1], batch[:, 1:])[1]):
                pass  # The gradients overflowed, so that nothing was updated: the loss scale is lower now.

    return run


def prefill(job, tokens, compiled):
    reader = Reader(job, compiled)
    tokens = torch.from_numpy(tokens[:, :-1]).to(device(job))

    def run(count):
        with torch.no_grad():
            for _ in range(count):
                reader.go_to(0)
                reader.read(tokens, 0)
        synchronize(job)

    return run


def decoding(job, tokens, compiled):
    reader = Reader(job, compiled)

    def run(count):
        written = torch.from_numpy(tokens[:, :1].copy()).to(device(job))  # other strides would be compiled once more
        with torch.no_grad():
            reader.go_to(job.length - count)
            for place in range(job.length - count, job.length):
                written = reader.read(written, place).argmax(-1, keepdim=True)
        synchronize(job)

    return run


def synchronize(job):
    if job.device == "GPU":
        torch.cuda.synchronize()


def prepare(job):
    tokens = np.random.default_rng(1).integers(0, job.sizes["vocabulary"], (job.texts, job.length + 1))
    kinds = dict(training=training, prefill=prefill, decoding=decoding)
    run = kinds[job.kind](job, tokens, job.by == "torch.compile")
    return run, torch.cuda.max_memory_allocated if job.device == "GPU" else lambda: 0


if __name__ == "__main__":
    main(prepare)
