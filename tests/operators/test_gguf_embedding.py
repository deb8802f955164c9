import re

import mindspore
import numpy as np
import pytest

import msops
from blocks import KINDS, dequantized, random_blocks, row_bytes
from card import Card, chain, length, lengths
from msops.operators.gguf_embedding import operators
from msops.testing.checks import Net, run, run_gradient
from test_gather_points import far_indices


def take(ids, blocks, kind, to="float16"):
    numbers = dequantized(blocks, kind).astype(to)
    out = np.zeros((*ids.shape, numbers.shape[1]), to)
    is_taken = (ids >= 0) & (ids < len(blocks))
    out[is_taken] = numbers[ids[is_taken]]
    return (out,)


def case(places, rows, columns, kind, to="float16"):
    return [places, (rows, row_bytes(kind, columns))], dict(kind=kind, to=to)


class TestGgufEmbedding(Card):
    function = msops.gguf_embedding
    formulas = (take,)
    cases = {
        **{kind: case((2, 3), 11, 512, kind) for kind in KINDS},
        "small": case((3,), 4, 32, "Q8_0", "float32"),
        "a number": case((), 3, 64, "Q4_1"),
        "no places": case((2, 0), 3, 64, "Q4_0"),
        "no columns": case((3,), 2, 0, "Q4_0"),
        "float32": case((5,), 7, 96, "Q4_0", "float32"),
        "float64": case((5,), 7, 256, "Q6_K", "float64"),
        "large": case((400,), 300, 1024, "Q5_K"),
    }
    further = {"no rows": case((0,), 0, 64, "Q4_1"), "odd": case((33,), 9, 1056, "Q4_0")}
    small = "small"
    roundings = 0

    def operators(self, shapes=(), kind="Q4_0", to="float16"):
        return chain(operators(kind, getattr(mindspore, to)))

    def inputs(self, shapes, dtype, seed=1, kind="Q4_0", **_):
        (rows, size), rng = shapes[1], np.random.default_rng(seed)
        ids = np.asarray(rng.integers(0, max(1, rows), shapes[0]), np.int64 if rows % 2 else np.int32)
        return [ids, random_blocks(seed, kind, rows, size // KINDS[kind][0] * KINDS[kind][1])]

    def random_case(self, random):
        """Chooses no places if there are no rows, since no index would be right."""
        kind, rows = random.choice([*KINDS]), length(random)
        to = random.choice(("float16", "float32", "float64"))
        columns = KINDS[kind][1] * (length(random) % 4)
        return case(lengths(random)[:3] if rows else (0,), rows, columns, kind, to)


CARD = TestGgufEmbedding()


@pytest.mark.parametrize("name", CARD.cases)
def test_case(mode, name):
    shapes, settings = CARD.cases[name]
    ids, blocks = CARD.inputs(shapes, None, **settings)
    net = Net(msops.gguf_embedding, kind=settings["kind"], dtype=getattr(mindspore, settings["to"]))
    (out,) = run(net, ids, blocks)
    assert out.dtype == settings["to"]
    np.testing.assert_array_equal(out, *take(ids, blocks, **settings))


def test_index_out_of_range(mode):
    """An index out of range is the entry's error on the CPU, and gives 0 on a GPU."""
    blocks, net = random_blocks(0, "Q4_1", 5, 64), Net(msops.gguf_embedding, kind="Q4_1")
    for far in far_indices(mode):
        ids = np.array([[0, 4], [far, 1]])
        if mindspore.get_context("device_target") == "GPU":
            np.testing.assert_array_equal(run(net, ids, blocks)[0], *take(ids, blocks, "Q4_1"))
            continue
        with pytest.raises(RuntimeError, match=re.escape(f"gguf_embedding: ids[1, 0] is {far}, but blocks has 5 rows")):
            run(net, ids, blocks)


def test_gradients_are_0(mode):
    ids, blocks = np.array([1, 0]), random_blocks(0, "Q4_0", 2, 64)
    gradients = run_gradient(Net(msops.gguf_embedding, kind="Q4_0"), [ids, blocks], [np.ones((2, 64), np.float16)])
    assert [(each.shape, each.any()) for each in gradients] == [(ids.shape, False), (blocks.shape, False)]


@pytest.mark.parametrize(
    ("ids", "blocks", "settings", "error", "words"),
    [
        (np.zeros(2, np.float32), np.zeros((2, 18), np.uint8), {}, TypeError,
         "gguf_embedding: ids must be int32 or int64, got float32"),
        (np.zeros(2, np.int32), np.zeros((2, 17), np.uint8), {}, ValueError,
         "gguf_embedding: blocks must have rows of a multiple of 18 bytes for Q4_0, got 17"),
        (np.zeros(2, np.int32), np.zeros(18, np.uint8), {}, ValueError,
         "gguf_embedding: blocks must have shape (N, R), got (18,)"),
        (np.zeros(2, np.int32), np.zeros((2, 18), np.uint8), dict(kind="q4_0"), ValueError,
         "gguf_embedding: kind must be one of Q4_0, Q4_1"),
        (np.zeros(2, np.int32), np.zeros((2, 18), np.uint8), dict(dtype=mindspore.uint8), TypeError,
         "gguf_embedding: dtype must be float16, float32 or float64, got UInt8"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(mode, ids, blocks, settings, error, words):
    with pytest.raises(error) as caught:
        run(Net(msops.gguf_embedding, **{"kind": "Q4_0", **settings}), ids, blocks)
    assert words in str(caught.value)
