"""Measures what is lost when the weights of SmolLM2-135M get fewer bits: its perplexity on the manual of Python, which
comes with Python, for each kind of weights. Prints a table."""

import argparse
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msops
import quantized
from llama import NextTokenLoss
from program import COUNT, run, use
from tokenizer import Tokenizer
from weights import FileError, Gguf, default_path, load, need


class Codes(nn.Cell):
    """A linear layer of what `convert_nf4` returns."""

    def __init__(self, found, bias):
        super().__init__()
        self.weight, self.scale, self.codebook = (
            Parameter(Tensor(found[name]), name=name, requires_grad=False) for name in ("weight", "scale", "codebook")
        )
        self.bias, self.bits, self.group = bias, found["bits"], found["group"]

    def construct(self, x):
        settings = dict(bits=self.bits, group=self.group, codebook=self.codebook)
        return msops.weight_quant_matmul(x, self.weight, self.scale, bias=self.bias, **settings)


class Int8(nn.Cell):
    """A linear layer that rounds x, too: each row of x and of the weight has a scale."""

    def __init__(self, linear):
        super().__init__()
        codes, scale = msops.quantize_rows(linear.weight)
        self.weight = Parameter(codes, name="weight", requires_grad=False)
        self.scale = Parameter(scale, name="scale", requires_grad=False)
        self.bias = linear.bias

    def construct(self, x):
        codes, scale = msops.quantize_rows(x)
        return msops.int8_matmul(codes, self.weight, self.scale, scale, self.bias, dtype=x.dtype)


def rounded(linear, bits, group, symmetric=False):
    """Rounds to nearest, with scales in float16."""
    weight = linear.weight.astype(mindspore.float16)
    return msops.WeightQuantMatmul.from_weight(weight, linear.bias, bits, group, symmetric)


def as_gguf(linear, kind):
    """Rounds as llama.cpp does."""
    gguf = need("gguf")
    blocks = gguf.quants.quantize(linear.weight.asnumpy(), gguf.GGMLQuantizationType[kind])
    return quantized.of_blocks(linear, Tensor(blocks), kind, mindspore.float32)


def as_nf4(linear, block=64):
    """Rounds to the nearest number of the codebook, as bitsandbytes does."""
    weight, shape = linear.weight.asnumpy().reshape(-1, block), linear.weight.shape
    book = msops.convert_nf4(np.zeros(1, np.uint8), np.ones(1, np.float32), (1, 2))["codebook"]
    largest = np.maximum(np.abs(weight).max(1), np.finfo(np.float32).tiny)
    codes = np.searchsorted((book[1:] + book[:-1]) / 2, weight / largest[:, None]).astype(np.uint8).reshape(-1, 2)
    return Codes(msops.convert_nf4(codes[:, 0] << 4 | codes[:, 1], largest, shape, block), linear.bias)


KINDS = {
    **{
        f"{bits} bits, groups of {group}, {'symmetric' if symmetric else 'zero points'}": partial(
            rounded, bits=bits, group=group, symmetric=symmetric
        )
        for bits, group in ((8, 128), (4, 32), (4, 64), (4, 128))
        for symmetric in (False, True)
    },
    "NF4, blocks of 64": as_nf4,
    "int8 times int8, a scale for each row": Int8,
    "Q8_0": partial(as_gguf, kind="Q8_0"),
    "Q4_0": partial(as_gguf, kind="Q4_0"),
}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument("--pieces", type=COUNT, default=8, help="how many pieces of the text are read")
    parser.add_argument("--length", type=COUNT, default=512, help="how many tokens a piece has")
    return parser.parse_args(arguments)


def manual():
    """Returns the manual of Python, which comes with it."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def pieces_of(tokenizer, amount, length):
    """Returns the first tokens of the manual and, for each, the one after it, both (amount, length)."""
    tokens = np.array(tokenizer.encode(manual()[: 8 * amount * length])[: amount * length + 1], np.int32)
    return tokens[:-1].reshape(amount, length), tokens[1:].reshape(amount, length)


def networks(file, length):
    """Yields each kind of weights and a network of such."""
    net = load(file, msops, length)
    linears = {}
    for name in quantized.matrices(net):
        quantized.replace(net, name, lambda linear, name=name: linears.setdefault(name, linear))
    yield "float32, unpacked from the file", net
    yield "as they lie in the file (Q4_1)", quantized.load(file, length)
    for kind, make in KINDS.items():
        for name, linear in linears.items():
            quantized.replace(net, name, lambda _, linear=linear: make(linear))  # noqa: B023
        yield kind, net
    yield "float16, and all else in float16, too", load(file, msops, length, mindspore.float16)


def perplexity(net, pieces):
    """Returns e to the mean loss of a token. Each piece is read from its own beginning."""
    loss = NextTokenLoss(msops)
    losses = [loss(net(Tensor(x[None])), Tensor(y[None])).asnumpy() for x, y in zip(*pieces)]
    return np.exp(np.mean(losses, dtype=np.float64))


def main():
    args = parse()
    use(args.device_target)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)  # each network is used once
    try:
        file = Gguf(default_path())
        pieces = pieces_of(Tokenizer(file), args.pieces, args.length)
        print("| weights of the layers | bits | perplexity |\n|---|---|---|")
        numbers = None
        for kind, net in networks(file, args.length):
            parts = [part for layer in net.layers for part in (layer.attention, layer.feed_forward)]
            size = sum(p.nbytes for part in parts for p in part.get_parameters())
            numbers = numbers or size / 4  # the first network has float32
            print(f"| {kind} | {8 * size / numbers:.2f} | {perplexity(net, pieces):.3f} |", flush=True)
    except FileError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run(main)
