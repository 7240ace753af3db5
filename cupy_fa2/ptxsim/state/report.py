"""What a launch did: the counts that stand in for a profiler, and how they are taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import HazardError
from ..types import Array
from .registers import whole_warps

SECTOR_BYTES = 32
#: What one wavefront of shared memory moves at best: 32 banks of 4 bytes.
WAVEFRONT_BYTES = 128


@dataclass
class Report:
    """Counts of one launch; reports add up.

    Instructions, wavefronts and sectors are counted per warp. An instruction counts for every warp that
    reaches it, its predicate aside. The ideal is the least number for the same bytes: for shared memory
    without bank conflicts, for global memory with every byte of every sector used.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    wavefronts: Counter[str] = field(default_factory=Counter)
    wavefronts_ideal: Counter[str] = field(default_factory=Counter)
    global_load_sectors: int = 0
    global_load_sectors_ideal: int = 0
    global_store_sectors: int = 0
    global_store_sectors_ideal: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    barriers: int = 0
    blocks: int = 0
    warps: int = 0
    hazards: list[HazardError] = field(default_factory=list)
    seconds: float = 0.0

    def _count(self, base: str) -> int:
        return sum(n for opcode, n in self.instructions.items() if opcode.split(".")[0] == base)

    @property
    def mma(self) -> int:
        """Matrix multiply instructions."""
        return self._count("mma")

    @property
    def ldmatrix(self) -> int:
        """Matrix load instructions."""
        return self._count("ldmatrix")

    @property
    def shared_wavefronts(self) -> int:
        """Passes over shared memory; `wavefronts` has them by kind (ld, st, ldmatrix, cp.async)."""
        return self.wavefronts.total()

    @property
    def shared_wavefronts_ideal(self) -> int:
        """The passes without bank conflicts."""
        return self.wavefronts_ideal.total()

    @property
    def bank_conflicts(self) -> int:
        """Passes over shared memory beyond the ideal."""
        return self.shared_wavefronts - self.shared_wavefronts_ideal

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, lists and dictionaries."""
        return {
            "instructions": dict(sorted(self.instructions.items())),
            "mma": self.mma,
            "ldmatrix": self.ldmatrix,
            "shared_wavefronts": self.shared_wavefronts,
            "shared_wavefronts_ideal": self.shared_wavefronts_ideal,
            "shared_wavefronts_by_kind": dict(sorted(self.wavefronts.items())),
            "shared_wavefronts_ideal_by_kind": dict(sorted(self.wavefronts_ideal.items())),
            "bank_conflicts": self.bank_conflicts,
            "global_load_sectors": self.global_load_sectors,
            "global_load_sectors_ideal": self.global_load_sectors_ideal,
            "global_store_sectors": self.global_store_sectors,
            "global_store_sectors_ideal": self.global_store_sectors_ideal,
            "bytes_loaded": self.bytes_loaded,
            "bytes_stored": self.bytes_stored,
            "barriers": self.barriers,
            "blocks": self.blocks,
            "warps": self.warps,
            "hazards": [str(hazard) for hazard in self.hazards],
            "seconds": self.seconds,
        }

    def __add__(self, other: Report) -> Report:
        mine, theirs = vars(self), vars(other)
        return Report(**{name: mine[name] + theirs[name] for name in mine})

    def __str__(self) -> str:
        busiest = ", ".join(f"{opcode} {n}" for opcode, n in self.instructions.most_common(6))
        kinds = ", ".join(f"{kind} {n}/{self.wavefronts_ideal[kind]}" for kind, n in sorted(self.wavefronts.items()))
        lines = [
            f"{self.blocks} blocks, {self.warps} warps, {self.instructions.total()} warp instructions, "
            f"{self.barriers} barriers, {self.seconds:.2f} s",
            f"instructions: {self.mma} mma, {self.ldmatrix} ldmatrix; most: {busiest}",
            f"shared memory: {self.bank_conflicts} bank conflicts; wavefronts / ideal: {kinds or 'none'}",
            f"global loads: {self.bytes_loaded} bytes, "
            f"{self.global_load_sectors} sectors, ideal {self.global_load_sectors_ideal}",
            f"global stores: {self.bytes_stored} bytes, "
            f"{self.global_store_sectors} sectors, ideal {self.global_store_sectors_ideal}",
            f"hazards: {len(self.hazards)}",
        ]
        return "\n".join(lines + [str(hazard) for hazard in self.hazards])

    def on_shared(self, kind: str, offsets: Array, width: int, lanes: Array | None) -> None:
        """Count an access to shared memory, `width` bytes per thread; `lanes` None: all threads."""
        # A wide access takes the warp in parts, each of at most one wavefront's bytes.
        unit = max(width, 4)
        banks = WAVEFRONT_BYTES // unit
        whole = lanes is None or whole_warps(lanes)
        phases = _by_warp(offsets // unit, None if whole else lanes).reshape(-1, banks)
        bank = phases & (banks - 1)
        if whole and (np.bitwise_or.reduce(1 << bank, axis=1) == (1 << banks) - 1).all():
            used = ideal = len(phases)
        else:
            ordered, fresh = _distinct(phases)
            row, column = np.nonzero(fresh)
            counts = np.bincount(row * banks + (ordered[row, column] & (banks - 1)), minlength=len(phases) * banks)
            used = int(counts.reshape(-1, banks).max(axis=1).sum())
            ideal = int(fresh.any(axis=1).sum())
        self.wavefronts[kind] += used
        self.wavefronts_ideal[kind] += ideal

    def on_global(self, is_store: bool, address: Array, width: int, lanes: Array | None) -> None:
        """Count an access of `width` bytes per thread in global memory."""
        whole = lanes is None or whole_warps(lanes)
        units = _by_warp(address // width, None if whole else lanes)
        ordered, fresh = _distinct(units)
        ideal = int((-(-fresh.sum(axis=1) * width // SECTOR_BYTES)).sum())
        sector = ordered // (SECTOR_BYTES // width)
        first = fresh.copy()
        first[:, 1:] &= (sector[:, 1:] != sector[:, :-1]) | (ordered[:, :-1] < 0)
        used = int(first.sum())
        if is_store:
            self.global_store_sectors += used
            self.global_store_sectors_ideal += ideal
            self.bytes_stored += address.size * width
        else:
            self.global_load_sectors += used
            self.global_load_sectors_ideal += ideal
            self.bytes_loaded += address.size * width

    def on_bulk_load(self, address: Array, width: int) -> None:
        """Count the reads of one bulk copy, `width` bytes each; none of them twice."""
        self.global_load_sectors += np.unique(address // SECTOR_BYTES).size
        self.global_load_sectors_ideal += -(-address.size * width // SECTOR_BYTES)
        self.bytes_loaded += address.size * width

    def on_bulk_write(self, offsets: Array) -> None:
        """Count the shared memory that one bulk copy writes, 16 bytes each."""
        self.wavefronts["cp.async.bulk"] += np.unique(offsets // WAVEFRONT_BYTES).size
        self.wavefronts_ideal["cp.async.bulk"] += -(-offsets.size * 16 // WAVEFRONT_BYTES)


def _by_warp(values: Array, lanes: Array | None) -> Array:
    """One row of 32 per warp; threads that take no part have -1."""
    if lanes is None:
        return values.reshape(-1, 32)
    warps, row = np.unique(lanes >> 5, return_inverse=True)
    table = np.full((warps.size, 32), -1, np.int64)
    table[row, lanes & 31] = values
    return table


def _distinct(rows: Array) -> tuple[Array, Array]:
    """Rows sorted, and where a value stands for the first time; -1 is no value."""
    ordered = np.sort(rows, axis=1)
    fresh = ordered >= 0
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return ordered, fresh
