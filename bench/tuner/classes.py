"""One class of head dimensions on one kind of card: from candidates to the entries of its table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan import forward_spec
from cupy_fa2.plan.feasible import accumulator_registers, infeasible
from cupy_fa2.plan.row import Rows
from cupy_fa2.problem import Structure
from tuner.candidates import DTYPE, FEW, candidates, spec_of, transports, variants
from tuner.ladder import Timed, ladder, plain_tile
from tuner.measure import Search, compiled
from tuner.model import clocks
from tuner.registers import SpillBook
from tuner.sizes import Sizes, title
from tuner.tools import first_line, log, read_result

__all__ = ["LONG", "SHORT", "Class", "Times", "expected", "measured", "rows_of", "today_of"]

SHORT, LONG = 512, 8192  # seqlens that are timed
_MOST = 18  # candidates of a transport
_VARIED = 3  # the fastest, of which variants are timed

#: What is tried on the fastest, one field after the other.
_VARIANTS: tuple[dict[str, list[Any]], ...] = (
    {"q_kept": [16, 32]},
    {"stages": [1, 2, 3]},
    {"last_to_first": [False]},
    {"min_blocks": [2]},
)


@dataclass(frozen=True)
class Class:
    """Head dimensions, and whether a band hides keys."""

    head_dim: int
    head_dim_v: int
    masked: bool

    @property
    def features(self) -> Features:
        """Of the calls that are timed."""
        return Features("causal" if self.masked else "full")

    def __str__(self) -> str:
        return title(self.head_dim, self.head_dim_v, self.masked)


@dataclass
class Times:
    """What was timed: (class, transport) -> candidates."""

    card: str = ""
    date: str = ""
    commit: str | None = None
    arch: int = 0
    found: dict[tuple[Class, str], list[Timed]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Times:
        """As `result` wrote them."""
        data = read_result(path)
        times = cls(data["card"], data["date"], data["commit"], data["arch"])
        for row in data["rows"]:
            key = Class(row["head_dim"], row["head_dim_v"], row["masked"]), row["transport"]
            tile = FwdTile(head_dim=row["head_dim"], head_dim_v=row["head_dim_v"], **row["tile"])
            times.found.setdefault(key, []).append(Timed(tile, row["ms"], row["short_ms"], row["tflops"]))
        return times

    def result(self) -> dict[str, Any]:
        """As a result file has them."""
        rows = []
        for (one, transport), found in self.found.items():
            for timed in sorted(found, key=lambda timed: timed.time):
                tile = {k: v for k, v in asdict(timed.tile).items() if k not in ("head_dim", "head_dim_v")}
                times = {"ms": timed.time, "short_ms": timed.short, "tflops": timed.tflops}
                spec = spec_of(timed.tile, transport, one.features)
                name = {"name": spec.name if spec else str(timed.tile)}
                rows.append({**name, **asdict(one), "transport": transport, **times, "tile": tile})
        head = {"schema": 1, "kind": "tiles", "card": self.card, "date": self.date, "commit": self.commit}
        return {**head, "arch": self.arch, "rows": rows}


def _candidates(one: Class, device: Device) -> dict[str, list[FwdTile]]:
    """Tiles by transport; with cp.async also those that tensor copies have, for plain calls get one for both."""
    found: dict[str, list[FwdTile]] = {}
    for transport in transports(device):
        with contextlib.suppress(ValueError):  # none: tensor maps want multiples of 64
            found[transport] = candidates(one.head_dim, one.head_dim_v, transport, device, FEW, _MOST)
    if "tensor" in found:
        found["cp_async"] += [replace(tile, stages=stages) for tile in found["tensor"] for stages in (2, 1)]
    for transport, tiles in found.items():
        # Bounds and addresses do not fit beside more.
        most = 176 if one.masked and transport == "cp_async" else 192
        able = [tile for tile in tiles if tile.rows_per_warp <= 32 and accumulator_registers(tile) <= most]
        # Deciding per warp what to mask saves time where it costs no spills: docs/notebook.md, 28.
        by_warp = [replace(tile, mask_by_warp=True) for tile in able if one.masked and transport == "tensor"]
        found[transport] = [x for x in dict.fromkeys([*by_warp, *able]) if infeasible(x, device) is None]
    return found


def today_of(one: Class, transport: str, device: Device) -> FwdSpec:
    """What plain calls get before anything is written."""
    structure = Structure.typical(
        one.head_dim, one.head_dim_v, features=one.features, tensor_maps=transport == "tensor", dtype=DTYPE
    )
    return forward_spec(structure, device)[0]


def expected(one: Class, device: Device) -> dict[str, list[Timed]]:
    """Candidates by transport, with the times that the model gives them."""
    return {
        transport: [Timed(tile, clocks(tile, transport, device)) for tile in tiles]
        for transport, tiles in _candidates(one, device).items()
    }


def measured(one: Class, device: Device, out_of_time: Callable[[], bool]) -> dict[str, list[Timed]]:
    """Candidates by transport, with milliseconds on this card. A kernel that fails is left out."""
    specs: list[FwdSpec] = []
    for transport, tiles in _candidates(one, device).items():
        made = [spec_of(tile, transport, one.features) for tile in tiles]
        specs += [spec for spec in [*made, today_of(one, transport, device)] if spec]
    search = Search(device, Sizes(one.head_dim, one.head_dim_v, one.masked, LONG))
    times = search(compiled(list(dict.fromkeys(specs)), device), 0.01)
    for transport in transports(device) if not out_of_time() else ():
        ranked = sorted((spec for spec in times if spec.transport == transport), key=times.__getitem__)
        more = [spec for best in ranked[:_VARIED] for values in _VARIANTS for spec in variants(best, device, values)]
        times |= search([spec for spec in compiled(more, device) if spec not in times], 0.01)
    # All once more, in turn: what was timed in different minutes does not compare.
    times = search(list(times), 0.03)
    flop = search.flop
    del search
    short = Search(device, Sizes(one.head_dim, one.head_dim_v, one.masked, SHORT))(list(times), 0.01)
    found: dict[str, list[Timed]] = {}
    for spec, ms in times.items():
        timed = Timed(spec.tile, round(ms, 5), round(short[spec], 5) if spec in short else None, flop / ms / 1e9)
        if spec.min_blocks == 1:  # shown, but none was ever faster
            found.setdefault(spec.transport, []).append(replace(timed, tflops=round(timed.tflops or 0.0, 1)))
        else:
            log(f"  {spec.name}: {timed.tflops:.1f} TFLOP/s")
    return found


def rows_of(one: Class, found: dict[str, list[Timed]], devices: Sequence[Device], book: SpillBook, origin: str) -> Rows:
    """The table's entries: one for each transport, or none at all where one of them fails."""
    rows: Rows = {}
    plain = None
    begin = time.perf_counter()
    try:
        if "tensor" in found and "cp_async" in found:
            plain = plain_tile(found["tensor"], found["cp_async"], one.masked, devices, book)
        for transport, timed in found.items():
            key = one.head_dim, one.head_dim_v, one.masked, transport
            rows[key] = ladder(timed, one.masked, transport, devices, book, origin, plain)
    except Exception as error:  # both transports or none: plain calls have one tile
        log(f"{one}: {first_line(error)}")
        return {}
    log(f"{one} for sm_{devices[0].arch}: {book.builds} kernels built so far, {time.perf_counter() - begin:.0f} s")
    return rows
