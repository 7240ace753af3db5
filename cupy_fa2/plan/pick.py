"""The choice of a forward kernel: pure functions over tables, with the reason beside each entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupy_fa2.device import Device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdTile
from cupy_fa2.plan.feasible import infeasible
from cupy_fa2.plan.tuned import table
from cupy_fa2.problem import Structure

__all__ = ["Choice", "forward_candidates", "pick_forward"]


@dataclass(frozen=True)
class Choice:
    """What is left open by a problem.

    Attributes
    ----------
    tile : FwdTile
    transport : {"cp_async", "tensor"}
        How K and V come into shared memory.
    min_blocks : int
        Blocks that registers must leave room for.
    reason : str
    """

    tile: FwdTile
    transport: str
    min_blocks: int
    reason: str


def forward_candidates(head_dim: int, head_dim_v: int) -> list[Choice]:
    """Choices by rule, for head dimensions (multiples of 16) that no table covers; best first."""

    def choice(block_m: int, block_n: int, num_warps: int, stages: int, reason: str) -> Choice:
        return Choice(FwdTile(block_m, block_n, head_dim, head_dim_v, num_warps, stages), "cp_async", 1, reason)

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


def pick_forward(structure: Structure, device: Device) -> Choice:
    """The table's choice for `device`, if it has one, else the first by rule that fits; with room for the features."""
    features = structure.features
    head_dims = structure.head_dim, structure.head_dim_v
    tensor_maps = structure.tensor_maps and not features.padded
    tuned = _from_table(*head_dims, device, features.band != "full", structure.seqlen_q, tensor_maps)
    refused = []
    for choice in ([tuned] if tuned else []) + forward_candidates(*head_dims):
        problem = infeasible(choice.tile, device)
        if problem is None:
            load = register_weight(features) + 3 * (structure.out_dtype == "float")
            return replace(choice, tile=_with_room(choice, features, load))
        refused.append(f"{choice.tile.block_m}x{choice.tile.block_n}, {choice.tile.stages} stage(s) {problem}")
    raise ValueError(f"no tile for head_dim {head_dims} fits on {device.name}: {'; '.join(refused)}")


def register_weight(features: Features) -> int:
    """How many registers of the main loop features take, in a coarse unit."""
    modifiers = (features.negate, features.softcap, features.scaled, features.alibi)
    arrays = (1 + x.rows + 3 * (not x.pairs) for x in (features.bias, features.mask) if x is not None)
    return sum(modifiers) + sum(arrays) + 2 * features.dropout


def _with_room(choice: Choice, features: Features, load: int) -> FwdTile:
    """The choice's tile, or one that leaves registers for `load` (see `register_weight`); spills are what decides.

    Where head_dim_v is 128 and options are many, pairs of warps have the room, since each holds half of O: on an H200
    they cost 4 % at 128 keys, less than the small tiles that single warps would be left with.

    Keys that come by cp.async may get another tile here than by tensor maps, and so other roundings.
    """
    tile = choice.tile
    if load == 0:
        # Lengths of each batch element take the last registers beside a diagonal.
        crowded = features.padded and features.band != "full" and tile.head_dim_v == 128 and tile.rows_per_warp == 32
        return replace(tile, block_n=32) if crowded else tile
    dense = choice.transport == "cp_async"
    roomy = replace(tile, stages=1 if dense else tile.stages, q_kept=0, mask_by_warp=not dense)
    load += dense  # cp.async takes addresses
    if tile.team == 2 or tile.rows_per_warp < 32:
        if load < 3 or (tile.team == 1 and load < 4):
            return roomy
        return replace(_sixteen_rows(roomy), block_n=48 if tile.team == 2 and load < 5 and not features.dropout else 32)
    if tile.head_dim_v <= 64:
        block_n = 32 if load > 3 else 48 if load > 2 else 64 if load > 1 else 96
        if features.dropout:
            block_n = 32 if load > 2 else 64
        return replace(roomy, block_n=min(tile.block_n, block_n)) if load < 10 else _sixteen_rows(roomy)
    if tile.head_dim == tile.head_dim_v == 128 and tile.block_m == 128 and load < 12:
        masked = features.band != "full"
        if load == 1 and not masked:
            return replace(roomy, block_n=48)
        wide = not dense and load < 3 and not (masked and features.bias)
        float_bias = features.bias is not None and features.bias.dtype == "float"
        return replace(roomy, block_n=(96 if float_bias else 128) if wide else 64, num_warps=8, team=2)
    return replace(roomy, block_n=32) if load < 3 else _sixteen_rows(roomy)


def _sixteen_rows(tile: FwdTile) -> FwdTile:
    """Sixteen rows per warp and few keys: half of the registers, and at best two thirds of the speed."""
    return replace(tile, block_n=32, num_warps=tile.block_m // 16, team=1)


def _from_table(
    head_dim: int, head_dim_v: int, device: Device, causal: bool, seqlen_q: int, tensor_maps: bool
) -> Choice | None:
    """The entry for these head dimensions with the longest sequences that are reached.

    Where tensor maps cannot describe k and v, the same tile with cp.async: how keys lie in memory does not show in the
    result's bits, but for some options (`_with_room`).
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
    transport = spec.get("transport", "cp_async")
    if transport == "tensor" and not tensor_maps:
        # Addresses need the registers that Q may have had, and those of a second buffer where O takes 128.
        transport, tile = "cp_async", replace(tile, stages=1 if head_dim_v == 128 else 2, q_kept=0, mask_by_warp=False)
    return Choice(tile, transport, spec.get("min_blocks", 1), f"Of the table for sm_{device.arch} ({source})")
