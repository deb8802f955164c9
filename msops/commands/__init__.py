"""Contains the commands of `python -m msops`, one module or package each."""
