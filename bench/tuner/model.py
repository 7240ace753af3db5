"""What a tile is expected to take, where no card of its kind is at hand: enough to put candidates in an order.

Fitted to 20 tiles measured on an H200 (docs/notebook.md, 1 to 27), then held to 181 others (32): of those it has 90 %
within 8 %, and what it takes for the fastest is as fast as the fastest within 3.5 % for 14 of 16 classes. Other
architectures are taken to differ in the rate of their tensor cores alone.
"""

from __future__ import annotations

from cupy_fa2.device import Device
from cupy_fa2.kernel.forward import FwdTile
from cupy_fa2.plan.feasible import accumulator_registers, blocks_by_shared_memory

__all__ = ["blocks_together", "clocks"]

#: Clocks of a multiprocessor for one m16n8k16 with float32 sums. sm_90: docs/notebook.md, "What bounds". The others:
#: vendor's data sheets, 312 TFLOP/s of an A100 and 165 of an RTX 4090 (71 of an RTX 3090).
_MMA = {80: 2.0, 86: 8.0, 89: 8.0, 90: 1.45, 100: 1.45, 120: 8.0}
_LDMATRIX = 4.0  # 512 bytes at 128 per clock
_EXPONENTIALS = 16.0  # per clock
_LONE = 1.14  # fewer than two warps per scheduler
#: Of cp.async: all warps of a multiprocessor wait for one barrier where they are of one block; and what of O and S
#: leaves no registers to load fragments ahead with, per register.
_ONE_BLOCK, _CROWDED, _MOST_ACCUMULATORS = 1.07, 0.004, 168
#: Products and shared memory hardly overlap, for few warps run at a time; all found by the fit.
_UNITS, _EXPONENTIAL, _STEP, _COPY = 1.13, 1.79, 143.0, 0.14


def blocks_together(tile: FwdTile, device: Device, registers: int | None = None) -> int:
    """Blocks of a multiprocessor, by shared memory and by registers, which are guessed where they are not known."""
    registers = min(255, accumulator_registers(tile) + 72) if registers is None else registers
    by_registers = 65_536 // (-(-registers // 8) * 8 * tile.threads)
    return min(blocks_by_shared_memory(tile, device), by_registers)


def clocks(tile: FwdTile, transport: str, device: Device, registers: int | None = None) -> float:
    """Clocks of a multiprocessor for 1,000 pairs of query and key; infinite where no block fits."""
    blocks = blocks_together(tile, device, registers)
    if blocks < 1:
        return float("inf")
    pairs, dims = tile.block_m * tile.block_n, tile.head_dim + tile.head_dim_v
    mma = pairs * dims / 2048 * _MMA[device.arch]
    # Each warp reads its keys of K, its columns of V, and Q but for what it keeps.
    reads = tile.block_n / tile.team * tile.head_dim + tile.block_n * tile.head_dim_v / tile.team
    reads += tile.rows_per_warp * (tile.head_dim - tile.q_kept)
    shared = _LDMATRIX * tile.num_warps * reads / 256 + tile.block_n * dims / 64
    shared += pairs / 32 if tile.team > 1 else 0  # probabilities, written and read
    total = _UNITS * (mma + shared) + _EXPONENTIAL * pairs / _EXPONENTIALS + _STEP * tile.num_warps / blocks
    total += _COPY * tile.block_n * dims / 8 if transport == "cp_async" else 0
    total *= _LONE if tile.num_warps * blocks < 8 else 1
    if transport == "cp_async":
        total *= _ONE_BLOCK if blocks == 1 else 1
        total *= 1 + _CROWDED * max(accumulator_registers(tile) - _MOST_ACCUMULATORS, 0)
    return 1000 * total / pairs
