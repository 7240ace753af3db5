"""What fits on a card."""

from __future__ import annotations

from cupy_fa2.device import Device
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdTile

__all__ = ["accumulator_registers", "blocks_by_shared_memory", "infeasible", "serves"]

#: Keys whose dropout numbers come from one call of the generator, so that one warp has to have them together.
DROPOUT_KEYS = 32


def accumulator_registers(tile: FwdTile) -> int:
    """Registers per thread that hold O and S through the main loop, which nothing can shrink."""
    return tile.rows_per_warp * (tile.head_dim_v + tile.block_n) // tile.team // 32


def blocks_by_shared_memory(tile: FwdTile, device: Device) -> int:
    """Blocks per multiprocessor that its shared memory has room for; the system takes 1 KiB of each."""
    return device.shared_per_sm // (tile.shared_bytes + 1024)


def infeasible(tile: FwdTile, device: Device) -> str | None:
    """Why `tile` cannot run on `device`, or None if it can."""
    if tile.shared_bytes > device.shared_per_block:
        return f"needs {tile.shared_bytes} bytes of shared memory, {device.name} gives {device.shared_per_block}"
    # Of 255 registers about 60 go to operands, addresses and the softmax state.
    if accumulator_registers(tile) > 200:
        return f"accumulators alone take {accumulator_registers(tile)} registers per thread"
    return None


def serves(tile: FwdTile, features: Features) -> bool:
    """Whether kernels of this tile can do what is asked, fast or not."""
    return not features.dropout or tile.block_n // tile.team % DROPOUT_KEYS == 0
