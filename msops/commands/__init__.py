"""The commands of `python -m msops`."""
