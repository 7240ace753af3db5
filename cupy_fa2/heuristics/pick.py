"""The choice of a forward tile."""

from __future__ import annotations

from cupy_fa2.device import Device
from cupy_fa2.heuristics.feasible import infeasible
from cupy_fa2.spec import FwdTile

__all__ = ["forward_candidates", "pick_forward"]


def forward_candidates(head_dim: int, head_dim_v: int) -> list[tuple[FwdTile, str]]:
    """Tiles for these head dimensions (multiples of 16), best first, each with the reason for its place."""

    def tile(block_m: int, block_n: int, num_warps: int, stages: int) -> FwdTile:
        return FwdTile(block_m, block_n, head_dim, head_dim_v, num_warps, stages)

    # 32 rows per warp halve the shared-memory reads per mma, but O then takes head_dim_v registers per thread: up to
    # 128 that leaves room for S. Beyond, 16 rows per warp and more of them.
    if head_dim_v <= 128:
        return [
            (tile(128, 64, 4, 2), "32 rows per warp: each K and V fragment serves two mma; copies one tile ahead"),
            (tile(128, 64, 4, 1), "32 rows per warp; single-buffered to fit"),
            (tile(64, 64, 2, 1), "32 rows per warp, half the rows to fit"),
            (tile(64, 32, 2, 1), "the smallest tile, to fit"),
        ]
    return [
        (tile(64, 64, 4, 1), "16 rows per warp, since O takes head_dim_v / 2 registers; two blocks per SM on sm_90"),
        (tile(64, 32, 4, 1), "half the keys to fit"),
        (tile(32, 32, 2, 1), "the smallest tile, to fit"),
    ]


def pick_forward(head_dim: int, head_dim_v: int, device: Device) -> tuple[FwdTile, str]:
    """The first candidate that fits on `device`, and why it was taken."""
    refused = []
    for tile, reason in forward_candidates(head_dim, head_dim_v):
        problem = infeasible(tile, device)
        if problem is None:
            return tile, reason
        refused.append(f"{tile.block_m}x{tile.block_n}, {tile.stages} stage(s) {problem}")
    raise ValueError(f"no tile for head_dim {head_dim}, {head_dim_v} fits on {device.name}: {'; '.join(refused)}")
