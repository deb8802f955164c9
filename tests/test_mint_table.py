"""Tests that docs/mint.md says of each name of `mindspore.mint` what its examples show on this device."""

import pytest

from mint_examples import differs
from mint_table import BEGIN, DEVICES, END, NONE, PAGE, cell, measured, reason, rows_of, with_column
from msops.compat import VERSION


@pytest.mark.wide
@pytest.mark.skipif(VERSION < (2, 10), reason="docs/mint.md says it of MindSpore 2.10")
def test_page(device_target):
    column = DEVICES.index(device_target)
    said = {name: cells[column] for name, cells in rows_of(PAGE.read_text()).items()}
    if not any(said.values()):
        pytest.skip(f"the page says nothing of a {device_target}: run tests/mint_table.py there")
    found = {name: value for name, (value, _) in measured(device_target).items()}
    assert found == said


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
    page = with_column(page, "CPU", {"mint.a": ("yes", ""), "mint.b": ("no", "no kernel")})
    page = with_column(page, "GPU", {"mint.a": ("yes", ""), "mint.b": ("yes", "")})
    assert rows_of(page) == {"mint.a": ["yes", "yes", ""], "mint.b": ["no", "yes", "no kernel"]}
    assert page.startswith("Before.\n")
    assert page.endswith("After.\n")


def test_differences():
    assert not differs("[1, 2.]\n<BLANKLINE>\n[3]", "[1. 2.]\n\n[3]")
    assert differs("[1 2]", "[1 3]")
    assert differs("[1 2]", "None")
