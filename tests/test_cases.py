"""Cases in which attention kernels in production have been wrong, as far as today's calls can express them.

Each test in `test_cases_*.py` names the ids of its cases in its docstring; `PENDING` says what the others, or the rest
of these, wait for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

KNOWN = [
    f"B{number:03}"
    for number in (
        *range(1, 13), *range(14, 28), 29, 32, *range(34, 38), 39, 40, 41, 43, 45, *range(47, 51), 52, 53, 54,
        58, 59, 60, 62, 63, 65, 67, 69, 70, 71, 73, 75, 76, 77, 81, 82, 84, 85, 87, 88, 89,
    )
]  # fmt: skip

# Case, or the rest of a case that is tested below in part: the feature it waits for.
PENDING = {
    "B001": "backward, varlen, window",
    "B002": "backward",
    "B003": "backward",
    "B004": "backward, varlen, kvcache",
    "B005": "backward, varlen, kvcache",
    "B006": "kvcache, paged",
    "B007": "kvcache, varlen",
    "B008": "paged varlen",
    "B009": "backward, split-KV",
    "B010": "backward",
    "B011": "varlen, backward",
    "B012": "varlen",
    "B014": "varlen, paged, split-KV",
    "B015": "backward, varlen, kvcache",
    "B016": "varlen, kvcache, paged",
    "B017": "dropout, backward",
    "B018": "backward, varlen",
    "B019": "paged",
    "B020": "kvcache",
    "B021": "softcap",
    "B022": "window",
    "B023": "window",
    "B024": "backward",
    "B025": "backward, dropout, kvcache",
    "B026": "varlen, paged, split-KV",
    "B027": "backward",
    "B029": "backward, split-KV",
    "B032": "varlen, kvcache, backward",
    "B034": "kvcache",
    "B035": "backward",
    "B036": "varlen",
    "B037": "dropout",
    "B039": "dropout",
    "B040": "dropout",
    "B041": "paged, split-KV",
    "B043": "window, paged",
    "B045": "paged",
    "B047": "paged",
    "B048": "paged",
    "B049": "paged",
    "B050": "kvcache",
    "B052": "ALiBi",
    "B053": "ALiBi",
    "B054": "backward",
    "B058": "backward",
    "B059": "kvcache, paged",
    "B060": "backward, kvcache",
    "B062": "window",
    "B063": "window",
    "B065": "backward",
    "B067": "window, softcap, ALiBi, dropout",
    "B069": "varlen",
    "B070": "varlen",
    "B071": "varlen, paged, backward",
    "B073": "backward, varlen",
    "B075": "kvcache",
    "B089": "backward, varlen, kvcache",
}


def named_cases() -> dict[str, set[str]]:
    """Test -> the cases that its docstring names."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_cases_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = set(re.findall(r"\bB\d{3}\b", ast.get_docstring(node) or ""))
    return found


def test_every_case_is_tested_or_pending():
    found = named_cases()
    assert [name for name, cases in found.items() if not cases] == []
    assert set().union(*found.values()) | set(PENDING) == set(KNOWN)
    assert len(KNOWN) == 65
    assert all(PENDING.values())
