"""Measuring the rows of a bench, and its command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peers

from cupy_fa2.compile import Binary
from cupy_fa2.device import cuda_device, named_device
from cupy_fa2.kernel.base import KernelSpec
from cupy_fa2.plan import Plan
from harness.arrays import Inputs, release_memory
from harness.bench import Bench, Session
from harness.launch import compile_all
from harness.machine import describe_machine, first_line, log, need_gpu
from harness.results import SCHEMA, stored_path, write_result

__all__ = ["main", "run"]


def run(bench: Bench, rows: list[Any], session: Session, output: Path | None) -> dict[str, Any]:
    """Measure the rows. The result is stored after each, so that an interrupted run leaves what it had.

    A row that fails gets an ``error``, and does not stop the others.
    """
    started = time.perf_counter()
    given, result = session.arguments, session.result
    plans: dict[str, Plan | str] = {}
    for row in rows:
        try:
            plans[row.name] = bench.plan(row, session.device)
        except Exception as error:
            plans[row.name] = first_line(error)
    specs = [launch.spec for plan in plans.values() if isinstance(plan, Plan) for launch in plan.kernels]
    binaries = compile_all(specs, session.device)
    log(f"{len(binaries)} kernels compiled, {time.perf_counter() - started:.1f} s")
    bench.begin(rows, session)
    for done, row in enumerate(rows):
        if given.deadline and time.perf_counter() - started > given.deadline:
            log(f"the deadline has passed: {len(rows) - done} rows are left out")
            break
        found = {**bench.describe(row), **_kernels(plans[row.name], binaries), "messages": {}}
        result["rows"].append(found)
        if "error" not in found:
            try:
                _measure(bench, row, found, session)
            except Exception as error:
                found["error"] = first_line(error)
            finally:
                release_memory()
        bench.finish(result["rows"])
        log(bench.line(found))
        if output:
            write_result(output, result)
    result["seconds"] = round(time.perf_counter() - started, 1)
    if output:
        write_result(output, result)
    return result


def _kernels(plan: Plan | str, binaries: Mapping[KernelSpec, Binary | str]) -> dict[str, Any]:
    """Fields of a row: the names of its kernels, the most registers and spills of one, or why there is none."""
    if isinstance(plan, str):
        return {"kernel": None, "error": plan}
    specs = [launch.spec for launch in plan.kernels]
    fields: dict[str, Any] = {"kernel": ", ".join(spec.name for spec in specs)}
    built = [binaries[spec] for spec in specs]
    if failed := [binary for binary in built if isinstance(binary, str)]:
        return {**fields, "error": failed[0]}
    for name in ("registers", "spill_bytes"):
        fields[name] = max(getattr(binary, name) for binary in built)
    return fields


def _measure(bench: Bench, row: Any, found: dict[str, Any], session: Session) -> None:
    ours, theirs = bench.calls(row, found, session)
    try:
        times = session.time({**ours, **theirs})
    except Exception as error:
        if not theirs:
            raise
        # A peer ran once, and not again: our time is worth having without it.
        found["messages"] |= dict.fromkeys(theirs, first_line(error))
        times = session.time(ours)
    bench.summarise(row, found, times, session)


def main(benches: Mapping[str, Bench]) -> int:
    """``bench.py [kind] [flags]``; the first of `benches` where no kind is named."""
    words = sys.argv[1:]
    kind = words.pop(0) if words and not words[0].startswith("-") else next(iter(benches))
    if kind not in benches:
        print(f"there is no bench {kind!r}; there are {', '.join(benches)}", file=sys.stderr)
        return 2
    bench = benches[kind]
    parser = _parser(bench, benches)
    given = parser.parse_args(words)
    if given.quick:
        given.seconds = min(given.seconds, 0.15)
    if given.peers is None:
        given.peers = list((given.quick and bench.quick_peers) or bench.peers)
    rows = bench.select(given)
    if not rows:
        parser.error("no row is left")
    if given.list:
        for row in rows:
            marks = "".join(f", {mark.what}: mark {mark.bound:.2f}" for mark in bench.marks(bench.describe(row)))
            kernels = bench.plan(row, named_device(given.card)).kernels
            print(f"{row.name}: {', '.join(launch.spec.name for launch in kernels)}{marks}")
        return 0

    cupy = need_gpu()
    device = cuda_device(0)
    whole = len(rows) == len(bench.rows) and not given.quick
    output = given.output or (stored_path(device.name, kind) if whole else None)
    result = {
        "schema": SCHEMA,
        "kind": kind,
        **describe_machine(device, given.commit),
        "versions": peers.versions(),
        "quick": given.quick,
        "method": {name: getattr(given, name) for name in ("rounds", "seconds", "flush", "seed")},
        "rows": [],
    }
    run(bench, rows, Session(device, Inputs(cupy), given, result), output)
    print(bench.table(result))
    marks = [mark for row in result["rows"] for mark in bench.marks(row)]
    failed = sum("error" in row for row in result["rows"])
    met = f"{sum(mark.met for mark in marks)} of {len(marks)} marks met; " if marks else ""
    print(f"{met}{len(result['rows'])} rows, {failed} without a time, {result['seconds']:.0f} s")
    if output:
        print(f"written: {output}")
    return 1 if failed else 0


def _parser(bench: Bench, benches: Mapping[str, Bench]) -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:10} {other.title}" for name, other in benches.items())
    parser = argparse.ArgumentParser(
        prog=f"bench.py {bench.kind}",
        description=bench.title,
        epilog=f"{bench.details.strip()}\n\nkinds (bench.py KIND --help):\n{kinds}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the rows and the kernels they get on --card; needs no GPU")
    add("--card", default="H200", help="only for --list (see cupy_fa2.device.NAMED_DEVICES)")
    add("--only", nargs="+", choices=[row.name for row in bench.rows], metavar="ROW", help="these rows (see --list)")
    add("--quick", action="store_true", help="fewer rows and peers where the kind says so, and fewer rounds")
    add("--peers", nargs="*", choices=bench.peers, help=f"compare with these (default: {' '.join(bench.peers)})")
    add("--output", type=Path, help="result file; by default bench/results/<card>-<kind>.json if all rows are measured")
    add("--seconds", type=float, default=bench.seconds, help="time for the rounds of a row")
    add("--rounds", type=int, default=bench.rounds, help="at least so many, whatever time they take")
    add("--flush", action=argparse.BooleanOptionalAction, default=bench.flush, help="flush L2 before each call")
    add("--seed", type=int, default=0, help="of the order of calls in each round")
    add("--deadline", type=float, default=0.0, help="start no row after so many seconds in all")
    add("--commit", help="what to store as the commit, where this is no git checkout")
    bench.add_arguments(parser)
    return parser
