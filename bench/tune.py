"""Choose the forward's tiles, and write them down as data: ``cupy_fa2/plan/tuned/sm<arch>.py``.

    python bench/tune.py --head-dim 96 192,128      on this GPU: times candidates, and builds them with options
                                                    (192,128: head_dim 192 with head_dim_v 128)
    python bench/tune.py --without-gpu --card A100 "RTX 3090" H200 --head-dim 96
                                                    the same by registers and spills alone, which NVRTC knows; the
                                                    order is that of stored times, or else of tuner/model.py
    python bench/tune.py --list                     what would be tried on --card; needs no GPU
    python bench/tune.py --head-dim 128 --feature softcap --feature bias
                                                    kernels with both: a table and, with --output, JSON. No rows

Entries of other head dimensions are left as they are. How candidates become rows is in ``tuner/ladder.py``: ties are
settled by its rules, and by nobody afterwards. What fields mean is in `cupy_fa2.plan.row`.

``--output FOLDER`` writes there in place of the tree: ``sm<arch>.py``, and what belongs into ``bench/results``: the
times (``<card>-tiles.json``) and, for every NVRTC that was asked, the kernels that spill (``spills.json``).
``--without-gpu`` reads both, so that rooms can be found anew with another NVRTC, in the order that was timed.

``--budget`` bounds the seconds that a run on a GPU takes: when three fifths are over nothing more is timed, when all
are over nothing more is built, and what has no rows yet keeps those it had.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from tuner.candidates import FEW, SHAPES, VARIANTS, spec_of, tiles, transports, variants
from tuner.classes import SHORT, Class, Times, expected, measured, rows_of, today_of
from tuner.ladder import Timed, settled
from tuner.registers import SPILLS, SpillBook
from tuner.sizes import Sizes, title
from tuner.tables import Table, read_table, render
from tuner.tools import PIECES, RESULTS, ROOT, describe_machine, first_line, log, need_gpu, stored_path, write_result
from tuner.with_features import feature_specs, tune_features

from cupy_fa2.device import Device, cuda_device, named_device
from cupy_fa2.plan.row import Row, Rows

__all__ = ["main"]

TABLES = ROOT / "cupy_fa2" / "plan" / "tuned"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", nargs="+", default=["64", "128", "256"], help="classes, 192,128 for unlike ones")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="default: both")
    parser.add_argument("--without-gpu", action="store_true", help="by registers and spills, for every --card")
    parser.add_argument("--card", nargs="+", default=["H200"], help="only for --without-gpu and --list")
    parser.add_argument("--list", action="store_true", help="print what would be tried on --card, measure nothing")
    parser.add_argument("--quick", action="store_true", help="fewer shapes; for --list and --feature")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for a run on a GPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="that compile")
    parser.add_argument("--output", type=Path, help="a folder, in place of the tree; with --feature a JSON file")
    parser.add_argument("--feature", action="append", choices=[*PIECES], help="of the kernels; may be repeated")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192], help="only with --feature")
    parser.add_argument("--commit", help="what to store as the commit, where this is no git checkout")
    options = parser.parse_args()
    dims = [tuple(int(x) for x in text.split(",")) for text in options.head_dim]
    masks = (False, True) if options.causal is None else (options.causal,)
    classes = [Class(one[0], one[-1], masked) for one, masked in itertools.product(dims, masks)]
    if options.feature:
        return main_features(options, classes)
    if options.list:
        for one, card in itertools.product(classes, options.card):
            show(one, named_device(card), FEW if options.quick else SHAPES)
        return 0
    return without_gpu(options, classes) if options.without_gpu else on_gpu(options, classes)


def show(one: Class, device: Device, shapes: dict[str, list[Any]]) -> None:
    """``--list``: every shape of a class, with how it can be varied."""
    found = tiles(one.head_dim, one.head_dim_v, device, shapes)
    print(f"{one}, {device.name}: {len(found)} shapes")
    for tile, transport in itertools.product(found, transports(device)):
        if spec := spec_of(tile, transport):
            others = variants(spec, device, VARIANTS)
            print(f"  {spec.name}, {len(others)} variants, {spec.shared_bytes} bytes of shared memory")


def without_gpu(options: argparse.Namespace, classes: Sequence[Class]) -> int:
    """Rows by registers, in the order of stored times or of the model."""
    stored = {times.arch: times for times in map(Times.read, sorted(RESULTS.glob("*-tiles.json")))}
    book = SpillBook(threads=options.threads)
    for card in options.card:
        device = named_device(card)
        times = stored.get(device.arch, Times())
        rows: Rows = {}
        for one in classes:
            timed = {transport: found for (other, transport), found in times.found.items() if other == one}
            name = "timed" if timed else "expected"
            rows |= rows_of(one, timed or expected(one, device), [device], book, name)
            write(options, device.arch, rows, {**origins(book), "timed": timed_origin(times, book)}, book)
    return 0


def on_gpu(options: argparse.Namespace, classes: Sequence[Class]) -> int:
    """Rows in the order that is measured here."""
    need_gpu()
    begin = time.perf_counter()
    device = cuda_device(0)
    machine = describe_machine(device, options.commit)
    book = SpillBook(threads=options.threads, deadline=begin + options.budget)
    times = Times(device.name, machine["date"], machine["commit"], device.arch)
    timings = stored_path(device.name, "tiles", options.output)

    def over(share: float) -> bool:
        return time.perf_counter() - begin > options.budget * share

    for one in classes:
        if over(0.6):
            log(f"{one}: not timed, three fifths of the budget are over")
            continue
        try:
            for transport, found in measured(one, device, lambda: over(0.6)).items():
                times.found[one, transport] = found
        except Exception as error:  # of one class: the others are measured all the same
            log(f"{one}: {first_line(error)}")
        write_result(timings, times.result())

    def rows_for(one: Class) -> Rows:
        timed = {transport: found for (other, transport), found in times.found.items() if other == one}
        return rows_of(one, timed, [device], book, "timed")

    rows: Rows = {}
    today = {key: today_of(*key, device).name for key in times.found}
    # An entry's kernels are built one after the other, for most depend on how the last one went.
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for entries in pool.map(rows_for, dict.fromkeys(one for one, _ in times.found)):
            rows |= entries
    if rows:
        write(options, device.arch, rows, {"timed": timed_origin(times, book)}, book)
    for (one, transport), found in times.found.items():
        summary(one, transport, found, rows.get((*astuple(one), transport), ()), today[one, transport])
    print(f"{time.perf_counter() - begin:.0f} s, {book.builds} kernels built for rows; written to {timings.parent}")
    return 0


def summary(one: Class, transport: str, found: Sequence[Timed], rows: Sequence[Row], today: str) -> None:
    """What came out, in a few lines."""
    print(f"{one}, {transport}")
    names = [f"{row.block_m}x{row.block_n}w{row.num_warps}s{row.stages}t{row.team}:{row.room}" for row in rows]
    print(f"  rows, with their room: {', '.join(names) or 'none: those that there were stay'}")
    shown = {timed.tile for timed in settled(found)[:3]}
    for timed in settled(found):
        spec = spec_of(timed.tile, transport, one.features)
        was = spec is not None and spec.name == today
        if spec and (was or timed.tile in shown):
            short = f", at {SHORT} {timed.short} ms" if timed.short else ""
            print(f"  {spec.name:48} {timed.tflops:6.1f} TFLOP/s{short}{', today' if was else ''}")


def origins(book: SpillBook) -> dict[str, str]:
    """Of rows that were not timed."""
    return {"expected": f"the order of tuner/model.py, not timed; room by registers of {book.versions}"}


def timed_origin(times: Times, book: SpillBook) -> str:
    """Of rows that were."""
    return f"timed on {times.card}, {times.date}, {times.commit}; room by registers of {book.versions}"


def write(options: argparse.Namespace, arch: int, rows: Rows, texts: dict[str, str], book: SpillBook) -> None:
    """The table with these entries in place of its own, and the record of spills."""
    table = read_table(TABLES / f"sm{arch}.py")
    kept = {key: entry for key, entry in table.rows.items() if key not in rows}
    names = {name: name for name in texts}
    names = {name: _free_name(name, text, table.origins, kept) for name, text in texts.items()}
    fresh = {key: tuple(replace(row, origin=names[row.origin]) for row in entry) for key, entry in rows.items()}
    merged = {**table.origins, **{names[name]: text for name, text in texts.items()}}
    path = (options.output or TABLES) / f"sm{arch}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(Table(table.doc, merged, {**kept, **fresh})))
    book.write(options.output / SPILLS.name if options.output else None)


def _free_name(name: str, text: str, origins: Mapping[str, str], kept: Rows) -> str:
    """`name`, with a number where rows that are kept have it for another text."""
    used = {row.origin for entry in kept.values() for row in entry}
    numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(one for one in numbered if one not in used or origins[one] == text)


def main_features(options: argparse.Namespace, classes: Sequence[Class]) -> int:
    """``--feature``: everything that is measured, to be read by whoever writes kernels."""
    features = list(dict.fromkeys(options.feature))
    shapes = FEW if options.quick else SHAPES
    sizes = [Sizes(c.head_dim, c.head_dim_v, c.masked, n) for c, n in itertools.product(classes, options.seqlen)]
    if options.list:
        device = named_device(options.card[0])
        for one in sizes:
            specs = feature_specs(one, features, device, shapes)
            print(f"{title(one.head_dim, one.head_dim_v, one.causal)}, seqlen {one.seqlen}: {len(specs)} shapes")
            for spec in specs:
                print(f"  {spec.name}, {spec.shared_bytes} bytes of shared memory")
        return 0
    need_gpu()
    device = cuda_device(0)
    result = {"schema": 1, "kind": "tune", **describe_machine(device, options.commit), "features": features, "rows": []}
    failed = 0
    for one in sizes:
        try:
            result["rows"] += tune_features(device, one, features, shapes)
        except Exception as error:
            failed += 1
            log(f"{title(one.head_dim, one.head_dim_v, one.causal)}, seqlen {one.seqlen}: {first_line(error)}")
        if options.output:
            write_result(options.output, result)
    if options.output:
        print(f"written: {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
