"""Rows for head dimensions that no table has, by rule."""

from __future__ import annotations

from dataclasses import replace

from cupy_fa2.device import Device
from cupy_fa2.plan.feasible import infeasible
from cupy_fa2.plan.row import Row

__all__ = ["ORIGINS", "rows_by_rule"]

#: Why a row is where it is.
ORIGINS = {
    "ahead": "32 rows per warp: each K and V fragment serves two mma; copies one tile ahead",
    "single": "32 rows per warp; single-buffered to fit, or to leave registers for options",
    "half": "32 rows per warp, half the rows to fit",
    "narrow": "few keys, which leaves registers for options",
    "sixteen": "16 rows per warp and few keys: half of the registers, and at best two thirds of the speed",
    "wide": "16 rows per warp, since O takes head_dim_v / 2 registers; two blocks per SM on sm_90",
    "smallest": "the smallest tile, to fit",
}


def rows_by_rule(head_dim: int, head_dim_v: int, masked: bool, device: Device) -> list[Row]:
    """Rows with cp.async for head dimensions that are multiples of 16, best first; `masked` where a band hides keys."""
    # 32 rows per warp halve the shared-memory reads per mma, but O then takes head_dim_v registers per thread: up to
    # 128 that leaves room for S. Beyond, 16 rows per warp and more of them.
    if head_dim_v > 128:
        return [
            Row(64, 64, 4, 1, room=3, origin="wide"),
            Row(64, 32, 4, 1, origin="narrow"),
            Row(32, 32, 2, 1, origin="smallest"),
        ]
    # S takes block_n registers. With O's 96 or more, 64 of them would leave the scheduler no room.
    block_n = 64 if head_dim_v <= 80 else 48 if head_dim <= 128 else 32
    rows: list[Row] = []
    for widest in (Row(128, block_n, 4, 1, origin="single"), Row(64, block_n, 2, 1, origin="half")):
        # A block whose widest tile does not fit is not taken with fewer keys either.
        if infeasible(widest.tile(head_dim, head_dim_v), device) is None:
            rows += _for_options(widest, head_dim_v, masked)
    return [*rows, Row(64, 32, 2, 1, origin="smallest")]


def _for_options(widest: Row, head_dim_v: int, masked: bool) -> list[Row]:
    """The rows of one number of query rows: from those of plain calls to those with room for everything."""
    ahead = [replace(widest, stages=2, origin="ahead")] if widest.block_m == 128 else []
    plain = [replace(row, room=1) for row in [*ahead, widest]]
    if head_dim_v == 128 and masked:
        # Lengths of each batch element take the last registers beside a diagonal.
        crowded = [replace(row, block_n=32) for row in plain]
        plain = [*(replace(row, but_not=("padded",)) for row in plain), *crowded]
    steps = ((64, 2), (48, 3), (32, 9)) if head_dim_v <= 64 else ((32, 2),)
    narrow = [replace(widest, block_n=min(keys, widest.block_n), room=room) for keys, room in steps]
    sixteen = replace(widest, block_n=32, num_warps=widest.block_m // 16, origin="sixteen")
    return [*plain, *narrow, sixteen]
