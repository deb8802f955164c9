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
from common import can_record, processes
from generation import CachedLlama, Reader, TextError, continue_text, sample
from llama import Llama, NextTokenLoss
from program import COUNT, SEED, finished, make_folder, number, run, use
from tokenizer import Tokenizer
from training import Text, Trainer
from weights import FileError, Gguf, default_path, load

OPERATORS = {"msops": msops, "mindspore": composed}
READ = 10  # steps between two reads of the losses, each of which waits for the GPU
_OUTPUT = Path(__file__).resolve().parents[1] / "output" / "smollm"


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file; its last tenth is for validation")
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="float32 on the CPU, float16 on the GPU")
    parser.add_argument("--operators", choices=OPERATORS, default="msops", help="which operators to use")
    parser.add_argument("--steps", type=COUNT, default=100, help="how many steps to train in all")
    parser.add_argument("--batch", type=COUNT, default=4, help="how many pieces a batch has, in all processes together")
    parser.add_argument("--length", type=COUNT, default=256, help="how many tokens a piece has")
    parser.add_argument("--accumulate", type=COUNT, default=1, help="how many batches a step has")
    parser.add_argument("--learning-rate", type=number(float, 0, 1), default=1e-4, help="the highest learning rate")
    parser.add_argument(
        "--warmup", type=number(int, 0, 10**9), default=10, help="how many steps it takes the learning rate to rise"
    )
    parser.add_argument("--clip", type=number(float, 0, 1e9), default=1.0, help="the greatest norm of the gradients")
    parser.add_argument("--every", type=COUNT, default=50, help="how many steps lie between checkpoints")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the pieces and of the sample")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="folder of the checkpoint and the losses")
    parser.add_argument("--random", action="store_true", help="train a tiny model from random numbers, to try this")
    parser.add_argument("--eager", action="store_true", help="launch each kernel of a step, instead of a CUDA graph")
    return parser.parse_args(arguments)


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
    net.set_train(False)
    with finished():
        return np.mean([loss(net(Tensor(x)), Tensor(y)).asnumpy() for x, y in text.validation_batches(batch)])


def show_sample(net, tokenizer, text, seed):
    rng, amount = np.random.default_rng(seed), net.length // 2
    start = list(text.validation[: max(1, net.length // 4)])
    choose = lambda scores: sample(scores, rng, 0.7, 0.9)  # noqa: E731
    try:
        tokens = list(continue_text(Reader(CachedLlama(net)), start, amount, choose, tokenizer.ends))
    except TextError as error:
        sys.exit(str(error))
    print(f"--- {tokenizer.decode(start)} [...]{tokenizer.decode(tokens)}\n---")


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} must be UTF-8: {error}") from error


def keep_losses(path, step):
    """Keeps the rows of the first steps alone. Training that was stopped between two checkpoints has written more."""
    if path.exists():
        steps = {str(i + 1) for i in range(step)}
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(row for row in rows if row.partition(",")[0] in steps))


class Losses:
    """Collects what steps return, which the GPU may still be computing, and writes it to a file, with the speed since
    the last time. Without a file, it tells the losses alone."""

    def __init__(self, path, tokens):
        self._path, self._tokens, self._kept, self._begin = path, tokens, [], time.perf_counter()

    def add(self, step, losses, norm):
        self._kept.append((step, losses, norm))

    def write(self):
        """Waits for the GPU, and returns what the progress bar shows of the last step."""
        rows = [(step, np.mean([x.asnumpy() for x in losses]), norm.asnumpy()) for step, losses, norm in self._kept]
        speed = len(rows) * self._tokens / (time.perf_counter() - self._begin)
        if self._path is not None:
            with self._path.open("a") as file:
                file.writelines(f"{step},{mean:.7g},{norm:.7g},{speed:.1f}\n" for step, mean, norm in rows)
        self._kept, self._begin = [], time.perf_counter()
        _, mean, norm = rows[-1]
        return dict(loss=f"{mean:.3f}", norm=f"{norm:.2f}", tokens_s=f"{speed:.0f}")


def main():
    args = parse()
    make_folder(args.output)
    use(args.device_target)
    rank, size = processes()
    if args.batch % size:
        sys.exit(f"--batch must be a multiple of the {size} processes, got {args.batch}")
    dtype = getattr(mindspore, args.dtype or {"CPU": "float32", "GPU": "float16"}[args.device_target])
    loss = NextTokenLoss(OPERATORS[args.operators])
    checkpoint, losses = args.output / "checkpoint.ckpt", args.output / "losses.csv"
    try:
        tokenizer, net = make(args, dtype)
        text = Text(tokenizer.encode(read_text(args.text)), args.length, args.seed)
        record = args.device_target == "GPU" and size == 1 and can_record() and not args.eager
        settings = args.learning_rate, args.warmup, args.steps, args.clip
        trainer = Trainer(net, loss, *settings, processes=size, record=record)
        if checkpoint.exists():
            trainer.restore(checkpoint)
    except (FileError, OSError) as error:
        sys.exit(str(error))
    if rank == 0:
        keep_losses(losses, trainer.step)
        print(f"step {trainer.step}: validation loss {validate(net, loss, text, args.batch):.4f}", flush=True)

    progress = tqdm(range(trainer.step, args.steps), initial=trainer.step, total=args.steps, disable=rank > 0)
    kept = Losses(losses if rank == 0 else None, args.accumulate * args.batch * args.length)
    for step in progress:
        with finished() as interrupts:
            kept.add(step + 1, *trainer.train(text.batches(step, args.accumulate, args.batch, rank, size)))
            must_save = trainer.step % args.every == 0 or trainer.step == args.steps or interrupts
            if must_save or trainer.step % READ == 0:
                progress.set_postfix(kept.write())
            if must_save and rank == 0:
                trainer.save(checkpoint)
    if rank == 0:
        print(f"step {trainer.step}: validation loss {validate(net, loss, text, args.batch):.4f}")
        show_sample(net, tokenizer, text, args.seed)
        print(f"checkpoint: {checkpoint}")


if __name__ == "__main__":
    run(main, " The same command goes on from the last checkpoint.")
