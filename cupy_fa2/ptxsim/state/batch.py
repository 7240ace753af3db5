"""The blocks that run together: everything that an instruction works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UninitializedReadError, UnsupportedInstruction
from ..memory.global_memory import GlobalMemory
from ..memory.shared_memory import SharedMemory
from ..ordering.hazards import Reporter
from ..ordering.mbarrier import Mbarriers
from ..ptx.kernel import Instruction, Vector
from ..types import Array
from .registers import Registers, Selection
from .report import Report


@dataclass
class Batch:
    """The blocks that run together: everything a step works on."""

    registers: Registers
    shared: SharedMemory
    memory: GlobalMemory
    params: Array
    report: Report
    hazard: Reporter
    #: Each thread's number in the batch, from 0, and in the grid, from 1.
    lanes: npt.NDArray[np.int64]
    grid_threads: npt.NDArray[np.uint32]

    @property
    def barriers(self) -> Mbarriers:
        """The blocks' mbarriers."""
        if self.shared.barriers is None:
            raise UnsupportedInstruction("a bulk copy in a kernel without mbarriers")
        return self.shared.barriers

    def chosen(self, sel: Selection) -> npt.NDArray[np.int64]:
        """The selected threads' numbers."""
        return self.lanes if sel is None else self.lanes[sel]

    def require_defined(self, register: int, sel: Selection) -> None:
        """Refuse a read of a register that one of the selected threads never wrote."""
        if (missing := self.registers.undefined(register, sel)) is not None:
            name = self.registers.names[register]
            message = f"register {name} is read, which nothing has written"
            self.hazard(UninitializedReadError(message, lanes=self.chosen(sel)[missing]))


#: What an instruction does for the selected threads.
Step = Callable[[Selection], None]
#: What a control instruction, given by its index, does: it appends the groups that go on to the scheduler's.
Handler = Callable[[int, Selection], None]
Binder = Callable[[Instruction, Batch], Step]


def items(operand: Any) -> tuple[Any, ...]:
    """The elements of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def special_registers(
    blocks: npt.NDArray[np.int64],
    block: tuple[int, int, int],
    grid: tuple[int, int, int],
    dynamic_bytes: int,
) -> dict[str, Array]:
    """The machine's own registers, for blocks given by their number in the grid."""
    threads = block[0] * block[1] * block[2]
    thread, number = np.tile(np.arange(threads), blocks.size), np.repeat(blocks, threads)
    one = np.uint64(1)
    own = one << (thread & 31).astype(np.uint64)
    # In 64 bits: for lane 31, `through` is 2^32 - 1, made from 2^32, which 32 bits cannot hold.
    below, through, everyone = own - one, own * np.uint64(2) - one, np.uint64(0xFFFFFFFF)
    specials = {
        "%laneid": thread & 31,
        "%warpid": thread >> 5,
        "%nwarpid": np.full_like(thread, threads >> 5),
        "%lanemask_eq": own,
        "%lanemask_lt": below,
        "%lanemask_le": through,
        "%lanemask_ge": everyone - below,
        "%lanemask_gt": everyone - through,
        "%dynamic_smem_size": np.full_like(thread, dynamic_bytes),
    }
    for prefix, index, size in (("tid", thread, block), ("ctaid", number, grid)):
        rest = index
        for axis, extent in zip("xyz", size, strict=True):
            specials[f"%{prefix}.{axis}"] = rest % extent
            specials[f"%n{prefix}.{axis}"] = np.full_like(rest, extent)
            rest = rest // extent
    return {name: value.astype(np.uint32) for name, value in specials.items()}
