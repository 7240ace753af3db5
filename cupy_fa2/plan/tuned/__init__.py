"""Tables of rows, one module per architecture: data, written by ``bench/tune.py``; `plan.row` has what fields mean."""

from __future__ import annotations

from collections.abc import Iterator

from cupy_fa2.plan.row import Key, Row
from cupy_fa2.plan.tuned import sm80, sm86, sm90, sm100

__all__ = ["tuned_rows"]

_TABLES = {80: sm80, 86: sm86, 89: sm86, 90: sm90, 100: sm100, 120: sm86}


def tuned_rows(arch: int, key: Key) -> Iterator[tuple[Row, str]]:
    """Rows of an architecture's table, best first, each with where it is from; none where the table has none."""
    if (module := _TABLES.get(arch)) is not None:
        yield from ((row, module.ORIGINS[row.origin]) for row in module.ROWS.get(key, ()))
