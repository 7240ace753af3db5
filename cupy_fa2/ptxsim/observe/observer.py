"""What somebody who watches a launch is told, and how they look at registers and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..ptx.kernel import Address, Instruction, Kernel, Operand, Reg
from ..state.batch import Batch
from ..state.report import Report
from ..types import Array

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Barrier = tuple[Literal["bar", "mbarrier"], int]


class Observer(Protocol):
    """Watches a launch; inherit from it and write the methods that are of interest.

    Blocks run in batches, and all warps of a batch that stand at one instruction execute it in one step. So an event
    is about many warps, of one block or of several; a warp is named by its number in the batch, from 0, and all arrays
    of an event have one row for each of its warps. Steps come in an order in which the launch could have happened, one
    of many: what a barrier orders is told in that order, and nothing else says what came first.

    An observer changes no result and no count. What it raises ends the launch.
    """

    def begin(self, view: BatchView) -> None:
        """Some blocks start; until the next call, all events are about them."""

    def step(self, event: StepEvent) -> None:
        """Warps executed an instruction.

        Branches, exits and all that may wait (barriers, ``mbarrier.try_wait``) are told before they act, all others
        after. A wait that is tried again is not told again.
        """

    def wait(self, event: WaitEvent) -> None:
        """Warps came to a barrier or an mbarrier and wait there, be it for no time at all.

        They make no step before their release. The exception is ``mbarrier.test_wait``, which may fail and return.
        """

    def release(self, event: WaitEvent) -> None:
        """Warps that waited go on."""

    def end(self, view: BatchView, blocks: Indices) -> None:
        """All threads of some blocks have exited; `blocks` are their rows in ``view.blocks``."""


class BatchView:
    """Looks at the blocks that run together. Arrays that it returns are copies.

    Attributes
    ----------
    kernel : Kernel
        What runs.
    grid, block : tuple of int
        Blocks in the grid and threads in a block, x first.
    blocks : ndarray
        (blocks, 3): where each block of the batch lies in the grid, x first.
    """

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int], blocks: Indices, batch: Batch
    ) -> None:
        self.kernel, self.grid, self.block, self.blocks, self._batch = kernel, grid, block, blocks, batch

    @property
    def warps_per_block(self) -> int:
        """Warps in a block: warp w of the batch is one of block ``w // warps_per_block``."""
        return self.block[0] * self.block[1] * self.block[2] // 32

    @property
    def report(self) -> Report:
        """The counts so far, which are the launch's own; `instructions` only grow at the end of a batch."""
        return self._batch.report

    def read(self, operand: Operand | str, t: str | None = None, warps: Indices | None = None) -> Array:
        """The value of a register, or of another operand, in each lane.

        Parameters
        ----------
        operand : operand or str
            An operand of an instruction, or the name of a register, a shared variable or a special register. An address
            in brackets is read as that address, not as what lies there.
        t : str, optional
            PTX type to read it as, such as "f32", "s64" or "pred"; by default an unsigned integer of its width.
        warps : ndarray, optional
            Which warps of the batch; by default all.

        Returns
        -------
        ndarray
            (warps, 32). In lanes where nothing has written a register (see `defined`) the value means nothing.
        """
        registers = self._batch.registers
        operand = self.operand(operand)
        if isinstance(operand, Address):
            return np.array(_of(registers.address_reader(operand)(None), warps))
        if t is None:
            bits = operand.bits if isinstance(operand, Reg) else 32
            t = "pred" if bits == 1 else f"u{bits}"
        values = np.broadcast_to(registers.reader(operand, t)(None), registers.threads)
        return np.array(_of(values, warps))

    def defined(self, operand: Operand | str, warps: Indices | None = None) -> Mask:
        """In which lanes a register was written; (warps, 32)."""
        register = self.operand(operand)
        everywhere = np.ones(self._batch.registers.threads, np.bool_)
        if isinstance(register, Reg) and (missing := self._batch.registers.undefined(register.index, None)) is not None:
            everywhere = ~missing
        return np.array(_of(everywhere, warps))

    def operand(self, name: Operand | str) -> Operand:
        """The operand of a name; a register that two scopes declare is known by the first."""
        if not isinstance(name, str):
            return name
        return self._batch.registers.named(name)

    def shared(self, block: int, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the shared memory of one block of the batch, by address; those that nothing has written are 0xff.

        Raises
        ------
        ValueError
            If they are not inside it.
        """
        return self._batch.shared.peek(block, address, nbytes)

    def copy_groups(self, warps: Indices | None = None) -> Indices:
        """How many groups of ``cp.async`` each lane has committed; (warps, 32).

        A copy that is issued belongs to the group of this number, counted from 0, and ``cp.async.wait_group n`` waits
        for all groups but the latest n of those committed.
        """
        return np.array(_of(self._batch.shared.hazards.committed, warps))


def _of(values: Array, warps: Indices | None) -> Array:
    rows: Array = values.reshape(-1, 32)
    return rows if warps is None else rows[warps]


class _Event:
    """Warps at an instruction.

    Attributes
    ----------
    view : BatchView
        The blocks that run.
    instruction : Instruction
        With its `opcode`, `operands`, PTX `line` and `text`, and its source positions in `frames`, innermost inlined
        function first.
    """

    def __init__(self, view: BatchView, instruction: Instruction, threads: Indices, active: Indices) -> None:
        self.view, self.instruction, self._threads, self._active = view, instruction, threads, active

    @cached_property
    def warps(self) -> Indices:
        """Numbers of the warps in the batch, ascending."""
        threads = self._threads
        if threads.size == self.view._batch.lanes.size:
            return threads[::32] >> 5
        return np.unique(threads >> 5)

    @property
    def blocks(self) -> Indices:
        """The block of each warp: its row in ``view.blocks``."""
        return self.warps // self.view.warps_per_block

    @property
    def warps_in_block(self) -> Indices:
        """The number of each warp in its block."""
        return self.warps % self.view.warps_per_block

    @cached_property
    def active(self) -> Mask:
        """(warps, 32): the lanes that came here and for which the instruction's predicate holds."""
        table = np.zeros(self.view._batch.lanes.size, np.bool_)
        table[self._active] = True
        return _of(table, self.warps)

    @property
    def source(self) -> str | None:
        """Innermost ``file:line`` of the instruction, where line information was compiled in."""
        frames = self.instruction.frames
        return f"{frames[0].file}:{frames[0].line}" if frames else None

    def read(self, operand: Operand | str, t: str | None = None) -> Array:
        """`BatchView.read` for the warps of this event."""
        return self.view.read(operand, t, self.warps)


class StepEvent(_Event):
    """Warps that execute an instruction, whether or not its predicate holds in any lane."""

    @property
    def copy(self) -> Literal["issue", "commit", "wait"] | None:
        """What an instruction of asynchronous copies does; None for all others."""
        if self.instruction.base != "cp":
            return None
        modifiers = self.instruction.modifiers
        if "commit_group" in modifiers:
            return "commit"
        return "wait" if "wait_group" in modifiers or "wait_all" in modifiers else "issue"


class WaitEvent(_Event):
    """Warps that wait, or that waited and go on; of each warp, the `active` lanes.

    Attributes
    ----------
    barrier : (str, int)
        ``("bar", number)`` or ``("mbarrier", shared address)``: each block has its own of that name.
    """

    def __init__(self, view: BatchView, instruction: Instruction, lanes: Indices, barrier: Barrier) -> None:
        super().__init__(view, instruction, lanes, lanes)
        self.barrier = barrier
