"""Run from the project's root, as in `python -m benchmarks`. Uses the tests' way to call C entries."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
