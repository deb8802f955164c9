"""Tests that the patch breaks none of the examples in MindSpore's own documentation.

docs/mint.md says the same of `mindspore.mint`, as test_mint_table.py sees to.
"""

import mindspore
import pytest

from mint_examples import findings, names

PARTS = 6  # of each module's names


def names_of(module):
    if module == "Tensor":
        return [f"Tensor.{name}" for name in dir(mindspore.Tensor) if not name.startswith("_")]
    return sorted(names((module,)))


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("module", ["Tensor", "nn", "ops"])
def test_patch_breaks_no_example(module, part, device_target):
    """An example that prints what it says does so in both modes while MindSpore is patched."""
    paths = names_of(module)[part::PARTS]
    patched, _ = findings(device_target, True, paths)
    failing = [path for path in paths if patched[path, False] or patched[path, True]]
    own, _ = findings(device_target, False, failing)
    broken = [
        path for path in failing if any(patched[path, graph] and own[path, graph] == "" for graph in (False, True))
    ]
    # An example may also fail after another, as SearchSorted after one of another rank, without the patch.
    alone, _ = findings(device_target, True, broken)
    assert not {name: found for name, found in alone.items() if found and own[name] == ""}
