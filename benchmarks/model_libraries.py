"""Times models of mindone, a language model and a diffusion model, with msops and with MindSpore's own operators,
beside the same weights in Hugging Face's libraries for PyTorch, eager.

python -m benchmarks.model_libraries [--device GPU] [--quick] [--csv FILE]

It needs mindone, transformers and diffusers, of the versions in the Makefile, and PyTorch. Each run is a process of its
own. Weights are random, and float16: the runs in PyTorch make and save them. A gradient is a forward pass and the
gradients of all weights, without an optimizer. The loss of each is printed, since equal losses show that all computed
the same. mindone runs in PyNative mode; by a CUDA graph, inputs are copied in, and gradients stay in the graph's
memory.
"""

import argparse
import csv
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .jobs import rows_of_job
from .llm import median

TURN = {"GPU": 4, "CPU": 1}  # steps between two looks at the clock
# transformers loads these where it finds them; their libraries of CUDA are not those of MindSpore's GPU backend.
HIDDEN = ("torch", "torchvision", "torchaudio", "accelerate", "peft", "timm", "jax", "flax")
LIMIT = 240  # s after which a run is given up
FAST, GRAPH = "msops, fast calls", "msops, CUDA graph"
ATTENTION = {
    "torch": "sdpa", **dict.fromkeys(("msops", FAST, GRAPH), "flash_attention_2"), "MindSpore": "eager"
}  # fmt: skip
PEERS = tuple(ATTENTION)  # PyTorch first: it saves the weights


class Model(NamedTuple):
    """A class of both libraries, its configuration, and the shapes of its inputs."""

    library: str
    name: str
    config: str
    settings: dict
    samples: int  # of a step
    sizes: dict  # of a sample
    unit: str

    @property
    def things(self):
        """Returns how many tokens or images a step has."""
        return self.samples * self.sizes.get("tokens", 1)


def language(samples, tokens, **settings):
    sizes = dict(tokens=tokens, vocabulary=settings["vocab_size"])
    return Model("transformers", "LlamaForCausalLM", "LlamaConfig", settings, samples, sizes, "tokens/s")


def diffusion(samples, side, words, **settings):
    sizes = dict(side=side, words=words, pooled=settings["pooled_projection_dim"], text=settings["joint_attention_dim"])
    settings.update(in_channels=64, guidance_embeds=False)
    return Model("diffusers", "FluxTransformer2DModel", "", settings, samples, sizes, "images/s")


# Llama has SmolLM2-135M's sizes; FLUX has fewer heads and blocks than FLUX.1, and images of 512 x 512.
MODELS = {
    "Llama": language(
        8, 2048, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "FLUX": diffusion(
        4, 32, 256, num_layers=2, num_single_layers=4, attention_head_dim=128, num_attention_heads=12,
        joint_attention_dim=4096, pooled_projection_dim=768,
    ),
}  # fmt: skip
QUICK = {
    "Llama": language(
        2, 64, vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    ),
    "FLUX": diffusion(
        2, 4, 8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    ),
}  # fmt: skip


def inputs_of(model):
    """Returns the arrays of a model's arguments, and of the output that it is trained towards, or None."""
    rng, sizes, samples = np.random.default_rng(0), model.sizes, model.samples
    if model.library == "transformers":
        tokens = rng.integers(3, sizes["vocabulary"], (samples, sizes["tokens"]), np.int32)
        # mindone 0.5.0 makes a mask of one key too many unless it gets one
        return dict(input_ids=tokens, labels=tokens, attention_mask=np.ones_like(tokens), use_cache=False), None

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    places = sizes["side"] ** 2
    grid = np.stack((np.zeros(places), *np.divmod(np.arange(places), sizes["side"])), 1).astype(np.float16)
    arrays = dict(
        hidden_states=numbers(samples, places, 64),
        encoder_hidden_states=numbers(samples, sizes["words"], sizes["text"]),
        pooled_projections=numbers(samples, sizes["pooled"]),
        timestep=np.full(samples, 0.5, np.float16),
        img_ids=grid,
        txt_ids=np.zeros((sizes["words"], 3), np.float16),
    )
    return arrays, numbers(samples, places, 64)


def loss_of(outputs, target):
    """Returns a language model's own loss, or the mean square of the errors of a diffusion model."""
    if target is None:
        return outputs.loss if hasattr(outputs, "loss") else outputs[0]
    return ((outputs[0].float() - target.float()) ** 2).mean()


def of_torch(model, device, folder, by):
    """Returns functions that run a model n times, forward and with gradients, and return the last loss."""
    sys.modules.update(jax=None, flax=None)  # transformers would load them, and they may want another NumPy
    import torch

    cuda = device == "GPU"
    library = importlib.import_module(model.library)
    kind = getattr(library, model.name)
    torch.manual_seed(0)
    if model.config:
        config = getattr(library, model.config)(**model.settings, attn_implementation=ATTENTION[by])
        net = kind(config)
    else:
        net = kind(**model.settings)
    net.half().save_pretrained(folder)
    net.to("cuda" if cuda else "cpu").train()

    def tensor(array):
        array = array.astype(np.int64) if array.dtype == np.int32 else array
        return torch.from_numpy(array).to("cuda" if cuda else "cpu")

    arrays, target = inputs_of(model)
    inputs = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    target = target if target is None else tensor(target)

    def forward(count):
        with torch.no_grad():
            for _ in range(count):
                loss = loss_of(net(**inputs), target)
        return loss.item()

    def gradient(count):
        for _ in range(count):
            net.zero_grad()
            loss = loss_of(net(**inputs), target)
            loss.backward()
        if cuda:
            torch.cuda.synchronize()
        return loss.item()

    return forward, gradient


def of_mindone(model, device, folder, by):
    """Does as of_torch, with the weights of the folder."""
    sys.modules.update(dict.fromkeys(HIDDEN))
    import mindspore

    mindspore.set_device(device)
    if by.startswith("msops"):
        import msops

        msops.patch_mindspore()
        if by == FAST:
            msops.use_fast_calls()
    library = importlib.import_module(f"mindone.{model.library}")
    words = dict(dtype=mindspore.float16, attn_implementation=ATTENTION[by])
    if not model.config:
        words = dict(mindspore_dtype=mindspore.float16)
    net = getattr(library, model.name).from_pretrained(folder, **words)
    net.set_train()
    arrays, target = inputs_of(model)
    constants = {name: x for name, x in arrays.items() if not isinstance(x, np.ndarray)}
    inputs = {name: mindspore.Tensor(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
    inputs, target = [*inputs.values()], target if target is None else mindspore.Tensor(target)
    names = [name for name in arrays if name not in constants]

    def loss(*tensors):
        return loss_of(net(**dict(zip(names, tensors)), **constants), target)

    value_and_gradients = mindspore.value_and_grad(loss, None, net.trainable_params())
    if by == GRAPH:
        loss, value_and_gradients = (msops.cuda_graph(each, copy_outputs=False) for each in (loss, value_and_gradients))

    def forward(count):
        for _ in range(count):
            found = loss(*inputs)
        return float(found.asnumpy())

    def gradient(count):
        for _ in range(count):
            found, _ = value_and_gradients(*inputs)
        if device == "GPU":
            mindspore.runtime.synchronize()
        return float(found.asnumpy())

    return forward, gradient


def job(model, device, folder, by):
    """Runs a model by one library, and prints its rows in JSON."""
    for kind, run in zip(
        ("forward", "gradient"), (of_torch if by == "torch" else of_mindone)(model, device, folder, by)
    ):
        loss = run(3)  # of which the third is recorded, by a CUDA graph
        us = median(run, TURN[device]).us
        print(json.dumps(dict(kind=kind, by=by, loss=loss, ms=us / 1e3, rate=1e6 * model.things / us)), flush=True)


def rows_of(name, options, folder):
    """Runs a model by each library, and yields the rows."""
    for by in PEERS:
        words = [name, options.device, str(folder), by, *(["--quick"] if options.quick else [])]
        row, of_torch = dict(model=name, by=by), by == "torch"
        yield from rows_of_job("benchmarks.model_libraries", words, row, LIMIT, of_torch=of_torch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument(
        "--job", nargs=4, metavar=("MODEL", "DEVICE", "FOLDER", "BY"), help="run one, for the first command"
    )
    options = parser.parse_args()
    models = QUICK if options.quick else MODELS
    if options.job:
        name, device, folder, by = options.job
        os.chdir(folder)  # where MindSpore writes files of its own
        job(models[name], device, folder, by)
        return
    rows = []
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(name, options, folder):
                rows.append(row)
                told = row.get("why") or f"{row['ms']:.2f} ms, {row['rate']:.4g} {model.unit}, loss {row['loss']:.5f}"
                print(f"{name} {row.get('kind', '')} by {row['by']}: {told}", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("model", "kind", "by", "ms", "rate", "loss", "why"))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
