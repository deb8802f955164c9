"""Times models of mindone, of texts and of images, with msops and with MindSpore's own operators, beside the same
weights in Hugging Face's libraries for PyTorch, eager and compiled (mode "reduce-overhead" on a GPU).

python -m benchmarks.model_libraries [--device GPU] [--quick] [--csv FILE] [--by PEER] [--together N] [MODEL ...]

It needs mindone, transformers and diffusers, of the versions in the Makefile, and PyTorch. Each run is a process of its
own; with --together, those of N models are loaded and run at once, and then timed one after the other. Weights are
random, and float16: the runs in PyTorch make and save them. A gradient is a forward pass and the gradients of all
weights; a step, of the Llama alone, is that and AdamW, PyTorch's fused one and MindSpore's nn.AdamWeightDecay. The loss
of the third run is printed, since equal losses show that all computed the same. mindone runs in PyNative mode; by a
CUDA graph, inputs are copied in, and gradients stay in the graph's memory. "GB" is the most memory of tensors at once,
on a GPU.
"""

import argparse
import csv
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .jobs import Job
from .llm import median

TURN = {"GPU": 4, "CPU": 1}  # steps between two looks at the clock
# transformers loads these where it finds them; their libraries of CUDA are not those of MindSpore's GPU backend.
HIDDEN = ("torch", "torchvision", "torchaudio", "accelerate", "peft", "timm", "jax", "flax")
RATE, EPS = 1e-4, 1e-3  # of AdamW: float16 holds both, and does not divide by 0
SAVED, READY = "saved", "ready"  # what a job prints once its weights are in its folder, and once it has run
LIMIT = 240  # s after which a run is given up
FAST, GRAPH = "msops, fast calls", "msops, CUDA graph"
TORCH = ("torch", "torch.compile")  # the first of all: it saves the weights
PEERS = (*TORCH, "msops", FAST, GRAPH, "MindSpore")


class Model(NamedTuple):
    """A class of both libraries, its configuration, and a function of the samples of a step that gives its inputs.
    Models of transformers have a class of configurations, and a loss of their own; the output of the others, which has
    the first input's shape, is trained towards random numbers."""

    name: str
    config: str
    settings: dict
    samples: int
    inputs: Callable
    tokens: int = 0  # of a sample that is a text
    attention: tuple = ("sdpa", "flash_attention_2")  # of PyTorch and of msops
    has_steps: bool = False  # whether steps with AdamW are timed, too

    @property
    def library(self):
        return "transformers" if self.config else "diffusers"

    @property
    def unit(self):
        return "tokens/s" if self.tokens else "images/s"

    @property
    def things(self):
        """Returns how many tokens or images a step has."""
        return self.samples * (self.tokens or 1)


RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


def words(count, *shape):
    return RNG.integers(3, count, shape, np.int32)


def causal(name, samples, length, **settings):
    """Returns a language model that learns the next token of each place."""

    def inputs(samples):
        tokens = words(settings["vocab_size"], samples, length)
        # mindone 0.5.0 makes a mask of one key too many unless it gets one
        return dict(input_ids=tokens, labels=tokens, attention_mask=np.ones_like(tokens), use_cache=False)

    has_steps = name == "Llama"
    return Model(f"{name}ForCausalLM", f"{name}Config", settings, samples, inputs, length, has_steps=has_steps)


def bert(samples, length, **settings):
    def inputs(samples):
        tokens = words(settings["vocab_size"], samples, length)
        labels = RNG.integers(5, size=samples, dtype=np.int32)
        return dict(input_ids=tokens, attention_mask=np.ones_like(tokens), labels=labels)

    settings.update(num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    name, config = "BertForSequenceClassification", "BertConfig"
    return Model(name, config, settings, samples, inputs, length, ("sdpa", "eager"))


def t5(samples, length, answer, **settings):
    def inputs(samples):
        of = settings["vocab_size"]
        return dict(input_ids=words(of, samples, length), labels=words(of, samples, answer), use_cache=False)

    settings.update(dropout_rate=0.0, decoder_start_token_id=0)
    name, config = "T5ForConditionalGeneration", "T5Config"
    return Model(name, config, settings, samples, inputs, length + answer, ("eager", "eager"))


def deit(samples, side, **settings):
    def inputs(samples):
        labels = RNG.integers(settings["num_labels"], size=samples, dtype=np.int32)
        return dict(pixel_values=numbers(samples, 3, side, side), labels=labels)

    settings.update(image_size=side, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    name, config = "DeiTForImageClassification", "DeiTConfig"
    return Model(name, config, settings, samples, inputs, attention=("sdpa", "eager"))


def unet(samples, side, text, **settings):
    def inputs(samples):
        prompt = numbers(samples, text, settings["cross_attention_dim"])
        steps = np.linspace(10, 900, samples).astype(np.int32)
        return dict(sample=numbers(samples, 4, side, side), timestep=steps, encoder_hidden_states=prompt)

    return Model("UNet2DConditionModel", "", dict(sample_size=side, **settings), samples, inputs)


def sd3(samples, side, text, **settings):
    def inputs(samples):
        return dict(
            hidden_states=numbers(samples, settings["in_channels"], side, side),
            encoder_hidden_states=numbers(samples, text, settings["joint_attention_dim"]),
            pooled_projections=numbers(samples, settings["pooled_projection_dim"]),
            timestep=np.linspace(10, 900, samples).astype(np.float16),
        )

    return Model("SD3Transformer2DModel", "", settings, samples, inputs)


def flux(samples, side, text, **settings):
    def inputs(samples):
        places = side**2
        grid = np.stack((np.zeros(places), *np.divmod(np.arange(places), side)), 1).astype(np.float16)
        return dict(
            hidden_states=numbers(samples, places, 64),
            encoder_hidden_states=numbers(samples, text, settings["joint_attention_dim"]),
            pooled_projections=numbers(samples, settings["pooled_projection_dim"]),
            timestep=np.full(samples, 0.5, np.float16),
            img_ids=grid,
            txt_ids=np.zeros((text, 3), np.float16),
        )

    settings.update(in_channels=64, guidance_embeds=False)
    return Model("FluxTransformer2DModel", "", settings, samples, inputs)


ENCODER = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
# Llama has SmolLM2-135M's sizes; FLUX has fewer heads and blocks than FLUX.1, and images of 512 x 512, as the others of
# diffusers; Qwen3 has 4 of the 48 layers of Qwen3-30B-A3B. DeiT has ViT-B/16's sizes: mindone 0.5.0 cannot make a ViT.
MODELS = {
    "Llama": causal(
        "Llama", 8, 2048, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    ),
    "FLUX": flux(
        4, 32, 256, num_layers=2, num_single_layers=4, attention_head_dim=128, num_attention_heads=12,
        joint_attention_dim=4096, pooled_projection_dim=768,
    ),
    "BERT": bert(32, 512, vocab_size=30522, **ENCODER),
    "T5": t5(16, 512, 128, vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12),
    "DeiT": deit(64, 224, num_labels=1000, patch_size=16, **ENCODER),
    "U-Net": unet(8, 64, 77, cross_attention_dim=768),
    "SD3": sd3(
        4, 64, 333, sample_size=128, in_channels=16, out_channels=16, num_layers=24, attention_head_dim=64,
        num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
        pos_embed_max_size=192,
    ),
    "Qwen3": causal(
        "Qwen3Moe", 8, 1024, vocab_size=151936, hidden_size=2048, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=1024,
    ),
}  # fmt: skip
QUICK = {
    "Llama": causal(
        "Llama", 2, 64, vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        **SMALL,
    ),
    "FLUX": flux(
        2, 4, 8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    ),
    "BERT": bert(2, 64, vocab_size=256, **SMALL),
    "T5": t5(2, 64, 16, vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
    "DeiT": deit(2, 32, num_labels=5, patch_size=8, **SMALL),
    "U-Net": unet(
        2, 16, 7, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), block_out_channels=(32, 64),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
        norm_num_groups=8, layers_per_block=1,
    ),
    "SD3": sd3(
        2, 8, 7, sample_size=16, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32,
        patch_size=1, pos_embed_max_size=16,
    ),
    "Qwen3": causal(
        "Qwen3Moe", 2, 64, vocab_size=256, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, **SMALL,
    ),
}  # fmt: skip


def inputs_of(model):
    """Returns the arrays of a model's arguments, and of the output that it is trained towards, or None."""
    inputs = model.inputs(model.samples)
    return inputs, None if model.config else numbers(*next(iter(inputs.values())).shape)


def loss_of(outputs, target):
    """Returns a model's own loss, or the mean square of the errors of a diffusion model."""
    if target is None:
        return outputs.loss if hasattr(outputs, "loss") else outputs[0]
    return ((outputs[0].float() - target.float()) ** 2).mean()


def of_torch(model, device, folder, by):
    """Returns functions that run a model n times, forward, with gradients and with AdamW, and return the last loss, and
    one of the most memory, in bytes."""
    sys.modules.update(jax=None, flax=None)  # transformers would load them, and they may want another NumPy
    import torch

    cuda, place = device == "GPU", "cuda" if device == "GPU" else "cpu"
    library = importlib.import_module(model.library)
    kind = getattr(library, model.name)
    if by == TORCH[0]:
        torch.manual_seed(0)
        made = kind(getattr(library, model.config)(**model.settings)) if model.config else kind(**model.settings)
        made.half().save_pretrained(folder)
        print(SAVED, flush=True)
    options = dict(attn_implementation=model.attention[0]) if model.config else {}
    net = kind.from_pretrained(folder, torch_dtype=torch.float16, **options).half().to(place).train()

    def tensor(array):
        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array).to(place)

    arrays, target = inputs_of(model)
    inputs = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    target = target if target is None else tensor(target)

    def loss():
        return loss_of(net(**inputs), target)

    if by == TORCH[1]:
        loss = torch.compile(loss, dynamic=False, **(dict(mode="reduce-overhead") if cuda else {}))

    def forward(count):
        with torch.no_grad():
            for _ in range(count):
                found = loss()
        return found.item()

    def gradient(count, then=lambda: None):
        for _ in range(count):
            net.zero_grad()
            found = loss()
            found.backward()
            then()
        if cuda:
            torch.cuda.synchronize()
        return found.item()

    optimizer = torch.optim.AdamW(net.parameters(), RATE, eps=EPS, fused=True)

    def step(count):
        return gradient(count, optimizer.step)

    return forward, gradient, step, torch.cuda.max_memory_allocated


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
    options = dict(mindspore_dtype=mindspore.float16)
    if model.config:
        attention = model.attention[1] if by.startswith("msops") else "eager"
        options = dict(dtype=mindspore.float16, attn_implementation=attention)
    # As in PyTorch, all weights are float16: T5 would keep some of them in float32.
    net = getattr(library, model.name).from_pretrained(folder, **options).to(mindspore.float16)
    net.set_train()
    arrays, target = inputs_of(model)
    constants = {name: x for name, x in arrays.items() if not isinstance(x, np.ndarray)}
    inputs = {name: mindspore.Tensor(x) for name, x in arrays.items() if isinstance(x, np.ndarray)}
    inputs, target = [*inputs.values()], target if target is None else mindspore.Tensor(target)
    names = [name for name in arrays if name not in constants]

    def loss(*tensors):
        return loss_of(net(**dict(zip(names, tensors)), **constants), target)

    value_and_gradients = mindspore.value_and_grad(loss, None, net.trainable_params())
    optimizer = mindspore.nn.AdamWeightDecay(net.trainable_params(), RATE, eps=EPS)

    def one_step(*tensors):
        found, gradients = value_and_gradients(*tensors)
        optimizer(gradients)
        return found

    def repeated(run):
        run = msops.cuda_graph(run, copy_outputs=False) if by == GRAPH else run

        def repeat(count):
            for _ in range(count):
                found = run(*inputs)
            if device == "GPU":
                mindspore.runtime.synchronize()
            return float((found[0] if isinstance(found, tuple) else found).asnumpy())

        return repeat

    return *map(repeated, (loss, value_and_gradients, one_step)), mindspore.runtime.max_memory_allocated


def job(model, device, folder, by, waits):
    """Runs a model by one library, and prints its rows in JSON."""
    *runs, memory = (of_torch if by in TORCH else of_mindone)(model, device, folder, by)
    runs = dict(zip(("forward", "gradient", *(["step"] if model.has_steps else [])), runs))
    losses, failed = {}, None
    for kind, run in runs.items():
        try:
            losses[kind] = run(3)  # a CUDA graph records the third run
        except RuntimeError as error:  # the others are timed even so
            failed = error
    if waits:
        print(READY, flush=True)
        sys.stdin.readline()
    for kind, loss in losses.items():
        us = median(runs[kind], TURN[device]).us
        row = dict(kind=kind, loss=loss, ms=us / 1e3, rate=1e6 * model.things / us)
        print(json.dumps(row | (dict(GB=memory() / 1e9) if device == "GPU" else {})), flush=True)
    if failed:
        raise failed


def rows_of(names, options, root):
    """Runs models by each library, and yields the rows. PyTorch is one of them always, since it saves the weights."""
    peers = PEERS if options.by is None else tuple(dict.fromkeys((TORCH[0], *options.by)))
    together, waiting = options.together > 0, []
    for name in names:
        (root / name).mkdir()
        for by in peers:
            flags = [flag for flag, is_set in (("--quick", options.quick), ("--waits", together)) if is_set]
            words = [name, options.device, str(root / name), by, *flags]
            job = Job("benchmarks.model_libraries", words, dict(model=name, by=by), of_torch=by in TORCH)
            if not together:
                yield from job.rows(LIMIT)
                continue
            waiting.append(job)
            if by == TORCH[0]:
                job.wait_for(SAVED, LIMIT)
    for job in waiting:
        job.wait_for(READY, LIMIT)
    for job in waiting:
        job.go_on()
        yield from job.rows(LIMIT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--by", action="append", choices=PEERS, help="one of the libraries; may be given again")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)}")
    parser.add_argument(
        "--job", nargs=4, metavar=("MODEL", "DEVICE", "FOLDER", "BY"), help="run one, for the first command"
    )
    parser.add_argument("--together", type=int, default=0, metavar="N", help="how many models are loaded at once")
    parser.add_argument("--waits", action="store_true", help="wait for a line before times are taken")
    options = parser.parse_args()
    if wrong := set(options.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(wrong))}")
    models = QUICK if options.quick else MODELS
    if options.job:
        name, device, folder, by = options.job
        os.chdir(folder)  # where MindSpore writes files of its own
        job(models[name], device, folder, by, options.waits)
        return
    rows, names, count = [], options.models or [*models], max(1, options.together)
    for first in range(0, len(names), count):
        with tempfile.TemporaryDirectory() as root:
            for row in rows_of(names[first : first + count], options, Path(root)):
                rows.append(row)
                name, unit = row["model"], models[row["model"]].unit
                told = row.get("why") or f"{row['ms']:.2f} ms, {row['rate']:.4g} {unit}, loss {row['loss']:.5f}"
                print(f"{name} {row.get('kind', '')} by {row['by']}: {told}", flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("model", "kind", "by", "ms", "rate", "loss", "GB", "why"))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
