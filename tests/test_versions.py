"""What docs/versions.md says of the MindSpore at hand is so. `make test-matrix` asks the other versions."""

import os
import sys

import pytest

from matrix import FEATURES, MODES, ROOT, TABLE, rows_of, works
from msops.compat import VERSION


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, mode):
    key = *(".".join(map(str, version[:2])) for version in (VERSION, sys.version_info)), mode
    row = rows_of(TABLE.read_text()).get(key)
    if row is None:
        pytest.skip(f"docs/versions.md has no row of MindSpore {key[0]} with Python {key[1]}")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert works(sys.executable, variables, feature, mode) == row[list(FEATURES).index(feature)]
