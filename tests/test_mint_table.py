"""Tests that docs/mint.md says of each name of `mindspore.mint` what its examples show on this device."""

import re

import pytest

from mint_examples import differs, names
from mint_table import (
    BEGIN,
    COMPOSED,
    DEVICES,
    END,
    MINDSPORE,
    NONE,
    PAGE,
    Row,
    base,
    cell,
    measured,
    reason,
    rows_of,
    with_column,
)
from msops.compat import VERSION


@pytest.mark.wide
@pytest.mark.skipif(VERSION < (2, 10), reason="docs/mint.md says it of MindSpore 2.10")
def test_page(device_target):
    column = 1 + DEVICES.index(device_target)
    rows = rows_of(PAGE.read_text())
    said = {name: (cells[0], cells[column]) for name, cells in rows.items() if cells[column]}
    if not said:
        pytest.skip(f"the page says nothing of a {device_target}: run tests/mint_table.py there")
    found = measured(device_target)
    assert found.keys() == rows.keys()
    assert {
        name: (rows[name][0] if row.base == NONE or device_target != DEVICES[0] else row.base, row.cell)
        for name, row in found.items()
        if name in said
    } == said


def test_cells():
    assert cell("", "") == "yes"
    assert cell("", "an error") == "PyNative"
    assert cell("an error", "") == "graph"
    assert cell("one", "other") == "no"
    assert cell(None, None) == NONE
    assert reason("RuntimeError: The kernel XExt unregistered.", "") == "no kernel of `XExt`"
    assert reason(None, None) == "no example"


def test_columns_are_kept():
    page = f"Before.\n{BEGIN}\n{END}\nAfter.\n"
    page = with_column(page, "CPU", {"mint.a": Row("`gelu`", "yes", ""), "mint.b": Row(NONE, NONE, "no example")})
    page = with_column(page, "GPU", {"mint.a": Row(NONE, "no", "why"), "mint.b": Row(COMPOSED, "yes", "")})
    assert rows_of(page) == {"mint.a": ["`gelu`", "yes", "no", "why"], "mint.b": [COMPOSED, NONE, "yes", "no example"]}
    assert page.startswith("Before.\n")
    assert page.endswith("After.\n")


def test_what_names_stand_on():
    assert base([]) == MINDSPORE
    assert base(["core/compiled.py", "patch/mint/shape.py"]) == COMPOSED
    assert base(["patch/mint/loss.py", "operators/__init__.py", "operators/gelu.py"]) == "`gelu`"


def test_names():
    found = names()
    assert {"mint.ones", "mint.gather", "mint.nn.LayerNorm", "mint.nn.functional.selu"} <= set(found)
    assert not [name for name in found if re.search(r"Tensor|constexpr|_op$|_ext$", name)]


def test_differences():
    assert not differs("[1, 2.]\n<BLANKLINE>\n[3]", "[1. 2.]\n\n[3]")
    assert differs("[1 2]", "[1 3]")
    assert differs("[1 2]", "None")
