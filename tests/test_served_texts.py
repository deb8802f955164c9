"""Tests that the server of examples/smollm gives each text what it gets alone, whatever blocks it has."""

import importlib
import sys

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from child import ROOT
from msops.compat import VERSION

pytestmark = pytest.mark.skipif(VERSION < (2, 9), reason="the examples are for the newest version of MindSpore")
WORDS = 50


@pytest.fixture(scope="module")
def modules():
    """Returns the modules llama and serving of the examples."""
    kept = list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "smollm"), str(ROOT / "examples")]
    yield importlib.import_module("llama"), importlib.import_module("serving")
    sys.path[:] = kept


class Numbers:
    """Stands for a network: its caches hold the tokens themselves, and the next token is a number that all tokens of a
    text give."""

    def __init__(self, blocks, size, capacity):
        self.capacity, self.size, self.cache = capacity, size, np.full((blocks * size, 2), -1)
        self.read, self.sizes = 0, set()

    @staticmethod
    def next_token(tokens):
        return int(np.sum((np.arange(len(tokens)) + 7) * (np.array(tokens) + 3) ** 2) % WORDS)

    def __call__(self, *inputs):
        tokens, places, slots, tables, lengths, starts = (x.asnumpy() for x in inputs)
        assert starts[[0, -1]].tolist() == [0, tokens.shape[1]]
        assert (np.diff(starts) >= 0).all()
        np.testing.assert_array_equal(slots >= 0, np.arange(len(slots)) < starts[-2])
        assert lengths[-1] == 0
        self.sizes.add(tokens.shape[1])
        self.read += starts[-2]
        written = slots >= 0
        assert len(set(slots[written])) == written.sum()
        self.cache[slots[written]] = np.stack([tokens[0], places], 1)[written]
        best = []
        for table, length in zip(tables, lengths):
            keys = np.arange(length)
            found = self.cache[table[keys // self.size] * self.size + keys % self.size]
            np.testing.assert_array_equal(found[:, 1], keys)
            best.append(self.next_token(found[:, 0]))
        return Tensor(np.array(best)), Tensor(np.array(best, np.float32))


def continued(next_token, tokens, most, room, ends):
    """Returns the answer to a text that is alone."""
    tokens, begin = list(tokens), len(tokens)
    while len(tokens) < min(begin + most, room + 1):
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[begin:]


def served(server, texts):
    """Returns the answers, how many texts shared a block at most, and how many were served at once."""
    answers, shared, together = [[] for _ in texts], 0, 0
    for i, text in enumerate(texts):
        server.add(i, text)
    for _ in range(1000):
        for text, token, _ in server.step()[1]:
            answers[text.number].append(token)
        shared, together = max(shared, *server.pool.users), max(together, len(server.running))
        if not server.waiting and not server.running:
            return answers, shared, together
    pytest.fail("the texts do not end")


@pytest.mark.parametrize("seed", range(12))
def test_pool(modules, seed):
    """Texts of all lengths, of which some begin alike, in pools that have room for few of them."""
    rng, (_, serving) = np.random.default_rng(seed), modules
    size, texts, chunk, most = (int(rng.integers(1, n)) for n in (7, 6, 30, 12))
    blocks = int(rng.integers(30, 90)) // size + 1
    room = min(60, blocks * size)
    beginnings = [rng.integers(0, WORDS, n).tolist() for n in (0, 11, 25)]
    wanted = []
    for _ in range(12):
        text = beginnings[rng.integers(3)] + rng.integers(0, WORDS, rng.integers(1, 9)).tolist()
        wanted.append(text[:room])
    wanted.append(wanted[0])  # is shared as a whole
    net, pool, ends = Numbers(blocks, size, 60), serving.Pool(blocks, size), {7, 19}
    server = serving.Server(net, pool, texts, chunk, most, ends)
    answers, shared, together = served(server, wanted)
    assert answers == [continued(net.next_token, text, most, room, ends) for text in wanted]
    assert sorted(pool.free) == list(range(blocks))
    assert not any(pool.users)
    assert not any(pool.share(text) for text in wanted)
    assert shared <= together <= texts
    assert net.sizes <= {texts, max(texts, chunk)}


def test_shared_beginning(modules):
    """The beginning that three texts share is read once. A text that is read already gets on beside a long one."""
    _, serving = modules
    net = Numbers(20, 4, 60)
    server = serving.Server(net, serving.Pool(20, 4), 3, 8, 2)
    beginning = list(range(12))
    _, shared, _ = served(server, [[*beginning, last] for last in (30, 31, 32)])
    assert shared == 3
    assert net.read == 13 + 2 * 1 + 3  # of each answer but its last token
    server.add(0, [5])
    server.step()
    server.add(1, list(range(12)))
    count, found = server.step()
    assert (count, [text.number for text, *_ in found]) == (8, [0])
    assert server.running[0].read == 7


def test_words(modules):
    _, serving = modules
    server = serving.Server(Numbers(4, 4, 60), serving.Pool(4, 4), 2, 8, 3)
    for tokens in ([], [1] * 17):
        with pytest.raises(serving.TextError, match=f"Text 5 must have 1 to 16 tokens, got {len(tokens)}"):
            server.add(5, tokens)


def test_network(modules):
    """Four texts, two at once, in a pool of few blocks: each token is the best one of the whole text's scores."""
    llama, serving = modules
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(1)
    net, reference = (llama.Llama(msops, WORDS, layers=2, width=48, heads=6, kv_heads=2, length=32) for _ in range(2))
    for ours, theirs in zip(reference.get_parameters(), net.get_parameters()):
        ours.set_data(theirs)
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, WORDS, 9).tolist()
    texts = [beginning + rng.integers(0, WORDS, n).tolist() for n in (4, 1, 9, 6)]
    server = serving.Server(serving.BlockLlama(net, 12, 4), serving.Pool(12, 4), 2, 2, 6)
    answers, shared, _ = served(server, texts)
    assert shared == 2
    padded = np.zeros((4, 32), np.int32)
    for row, text, answer in zip(padded, texts, answers):
        row[: len(text) + 6] = text + answer
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    scores = reference(Tensor(padded)).asnumpy()
    best = [row[len(text) - 1 :][:6].argmax(-1).tolist() for row, text in zip(scores, texts)]
    assert answers == best
