"""Compares attention's kernels for tensor cores, in an emulator of a GPU, with the entries on the CPU: those for sm_80,
and those for sm_90a, which are chosen where TMA can read the rows."""

import pytest

import test_emulated_entries as emulated
from gpu import check_call

pytestmark = pytest.mark.wide

CASES = [pytest.param(*case, id=name) for name, *case in emulated.CASES if name.startswith("flash_attention")]


@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize(("card", "shapes", "settings"), CASES)
def test_tensor_cores_equal_cpu(card, shapes, settings, architecture, monkeypatch):
    monkeypatch.setenv("MSOPS_EMULATOR_ARCHITECTURE", architecture)
    for call in card.entry_calls(shapes, settings, "float16"):
        check_call(emulated.Emulator(), call, "float16", shift=0)


@pytest.mark.parametrize("name", ["causal, groups", "window, softcap, groups", "lengths, causal, scale", "1000"])
def test_blocks_add_in_order(name, monkeypatch):
    """Blocks that run at once wait for each other where they add to the same sums."""
    monkeypatch.setenv("MSOPS_EMULATOR_BLOCKS", "4")
    [(card, shapes, settings)] = [case for full, *case in emulated.CASES if full == f"flash_attention {name}"]
    for call in card.entry_calls(shapes, settings, "float16"):
        check_call(emulated.Emulator(), call, "float16", shift=0)
