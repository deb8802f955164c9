"""The benchmark runs from the project's root: `python -m benchmarks`."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(_TESTS / name) for name in ("", "cards", "operators")]  # the operators' cards have the formulas
