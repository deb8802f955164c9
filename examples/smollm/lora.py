"""Adapts SmolLM2-135M to a text by LoRA: small matrices are trained beside those of the model, which have 4 bits and
stay as they are. Then does the same beside matrices that are not rounded, and prints the losses of both."""

import argparse
import sys
from functools import partial
from pathlib import Path

import mindspore
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Normal, Zero, initializer
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msops
from common import can_record
from llama import NextTokenLoss
from perplexity import manual, rounded
from program import COUNT, SEED, number, run, use
from quantized import matrices, replace
from train import make, read_text, validate
from training import Text, Trainer
from weights import FileError

_LETTERS = 30_000  # of the manual: its last tenth is for validation


class LoRA(nn.Cell):
    """Adds the product of two small matrices to a layer that is not trained: base(x) + x down^T up^T. It begins as the
    layer alone, since `up` is 0."""

    def __init__(self, base, outputs, inputs, rank):
        super().__init__()
        self.base = base
        self.down = Parameter(initializer(Normal(inputs**-0.5), (rank, inputs)), name="down")
        self.up = Parameter(initializer(Zero(), (outputs, rank)), name="up")
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        rows = x.reshape(-1, x.shape[-1])
        small = self.matmul(self.matmul(rows, self.down.astype(x.dtype)), self.up.astype(x.dtype))
        return self.base(x) + small.reshape(*x.shape[:-1], -1)


def adapt(net, rank, base):
    """Puts LoRA in the place of each matrix of the layers, beside `base(linear)`, and trains nothing else."""
    for name in matrices(net):
        replace(net, name, lambda linear: LoRA(base(linear), *linear.weight.shape, rank))
    for name, parameter in net.parameters_and_names():
        parameter.name = name  # the trainer needs names that differ
        parameter.requires_grad = name.endswith((".down", ".up"))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="a text file; without it, the manual of Python is learned")
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="float32 on the CPU, float16 on the GPU")
    parser.add_argument("--steps", type=COUNT, default=20, help="how many steps to train")
    parser.add_argument("--batch", type=COUNT, default=2, help="how many pieces of the text a step has")
    parser.add_argument("--length", type=COUNT, default=64, help="how many tokens a piece has")
    parser.add_argument("--rank", type=COUNT, default=8, help="how many rows the small matrices have")
    parser.add_argument("--learning-rate", type=number(float, 0, 1), default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the small matrices and the pieces")
    parser.add_argument("--random", action="store_true", help="adapt a tiny model of random numbers, to try this")
    return parser.parse_args(arguments)


def learn(args, dtype, base):
    """Returns the network, and its validation losses before, amid and after training."""
    tokenizer, net = make(args, dtype)
    written = read_text(args.text) if args.text else manual()[:_LETTERS]
    text, loss = Text(tokenizer.encode(written), args.length, args.seed), NextTokenLoss(msops)
    mindspore.set_seed(args.seed)
    adapt(net, args.rank, base)
    record = args.device_target == "GPU" and can_record()
    trainer = Trainer(net, loss, args.learning_rate, args.steps // 10, args.steps, decay=0.0, record=record)
    losses = [validate(net, loss, text, args.batch)]
    for step in trange(1, args.steps + 1):
        trainer.train(text.batches(step, 1, args.batch))
        if step in (args.steps // 2, args.steps):
            losses.append(validate(net, loss, text, args.batch))
    return net, losses


def main():
    args = parse()
    args.operators = "msops"  # what train.make takes
    use(args.device_target)
    name = args.dtype or {"CPU": "float32", "GPU": "float16"}[args.device_target]
    bases = {"4 bits": partial(rounded, bits=4, group=64), name: lambda linear: linear}
    try:
        for kind, base in bases.items():
            net, losses = learn(args, getattr(mindspore, name), base)
            size = sum(p.nbytes for name, p in net.parameters_and_names() if ".base." in name) / 1e6
            trained = sum(p.size for p in net.trainable_params())
            shown = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{kind}: {size:.1f} MB, {trained} numbers trained, validation losses {shown}", flush=True)
    except (FileError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run(main)
