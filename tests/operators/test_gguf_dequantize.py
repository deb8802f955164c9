import importlib.util

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import msops
from blocks import KINDS, dequantized, random_blocks, row_bytes
from card import Card, chain, length, lengths
from guarded_call import GuardedCall
from msops.operators.gguf_dequantize import operators
from msops.testing.checks import Net, run, run_gradient
from msops.testing.entry import Status


def case(shape, columns, kind, to="float32"):
    """Returns a case of rows of so many numbers."""
    return [(*shape, row_bytes(kind, columns))], dict(kind=kind, to=to)


class TestGgufDequantize(Card):
    function = msops.gguf_dequantize
    formulas = (lambda blocks, kind, to="float32": (dequantized(blocks, kind).astype(to),),)
    cases = {
        **{kind: case((2, 3), 512, kind) for kind in KINDS},
        "small": case((2,), 64, "Q4_0"),
        "one row": case((), 256, "Q6_K"),
        "no rows": case((0, 2), 64, "Q4_1"),
        "no columns": case((3,), 0, "Q8_0"),
        "float16": case((7,), 256, "Q5_K", "float16"),
        "float64": case((7,), 768, "Q4_K", "float64"),
        "large": case((40,), 4096, "Q4_K", "float16"),
    }
    further = {"odd": case((33,), 96, "Q4_0", "float16"), "many blocks": case((3,), 32 * 1001, "Q8_0")}
    small = "small"
    roundings = 0

    def operators(self, shapes=(), kind="Q4_0", to="float32"):
        return chain(operators(kind, getattr(mindspore, to)))

    def inputs(self, shapes, dtype, seed=1, kind="Q4_0", **_):
        return [random_blocks(seed, kind, int(np.prod(shapes[0][:-1])), columns_of(shapes[0], kind)).reshape(shapes[0])]

    def random_case(self, random):
        kind = random.choice([*KINDS])
        to = random.choice(("float16", "float32", "float64"))
        return case(lengths(random)[:3], KINDS[kind][1] * (length(random) % 4), kind, to)


def columns_of(shape, kind):
    size, numbers = KINDS[kind]
    return shape[-1] // size * numbers


CARD = TestGgufDequantize()


@pytest.mark.parametrize("name", CARD.cases)
def test_case(mode, name):
    """Numbers are exactly ggml's, rounded once to the dtype."""
    shapes, settings = CARD.cases[name]
    [blocks] = CARD.inputs(shapes, None, **settings)
    net = Net(msops.gguf_dequantize, kind=settings["kind"], dtype=getattr(mindspore, settings["to"]))
    (out,) = run(net, blocks)
    assert out.dtype == settings["to"]
    np.testing.assert_array_equal(out, *CARD.reference(blocks, **settings))


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_package_gguf(kind):
    import gguf

    blocks = random_blocks(5, kind, 9, 1024)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(msops.gguf_dequantize(Tensor(blocks), kind).asnumpy(), want)


def test_extreme_blocks():
    """All bytes 0 or 255, and scales that are subnormal or the largest, are no exception."""
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    for kind, (size, _) in KINDS.items():
        blocks = np.array([[0] * size, [255] * size, [128] * size, [127] * size], np.uint8)
        for at, scale in zip((0, 2, 208), (np.float16(6e-8), np.float16(-65504), np.float16(65504))):
            if at < size:
                blocks[:, at : at + 2] = np.array([scale]).view(np.uint8)
        np.testing.assert_array_equal(run(Net(msops.gguf_dequantize, kind=kind), blocks)[0], dequantized(blocks, kind))


def test_gradient_is_0(mode):
    blocks = random_blocks(0, "Q4_0", 2, 64)
    [gradient] = run_gradient(Net(msops.gguf_dequantize, kind="Q4_0"), [blocks], [np.ones((2, 64), np.float32)])
    assert gradient.shape == blocks.shape
    assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("blocks", "kind", "settings", "error", "words"),
    [
        (np.zeros((2, 19), np.uint8), "Q4_0", {}, ValueError,
         "gguf_dequantize: blocks must have rows of a multiple of 18 bytes for Q4_0, got 19"),
        (np.zeros((2, 18), np.int8), "Q4_0", {}, TypeError, "gguf_dequantize: blocks must be uint8, got int8"),
        (np.zeros((2, 18), np.uint8), "Q4_2", {}, ValueError,
         "gguf_dequantize: kind must be one of Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, got 'Q4_2'"),
        (np.zeros((2, 18), np.uint8), 2, {}, TypeError, "gguf_dequantize: kind must be a str, got int"),
        (np.zeros((2, 18), np.uint8), "Q4_0", dict(dtype=mindspore.int32), TypeError,
         "gguf_dequantize: dtype must be float16, float32 or float64, got Int32"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(mode, blocks, kind, settings, error, words):
    with pytest.raises(error) as caught:
        run(Net(msops.gguf_dequantize, kind=kind, **settings), blocks)
    assert words in str(caught.value)


def test_blocks_that_do_not_fit_change_no_memory(capfd):
    [call] = CARD.entry_calls(*CARD.cases["small"], "float32")
    call.inputs[0] = np.zeros((2, 35), np.uint8)
    GuardedCall(call, capfd).refused(Status.BAD_SHAPE)
