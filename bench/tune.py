"""Choose the forward's tiles on this card: measure the feasible ones in one run, and write them down as data.

    python bench/tune.py                            head_dim 64, 128, 256; writes plan/tuned/sm90.py on an H200
    python bench/tune.py --head-dim 96 192,128      other classes (192,128: head_dim 192 with head_dim_v 128)
    python bench/tune.py --list                     what would be tried; needs no GPU
    python bench/tune.py --quick                    fewer specs
    python bench/tune.py --head-dim 128 --feature softcap --feature bias
                                                    kernels with both; a table and, with --output, JSON: no heuristics

The search is generic over the fields of `FwdTile` and `KernelSpec`: `SHAPES` and `VARIANTS` give the values of those
that are tried, all others keep their defaults. First every feasible shape, by successive halving: each round times the
remaining ones in turn, longer than the last round, and keeps the faster half. Then the variants of the best few shapes,
likewise.

What is written
---------------
``cupy_fa2/plan/tuned/sm<arch>.py``, data only::

    CARD = "NVIDIA H200"
    DATE = "2026-11-30"
    COMMIT = "0123456789ab"
    MEASURED = True                       # a table that is derived from another card's says False
    ENTRIES = {
        # (head_dim, head_dim_v, causal, min_seqlen): FwdTile's fields but the head dims, and KernelSpec's
        (128, 128, False, 0): {"tile": {"block_m": 128, "block_n": 64, ...}, "spec": {}, "tflops": 380.1},
        (128, 128, False, 2048): {"tile": {...}, "spec": {"kv": "tensor"}, "tflops": 407.3},
    }

An entry is for head dims that round up to its own; of those, a problem takes the one with the largest ``min_seqlen``
that its ``seqlen_q`` reaches. The tile is ``FwdTile(head_dim=..., head_dim_v=..., **tile)``, the spec
``KernelSpec(tile, ..., **spec)``; only what differs from the defaults is in ``spec``, while ``tile`` names every field.
Keys that tensor maps cannot describe get the same tile with cp.async, so a winner's tile has to exist for both.

With ``--feature``, a name of `rows.pieces.PIECES` and more than one if wanted, nothing of this is written. The table
shows the fastest specs and where today's choice stands among them, each with its registers, its spills and its cost:
its time over that of today's plain kernel, over the share of that one's pairs that it sees.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import runpy
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness.arrays import DTYPES, Arrays
from harness.case import visible_share
from harness.launch import bare, compile_all
from harness.machine import ROOT, commit, describe_machine, first_line, log, need_gpu
from harness.results import write_result
from harness.timing import interleaved
from rows.pieces import PIECES

from cupy_fa2.compile import Binary
from cupy_fa2.device import Device, cuda_device, named_device
from cupy_fa2.kernel.forward import KV_POLICIES, Features, FwdTile, KernelSpec
from cupy_fa2.plan import plan_forward
from cupy_fa2.plan.feasible import accumulator_registers, infeasible
from cupy_fa2.problem import Problem

__all__ = ["SHAPES", "VARIANTS", "Sizes", "asked", "candidates", "feature_specs", "main", "render", "variants"]

#: Fields of `FwdTile` -> values whose every combination is tried. Fields that do not exist are left out.
SHAPES: dict[str, list[Any]] = {
    "block_m": [64, 128],
    "block_n": [32, 48, 64, 80, 96, 112, 128],
    "num_warps": [2, 4, 8],
    "stages": [1, 2, 3],
    "q_kept": [0, 16, 32, 64, 256],
    "team": [1, 2],
}
QUICK_SHAPES: dict[str, list[Any]] = {**SHAPES, "block_m": [64, 128], "block_n": [48, 64, 96]}
#: Fields of `FwdTile` or `KernelSpec` -> values tried on the best shapes, every combination.
VARIANTS: dict[str, list[Any]] = {
    "last_to_first": [True, False],
    "mask_by_warp": [False, True],
    "min_blocks": [1, 2, 3],
}

SEQLENS = {0: 1024, 2048: 8192}  # an entry's min_seqlen -> the seqlen that stands for it
TOKENS = 16_384
HIDDEN = 2048
DTYPE = "bf16"

_MAX_SPILL = 16  # bytes; what the compile gate allows
_MAX_THREADS = 256
_SHAPES_KEPT = 3  # whose variants are tried
_BYTES_LEFT = 1024  # of shared memory that the system takes of each block


def candidates(head_dim: int, head_dim_v: int, device: Device, shapes: dict[str, list[Any]]) -> list[FwdTile]:
    """Tiles of every combination of `shapes` that can exist and fit on `device`."""
    names = [f.name for f in fields(FwdTile) if f.name in shapes]
    found = []
    for values in itertools.product(*(shapes[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        try:
            tile = FwdTile(**{"head_dim": head_dim, "head_dim_v": head_dim_v, **chosen})
        except ValueError:
            continue
        rows = tile.rows_per_warp
        if tile.threads <= _MAX_THREADS and rows <= 64 and infeasible(tile, device) is None:
            found.append(tile)
    return found


def variants(spec: KernelSpec, device: Device, values: dict[str, list[Any]]) -> list[KernelSpec]:
    """`spec` with every combination of `values` that can exist and run together on a multiprocessor."""
    tile_fields = {f.name for f in fields(FwdTile)}
    spec_fields = {f.name for f in fields(KernelSpec)}
    names = [name for name in values if name in tile_fields | spec_fields]
    found = []
    for chosen in itertools.product(*(values[name] for name in names)):
        setting = dict(zip(names, chosen, strict=True))
        try:
            tile = replace(spec.tile, **{k: v for k, v in setting.items() if k in tile_fields})
            other = replace(spec, tile=tile, **{k: v for k, v in setting.items() if k in spec_fields})
        except ValueError:
            continue
        if infeasible(tile, device) is None and _fits_together(other, device):
            found.append(other)
    return list(dict.fromkeys(found))


def _fits_together(spec: KernelSpec, device: Device) -> bool:
    """Whether a multiprocessor has the shared memory and could have the registers for `min_blocks`."""
    if spec.min_blocks == 1:
        return True
    registers = 65_536 // (spec.tile.threads * spec.min_blocks)
    shared = spec.min_blocks * (spec.tile.shared_bytes + _BYTES_LEFT)
    return shared <= device.shared_per_sm and registers >= accumulator_registers(spec.tile) + 40


def halvings(specs: list[KernelSpec], measure: Any) -> Iterator[tuple[KernelSpec, float]]:
    """The specs with their milliseconds, slowest first; the survivors of each round are timed again, for longer."""
    seconds, left = 0.004, specs
    while left:
        times = measure(left, seconds)
        ranked = sorted((spec for spec in left if spec in times), key=times.__getitem__)
        keep = len(ranked) // 2 if len(ranked) > 4 else 0
        for spec in reversed(ranked[keep:]):
            yield spec, times[spec]
        left, seconds = ranked[:keep], seconds * 2


@dataclass(frozen=True)
class Sizes:
    """What is timed: the tokens and the hidden size of the bench."""

    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen: int
    dtype: str = DTYPE

    @property
    def batch(self) -> int:
        """Sequences that make up the tokens."""
        return max(TOKENS // self.seqlen, 1)

    @property
    def num_heads(self) -> int:
        """Heads that make up the hidden size."""
        return max(HIDDEN // self.head_dim, 1)

    def shape(self, dim: int) -> tuple[int, int, int, int]:
        """Of an array whose last axis is `dim`."""
        return self.batch, self.seqlen, self.num_heads, dim

    def flop(self, window: tuple[int, int] | None = None) -> float:
        """Floating-point operations of the pairs that are seen."""
        pairs = self.batch * self.num_heads * self.seqlen**2 * visible_share(self, window)
        return 2.0 * pairs * (self.head_dim + self.head_dim_v)

    def given(self, arrays: Arrays, features: Iterable[str]) -> dict[str, Any]:
        """The options that ask for `features`, names of `PIECES`."""
        made: dict[str, Any] = {}
        for name in features:
            made |= PIECES[name](arrays, self)
        return made


def asked(sizes: Sizes, features: Iterable[str], device: Device) -> KernelSpec:
    """The spec that a call with these features gets today."""
    arrays = Arrays()
    q, v = (arrays.normal(sizes.shape(dim), DTYPES[sizes.dtype]) for dim in (sizes.head_dim, sizes.head_dim_v))
    given = sizes.given(arrays, features)
    problem = Problem.from_arrays(q, q, v, causal=sizes.causal, addresses=(0, 0, 0, 0), **given)
    return plan_forward(problem, device).spec


def features_of(spec: KernelSpec) -> dict[str, Any]:
    """The fields of a spec that say what its problem asks for."""
    return {f.name: getattr(spec, f.name) for f in fields(Features)}


class Search:
    """Measures specs of one (head_dim, head_dim_v, causal, seqlen), with the arrays of some features."""

    def __init__(self, device: Device, sizes: Sizes, features: Iterable[str] = ()) -> None:
        import cupy

        self.device, self.causal = device, sizes.causal
        rng = np.random.default_rng(0)

        def array(dim: int) -> Any:
            base = rng.standard_normal(1_048_583, np.float32).astype(DTYPES[sizes.dtype])
            flat = np.resize(base.view(np.uint16), int(np.prod(sizes.shape(dim))))
            return cupy.asarray(flat).view(DTYPES[sizes.dtype]).reshape(sizes.shape(dim))

        self.q, self.k, self.v = array(sizes.head_dim), array(sizes.head_dim), array(sizes.head_dim_v)
        self.out = cupy.empty_like(self.v)
        self.given = sizes.given(Arrays(cupy), features)
        self.flop = sizes.flop(self.given.get("window"))
        self.references: dict[Any, Any] = {}
        self.calls: dict[KernelSpec, Any] = {}

    def __call__(self, specs: Iterable[KernelSpec], seconds: float) -> dict[KernelSpec, float]:
        """Milliseconds of each spec that runs and gives the result of the first one with its features."""
        calls = {}
        for spec in specs:
            try:
                if spec not in self.calls:
                    arrays = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
                    arrays |= {name: x for name, x in self.given.items() if hasattr(x, "shape")}
                    numbers = {name: x for name, x in self.given.items() if name not in arrays}
                    _, call = bare(self.device, arrays, spec, causal=self.causal, **numbers)
                    self.out.view(np.uint16).fill(0x7FFF)
                    call()
                    self._check(spec)
                    self.calls[spec] = call
                calls[spec.name] = self.calls[spec]
            except Exception as error:
                log(f"  {spec.name}: {first_line(error)}")
        if not calls:
            return {}
        times = interleaved(calls, seconds=seconds * len(calls), min_rounds=2, max_rounds=12)
        return {spec: float(np.median(times[spec.name])) for spec in specs if spec.name in times}

    def _check(self, spec: KernelSpec) -> None:
        bits = self.out.view(np.uint16)[:1, :: max(self.out.shape[1] // 512, 1), :2].get()
        rows = bits.view(DTYPES[DTYPE]).astype(np.float32)
        if np.isnan(rows).any():
            raise RuntimeError("gives NaN")
        expected = self.references.setdefault(tuple(features_of(spec).items()), rows)
        if np.linalg.norm(rows - expected) > 0.02 * np.linalg.norm(expected):  # rounding gives some 0.005
            raise RuntimeError("gives another result than the first spec")


def tune(
    device: Device, head_dim: int, head_dim_v: int, causal: bool, shapes: dict[str, list[Any]]
) -> dict[tuple[int, int, bool, int], dict[str, Any]]:
    """Entries of one class and mask."""
    entries = {}
    title = _title(head_dim, head_dim_v, causal)
    tiles = candidates(head_dim, head_dim_v, device, shapes)
    specs = []
    for tile, kv in itertools.product(tiles, KV_POLICIES):
        if kv == "dense" or device.arch >= 90:
            with contextlib.suppress(ValueError):  # tiles that this policy cannot serve
                specs.append(KernelSpec(tile, DTYPE, DTYPE, causal, kv=kv))
    for min_seqlen, seqlen in SEQLENS.items():
        begin = time.perf_counter()
        search = Search(device, Sizes(head_dim, head_dim_v, causal, seqlen))
        ranked = list(halvings(_compiled(specs, device), search))
        best = [spec for spec, _ in ranked[-_SHAPES_KEPT:]]
        more = [other for spec in best for other in variants(spec, device, VARIANTS)]
        final = list(halvings(_compiled(more, device), search))
        if not final:
            log(f"{title} seqlen {seqlen}: nothing runs")
            continue
        print(f"{title}, seqlen {seqlen}: {len(ranked)} shapes, {len(more)} variants of the best {len(best)}", end="")
        print(f", {time.perf_counter() - begin:.1f} s")
        for spec, ms in reversed([*ranked[-8:], *final]):
            print(f"  {spec.name:50} {search.flop / ms / 1e9:6.1f} TFLOP/s")
        winner, ms = final[-1]
        entries[head_dim, head_dim_v, causal, min_seqlen] = entry(winner, search.flop / ms / 1e9)
    return entries


def feature_specs(
    sizes: Sizes, features: Iterable[str], device: Device, shapes: dict[str, list[Any]]
) -> list[KernelSpec]:
    """Specs with these features of every shape that can serve them; today's choice is the first."""
    today = asked(sizes, features, device)
    specs = [today]
    for tile, kv in itertools.product(candidates(sizes.head_dim, sizes.head_dim_v, device, shapes), KV_POLICIES):
        # One call of the random generator serves 32 keys, which a warp has to have together.
        whole = not today.dropout or tile.block_n // tile.team % 32 == 0
        if whole and (kv == "dense" or device.arch >= 90):
            with contextlib.suppress(ValueError):  # tiles that this policy cannot serve
                specs.append(replace(today, tile=tile, kv=kv, min_blocks=1))
    return list(dict.fromkeys(specs))


def tune_features(
    device: Device, sizes: Sizes, features: list[str], shapes: dict[str, list[Any]]
) -> list[dict[str, Any]]:
    """Rows of one class, mask and length: the fastest specs, today's choice, and the plain kernel."""
    title = f"{_title(sizes.head_dim, sizes.head_dim_v, sizes.causal)} {' '.join(features)}, seqlen {sizes.seqlen}"
    begin = time.perf_counter()
    specs = feature_specs(sizes, features, device, shapes)
    today, plain = specs[0], asked(sizes, (), device)
    search = Search(device, sizes, features)
    ranked = [spec for spec, _ in halvings(_compiled(specs, device), search)]
    best = ranked[-_SHAPES_KEPT:]
    more = [other for spec in best for other in variants(spec, device, VARIANTS)]
    final = [spec for spec, _ in halvings(_compiled(more, device), search)]
    # Once more, together: the best of both rounds beside today's kernels, spilling or not.
    shown = list(dict.fromkeys([*final[-6:][::-1], *ranked[-6:][::-1], today, plain]))
    built = compile_all(shown, device)
    times = search([spec for spec in shown if isinstance(built[spec], Binary)], 0.03)
    # What the plain kernel, which may be causal, would take for the pairs that are seen.
    plain_ms = times.get(plain, 0.0) * search.flop / sizes.flop()
    rows = []
    for spec in sorted(times, key=times.__getitem__):
        row = {
            "head_dim": sizes.head_dim,
            "head_dim_v": sizes.head_dim_v,
            "causal": sizes.causal,
            "seqlen": sizes.seqlen,
            "features": features,
            "role": "plain" if spec == plain else "today" if spec == today else "",
            "name": spec.name,
            **entry(spec, search.flop / times[spec] / 1e9),
            "ms": round(times[spec], 5),
            "cost": round(times[spec] / plain_ms, 4) if plain_ms and spec != plain else None,
            "registers": built[spec].registers,
            "spill_bytes": built[spec].spill_bytes,
        }
        rows.append(row)
    print(f"{title}: {len(ranked)} shapes, {len(more)} variants of the best {len(best)}, ", end="")
    print(f"{time.perf_counter() - begin:.1f} s")
    print(feature_table(rows))
    return rows


def feature_table(rows: list[dict[str, Any]]) -> str:
    """The rows of one search side by side, fastest first."""
    if not rows:
        return "  nothing runs"
    width = max(len(row["name"]) for row in rows)
    lines = [f"  {'':5} {'':{width}} {'ms':>8} {'cost':>6} {'TFLOP/s':>7} {'registers':>9} {'spills':>6}"]
    for row in rows:
        cost = "" if row["cost"] is None else f"{row['cost']:.3f}"
        flops = "" if row["role"] == "plain" else f"{row['tflops']:.1f}"
        lines.append(
            f"  {row['role']:5} {row['name']:{width}} {row['ms']:8.4f} {cost:>6} {flops:>7} {row['registers']:>9} "
            f"{row['spill_bytes']:>6}"
        )
    return "\n".join(lines)


def _title(head_dim: int, head_dim_v: int, causal: bool) -> str:
    return f"d{head_dim}" + (f"v{head_dim_v}" if head_dim_v != head_dim else "") + (" causal" if causal else "")


def _compiled(specs: list[KernelSpec], device: Device) -> list[KernelSpec]:
    """Those that compile with next to no spills."""
    built = compile_all(specs, device)
    for spec, binary in built.items():
        if isinstance(binary, str):
            log(f"  {spec.name}: {binary}")
    return [s for s, b in built.items() if isinstance(b, Binary) and b.spill_bytes <= _MAX_SPILL]


def entry(spec: KernelSpec, tflops: float) -> dict[str, Any]:
    """A winner as data."""
    tile = {name: value for name, value in asdict(spec.tile).items() if name not in ("head_dim", "head_dim_v")}
    skipped = ("tile", "dtype", "out_dtype", *(f.name for f in fields(Features)))
    settings = {
        f.name: getattr(spec, f.name)
        for f in fields(KernelSpec)
        if f.name not in skipped and getattr(spec, f.name) != f.default
    }
    return {"tile": tile, "spec": settings, "tflops": round(tflops, 1)}


def render(entries: dict[Any, Any], card: str, date: str, at_commit: str | None) -> str:
    """The module's text."""
    lines = [
        f'"""Tiles measured on one {card}; written by bench/tune.py, which says what the fields mean."""',
        "",
        "from typing import Any",
        "",
        f"CARD = {card!r}",
        f"DATE = {date!r}",
        f"COMMIT = {at_commit!r}",
        "MEASURED = True",
        "",
        "# fmt: off",
        "#: (head_dim, head_dim_v, causal, min_seqlen) -> fields of FwdTile, fields of KernelSpec, TFLOP/s.",
        "ENTRIES: dict[tuple[int, int, bool, int], dict[str, Any]] = {",
    ]
    for key, value in sorted(entries.items()):
        lines += [f"    {key}: {{", *(f"        {name!r}: {part!r}," for name, part in value.items()), "    },"]
    if any(len(line) > 120 for line in lines):
        lines.insert(2, "# ruff: noqa: E501")
    return "\n".join([*lines, "}", ""]).replace("'", '"')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", nargs="+", default=["64", "128", "256"], help="classes, 192,128 for unlike ones")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="default: both")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--list", action="store_true", help="print what would be tried on --card, measure nothing")
    parser.add_argument("--card", default="H200", help="only for --list")
    parser.add_argument("--output", type=Path, help="default: cupy_fa2/plan/tuned/sm<arch>.py; none with --feature")
    parser.add_argument("--feature", action="append", choices=[*PIECES], help="of the kernels; may be repeated")
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192], help="only with --feature")
    parser.add_argument("--merge", action="store_true", help="keep the entries of other classes of an existing file")
    parser.add_argument("--commit", help="what to store as the commit, where this is no git checkout")
    options = parser.parse_args()
    shapes = QUICK_SHAPES if options.quick else SHAPES
    classes = [tuple(int(x) for x in text.split(",")) for text in options.head_dim]
    classes = [(dims[0], dims[-1]) for dims in classes]
    masks = (False, True) if options.causal is None else (options.causal,)

    if options.feature:
        return main_features(options, classes, masks, shapes)
    if options.list:
        for head_dim, head_dim_v in classes:
            tiles = candidates(head_dim, head_dim_v, named_device(options.card), shapes)
            print(f"head_dim {head_dim}, {head_dim_v}: {len(tiles)} shapes")
            for tile in tiles:
                spec = KernelSpec(tile, DTYPE, DTYPE)
                others = variants(spec, named_device(options.card), VARIANTS)
                print(f"  {spec.name}, {len(others)} variants, {tile.shared_bytes} bytes of shared memory")
        return 0

    need_gpu()
    device = cuda_device(0)
    output = options.output or ROOT / "cupy_fa2" / "plan" / "tuned" / f"sm{device.arch}.py"
    entries: dict[Any, Any] = {}
    if options.merge and output.exists():
        entries.update(runpy.run_path(str(output))["ENTRIES"])
    machine = describe_machine(device, options.commit)
    for (head_dim, head_dim_v), causal in itertools.product(classes, masks):
        entries.update(tune(device, head_dim, head_dim_v, causal, shapes))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render(entries, device.name, machine["date"], options.commit or commit()))
    print(f"written: {output}")
    return 0


def main_features(
    options: argparse.Namespace, classes: list[tuple[int, int]], masks: tuple[bool, ...], shapes: dict[str, list[Any]]
) -> int:
    """``--feature``: everything that is measured, to be read by whoever writes the heuristics."""
    features = list(dict.fromkeys(options.feature))
    sizes = [Sizes(*dims, causal, n) for dims, causal, n in itertools.product(classes, masks, options.seqlen)]
    if options.list:
        device = named_device(options.card)
        for one in sizes:
            specs = feature_specs(one, features, device, shapes)
            print(f"{_title(one.head_dim, one.head_dim_v, one.causal)}, seqlen {one.seqlen}: {len(specs)} shapes")
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
            log(f"{_title(one.head_dim, one.head_dim_v, one.causal)}, seqlen {one.seqlen}: {first_line(error)}")
        if options.output:
            write_result(options.output, result)
    if options.output:
        print(f"written: {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
