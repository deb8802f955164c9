"""Learns to write the language of Python's manual with a mixture of experts, beside a dense model that computes as much
for each character."""

import sys

import matplotlib.pyplot as plt
import mindspore
import numpy as np
from mindspore import ops
from tqdm import trange

import msops
from common import options, recorded, training_step
from llama import Llama, NextTokenLoss
from text import Text

_EXPERTS, _CHOSEN, _HIDDEN = 8, 2, 176
_BALANCE, _SMALL = 0.01, 0.001  # the weights of the losses that keep the experts busy and the logits small


class Mixtral(Llama):
    """A Llama that has a mixture of experts in place of each feed-forward network."""

    def __init__(self, vocabulary, capacity_factor=None):
        def experts(_, width, hidden):
            settings = dict(capacity_factor=capacity_factor, return_routing=True)
            return msops.MixtureOfExperts(width, hidden, _EXPERTS, _CHOSEN, **settings)

        super().__init__(msops, vocabulary, hidden=_HIDDEN, feed_forward=experts)

    def construct(self, tokens):
        """Returns the scores, and the logits (N, experts) and the chosen experts (N, k) of each layer."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        h, routes = ops.gather(self.embedding, tokens, 0), ()
        x = self.norm(h)
        for layer in self.layers:
            x, h = layer.norm1(layer.attention(x, cos, sin), h)
            x, logits, experts = layer.feed_forward(x)
            x, h = layer.norm2(x, h)
            routes += ((logits, experts),)
        return self.score(x), routes


def balance(logits, experts):
    """Returns E sum_e f_e P_e, f_e the share of the slots and P_e the mean probability of expert e, whose least value
    is 1: all experts alike. The gradient goes through P."""
    chosen = ops.one_hot(experts, _EXPERTS, mindspore.Tensor(1.0), mindspore.Tensor(0.0))
    return _EXPERTS * (chosen.mean((0, 1)) * msops.softmax(logits).mean(0)).sum()


class RoutedLoss(NextTokenLoss):
    """Adds the losses of the routes to that of the tokens which come next."""

    def construct(self, outputs, tokens):
        scores, routes = outputs
        loss = self.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1))
        for logits, experts in routes:
            size = ops.square(ops.logsumexp(logits, -1)).mean()
            loss = loss + (_BALANCE * balance(logits, experts) + _SMALL * size) / len(routes)
        return loss


def learn(text, net, loss, args):
    """Trains, and returns the loss of each step, and how well the scores fit the validation text."""
    step, losses = recorded(training_step(net, loss, 1e-3, args.steps).set_train()), []
    progress = trange(args.steps, unit="step")
    for _, batch in zip(progress, text.batches(np.random.default_rng(args.seed))):
        losses.append(float(step(*batch).asnumpy()))
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    net.set_train(False)
    fit, found = NextTokenLoss(msops), []
    for tokens, following in text.validation_batches():
        outputs = net(tokens)
        found.append(fit(outputs[0] if isinstance(outputs, tuple) else outputs, following).asnumpy())
    return losses, np.mean(found)


def count(text, net):
    """Returns how many slots of each batch of the validation text go to each expert, (batches, layers, experts)."""
    counts = []
    for tokens, _ in text.validation_batches():
        chosen = [experts.asnumpy().ravel() for _, experts in net(tokens)[1]]
        counts.append([np.bincount(each, minlength=_EXPERTS) for each in chosen])
    return np.array(counts)


def draw(curves, shares):
    figure, (text, bars) = plt.subplots(1, 2, figsize=(12, 5), dpi=120, layout="constrained")
    for name, (losses, validation) in curves.items():
        (line,) = text.plot(range(1, len(losses) + 1), losses, alpha=0.5, label=f"training, {name}")
        text.axhline(validation, color=line.get_color(), linestyle="--", label=f"validation, {name}: {validation:.3f}")
    text.set(title="The characters of Python's manual", xlabel="step", ylabel="loss")
    text.legend()
    text.grid(alpha=0.3)
    for layer, each in enumerate(shares):
        bars.bar(np.arange(_EXPERTS) + 0.2 * (layer - 1.5), 100 * each, 0.2, label=f"layer {layer + 1}")
    bars.axhline(100 / _EXPERTS, color="k", linestyle=":")
    bars.set(title="What the experts do", xlabel="expert", ylabel="share of the validation text (%)")
    bars.legend()
    return figure


def main():
    args = options(__doc__, "steps", 400, capacity=("none", "1", "1.25", "1.5", "2"))
    text = Text()
    vocabulary = len(text.characters)
    dense = Llama(msops, vocabulary, hidden=_CHOSEN * _HIDDEN)
    factor = None if args.capacity == "none" else float(args.capacity)
    sparse = Mixtral(vocabulary, factor)
    curves = {
        "dense": learn(text, dense, NextTokenLoss(msops), args),
        "experts": learn(text, sparse, RoutedLoss(msops), args),
    }
    for (name, (_, validation)), net in zip(curves.items(), (dense, sparse)):
        size = sum(parameter.size for parameter in net.trainable_params())
        print(f"{name}: {size} parameters, validation loss {validation:.4f}")
    counts = count(text, sparse)
    slots = counts.sum(-1, keepdims=True)
    shares = counts.sum(0) / slots.sum(0)
    print(f"shares of the experts: {shares.min():.1%} to {shares.max():.1%}")
    if factor is not None:
        dropped = np.maximum(counts - np.ceil(factor * slots / _EXPERTS), 0).sum() / slots.sum()
        print(f"left out of the validation text: {dropped:.1%} of the slots")
    path = args.output / "mixtral.png"
    draw(curves, shares).savefig(path)
    print(f"picture: {path}")
    if factor is None and curves["experts"][1] >= curves["dense"][1]:
        sys.exit("The validation loss of the experts must be below that of the dense model.")


if __name__ == "__main__":
    main()
