"""Whether an operator is sound: :func:`opcheck`. :mod:`msops.testing.entry` calls C entries by themselves."""

from .opcheck import OpCheckError, Report, opcheck

__all__ = ["OpCheckError", "Report", "opcheck"]
