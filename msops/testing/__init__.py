"""Tests operators: :func:`opcheck` checks that one is sound; :mod:`msops.testing.entry` calls C entries."""

from .opcheck import opcheck
from .report import OpCheckError, Report

__all__ = ["OpCheckError", "Report", "opcheck"]
