"""Runs the commands of `python -m msops`."""

from __future__ import annotations

import os
import sys

# The working folder and PYTHONPATH come before the standard library. Their files must hide none of its modules here, so
# that the doctor can name such files.
path = sys.path[:]
standard = os.path.dirname(os.__file__)  # noqa: PTH120 (as a string)
sys.path[:] = path[path.index(standard) :] if standard in path else path

from . import pythons  # noqa: E402 (after the change of sys.path)

if sys.version_info < pythons.OLDEST:  # an older Python cannot read the modules imported below
    sys.exit(f"wrong  Python     {pythons.complaint()}\n{'':18}{pythons.another()}")

try:
    from .commands import Parser, doctor, new
except Exception:  # whatever a damaged module raises
    from . import files

    sys.path[:] = path
    text, mend = files.complaint()
    if not text:
        raise
    sys.exit("\n".join((f"wrong  msops      {text}", *(f"{'':18}{command}" for command in mend))))
finally:
    sys.path[:] = path


def main() -> None:
    parser = Parser("python -m msops", description="Tools for authors of operators.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new.add_command(commands)
    doctor.add_command(commands)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
