"""Compare a fresh result with the stored one, and fail where a ratio to torch's flash backend was lost.

    python bench/bench.py --output fresh.json
    python bench/check.py fresh.json            exit 1 where a ratio is lost by more than 3%

    python bench/options.py --output fresh.json
    python bench/check.py fresh.json            the same: the file says what it is

Times depend on clocks and drivers, ratios of one run much less. Rows are compared where both files have them; a row
that has a stored ratio and a fresh error is a loss. A stored row that the fresh run did not try (``--quick``) is not.
Rows of options.py are measured by torch's plain flash backend, or, where a file lacks that, by our own plain call.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from timing import stored_path

__all__ = ["compare", "main"]

SCHEMA = 1
TOLERANCE = 0.03


def compare(
    fresh: dict[str, Any], stored: dict[str, Any], peer: str = "flash2", tolerance: float = TOLERANCE
) -> tuple[list[str], int]:
    """Lines that describe every row of either, and how many rows have lost.

    Parameters
    ----------
    fresh, stored : dict
        Results of ``bench.py``, or both of ``options.py``.
    peer : str
        Whose ratio is compared, in results of ``bench.py``.
    tolerance : float
        Share of the stored ratio that may be lost.
    """
    old = {_key(row): row for row in stored["rows"]}
    lines, lost = [], 0
    for row in fresh["rows"]:
        before, now = _ratios(old.pop(_key(row), {}), row, peer)
        if before is None:
            verdict = "new" if now is not None else "-"
        elif now is None:
            verdict, lost = f"LOST: {row.get('error') or row.get('messages', {}).get(peer) or 'no ratio'}", lost + 1
        elif now < before * (1 - tolerance):
            verdict, lost = f"LOST {1 - now / before:.1%}", lost + 1
        else:
            verdict = f"{now / before - 1:+.1%}"
        lines.append(f"{_label(row)}  {_number(before)} -> {_number(now)}  {verdict}{_mark(row)}")
    lines += [f"{_label(row)}  stored, not in the fresh run" for row in old.values()]
    return lines, lost


def _ratios(before: dict[str, Any], now: dict[str, Any], peer: str) -> tuple[float | None, float | None]:
    """What is compared of a stored row and a fresh one: somebody's time over ours."""
    if "name" not in now:
        return before.get("ratios", {}).get(peer), now.get("ratios", {}).get(peer)
    if "yardstick" in before and ("yardstick" in now or "cost" not in now):
        return before["yardstick"], now.get("yardstick")
    return _over_plain(before), _over_plain(now)


def _over_plain(row: dict[str, Any]) -> float | None:
    return 1 / row["cost"] if "cost" in row else None


def _mark(row: dict[str, Any]) -> str:
    """A cost that has a mark, and the mark."""
    if row.get("mark") is None or "cost" not in row:
        return ""
    return f"  (cost {row['cost']:.2f}, mark {row['mark']:.2f}{'' if row['cost'] <= row['mark'] else ': MISSED'})"


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("name"), row["dtype"], row["head_dim"], row["causal"], row["seqlen"]


def _label(row: dict[str, Any]) -> str:
    mask = row.get("name") or ("causal" if row["causal"] else "full")
    return f"{row['dtype']:4} d{row['head_dim']:<3} {mask:{10 if 'name' in row else 6}} {row['seqlen']:>6}"


def _number(ratio: float | None) -> str:
    return "   -  " if ratio is None else f"{ratio:6.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("fresh", type=Path)
    parser.add_argument(
        "stored", type=Path, nargs="?", help="default: that of the fresh one's card and kind, in bench/results"
    )
    parser.add_argument("--peer", default="flash2")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args()
    fresh = json.loads(options.fresh.read_text())
    path = options.stored or stored_path(fresh["card"], fresh.get("kind", ""))
    if not path.exists():
        print(f"nothing is stored for this card: {path} is missing", file=sys.stderr)
        return 2
    stored = json.loads(path.read_text())
    for name, result in (("fresh", fresh), ("stored", stored)):
        if result.get("schema") != SCHEMA:
            print(f"the {name} result has schema {result.get('schema')}, this script reads {SCHEMA}", file=sys.stderr)
            return 2
    if fresh.get("kind") != stored.get("kind"):
        print("one result is of bench.py, the other of options.py", file=sys.stderr)
        return 2
    if fresh["card"] != stored["card"]:
        print(f"different cards: {fresh['card']} and {stored['card']}", file=sys.stderr)
        return 2
    lines, lost = compare(fresh, stored, options.peer, options.tolerance)
    print("\n".join(lines))
    print(
        f"{len(fresh['rows'])} rows against {stored['commit']} of {stored['date']}: "
        + (f"{lost} lost more than {options.tolerance:.0%}" if lost else f"none lost more than {options.tolerance:.0%}")
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
