"""Compare a fresh result with the stored one, and fail where a ratio to torch's flash back end was lost.

    python bench/bench.py --output fresh.json
    python bench/check.py fresh.json            exit 1 where a ratio is lost by more than 3%

    python bench/bench.py options --output fresh.json
    python bench/check.py fresh.json            the same: the file says what it is

Times depend on clocks and drivers, ratios of one run much less. Rows are compared where both files have them; a row
that has a stored ratio and a fresh error is a loss. A stored row that the fresh run did not try (``--quick``) is not.
What a kind compares is its bench's to say (`harness.bench.Bench.compared`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.results import read_result, stored_path
from rows import BENCHES

__all__ = ["compare", "main"]

TOLERANCE = 0.03


def compare(
    fresh: dict[str, Any], stored: dict[str, Any], peer: str = "flash2", tolerance: float = TOLERANCE
) -> tuple[list[str], int]:
    """Lines that describe every row of either, and how many rows have lost.

    Parameters
    ----------
    fresh, stored : dict
        Results of one kind.
    peer : str
        Whose ratio is compared, where rows have several.
    tolerance : float
        Share of the stored ratio that may be lost.
    """
    bench = BENCHES[fresh["kind"]]
    old = {row["name"]: row for row in stored["rows"]}
    width = max(len(row["name"]) for row in fresh["rows"] + stored["rows"])
    lines, lost = [], 0
    for row in fresh["rows"]:
        before, now = bench.compared(old.pop(row["name"], {}), row, peer)
        if before is None:
            verdict = "new" if now is not None else "-"
        elif now is None:
            verdict, lost = f"LOST: {row.get('error') or row.get('messages', {}).get(peer) or 'no ratio'}", lost + 1
        elif now < before * (1 - tolerance):
            verdict, lost = f"LOST {1 - now / before:.1%}", lost + 1
        else:
            verdict = f"{now / before - 1:+.1%}"
        marks = "".join(f"  ({mark})" for mark in bench.marks(row) if mark.value is not None)
        lines.append(f"{row['name']:{width}}  {_number(before)} -> {_number(now)}  {verdict}{marks}")
    lines += [f"{name:{width}}  stored, not in the fresh run" for name in old]
    return lines, lost


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
    try:
        fresh = read_result(options.fresh)
        stored = read_result(options.stored or stored_path(fresh["card"], fresh["kind"]))
        for name in ("kind", "card"):
            if fresh[name] != stored[name]:
                raise ValueError(f"the results are of two {name}s: {fresh[name]} and {stored[name]}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
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
