"""Tables of choices, one module per architecture: measured by ``bench/tune.py``, or derived and marked so."""

from __future__ import annotations

from types import ModuleType

from cupy_fa2.plan.tuned import sm80, sm86, sm90, sm100

__all__ = ["table"]

_TABLES = {80: sm80, 86: sm86, 89: sm86, 90: sm90, 100: sm100, 120: sm86}


def table(arch: int) -> ModuleType | None:
    """The table for an architecture, or None where there is none."""
    return _TABLES.get(arch)
