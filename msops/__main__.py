"""The commands of `python -m msops`."""

import argparse

from . import doctor, scaffold


class _Parser(argparse.ArgumentParser):
    """With errors of one line."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def main():
    parser = _Parser("python -m msops", description="Tools for authors of operators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    scaffold.add_command(commands)
    doctor.add_command(commands)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
