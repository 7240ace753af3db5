"""Cases in which attention kernels in production have been wrong, as far as today's calls can express them.

Each test in `test_cases_*.py` names the ids of its cases in its docstring; `PENDING` says what the others, or the rest
of these, wait for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cupy_fa2

KNOWN = [
    f"B{number:03}"
    for number in (
        *range(1, 13), *range(14, 28), 29, 32, *range(34, 38), 39, 40, 41, 43, 45, *range(47, 51), 52, 53, 54,
        58, 59, 60, 62, 63, 65, 67, 69, 70, 71, 73, 75, 76, 77, 81, 82, 84, 85, 87, 88, 89,
    )
]  # fmt: skip

# What is still missing: the function that will bring it.
MISSING = {
    "backward": "flash_attention_backward",
    "varlen": "flash_attention_varlen",
    "kvcache": "flash_attention_kvcache",
    "paged": "flash_attention_kvcache",
    "split-KV": "flash_attention_kvcache",
}

# Case, or the rest of a case that is tested in part: what it waits for.
PENDING = {
    "B001": "backward, varlen",
    "B002": "backward, varlen",
    "B003": "backward",
    "B004": "backward, varlen, kvcache, split-KV",
    "B005": "backward, varlen, kvcache",
    "B006": "kvcache, paged, split-KV",
    "B007": "varlen, kvcache, split-KV",
    "B008": "varlen, kvcache, paged, split-KV",
    "B009": "backward, split-KV",
    "B010": "backward",
    "B011": "backward, varlen",
    "B012": "backward, varlen",
    "B014": "varlen, paged, split-KV",
    "B015": "backward, varlen, kvcache",
    "B016": "varlen, kvcache, paged",
    "B017": "backward, varlen",
    "B018": "backward, varlen",
    "B019": "kvcache, paged",
    "B020": "kvcache, paged",
    "B021": "backward, varlen, kvcache",
    "B022": "backward, varlen",
    "B023": "backward, varlen",
    "B024": "backward, varlen",
    "B025": "backward, kvcache",
    "B026": "varlen, paged, split-KV",
    "B027": "backward, varlen",
    "B029": "backward, split-KV",
    "B032": "backward, varlen, kvcache, split-KV",
    "B034": "kvcache",
    "B035": "backward",
    "B036": "backward, varlen",
    "B039": "backward",
    "B041": "kvcache, paged, split-KV",
    "B043": "varlen, kvcache, paged, split-KV",
    "B045": "kvcache, paged",
    "B047": "kvcache, paged",
    "B048": "varlen, kvcache, paged",
    "B049": "kvcache, paged",
    "B050": "kvcache",
    "B052": "backward, varlen, kvcache",
    "B053": "backward, varlen",
    "B054": "backward",
    "B058": "backward",
    "B059": "kvcache, paged",
    "B060": "backward, kvcache",
    "B062": "varlen, kvcache",
    "B063": "varlen, kvcache",
    "B065": "backward",
    "B067": "backward, varlen, kvcache, paged, split-KV",
    "B069": "backward, varlen",
    "B070": "varlen",
    "B071": "backward, varlen, paged",
    "B073": "backward, varlen",
    "B075": "kvcache, split-KV",
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


def test_nothing_waits_for_what_is_there():
    """Once a function is there, its cases are tested and its word leaves the lists."""
    assert {feature for waits in PENDING.values() for feature in waits.split(", ")} == set(MISSING)
    assert [function for function in MISSING.values() if hasattr(cupy_fa2, function)] == []
