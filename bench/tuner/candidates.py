"""The tiles that are tried."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import fields, replace
from typing import Any

from cupy_fa2.device import Device
from cupy_fa2.kernel.features import PLAIN, Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan.feasible import accumulator_registers, infeasible, serves
from cupy_fa2.plan.row import Row
from tuner.model import clocks

__all__ = ["DTYPE", "FEW", "SHAPES", "VARIANTS", "candidates", "row_of", "spec_of", "tiles", "transports", "variants"]

DTYPE = "bf16"

#: Fields of `FwdTile` -> values whose every combination is tried; all others keep their defaults.
SHAPES: dict[str, list[Any]] = {
    "block_m": [64, 128],
    "block_n": [32, 48, 64, 80, 96, 112, 128],
    "num_warps": [2, 4, 8],
    "stages": [1, 2, 3],
    "q_kept": [0, 16, 32, 64, 256],
    "team": [1, 2],
}
#: Those of a search by registers alone, and of one that has little time.
FEW: dict[str, list[Any]] = {**SHAPES, "stages": [1, 2], "q_kept": [0]}
#: Fields of `FwdTile` or `FwdSpec` -> values tried on the best shapes, every combination.
VARIANTS: dict[str, list[Any]] = {
    "last_to_first": [True, False],
    "mask_by_warp": [False, True],
    "min_blocks": [1, 2, 3],
}

_MAX_THREADS = 256
_BYTES_LEFT = 1024  # of shared memory that the system takes of each block


def transports(device: Device) -> tuple[str, ...]:
    """How keys can come on this card."""
    # Tensor copies of later architectures have run nowhere yet.
    return ("tensor", "cp_async") if device.arch == 90 else ("cp_async",)


def tiles(head_dim: int, head_dim_v: int, device: Device, shapes: dict[str, list[Any]]) -> list[FwdTile]:
    """Tiles of every combination of `shapes` that can exist and fit on `device`."""
    found = []
    for values in itertools.product(*shapes.values()):
        with contextlib.suppress(ValueError):
            tile = FwdTile(**{"head_dim": head_dim, "head_dim_v": head_dim_v, **dict(zip(shapes, values, strict=True))})
            if tile.threads <= _MAX_THREADS and tile.rows_per_warp <= 64 and infeasible(tile, device) is None:
                found.append(tile)
    return found


def spec_of(
    tile: FwdTile, transport: str, features: Features = PLAIN, *, out_dtype: str = DTYPE, min_blocks: int = 1
) -> FwdSpec | None:
    """The kernel with this tile, or None where there can be none."""
    with contextlib.suppress(ValueError):
        return FwdSpec(tile, DTYPE, out_dtype, features, transport=transport, min_blocks=min_blocks)
    return None


def candidates(
    head_dim: int, head_dim_v: int, transport: str, device: Device, shapes: dict[str, list[Any]], most: int
) -> list[FwdTile]:
    """The `most` tiles that the model finds fastest, and what a few registers suffice for, best first."""
    able = [x for x in tiles(head_dim, head_dim_v, device, shapes) if spec_of(x, transport)]
    able.sort(key=lambda tile: (clocks(tile, transport, device), tile.stages != 2, tile.threads, tile.shared_bytes))
    # Of tiles that want the same registers the fastest few.
    kept: list[FwdTile] = []
    for tile in able:
        alike = [x for x in kept if (x.team, accumulator_registers(x)) == (tile.team, accumulator_registers(tile))]
        if len(alike) < 2:
            kept.append(tile)
    anything = [tile for tile in kept if serves(tile, Features(dropout=True)) and tile.team == 1]
    least = min(anything, key=lambda tile: (accumulator_registers(tile), clocks(tile, transport, device)))
    return list(dict.fromkeys([*kept[:most], least]))


def variants(spec: FwdSpec, device: Device, values: dict[str, list[Any]]) -> list[FwdSpec]:
    """`spec` with every combination of `values` that can exist and run together on a multiprocessor."""
    tile_fields = {f.name for f in fields(FwdTile)}
    found = []
    for chosen in itertools.product(*values.values()):
        setting = dict(zip(values, chosen, strict=True))
        with contextlib.suppress(ValueError):
            tile = replace(spec.tile, **{k: v for k, v in setting.items() if k in tile_fields})
            other = replace(spec, tile=tile, **{k: v for k, v in setting.items() if k not in tile_fields})
            if infeasible(tile, device) is None and _fits_together(other, device):
                found.append(other)
    return list(dict.fromkeys(found))


def row_of(tile: FwdTile, **more: Any) -> Row:
    """The tile as a row."""
    shape = {f.name: getattr(tile, f.name) for f in fields(Row) if hasattr(tile, f.name)}
    return Row(**shape, **more)


def _fits_together(spec: FwdSpec, device: Device) -> bool:
    """Whether a multiprocessor has the shared memory and could have the registers for `min_blocks`."""
    if spec.min_blocks == 1:
        return True
    registers = 65_536 // (spec.tile.threads * spec.min_blocks)
    shared = spec.min_blocks * (spec.tile.shared_bytes + _BYTES_LEFT)
    return shared <= device.shared_per_sm and registers >= accumulator_registers(spec.tile) + 40
