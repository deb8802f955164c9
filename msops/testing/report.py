"""Defines the report of :func:`msops.testing.opcheck`."""

from __future__ import annotations

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


class Finding(AssertionError):  # noqa: N818
    """A failure that belongs to another check than the one that found it."""

    def __init__(self, check: str, words: str) -> None:
        super().__init__(words)
        self.check = check


class Skipped(Exception):  # noqa: N818
    """Tells why a check cannot be made."""


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
        failures (dict): For each check that failed, what it found, as a list of lines.
        skipped (dict): For each check that was skipped, or skipped in part, the reason.
    """

    operator: str
    dtypes: tuple[str, ...]
    made: set[str]
    failures: dict[str, list[str]]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"opcheck of {self.operator}", f"  {'dtypes':<18} {', '.join(self.dtypes)}"]
        for check in CHECKS:
            words = ["FAILED" if check in self.failures else "ok"] * (check in self.made)
            words += [f"skipped: {self.skipped.get(check)}"] * (check in self.skipped)
            lines.append(f"  {check:<18} {'; in part '.join(words)}")
            lines += [f"    {failure}" for failure in self.failures.get(check, ())]
        return "\n".join(lines)

    def attempt(self, check: str, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of a check and returns its result. An exception is a failure, except Skipped."""
        try:
            result = function(*arguments)
        except Skipped as reason:
            self.skipped[check] = str(reason)
            return None
        except Exception as error:  # noqa: BLE001 (the report shows it)
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            line = f"{where}: {kind}{str(error).strip().splitlines()[0]}"
            check = getattr(error, "check", check)
            found = self.failures.setdefault(check, [])
            found += [line] if line not in found else []
            result = None
        self.made.add(check)
        return result
