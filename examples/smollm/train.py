"""Fine-tunes SmolLM2-135M-Instruct on a text file. Run again with the same options, it goes on from its checkpoint."""

import argparse
import sys
import time
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import composed
import msops
from common import processes
from generation import CachedLlama, Reader, continue_text, sample
from llama import Llama, NextTokenLoss
from tokenizer import Tokenizer
from training import Text, Trainer
from weights import FileError, Gguf, default_path, load

OPERATORS = {"msops": msops, "mindspore": composed}
_OUTPUT = Path(__file__).resolve().parents[1] / "output" / "smollm"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file; its last tenth is for validation")
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="float32 on the CPU, float16 on the GPU")
    parser.add_argument("--operators", choices=OPERATORS, default="msops", help="which operators to use")
    parser.add_argument("--steps", type=int, default=100, help="how many steps to train in all")
    parser.add_argument("--batch", type=int, default=4, help="how many pieces a batch has, in all processes together")
    parser.add_argument("--length", type=int, default=256, help="how many tokens a piece has")
    parser.add_argument("--accumulate", type=int, default=1, help="how many batches a step has")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="how many steps it takes the learning rate to rise")
    parser.add_argument("--clip", type=float, default=1.0, help="the greatest norm of the gradients")
    parser.add_argument("--every", type=int, default=50, help="how many steps lie between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pieces and of the sample")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="folder of the checkpoint and the losses")
    parser.add_argument("--random", action="store_true", help="train a tiny model from random numbers, to try this")
    return parser.parse_args()


def make(args, dtype):
    """Returns the tokenizer and the model, whose Parameters are float32 whatever it computes in."""
    file = Gguf(default_path())
    tokenizer = Tokenizer(file)
    if not args.random:
        return tokenizer, load(file, OPERATORS[args.operators], args.length, dtype, keep=mindspore.float32)
    mindspore.set_seed(args.seed)
    return tokenizer, Llama(
        OPERATORS[args.operators], tokenizer.size, 2, 32, 4, 2, args.length, interleaved=True, tied=True, dtype=dtype
    )


def validate(net, loss, text, batch):
    return np.mean([loss(net(Tensor(x)), Tensor(y)).asnumpy() for x, y in text.validation_batches(batch)])


def show_sample(net, tokenizer, text, seed):
    rng, amount = np.random.default_rng(seed), net.length // 2
    start = list(text.validation[: net.length // 4])
    choose = lambda scores: sample(scores, rng, 0.7, 0.9)  # noqa: E731
    tokens = continue_text(Reader(CachedLlama(net)), start, amount, choose, tokenizer.end)
    print(f"--- {tokenizer.decode(start)} [...]{tokenizer.decode(list(tokens))}\n---")


def main():
    args = parse()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_device(args.device_target)
    rank, size = processes()
    if args.batch % size:
        sys.exit(f"--batch must be a multiple of the {size} processes, got {args.batch}")
    dtype = getattr(mindspore, args.dtype or {"CPU": "float32", "GPU": "float16"}[args.device_target])
    try:
        tokenizer, net = make(args, dtype)
        text = Text(tokenizer.encode(args.text.read_text(encoding="utf-8")), args.length, args.seed)
    except (FileError, OSError, ValueError) as error:
        sys.exit(str(error))
    loss = NextTokenLoss(OPERATORS[args.operators])
    trainer = Trainer(net, loss, args.learning_rate, args.warmup, args.steps, args.clip, processes=size)
    args.output.mkdir(parents=True, exist_ok=True)
    checkpoint = args.output / "checkpoint.ckpt"
    if checkpoint.exists():
        trainer.restore(checkpoint)
    if rank == 0:
        print(f"step {trainer.step}: validation loss {validate(net, loss, text, args.batch):.4f}", flush=True)

    progress = tqdm(range(trainer.step, args.steps), initial=trainer.step, total=args.steps, disable=rank > 0)
    for step in progress:
        begin = time.perf_counter()
        mean, norm = trainer.train(text.batches(step, args.accumulate, args.batch, rank, size))
        speed = args.accumulate * args.batch * args.length / (time.perf_counter() - begin)
        progress.set_postfix(loss=f"{mean:.3f}", norm=f"{norm:.2f}", tokens_s=f"{speed:.0f}")
        if rank == 0:
            with (args.output / "losses.csv").open("a") as file:
                file.write(f"{step + 1},{mean:.7g},{norm:.7g},{speed:.1f}\n")
            if trainer.step % args.every == 0 or trainer.step == args.steps:
                trainer.save(checkpoint)
    if rank == 0:
        print(f"step {trainer.step}: validation loss {validate(net, loss, text, args.batch):.4f}")
        show_sample(net, tokenizer, text, args.seed)
        print(f"checkpoint: {checkpoint}")


if __name__ == "__main__":
    main()
