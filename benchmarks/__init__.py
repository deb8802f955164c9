"""Run from the project's root, as in `python -m benchmarks`."""
