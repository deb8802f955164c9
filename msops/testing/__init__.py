"""Whether an operator is sound: :func:`opcheck`. :mod:`msops.testing.entry` calls C entries by themselves."""

from .opcheck import opcheck
from .report import OpCheckError, Report

__all__ = ["OpCheckError", "Report", "opcheck"]
