"""Result files: ``results/<card>-<kind>.json``, one row a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.machine import ROOT

__all__ = ["RESULTS", "SCHEMA", "read_result", "row_name", "slug", "stored_path", "write_result"]

#: Version of the layout. A kind's fields are described where its rows are.
SCHEMA = 1
RESULTS = ROOT / "bench" / "results"


def slug(card: str) -> str:
    """Name of a card's files: ``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def stored_path(card: str, kind: str, folder: Path | None = None) -> Path:
    """Where the result of a card and a kind lies."""
    return (folder or RESULTS) / f"{slug(card)}-{kind}.json"


def row_name(dtype: str, head_dim: int, causal: bool, seqlen: int) -> str:
    """The name of a row that is nothing but its sizes: ``bf16-d128-causal-8192``."""
    return f"{dtype}-d{head_dim}-{'causal' if causal else 'full'}-{seqlen}"


def read_result(path: Path) -> dict[str, Any]:
    """A result; files from before there were kinds and names are of the forward.

    Raises
    ------
    ValueError
        If it has another schema than this code reads.
    """
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {result.get('schema')}, this script reads {SCHEMA}")
    result.setdefault("kind", "forward")
    for row in result["rows"]:
        if "name" not in row:
            row["name"] = row_name(*(row[part] for part in ("dtype", "head_dim", "causal", "seqlen")))
    return result


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result file, whole or not at all."""
    head = {key: value for key, value in result.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    text += ",\n".join("  " + json.dumps(row) for row in result["rows"]) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
