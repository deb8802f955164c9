"""Tests decoder_stack with caches in blocks, beside the cases of its card."""

import re

import mindspore
import numpy as np
import pytest

from card import Call, results_of, zeros
from gpu import compare_with_cpu
from msops.testing.checks import run
from msops.testing.entry import outputs_of
from numpy_decoder_stack import NAMES, OPTIONAL, Stack
from operator_test import wide_in_graph_mode
from test_decoder_stack import CARD
from test_emulated_entries import Emulator


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(keys=zeros((2, 11, 4, 2, 7))[0]),
            "keys must have shape (L, P, S, kv_heads, D) = (2, P, S, 2, 8) or (L P, ",
        ),
        (dict(keys=zeros((3, 11, 4, 2, 8))[0]), "S, kv_heads, D) with block_tables, got (3, 11, 4, 2, 8)"),
        (dict(keys=zeros((21, 4, 2, 8))[0]), "S, kv_heads, D) with block_tables, got (21, 4, 2, 8)"),
        (dict(keys=zeros((88, 2, 8))[0]), "S, kv_heads, D) with block_tables, got (88, 2, 8)"),
        (
            dict(keys=zeros((2, 11, 0, 2, 8))[0]),
            "keys must have at least one row in a block, got shape (2, 11, 0, 2, 8)",
        ),
        (dict(block_tables=np.zeros((2, 3), np.int32)), "block_tables must have shape (B, M) = (3, "),
        (dict(keys=None, lengths=None), "keys must be given with block_tables, got None"),
    ],
    ids=str,
)
def test_blocks_of_other_shapes(mode, changes, words):
    shapes, settings = CARD.cases["blocks"]
    inputs = dict(zip((*NAMES, *settings["optional"]), CARD.inputs(shapes, np.float32, **settings)))
    inputs.update(changes)
    if "keys" in changes:
        inputs["values"] = changes["keys"]
    inputs = {name: x for name, x in inputs.items() if x is not None}
    with pytest.raises(ValueError, match="decoder_stack: ") as caught:
        run(Stack([name for name in OPTIONAL if name in inputs], heads=4, kv_heads=2), *inputs.values())
    assert words in str(caught.value)


@wide_in_graph_mode
@pytest.mark.parametrize(
    ("name", "place", "number", "words"),
    [
        ("block_tables", (1, 1), 11, "block_tables[1, 1] is 11, expected 0 to 10"),
        ("block_tables", (2, 0), -1, "block_tables[2, 0] is -1, expected 0 to 10"),
        ("lengths", 1, 13, "lengths has 13, expected 0 to 12"),
    ],
    ids=str,
)
def test_blocks_outside_of_the_cache(mode, name, place, number, words):
    """They are errors on the CPU, where a text needs them."""
    if mindspore.get_context("device_target") != "CPU":
        pytest.skip("a GPU does not see them")
    shapes, settings = CARD.cases["blocks"]
    inputs = dict(zip((*NAMES, *settings["optional"]), CARD.inputs(shapes, np.float32, **settings)))
    inputs.update(lengths=np.int32([0, 5, 1]), block_tables=np.zeros((3, 3), np.int32))
    inputs[name][place] = number
    with pytest.raises(RuntimeError, match=re.escape(f"decoder_stack: {words}")):
        run(Stack(settings["optional"], heads=4, kv_heads=2), *inputs.values())


def call_with_tables_outside(name, dtype):
    """Returns a call some of whose needed entries name no block, and whose lengths are too large; its results are those
    of tables without these entries."""
    shapes, settings = CARD.entry_cases()[name]
    [operator], names = CARD.operators(shapes, **settings), (*NAMES, *settings["optional"])
    right = dict(zip(names, map(np.nan_to_num, CARD.inputs(shapes, dtype, **settings))))
    columns, (_, blocks, size, *_) = right["block_tables"].shape[1], right["keys"].shape
    right["block_tables"] = np.random.default_rng(0).integers(0, blocks, right["block_tables"].shape, np.int32)
    right["lengths"][:] = columns * size
    wrong = {name: x.copy() for name, x in right.items()}
    wrong["lengths"][1] = 2**31 - 1
    for text, column, number in ((0, 1, blocks), (1, columns - 1, -1), (1, 0, 2**31 - 1)):
        wrong["block_tables"][text, column] = number
    for text in (0, 1):
        kept = [x for x in wrong["block_tables"][text] if 0 <= x < blocks]
        right["block_tables"][text, : len(kept)], right["lengths"][text] = kept, len(kept) * size
    wrong["lengths"][2:], right["lengths"][2:] = -1, 0
    results = results_of(operator, *right.values())
    scratch = [np.empty(shape, kind) for shape, kind in outputs_of(operator, wrong.values())[len(results) :]]
    return Call(operator, [*wrong.values()], results, scratch)


OUTSIDE = [
    ("16 tokens after blocks", "float16"),
    ("20 features after blocks", "float32"),
    ("300 blocks of 2 texts", "float32"),
    ("24 texts with blocks", "float16"),
    ("24 texts with blocks", "float64"),
    ("a long prefill after blocks", "float16"),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "dtype"), OUTSIDE)
def test_emulated_blocks_outside(name, dtype):
    compare_with_cpu(Emulator(), call_with_tables_outside(name, dtype), dtype, shift=0)


@pytest.mark.parametrize(("name", "dtype"), OUTSIDE)
def test_gpu_blocks_outside(gpu, name, dtype):
    compare_with_cpu(gpu, call_with_tables_outside(name, dtype), dtype, shift=0)
