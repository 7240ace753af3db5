"""Kernels with options on this card: a table of the fastest specs, for whoever looks for a better kernel."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

from cupy_fa2.compile import Binary
from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdSpec
from cupy_fa2.plan.feasible import serves
from tuner.candidates import VARIANTS, tiles, transports, variants
from tuner.measure import Search, compiled, halvings
from tuner.sizes import Sizes, asked, title
from tuner.tools import compile_all

__all__ = ["described", "feature_specs", "feature_table", "tune_features"]

_SHAPES_KEPT = 3  # whose variants are tried


def feature_specs(sizes: Sizes, features: Iterable[str], device: Device, shapes: dict[str, list[Any]]) -> list[FwdSpec]:
    """Specs with these features of every shape that can serve them; today's choice is the first."""
    today = asked(sizes, features, device)
    specs = [today]
    for tile in tiles(sizes.head_dim, sizes.head_dim_v, device, shapes):
        for transport in transports(device) if serves(tile, today.features) else ():
            try:
                specs.append(replace(today, tile=tile, transport=transport, min_blocks=1))
            except ValueError:  # tiles that this transport cannot serve
                continue
    return list(dict.fromkeys(specs))


def tune_features(
    device: Device, sizes: Sizes, features: list[str], shapes: dict[str, list[Any]]
) -> list[dict[str, Any]]:
    """Rows of one class, mask and length: the fastest specs, today's choice, and the plain kernel."""
    what = f"{title(sizes.head_dim, sizes.head_dim_v, sizes.causal)} {' '.join(features)}, seqlen {sizes.seqlen}"
    begin = time.perf_counter()
    specs = feature_specs(sizes, features, device, shapes)
    today, plain = specs[0], asked(sizes, (), device)
    search = Search(device, sizes, features)
    ranked = [spec for spec, _ in halvings(compiled(specs, device), search)]
    best = ranked[-_SHAPES_KEPT:]
    more = [other for spec in best for other in variants(spec, device, VARIANTS)]
    final = [spec for spec, _ in halvings(compiled(more, device), search)]
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
            **described(spec, search.flop / times[spec] / 1e9),
            "ms": round(times[spec], 5),
            "cost": round(times[spec] / plain_ms, 4) if plain_ms and spec != plain else None,
            "registers": built[spec].registers,
            "spill_bytes": built[spec].spill_bytes,
        }
        rows.append(row)
    print(f"{what}: {len(ranked)} shapes, {len(more)} variants of the best {len(best)}, ", end="")
    print(f"{time.perf_counter() - begin:.1f} s")
    print(feature_table(rows))
    return rows


def described(spec: FwdSpec, tflops: float) -> dict[str, Any]:
    """A spec as data, without its types and features."""
    tile = {name: value for name, value in asdict(spec.tile).items() if name not in ("head_dim", "head_dim_v")}
    skipped = ("tile", "dtype", "out_dtype", "features")
    settings = {
        f.name: getattr(spec, f.name)
        for f in fields(FwdSpec)
        if f.name not in skipped and getattr(spec, f.name) != f.default
    }
    return {"tile": tile, "spec": settings, "tflops": round(tflops, 1)}


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
