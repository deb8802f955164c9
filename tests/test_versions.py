"""What docs/versions.md says of the MindSpore at hand is so. `make test-matrix` asks the other versions."""

import sys

import pytest
from mindspore import amp

import features
from matrix import FEATURES, TABLE, here, rows_of, works


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, mode, device_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore leaves files
    version, python_version, variables = here()
    row = rows_of(TABLE.read_text()).get((version, python_version, device_target, mode))
    if row is None:
        pytest.skip(f"docs/versions.md has no row of MindSpore {version} with Python {python_version}, {device_target}")
    if row[list(FEATURES).index(feature)] == "yes":
        getattr(features, feature)()
    else:  # in a process of its own, which may crash
        assert works(sys.executable, variables, feature, device_target, mode) == "no"


@pytest.mark.parametrize("level", ["O2", "O3", "auto"])
def test_model_in_mixed_precision(level, mode):
    scaled = amp.FixedLossScaleManager(2**10, drop_overflow_update=False)
    features.model(amp_level=level, loss_scale_manager=scaled)
