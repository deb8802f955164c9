"""Defines the report of :func:`msops.testing.opcheck`."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY_CHECKS = (
    *("no crash", "bounds", "inputs unchanged", "outputs written", "wrong calls"),
    *("special values", "large sizes", "threads", "no leak"),
)
CHECKS = (
    *ENTRY_CHECKS,
    *("shapes and dtypes", "forward", "gradient", "gradient's dtypes", "second derivative"),
    *("graph = pynative", "repeated runs", "views", "other sizes", "other attributes", "wrong inputs"),
)


RACE = "repeated runs"
LIFE = 5.0  # seconds from one sign of life to the next

# What of a finding differs from size to size and dtype to dtype: numbers, lists of them, nan, infinity, dtypes.
_NUMBERS = re.compile(r"[\[(][-\d, ]*[\])]|(?<![\w.])[-+]?(\d[\w.+-]*|nan|inf)\b|\bfloat(16|32|64)\b")


class Finding(AssertionError):  # noqa: N818
    """A failure that belongs to another check than the one that found it."""

    def __init__(self, check: str, words: str) -> None:
        super().__init__(words)
        self.check = check


class Skipped(Exception):  # noqa: N818
    """Tells why a check cannot be made."""


class Life:
    """Prints what opcheck does each LIFE seconds, to stderr, so that nobody takes a long check for one that hangs."""

    def __init__(self) -> None:
        self.begin = self.last = time.monotonic()

    def sign(self, words: str) -> None:
        now = time.monotonic()
        if now - self.last >= LIFE:
            self.last = now
            print(f"{words} ({now - self.begin:.0f} s)", file=sys.stderr, flush=True)


class OpCheckError(AssertionError):
    """An operator is not sound: the message has every check that failed. See :func:`msops.testing.opcheck`.

    Attributes:
        report (Report): The results of all checks, which the message shows.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Report(NamedTuple):
    """The results of all checks, which print as a table. See :func:`msops.testing.opcheck`.

    Attributes:
        operator (str): The name of the operator.
        dtypes (tuple): The names of the dtypes in which it was checked.
        made (set): The names of the checks that were made.
        failures (dict): For each check that failed, what it found, as a list of lines. Findings that differ in their
            numbers and dtypes alone are one line, the first.
        skipped (dict): For each check that was skipped, or skipped in part, the reason.
    """

    operator: str
    dtypes: tuple[str, ...]
    made: set[str]
    failures: dict[str, list[str]]
    skipped: dict[str, str]
    kinds: dict[tuple[str, str], list[str]]  # by the check and the words without numbers, all lines
    life: Life

    @classmethod
    def of(cls, operator: str, dtypes: tuple[str, ...]) -> Report:
        return cls(operator, dtypes, set(), {}, {}, {}, Life())

    def __str__(self) -> str:
        lines = [f"opcheck of {self.operator}", f"  {'dtypes':<18} {', '.join(self.dtypes)}"]
        more = {found[0]: len(found) - 1 for found in self.kinds.values()}
        # What a race makes wrong, other checks find, too: it comes first.
        for check in sorted(CHECKS, key=lambda check: check != RACE or check not in self.failures):
            words = ["FAILED" if check in self.failures else "ok"] * (check in self.made)
            words += [f"skipped: {self.skipped.get(check)}"] * (check in self.skipped)
            lines.append(f"  {check:<18} {'; in part '.join(words)}")
            found = self.failures.get(check, ())
            lines += [f"    {line}{f', and {more[line]} more' if more.get(line) else ''}" for line in found]
        return "\n".join(lines)

    def attempt(self, check: str, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a check and returns its result. An exception is a failure, except Skipped."""
        self.life.sign(f"opcheck of {self.operator}: {check}, {where}")
        try:
            result = function(*arguments)
        except Skipped as reason:
            self.skipped[check] = str(reason)
            return None
        except Exception as error:  # noqa: BLE001 (the report shows it)
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            line = f"{where}: {kind}{str(error).strip().splitlines()[0]}"
            check = getattr(error, "check", check)
            self._add(check, line)
            result = None
        self.made.add(check)
        return result

    def _add(self, check: str, line: str) -> None:
        """Adds a finding, unless there is one that differs in numbers and dtypes alone."""
        where, _, words = line.partition(": ")
        place = where if check == "wrong inputs" else where.split(",")[0]  # which says what is wrong with the inputs
        kind = check, _NUMBERS.sub("#", f"{place}: {words}")
        found = self.kinds.setdefault(kind, [])
        if not found:
            self.failures.setdefault(check, []).append(line)
        found += [line] if line not in found else []
