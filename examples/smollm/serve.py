"""Serves many questions at once, whose keys and values lie in blocks of one pool. Shows who has which block while it
goes, and then answers each question alone, to see that the answers are the same."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msops
from answers import read_questions
from chat import open_model, parser
from generation import TextError
from program import COUNT, run
from serving import BlockLlama, Pool, Server
from weights import FileError

INSTRUCTIONS = (
    "You are a guide in a museum of science. You answer the questions of visitors, who may be children, in one or two "
    "short sentences, in plain words, and you say so where you do not know the answer."
)
QUESTIONS = (
    "What is the capital of Japan?",
    "Why is the sky blue?",
    "Who was Ada Lovelace?",
    "How many legs does a spider have?",
    "What is the largest planet?",
    "Why do leaves fall in autumn?",
    "What is a prime number?",
    "At what temperature does water boil?",
    "How do birds find their way?",
    "What did Marie Curie discover?",
)


def parse(arguments=None):
    options = parser(__doc__)
    options.set_defaults(length=256, most=32)
    options.add_argument("questions", type=Path, nargs="?", help="a text file; without it, some questions are asked")
    options.add_argument("--texts", type=COUNT, default=6, help="how many questions are answered at once")
    options.add_argument("--chunk", type=COUNT, default=64, help="the most tokens that are read in one call")
    options.add_argument("--blocks", type=COUNT, default=40, help="how many blocks the pool has")
    options.add_argument("--block-size", type=COUNT, default=16, help="how many tokens a block has")
    options.add_argument("--unpacked", action="store_true", help="do not multiply by the weights as the file has them")
    return options.parse_args(arguments)


def letter(number):
    return chr(ord("a") + number % 26)


def picture(server):
    """Returns a sign for each block: a dot if it is free, # if several texts have it, else the letter of its text."""
    signs = ["."] * len(server.pool.users)
    for text in server.running:
        for block in text.blocks:
            signs[block] = letter(text.number) if server.pool.users[block] == 1 else "#"
    return "".join(signs)


def tokens_of(answer):
    return [token for token, _ in answer]


def serve(server, texts, show=False):
    """Returns the answers to `texts`, each a list of (token, score), and how many seconds that took."""
    answers, shown, calls, begin = [[] for _ in texts], [], 0, time.perf_counter()
    for i, tokens in enumerate(texts):
        server.add(i, tokens)
    while server.waiting or server.running:
        read, found = server.step()
        calls += 1
        for text, token, score in found:
            answers[text.number].append((token, score))
        now = [text.number for text in server.running]
        if show and now != shown:  # a text began or ended
            users, waiting = server.pool.users, len(server.waiting)
            shared = sum(count > 1 for count in users)
            print(f"{calls:5} {read:5} {waiting:8} {len(server.pool.free):5} {shared:7}  {picture(server)}", flush=True)
            shown = now
    return answers, time.perf_counter() - begin


def main():
    args = parse()
    args.bits = None if args.unpacked else 4
    tokenizer, net = open_model(args, msops)
    questions = read_questions(args.questions) if args.questions else QUESTIONS
    try:
        talks = [[("system", INSTRUCTIONS), ("user", question)] for question in questions]
        texts = [tokenizer.conversation(talk) for talk in talks]
        pool = Pool(args.blocks, args.block_size)
        net = BlockLlama(net, args.blocks, args.block_size)
        server = Server(net, pool, args.texts, args.chunk, args.most, tokenizer.ends)
        server.prepare()
        print(" call  read  waiting  free  shared  blocks: a dot is free, a letter has one text, # has several")
        answers, seconds = serve(server, texts, show=True)
        singles = [serve(server, [text]) for text in texts]
    except (FileError, TextError) as error:
        sys.exit(str(error))
    for i, (question, answer) in enumerate(zip(questions, answers)):
        print(f"\n{letter(i)}> {question}\n{tokenizer.decode(tokens_of(answer))}")
    alone, longer = [found[0] for found, _ in singles], sum(seconds for _, seconds in singles)
    count = sum(map(len, answers))
    print(f"\n{count} tokens, {count / seconds:.1f} per second, {count / longer:.1f} one question after another")
    equal = sum(both == own for both, own in zip(answers, alone))
    same = sum(tokens_of(both) == tokens_of(own) for both, own in zip(answers, alone))
    print(f"{same} of {len(texts)} answers have the same tokens as alone, {equal} also the same bits of all scores")
    if same < len(texts):
        sys.exit("Each answer must have the same tokens as alone.")


if __name__ == "__main__":
    run(main)
