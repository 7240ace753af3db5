"""Tables of tiles as text: ``cupy_fa2/plan/tuned/sm<arch>.py``, read and written."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from cupy_fa2.plan.row import Key, Row, Rows

__all__ = ["Table", "read_table", "render"]

_BEFORE = ("block_m", "block_n", "num_warps", "stages")  # these are given by position


@dataclass(frozen=True)
class Table:
    """What a module of `plan.tuned` holds."""

    doc: str
    origins: Mapping[str, str]
    rows: Rows


def read_table(path: Path) -> Table:
    """The table of a file."""
    module = runpy.run_path(str(path))
    return Table(module["__doc__"], module["ORIGINS"], module["ROWS"])


def render(table: Table) -> str:
    """The module's text; equal tables give equal texts."""
    used = {row.origin for rows in table.rows.values() for row in rows}
    lines = [f'"""{table.doc}"""', "", "from cupy_fa2.plan.row import Row, Rows", ""]
    lines += ["#: Where rows are from.", "ORIGINS = {"]
    lines += [f"    {_quoted(name)}: {_quoted(text)}," for name, text in sorted(table.origins.items()) if name in used]
    lines += ["}", "", "# fmt: off"]
    lines += [
        "#: head_dim, head_dim_v, whether a band hides keys, transport -> the fastest row first.",
        "ROWS: Rows = {",
    ]
    for key in sorted(table.rows, key=_order):
        head_dim, head_dim_v, masked, transport = key
        lines.append(f"    ({head_dim}, {head_dim_v}, {masked}, {_quoted(transport)}): (")
        lines += [f"        {_row(row)}," for row in table.rows[key]]
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def _order(key: Key) -> tuple[int, int, bool, bool]:
    head_dim, head_dim_v, masked, transport = key
    return head_dim, head_dim_v, masked, transport != "tensor"


def _row(row: Row) -> str:
    parts = [str(getattr(row, name)) for name in _BEFORE]
    for field in fields(Row):
        value = getattr(row, field.name)
        if field.name not in _BEFORE and (value != field.default or field.default is MISSING):
            parts.append(f"{field.name}={_value(value)}")
    return f"Row({', '.join(parts)})"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + "".join(f"{_quoted(x)}, " for x in value).rstrip(" " if len(value) == 1 else ", ") + ")"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return f'"{text}"'
