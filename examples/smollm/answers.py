"""Answers the questions of a file, one in each line, several at once. It takes the best token always."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msops
from chat import open_model, parser
from generation import Greedy, StackedLlama, TextError, continue_texts
from program import COUNT, run
from weights import FileError


def parse(arguments=None):
    options = parser(__doc__)
    options.add_argument("questions", type=Path, help="a text file; empty lines are left out")
    options.add_argument("--texts", type=COUNT, default=8, help="how many questions are answered at once")
    return options.parse_args(arguments)


def read_questions(path):
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    return [line for line in lines if line]


def main():
    args = parse()
    questions = read_questions(args.questions)
    tokenizer, net = open_model(args, msops)
    answers, times = [[] for _ in questions], []
    try:
        texts = [tokenizer.conversation([("user", question)]) for question in questions]
        net = Greedy(StackedLlama(net, args.texts), {"CPU": 1, "GPU": 16}[args.device_target])
        found = continue_texts(net, texts, args.most, list, tokenizer.ends)
        for i, token in found:
            answers[i].append(token)
            times.append(time.perf_counter())
    except (FileError, TextError) as error:
        sys.exit(str(error))
    for question, answer in zip(questions, answers):
        print(f"> {question}\n{tokenizer.decode(answer)}\n")
    half = len(times) // 2  # MindSpore compiles its graphs before that
    if half > 1:
        speed = (len(times) - 1 - half) / (times[-1] - times[half])
        print(f"[{len(times)} tokens, {speed:.1f} per second in the second half]", file=sys.stderr)


if __name__ == "__main__":
    run(main)
