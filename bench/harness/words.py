"""Rows as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["aligned", "grouped", "markdown"]

_NUMBER = re.compile(r"[-+]?[\d.,]+[x%]?")


def aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line of column names and one for each row; columns of numbers are set to the right. Nothing for no rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return []
    columns = {name: [row.get(name, "") for row in rows] for name in names}
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    right = {name for name, cells in columns.items() if all(_NUMBER.fullmatch(cell) for cell in cells if cell)}

    def line(row: Mapping[str, str]) -> str:
        cells = [(row.get(name, ""), name) for name in names]
        padded = (text.rjust(widths[name]) if name in right else text.ljust(widths[name]) for text, name in cells)
        return "  ".join(padded).rstrip()

    return [line({name: name for name in names}), *map(line, rows)]


def grouped(messages: Mapping[str, str]) -> list[tuple[str, str]]:
    """Messages by name, the names of equal ones together: [("a, b", "message")]."""
    names: dict[str, list[str]] = {}
    for name, text in messages.items():
        names.setdefault(text, []).append(name)
    return [(", ".join(who), text) for text, who in names.items()]


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]
