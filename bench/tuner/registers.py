"""Which tiles have registers for which options, as the assembler says; needs NVRTC and no GPU."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupy_fa2.compile import build, nvrtc_version, source_root
from cupy_fa2.device import Device
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.features import Features, ScoreArray
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.kernel.params import render_header
from cupy_fa2.plan.feasible import serves
from cupy_fa2.plan.weight import feature_names, register_weight
from tuner.candidates import DTYPE, spec_of
from tuner.tools import RESULTS

__all__ = ["SPILLS", "Ask", "Fit", "SpillBook", "asks", "fit"]

#: Where spills are recorded: what one NVRTC spills is not taken, whatever another says.
SPILLS = RESULTS / "spills.json"

#: Features that a row may refuse by name, where they alone do not fit.
_EXCEPTIONS = ("padded", "window", "bias_float", "bias", "dropout")


@dataclass(frozen=True)
class Ask:
    """Options of a call, as far as they take registers."""

    features: Features
    float_out: bool = False

    def weight(self, transport: str) -> int:
        """As plans have it."""
        return register_weight(self.features, float_out=self.float_out, transport=transport)

    def spec(self, tile: FwdTile, transport: str) -> FwdSpec | None:
        """The kernel with this tile."""
        if not serves(tile, self.features):
            return None
        return spec_of(tile, transport, self.features, out_dtype="float" if self.float_out else DTYPE)


def asks(masked: bool, transport: str) -> list[Ask]:
    """A sample of option sets of every weight, the lightest first; of masks the one that takes most registers.

    A window reads both bounds; a plain causal kernel is asked for as well. Sinks take registers after the loop alone.
    """
    bias, row, single = ScoreArray(DTYPE), ScoreArray(DTYPE, rows=False), ScoreArray(DTYPE, pairs=False)
    float_bias, mask = ScoreArray("float"), ScoreArray("bool")
    padded = transport == "cp_async"
    most = {"softcap": True, "alibi": True, "mask": mask, "sinks": True, "padded": padded, "dropout": True}
    sets: list[dict[str, Any]] = [
        {},
        {"softcap": True},
        {"bias": row},
        {"bias": bias},
        {"bias": float_bias},
        {"mask": mask},
        {"dropout": True},
        {"bias": bias, "mask": mask},
        {**most, "bias": bias},
    ]
    sets += [{"padded": True}] if padded else []
    band = "window" if masked else "full"
    made = [Ask(Features("causal", padded=one)) for one in sorted({False, padded}) if masked]
    made += [Ask(Features(band, **one)) for one in sets]
    made += [Ask(Features(band), True), Ask(Features(band, **most, bias=single), True)]
    return sorted(made, key=lambda ask: ask.weight(transport))


def _digest() -> str:
    """Of the kernels' sources, whose every change may move a register."""
    texts = [render_header(), *(path.read_text() for path in sorted(source_root().rglob("*.cuh")))]
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


class SpillBook:
    """Builds kernels, and remembers which spilled with which NVRTC.

    Parameters
    ----------
    path : Path or None
        The record. One of other sources is as good as none.
    threads : int, optional
        That compile.
    deadline : float
        Of `time.perf_counter`: after it nothing is built, and `TimeoutError` raised instead.
    """

    def __init__(self, path: Path | None = SPILLS, threads: int | None = None, deadline: float = math.inf) -> None:
        self._path, self._threads, self._deadline = path, threads or os.cpu_count(), deadline
        self._sources = _digest()
        self._known: dict[str, dict[str, int]] = {}
        if path and path.exists():
            record = json.loads(path.read_text())
            if record.get("sources") == self._sources:
                self._known = record["spills"]
        self.builds = 0

    @property
    def versions(self) -> str:
        """NVRTCs that spills are known of, in words."""
        names = {key.split()[0] for key in self._known} | {".".join(map(str, nvrtc_version()))}
        return "NVRTC " + ", ".join(sorted(names))

    def spills(self, specs: Iterable[FwdSpec], devices: Iterable[Device]) -> dict[FwdSpec, bool]:
        """Whether kernels spill with any NVRTC on any of these cards; built where that is not known yet."""
        specs = list(dict.fromkeys(specs))
        for device in devices:
            self._build([spec for spec in specs if not self._spilled(spec, device)], device)
        return {spec: any(self._spilled(spec, device) for device in devices) for spec in specs}

    def _spilled(self, spec: FwdSpec, device: Device) -> bool:
        return any(spec.name in book for key, book in self._known.items() if key.endswith(f" {target(spec, device)}"))

    def _build(self, specs: list[FwdSpec], device: Device) -> None:
        """Side by side, for NVRTC releases the interpreter's lock."""
        if specs and time.perf_counter() > self._deadline:
            raise TimeoutError("the budget is over")
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            for spec, spilled in zip(specs, pool.map(lambda spec: self._attempt(spec, device), specs), strict=True):
                self.builds += 1
                if spilled:
                    key = f"{'.'.join(map(str, nvrtc_version()))} {target(spec, device)}"
                    self._known.setdefault(key, {})[spec.name] = spilled

    def write(self, path: Path | None = None) -> None:
        """Keep what was found; versions and names in order, so that a file says by its differences what is new."""
        if path := path or self._path:
            ordered = {key: dict(sorted(book.items())) for key, book in sorted(self._known.items())}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"sources": self._sources, "spills": ordered}, indent=1) + "\n")

    @staticmethod
    def _attempt(spec: FwdSpec, device: Device) -> int:
        """Bytes spilled, -1 where there is no kernel or no block of it fits."""
        try:
            binary = build(spec, target(spec, device))
        except Exception:  # a tile that the compiler refuses is none to take; the search goes on
            return -1
        room = -(-binary.registers // 8) * 8 * spec.threads <= 65_536
        return binary.spill_bytes if room else -1


@dataclass
class Fit:
    """What a tile has registers for."""

    served: list[Ask] = field(default_factory=list)
    but_not: tuple[str, ...] = ()
    room: int = -1


def fit(tile: FwdTile, transport: str, wanted: Sequence[Ask], devices: Sequence[Device], book: SpillBook) -> Fit:
    """The option sets of `wanted`, lightest first, that a kernel of this tile serves without spills on all `devices`.

    All of a weight have to be served, but for features that the row then refuses by name.
    """
    found = Fit()
    first = wanted[0].spec(tile, transport)
    if first and book.spills([first], devices)[first]:  # before others of its weight are built
        return found
    for weight, group in itertools.groupby(wanted, lambda ask: ask.weight(transport)):
        able = [ask for ask in group if not set(found.but_not) & feature_names(ask.features)]
        if not able:
            return found
        specs = {ask: ask.spec(tile, transport) for ask in able}
        # A tile that dropout cannot take is refused for dropout by its shape, and needs no name for it.
        spills = book.spills([spec for spec in specs.values() if spec], devices)
        served = [ask for ask, spec in specs.items() if spec and not spills[spec]]
        failed = [ask for ask, spec in specs.items() if spec and spills[spec]]
        if failed:
            names = _refused(failed, served, found.served)
            if not names or found.but_not:
                return found
            found.but_not = names
            served = [ask for ask in served if feature_names(ask.features).isdisjoint(names)]
        found.served += served
        found.room = weight
    return found


def _refused(failed: Sequence[Ask], served: Sequence[Ask], before: Sequence[Ask]) -> tuple[str, ...]:
    """Features that all that failed has one of, and nothing `before` has: few, and of few that is served; else none."""

    def having(names: tuple[str, ...], some: Sequence[Ask]) -> int:
        return sum(not feature_names(ask.features).isdisjoint(names) for ask in some)

    names = [name for name in _EXCEPTIONS if not having((name,), before)]
    sets = [one for count in (1, 2) for one in itertools.combinations(names, count)]
    able = [one for one in sets if having(one, failed) == len(failed) and having(one, served) < len(served)]
    return min(able, key=lambda one: (len(one), having(one, served)), default=())
