"""The choice of a forward kernel: pure functions over tables, with the reason beside each entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupy_fa2.device import Device
from cupy_fa2.heuristics.feasible import infeasible
from cupy_fa2.heuristics.tuned import table
from cupy_fa2.spec import FwdTile

__all__ = ["Choice", "forward_candidates", "pick_forward"]


@dataclass(frozen=True)
class Choice:
    """What is left open by a problem.

    Attributes
    ----------
    tile : FwdTile
    kv : {"dense", "tensor"}
        How K and V come into shared memory.
    min_blocks : int
        Blocks that registers must leave room for.
    reason : str
    """

    tile: FwdTile
    kv: str
    min_blocks: int
    reason: str


def forward_candidates(head_dim: int, head_dim_v: int) -> list[Choice]:
    """Choices by rule, for head dimensions (multiples of 16) that no table covers; best first."""

    def choice(block_m: int, block_n: int, num_warps: int, stages: int, reason: str) -> Choice:
        return Choice(FwdTile(block_m, block_n, head_dim, head_dim_v, num_warps, stages), "dense", 1, reason)

    # 32 rows per warp halve the shared-memory reads per mma, but O then takes head_dim_v registers per thread: up to
    # 128 that leaves room for S. Beyond, 16 rows per warp and more of them.
    if head_dim_v <= 128:
        # S takes block_n registers. With O's 96 or more, 64 of them would leave the scheduler no room.
        block_n = 64 if head_dim_v <= 80 else 48 if head_dim <= 128 else 32
        return [
            choice(128, block_n, 4, 2, "32 rows per warp: each K and V fragment serves two mma; copies one tile ahead"),
            choice(128, block_n, 4, 1, "32 rows per warp; single-buffered to fit"),
            choice(64, block_n, 2, 1, "32 rows per warp, half the rows to fit"),
            choice(64, 32, 2, 1, "the smallest tile, to fit"),
        ]
    return [
        choice(64, 64, 4, 1, "16 rows per warp, since O takes head_dim_v / 2 registers; two blocks per SM on sm_90"),
        choice(64, 32, 4, 1, "half the keys to fit"),
        choice(32, 32, 2, 1, "the smallest tile, to fit"),
    ]


def pick_forward(
    head_dim: int,
    head_dim_v: int,
    device: Device,
    *,
    causal: bool,
    seqlen_q: int,
    tensor_maps: bool,
    crowded: bool = False,
    dropout: bool = False,
) -> Choice:
    """The table's choice for `device`, if it has one, else the first by rule that fits.

    Parameters
    ----------
    head_dim, head_dim_v : int
        Multiples of 16.
    device : Device
    causal : bool
    seqlen_q : int
    tensor_maps : bool
        Whether tensor maps can describe k and v.
    crowded : bool
        Whether score modifiers, masks that are read, dropout or second sums take registers of their own.
    dropout : bool
        Whether keys come by whole groups of 32, which one call of the random generator serves.
    """
    tuned = _from_table(head_dim, head_dim_v, device, causal, seqlen_q, tensor_maps)
    refused = []
    for choice in ([tuned] if tuned else []) + forward_candidates(head_dim, head_dim_v):
        problem = infeasible(choice.tile, device)
        if problem is None:
            tile = _roomier(choice.tile, choice.kv) if crowded else choice.tile
            if dropout and tile.block_n % 32:
                tile = replace(tile, block_n=max(tile.block_n // 32, 1) * 32)
            return replace(choice, tile=tile)
        refused.append(f"{choice.tile.block_m}x{choice.tile.block_n}, {choice.tile.stages} stage(s) {problem}")
    raise ValueError(f"no tile for head_dim {head_dim}, {head_dim_v} fits on {device.name}: {'; '.join(refused)}")


def _roomier(tile: FwdTile, kv: str) -> FwdTile:
    """`tile` with fewer keys where 32 rows per warp leave no registers for anything else; spills are what decides."""
    if tile.rows_per_warp < 32:
        return tile
    block_n = min(tile.block_n, 80 if tile.head_dim_v <= 64 else 32)
    return replace(tile, block_n=block_n, stages=1 if kv == "dense" else tile.stages)


def _from_table(
    head_dim: int, head_dim_v: int, device: Device, causal: bool, seqlen_q: int, tensor_maps: bool
) -> Choice | None:
    """The entry for these head dimensions with the longest sequences that are reached.

    Where tensor maps cannot describe k and v, the same tile with cp.async: how keys lie in memory must not show in the
    result's bits.
    """
    data = table(device.arch)
    if data is None:
        return None
    keys = [key for key in data.ENTRIES if key[:3] == (head_dim, head_dim_v, causal) and key[3] <= seqlen_q]
    if not keys:
        return None
    entry = data.ENTRIES[max(keys)]
    tile = FwdTile(head_dim=head_dim, head_dim_v=head_dim_v, **entry["tile"])
    source = f"measured on {data.CARD}, {data.DATE}" if data.MEASURED else f"derived, not measured: {data.CARD}"
    spec = entry["spec"]
    kv = spec.get("kv", "dense")
    if kv == "tensor" and not tensor_maps:
        # Addresses need the registers that Q may have had, and those of a second buffer where O takes 128.
        kv, tile = "dense", replace(tile, stages=1 if head_dim_v == 128 else 2, q_kept=0)
    return Choice(tile, kv, spec.get("min_blocks", 1), f"Of the table for sm_{device.arch} ({source})")
