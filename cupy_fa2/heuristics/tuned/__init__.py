"""Tables of measured choices, one module per architecture, written by ``bench/tune.py``."""

from __future__ import annotations

from types import ModuleType

from cupy_fa2.heuristics.tuned import sm90

__all__ = ["table"]

_TABLES = {90: sm90}


def table(arch: int) -> ModuleType | None:
    """The table for an architecture, or None where there is none yet."""
    return _TABLES.get(arch)
