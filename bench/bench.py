"""Measure the forward on this card, next to its peers, in one run.

    python bench/bench.py                      every row, some two minutes; writes bench/results/<card>.json
    python bench/bench.py --quick              24 rows and fewer peers, under 40 s; prints, writes nothing by default
    python bench/bench.py --output fresh.json  for bench/check.py to compare with what is stored

A ratio is the peer's time over ours in the same round, the median of all rounds: above 1 we are faster. Peers that
cannot be imported, and rows that fail, leave a message in their place.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peers
from cases import Case, cases
from timing import (
    Inputs,
    bare_call,
    compile_all,
    describe_machine,
    first_line,
    interleaved,
    need_gpu,
    plan_of,
    spread,
    stored_path,
    write_result,
)

from cupy_fa2 import flash_attention
from cupy_fa2.cli.ceiling import mma_ceiling
from cupy_fa2.device import Device, cuda_device

__all__ = ["SCHEMA", "main", "table"]

#: Version of a result file's layout. 1: see `measure_case` for the fields of a row.
SCHEMA = 1

# Outputs of N(0, 1) inputs are below 5; two kernels that round P and out to bfloat16 differ by less than this.
_LARGEST_DIFFERENCE = 0.07


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 2)[2])
    parser.add_argument("--quick", action="store_true", help="a third of the rows, torch's backends as the only peers")
    parser.add_argument("--output", type=Path, help="result file (default: bench/results/<card>.json, not if --quick)")
    parser.add_argument("--peers", nargs="*", choices=[*peers.TITLES], help="the peers to compare with")
    parser.add_argument("--dtype", choices=("f16", "bf16"), help="only these rows")
    parser.add_argument("--head-dim", type=int, nargs="+", help="only these rows")
    parser.add_argument("--seqlen", type=int, nargs="+", help="only these rows")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="only these rows")
    parser.add_argument("--seconds", type=float, default=0.0, help="time for the rounds of a row (0.4; --quick: 0.15)")
    parser.add_argument("--deadline", type=float, default=0.0, help="start no row after so many seconds in all")
    parser.add_argument("--commit", help="what to store as the commit, where this is no git checkout")
    options = parser.parse_args()

    started = time.perf_counter()
    need_gpu()
    rows = [
        case
        for case in cases(options.quick)
        if options.dtype in (None, case.dtype)
        and case.head_dim in (options.head_dim or [case.head_dim])
        and case.seqlen in (options.seqlen or [case.seqlen])
        and options.causal in (None, case.causal)
    ]
    if not rows:
        parser.error("no row is left")
    wanted = options.peers
    if wanted is None:
        wanted = ["flash2", "cudnn"] if options.quick else list(peers.TITLES)
    result = run(rows, wanted, options, started)
    print(table(result))
    failed = sum("error" in row for row in result["rows"])
    print(f"{len(result['rows'])} rows, {failed} without a time, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


def run(rows: list[Case], wanted: list[str], options: argparse.Namespace, started: float) -> dict[str, Any]:
    """Measure all rows and store the result after each, so that an interrupted run leaves what it had."""
    device = cuda_device(0)
    output = options.output or (None if options.quick else stored_path(device.name))
    result: dict[str, Any] = {
        "schema": SCHEMA,
        **describe_machine(device, options.commit),
        "versions": peers.versions(),
        "quick": options.quick,
        "mma_ceiling_tflops": {},
        "rows": [],
    }
    plans = {case: plan_of(case, device) for case in rows}
    binaries = compile_all([plan.spec for plan in plans.values()], device)
    log(f"{len(binaries)} kernels compiled, {time.perf_counter() - started:.1f} s since the start")
    for dtype in sorted({case.dtype for case in rows}):
        try:
            rates = mma_ceiling(dtype)
            result["mma_ceiling_tflops"][dtype] = round(max(rates.values()), 1)
        except Exception as error:
            log(f"no ceiling: {first_line(error)}")
    inputs = Inputs(max(case.elements for case in rows))
    order = sorted(rows, key=lambda case: case.dtype)  # one dtype's arrays after the other's; otherwise as listed
    for done, case in enumerate(order):
        if options.deadline and time.perf_counter() - started > options.deadline:
            log(f"the deadline has passed: {len(order) - done} rows are left out")
            break
        row: dict[str, Any] = {
            "dtype": case.dtype,
            "head_dim": case.head_dim,
            "causal": case.causal,
            "seqlen": case.seqlen,
            "batch": case.batch,
            "num_heads": case.num_heads,
            "kernel": plans[case].spec.name,
        }
        result["rows"].append(row)
        problem = binaries[plans[case].spec]
        if isinstance(problem, str):
            row["error"] = problem
            continue
        seconds = options.seconds or (0.15 if options.quick else 0.4)
        try:
            measure_case(row, case, device, inputs, wanted, seconds, result["mma_ceiling_tflops"].get(case.dtype))
        except Exception as error:
            row["error"] = first_line(error)
        log(line(row))
        if output:
            write_result(output, result)
    result["seconds"] = round(time.perf_counter() - started, 1)
    if output:
        write_result(output, result)
        print(f"written: {output}")
    return result


def measure_case(
    row: dict[str, Any],
    case: Case,
    device: Device,
    inputs: Inputs,
    wanted: list[str],
    seconds: float,
    ceiling: float | None,
) -> None:
    """Fill in a row.

    ``ms`` and ``tflops`` are of the public call, ``spread`` the middle half of its times over their median,
    ``kernel_ms`` of the bare launch, ``ceiling_share`` of the `mma.sync` ceiling; ``ratios`` and ``ratio_spreads`` by
    peer; ``messages`` where a peer gave no time; ``difference`` is the largest from FlashAttention-2's output.
    """
    q, k, v, out = inputs.arrays(case)
    messages: dict[str, str] = {}
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: flash_attention(q, k, v, causal=case.causal, out=out)}
    _, _, calls["kernel"] = bare_call(None, device, q, k, v, out, case.causal)
    calls["ours"]()
    for peer in (name for name in peers.PEERS if name in wanted):
        try:
            call = peers.prepare(peer, case, q, k, v)
            theirs = call()  # compiles, chooses an algorithm, or fails
            difference = peers.largest_difference(theirs, out)
            del theirs
            if peer == "flash2":
                row["difference"] = round(difference, 5)
                if not difference < _LARGEST_DIFFERENCE:
                    raise RuntimeError(f"wrong: differs from FlashAttention-2 by {difference:g}")
            elif not difference < _LARGEST_DIFFERENCE:
                raise peers.Unavailable(f"its output differs from ours by {difference:g}")
            calls[peer] = call
        except peers.Unavailable as error:
            messages[peer] = str(error)
        except Exception as error:
            if "difference" in row and peer == "flash2":
                raise
            messages[peer] = first_line(error)
    times = interleaved(calls, seconds=seconds, min_rounds=3)  # 64k tokens take half a second a round
    ours = np.array(times["ours"])
    row["ms"] = round(float(np.median(ours)), 5)
    row["spread"] = spread(ours)
    row["tflops"] = round(case.flop / row["ms"] / 1e9, 1)
    row["kernel_ms"] = round(float(np.median(times["kernel"])), 5)
    row["rounds"] = len(ours)
    if ceiling:
        row["ceiling_share"] = round(row["tflops"] / ceiling, 4)
    row["ratios"], row["ratio_spreads"] = {}, {}
    for peer in (name for name in calls if name in peers.TITLES):
        ratio = np.array(times[peer]) / ours
        row["ratios"][peer] = round(float(np.median(ratio)), 4)
        row["ratio_spreads"][peer] = spread(ratio)
    if "cupy" in wanted:
        try:
            row["ratios"]["cupy"] = round(peers.by_hand(case, q, k, v) / row["ms"], 2)
        except peers.Unavailable as error:
            messages["cupy"] = str(error)
        except Exception as error:
            messages["cupy"] = first_line(error)
    row["messages"] = messages


def line(row: dict[str, Any]) -> str:
    """A row in words, with its messages."""
    head = f"{row['dtype']:4} d{row['head_dim']:<3} {'causal' if row['causal'] else 'full':6} {row['seqlen']:>5}"
    if "error" in row:
        return f"{head}  {row['error']}"
    share = f"{row['ceiling_share']:.3f} of ceiling" if "ceiling_share" in row else ""
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in row["ratios"].items())
    notes = "".join(f"; no {name}: {text}" for name, text in row["messages"].items())
    return (
        f"{head}  {row['ms']:8.3f} ms (kernel {row['kernel_ms']:.3f}, spread {row['spread']:.3f})  "
        f"{row['tflops']:5.0f} TFLOP/s  {share}  {ratios}{notes}"
    )


def table(result: dict[str, Any]) -> str:
    """The rows side by side, and what was missing."""
    columns = [name for name in peers.TITLES if any(name in row.get("ratios", {}) for row in result["rows"])]
    ceilings = ", ".join(f"{value:.0f} ({dtype})" for dtype, value in result["mma_ceiling_tflops"].items())
    lines = [
        f"{result['card']}, driver {result['driver']}, commit {result['commit']}; mma.sync ceiling {ceilings} TFLOP/s; "
        "ratios: the peer's time over ours",
        f"{'dtype':5} {'d':>3} {'mask':6} {'seqlen':>6} {'ms':>8} {'TFLOP/s':>7} {'ceiling':>7}"
        + "".join(f" {name:>7}" for name in columns),
    ]
    for row in result["rows"]:
        head = f"{row['dtype']:5} {row['head_dim']:>3} {'causal' if row['causal'] else 'full':6} {row['seqlen']:>6}"
        if "error" in row:
            lines.append(f"{head} {row['error']}")
            continue
        share = f"{row['ceiling_share']:.3f}" if "ceiling_share" in row else ""
        ratios = (f"{row['ratios'][name]:.3f}" if name in row["ratios"] else "" for name in columns)
        lines.append(
            f"{head} {row['ms']:8.3f} {row['tflops']:7.0f} {share:>7}" + "".join(f" {text:>7}" for text in ratios)
        )
    counted: dict[tuple[str, str], int] = {}
    for row in result["rows"]:
        for message in row.get("messages", {}).items():
            counted[message] = counted.get(message, 0) + 1
    lines += [f"{peers.TITLES[peer]}, {count} rows: {text}" for (peer, text), count in sorted(counted.items())]
    return "\n".join(lines)


def log(text: str) -> None:
    """To standard error, at once, so that the table on standard output comes last."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
