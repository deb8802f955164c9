"""Learns the characters of Python's manual with Mamba, beside a Llama and an LLTM of the same size in the same time,
and to copy the letters that are hidden among noise."""

import sys
import time

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from tqdm import tqdm

import msops
from common import options
from llama import Linear, Llama, NextTokenLoss
from text import Text

_LETTERS, _COPIED, _AMONG = 8, 4, 16  # of the copying task: kinds of letters, how many are hidden, in how many places
_COPYING_STEPS = 450  # of training


class MambaBlock(nn.Cell):
    """Adds to the stream what a selective state space model reads in it, (B, T, width).

    The state is (the last steps before the convolution, the states of the scan), or () at the beginning.
    """

    def __init__(self, width, states, kernel=4):
        super().__init__()
        inner, self.rank = 2 * width, -(-width // 16)
        self.norm = msops.RMSNorm(width)
        self.enter = Linear(width, 2 * inner)
        self.convolve = msops.CausalConv1d(inner, kernel, activation="silu", return_final_state=True)
        self.select = Linear(inner, self.rank + 2 * states)
        self.step = Linear(self.rank, inner)
        lengths = np.exp(np.random.default_rng(0).uniform(np.log(1e-3), np.log(0.1), inner))
        self.step_bias = Parameter(Tensor(np.log(np.expm1(lengths)), mindspore.float32), name="step_bias")
        self.decay = Parameter(Tensor(np.log(np.tile(np.arange(1, states + 1), (inner, 1))), mindspore.float32))
        self.skip = Parameter(initializer("ones", inner), name="skip")
        self.scan = msops.SelectiveScan(delta_softplus=True, return_last_state=True)
        self.leave = Linear(inner, width)

    def construct(self, stream, state=()):
        x, gate = ops.chunk(self.enter(self.norm(stream)).swapaxes(1, 2), 2, 1)  # (B, inner, T)
        x, steps = self.convolve(x, *state[:1])
        selected = self.select(x.swapaxes(1, 2))
        delta = self.step(selected[..., : self.rank]).swapaxes(1, 2)
        b, c = ops.chunk(selected[..., self.rank :].swapaxes(1, 2), 2, 1)
        y, after = self.scan(x, delta, -ops.exp(self.decay), b, c, self.skip, gate, self.step_bias, *state[1:])
        return stream + self.leave(y.swapaxes(1, 2)), (steps, after)


class Mamba(nn.Cell):
    """Maps tokens (B, T) to scores of the token after each, (B, T, vocabulary). `read` also takes and returns the
    states of the layers, two of each, so that a text goes on from any token."""

    def __init__(self, vocabulary, layers=6, width=128, states=16):
        super().__init__()
        self.embedding = Parameter(initializer(Normal(1.0), (vocabulary, width)), name="embedding")
        self.layers = nn.CellList([MambaBlock(width, states) for _ in range(layers)])
        self.norm, self.head = msops.RMSNorm(width), Linear(width, vocabulary)

    def read(self, tokens, states=()):
        stream, after = ops.gather(self.embedding, tokens, 0), ()
        for i, layer in enumerate(self.layers):
            stream, state = layer(stream, states[2 * i : 2 * i + 2])
            after += state
        return self.head(self.norm(stream)), after

    def construct(self, tokens):
        return self.read(tokens)[0]


class Reader(nn.Cell):
    """Maps tokens and states to scores and states, one step or many."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, tokens, *states):
        return self.net.read(tokens, states)


class Recurrent(nn.Cell):
    """Maps tokens to scores as Mamba does, but by layers of LLTM."""

    def __init__(self, vocabulary, layers=2, width=128, hidden=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lltm = msops.LLTM(width, hidden, layers, batch_first=True)
        self.head = Linear(hidden, vocabulary)

    def construct(self, tokens):
        return self.head(self.lltm(self.embedding(tokens))[0])


def train(net, batches, seconds=np.inf, steps=np.inf, rate=2e-3):
    """Trains for this time, apart from compiling, or so many steps, while the learning rate falls to 0 along a cosine,
    and returns the losses."""
    optimizer = nn.AdamWeightDecay(net.trainable_params(), rate)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, NextTokenLoss(msops)), optimizer)
    step.set_train(True)
    losses, share = [float(step(*next(batches)).asnumpy())], 0.0
    start = time.perf_counter()
    with tqdm(total=100, bar_format="{desc}: {n:.0f} % [{elapsed}]") as progress:
        while share < 1:
            optimizer.learning_rate.set_data(Tensor(rate * (1 + np.cos(np.pi * share)) / 2, mindspore.float32))
            losses.append(float(step(*next(batches)).asnumpy()))
            share = min(1.0, max((time.perf_counter() - start) / seconds, len(losses) / steps))
            progress.update(100 * share - progress.n)
            progress.set_description(f"loss {losses[-1]:.3f}")
    net.set_train(False)
    return losses


def learn_text(args):
    """Trains three networks for the same time, and returns the losses of each and its loss on the validation text."""
    text, curves = Text(), {}
    vocabulary = len(text.characters)
    networks = {"Mamba": Mamba(vocabulary), "Llama": Llama(msops, vocabulary), "LLTM": Recurrent(vocabulary)}
    for name, net in networks.items():
        losses = train(net, text.batches(np.random.default_rng(args.seed)), args.seconds)
        pairs = [NextTokenLoss(msops)(net(x), y).asnumpy() for x, y in text.validation_batches()]
        curves[name] = losses, np.mean(pairs)
        size = sum(parameter.size for parameter in net.trainable_params())
        print(f"{name}: {size} parameters, {len(losses)} steps, "
              f"validation loss {curves[name][1]:.4f}")  # fmt: skip
    print(f"bigram table: validation loss {text.bigram_loss():.4f}")
    return text, networks["Mamba"], curves


def continue_text(text, net, rng, amount=240, temperature=0.8):
    """Returns a text that Mamba writes from a beginning, step by step, and the greatest difference between scores
    of the steps and those of all of it at once."""
    reader = Reader(net)
    tokens = list(np.searchsorted(text.characters, list("\n\nThe ")))
    scores, states = reader(Tensor([tokens[:-1]], mindspore.int32))
    seen = [scores.asnumpy()[0]]
    for _ in range(amount):
        scores, states = reader(Tensor([tokens[-1:]], mindspore.int32), *states)
        seen.append(scores.asnumpy()[0])
        tokens.append(int(np.argmax(seen[-1][0] / temperature + rng.gumbel(size=len(text.characters)))))
    at_once = net(Tensor([tokens[:-1]], mindspore.int32)).asnumpy()[0]
    return "".join(text.characters[token] for token in tokens), np.abs(np.concatenate(seen) - at_once).max()


class Copying:
    """The selective copying task: letters at random places among noise, and after them as many marks, at which the
    letters are to be said in their order."""

    noise, mark = 0, _LETTERS + 1

    def batch(self, rng, size=64):
        letters = rng.integers(1, _LETTERS + 1, (size, _COPIED))
        places = np.sort(rng.permuted(np.tile(np.arange(_AMONG), (size, 1)), axis=1)[:, :_COPIED], axis=1)
        tokens = np.full((size, _AMONG + _COPIED), self.noise)
        tokens[:, _AMONG:] = self.mark
        np.put_along_axis(tokens, places, letters, 1)
        wanted = np.full(tokens.shape, -100)  # the loss ignores what is not to be said
        wanted[:, _AMONG:] = letters
        return Tensor(tokens, mindspore.int32), Tensor(wanted, mindspore.int32)

    def batches(self, rng):
        while True:
            yield self.batch(rng)

    def accuracy(self, net, rng):
        tokens, wanted = self.batch(rng, 512)
        said = net(tokens).asnumpy()[:, _AMONG:].argmax(-1)
        return np.mean(said == wanted.asnumpy()[:, _AMONG:])


def learn_copying(args):
    task, rng = Copying(), np.random.default_rng(args.seed)
    net = Mamba(_LETTERS + 2, layers=2, width=64)
    losses = train(net, task.batches(rng), steps=_COPYING_STEPS)
    accuracy = task.accuracy(net, rng)
    print(f"selective copying: {accuracy:.2%} of the letters after {len(losses)} steps")
    return losses, accuracy


def draw(curves, copying, accuracy):
    figure, (text, copy) = plt.subplots(1, 2, figsize=(12, 5), dpi=120, layout="constrained")
    for name, (losses, validation) in curves.items():
        shares = np.linspace(0, 100, len(losses))
        (line,) = text.plot(shares, losses, alpha=0.5, label=f"training, {name}")
        text.axhline(validation, color=line.get_color(), linestyle="--", label=f"validation, {name}: {validation:.3f}")
    text.set(title="The characters of Python's manual", xlabel="time (%)", ylabel="cross-entropy")
    copy.semilogy(range(1, len(copying) + 1), copying)
    copy.set(title=f"Selective copying, {accuracy:.1%} at the end", xlabel="step", ylabel="cross-entropy")
    text.legend()
    for axes in text, copy:
        axes.grid(alpha=0.3)
    return figure


def main():
    args = options(__doc__, "seconds", 60)
    text, net, curves = learn_text(args)
    written, difference = continue_text(text, net, np.random.default_rng(args.seed))
    print(f"--- Mamba writes, step by step:\n{written.strip()}\n---")
    print(f"scores of the steps and of all at once differ by {difference:.1e}")
    copying, accuracy = learn_copying(args)
    path = args.output / "mamba.png"
    draw(curves, copying, accuracy).savefig(path)
    print(f"picture: {path}")
    if difference > 1e-3 or accuracy < 0.99:
        sys.exit("Steps must give the scores of all at once, and 99 % of the letters must be copied.")


if __name__ == "__main__":
    main()
