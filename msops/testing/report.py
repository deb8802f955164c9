"""What :func:`msops.testing.opcheck` found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY_CHECKS = ("no crash", "bounds", "inputs unchanged", "outputs written", "wrong calls")
CHECKS = (
    *ENTRY_CHECKS,
    *("shapes and dtypes", "forward", "gradient", "gradient's dtypes", "graph = pynative", "repeated runs", "views"),
    *("other sizes", "other attributes", "wrong inputs"),
)


class Finding(AssertionError):  # noqa: N818
    """A failure of a check that is not the one in which it was found."""

    def __init__(self, check: str, words: str) -> None:
        super().__init__(words)
        self.check = check


class Skipped(Exception):  # noqa: N818
    """Why a check cannot be made."""


class OpCheckError(AssertionError):
    """An operator is not sound: the message has every check that failed. See :func:`msops.testing.opcheck`.

    Attributes:
        report (Report): What the message says.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


class Report(NamedTuple):
    """What was checked: prints as a table. See :func:`msops.testing.opcheck`.

    Attributes:
        operator (str): Its name.
        dtypes (tuple): The names of the dtypes in which it was checked.
        made (set): The names of the checks that were made.
        failures (dict): What each check that failed found, a list of lines.
        skipped (dict): Why a check, or a part of it, was not made.
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
        """Calls a function of a check, and returns what it does. What it raises is a failure, except Skipped."""
        try:
            result = function(*arguments)
        except Skipped as reason:
            self.skipped[check] = str(reason)
            return None
        except Exception as error:  # noqa: BLE001 (is reported)
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            line = f"{where}: {kind}{str(error).strip().splitlines()[0]}"
            check = getattr(error, "check", check)
            found = self.failures.setdefault(check, [])
            found += [line] if line not in found else []
            result = None
        self.made.add(check)
        return result
