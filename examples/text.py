"""Learns to write the language of Python's manual, character by character, with a small Llama."""

import sys
import time
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Tensor
from tqdm import trange

import composed
import msops
from common import options, recorded, training_step
from llama import Llama, NextTokenLoss, generate

_LENGTH, _BATCH = 64, 16
_OPERATORS = {"msops": msops, "mindspore": composed}


class Text:
    """Holds the characters of Python's manual as tokens. The first tenth is for validation."""

    def __init__(self):
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        tokens = np.searchsorted(self.characters, list(text)).astype(np.int32)
        self.validation, self.train = np.split(tokens, [len(tokens) // 10])

    def batches(self, rng):
        """Yields random pieces of the text, and what comes after each of their characters, for ever."""
        while True:
            yield _pairs(self.train, rng.integers(0, len(self.train) - _LENGTH, _BATCH))

    def validation_batches(self):
        starts = np.arange(0, len(self.validation) - _LENGTH, _LENGTH)
        for i in range(0, len(starts) - _BATCH + 1, _BATCH):
            yield _pairs(self.validation, starts[i : i + _BATCH])

    def bigram_loss(self):
        """Returns the validation loss of a table of how often each character follows each."""
        counts = np.full((len(self.characters), len(self.characters)), 0.1)
        np.add.at(counts, (self.train[:-1], self.train[1:]), 1)
        shares = counts / counts.sum(1, keepdims=True)
        return -np.mean(np.log(shares[self.validation[:-1], self.validation[1:]]))

    def sample(self, net, rng):
        start = np.searchsorted(self.characters, list("\n\nThe "))
        tokens = generate(net, start, 240, _LENGTH, rng)
        return "".join(self.characters[token] for token in tokens).strip()


def _pairs(tokens, starts):
    pieces = tokens[starts[:, None] + np.arange(_LENGTH + 1)]
    return Tensor(pieces[:, :-1]), Tensor(pieces[:, 1:])


def learn(text, name, args):
    """Trains a Llama of these operators. Returns the loss of each step, the median time of a step, and the loss on the
    validation text."""
    mindspore.set_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    net = Llama(_OPERATORS[name], len(text.characters), length=_LENGTH)
    loss = NextTokenLoss(_OPERATORS[name])
    step = training_step(net, loss, 1e-3, args.steps)
    print(f"--- before training, with the operators of {name}:\n{text.sample(net, rng)}")

    losses, times = [], []
    step = recorded(step.set_train())
    progress = trange(args.steps, unit="step")
    for _, batch in zip(progress, text.batches(rng)):
        start = time.perf_counter()
        losses.append(float(step(*batch).asnumpy()))
        times.append(time.perf_counter() - start)
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    net.set_train(False)
    print(f"--- after training:\n{text.sample(net, rng)}\n---")
    validation = np.mean([loss(net(x), y).asnumpy() for x, y in text.validation_batches()])
    return losses, np.median(times), validation


def draw(curves, bigram):
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    for name, (losses, _, validation) in curves.items():
        (line,) = axes.plot(range(1, len(losses) + 1), losses, alpha=0.7, label=f"training, {name}")
        axes.axhline(validation, color=line.get_color(), linestyle="--", label=f"validation, {name}: {validation:.3f}")
    axes.axhline(bigram, color="k", linestyle=":", label=f"validation, bigram table: {bigram:.3f}")
    axes.set(title="The characters of Python's manual", xlabel="step", ylabel="cross-entropy")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main():
    args = options(__doc__, "steps", 250, operators=("msops", "mindspore", "both"))
    text, names = Text(), [*_OPERATORS] if args.operators == "both" else [args.operators]
    curves = {name: learn(text, name, args) for name in names}
    bigram = text.bigram_loss()

    for name, (_, seconds, validation) in curves.items():
        print(f"{name}: {1000 * seconds:.1f} ms a step, validation loss {validation:.4f}")
    if len(names) > 1:
        (ours, *_), (theirs, *_) = curves.values()
        relative = np.abs(np.divide(ours, theirs) - 1)
        print(f"losses differ by {relative[:10].max():.1e} in the first 10 steps, {relative.max():.1e} in all")
    path = args.output / "text.png"
    draw(curves, bigram).savefig(path)
    print(f"bigram table: validation loss {bigram:.4f}\npicture: {path}")
    if max(validation for *_, validation in curves.values()) >= bigram:
        sys.exit("The validation loss must be below that of the bigram table.")


if __name__ == "__main__":
    main()
