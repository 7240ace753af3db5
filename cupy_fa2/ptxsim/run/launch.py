"""Launches: a grid in batches of blocks, and errors with the place where they happened."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import HazardError, LaunchError, SimulationError
from ..instructions.bind import bind
from ..instructions.mbarrier import is_wait
from ..memory.global_memory import GlobalMemory
from ..memory.shared_memory import SharedLayout, SharedMemory
from ..observe.observer import BatchView, Observer
from ..observe.watch import Watch
from ..ordering.mbarrier import BYTES
from ..ptx.kernel import TYPE_BYTES, Imm, Kernel
from ..state.batch import Batch, Step, special_registers
from ..state.registers import Registers
from ..state.report import Report
from ..types import UNSIGNED, Array
from . import idle
from .barriers import may_be_partial
from .scheduler import Scheduler, is_control

#: Threads that run together: enough to hide the cost of a NumPy call, few enough for the registers to stay cached.
_BATCH_THREADS = 2048
_BATCH_BYTES = 256 << 20

#: Blocks along x, y and z, on every card.
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True, slots=True)
class Card:
    """The limits of the simulated GPU; by default those of an A100."""

    name: str = "A100"
    shared_per_block: int = 163 * 1024
    threads_per_block: int = 1024


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    params: bytes | Sequence[bytes],
    memory: GlobalMemory,
    card: Card | None = None,
    hazards: Literal["raise", "collect"] = "raise",
    observer: Observer | None = None,
) -> Report:
    """Run a kernel to its end.

    Parameters
    ----------
    kernel : Kernel
        From `parse_kernel`.
    grid, block : tuple of int
        Blocks in the grid and threads in a block, x first. A block is made of whole warps.
    shared_bytes : int
        Dynamic shared memory of a block.
    params : bytes or sequence of bytes
        The bytes of each kernel parameter, in order; plain bytes for a single one.
    memory : GlobalMemory
        The arrays that the kernel may touch.
    card : Card, optional
        The limits to keep to.
    hazards : {"raise", "collect"}
        Whether the first hazard (race, uninitialised read, misused asynchronous copy) ends the launch, or
        hazards are kept in the report, one of each kind per instruction. All other errors end the launch.
    observer : Observer, optional
        Who is told what runs, step by step.

    Returns
    -------
    Report
        Counts, and the hazards collected.

    Raises
    ------
    SimulationError
        One of its subclasses, which says what went wrong and where.
    """
    start = time.perf_counter()
    card = card or Card()
    threads = block[0] * block[1] * block[2]
    layout = SharedLayout(kernel.shared, shared_bytes)
    used = layout.static_bytes + shared_bytes
    if not 0 < threads <= card.threads_per_block or threads % 32:
        raise LaunchError(f"a block of {threads} threads: whole warps, at most {card.threads_per_block} threads")
    if not all(0 < extent <= limit for extent, limit in zip(grid, _GRID_LIMITS, strict=True)):
        raise LaunchError(f"a grid of {grid} blocks: at least 1 and at most {_GRID_LIMITS}")
    if used > card.shared_per_block:
        raise LaunchError(f"{used} bytes of shared memory; a block of {card.name} has {card.shared_per_block}")
    parameters = _parameter_space(kernel, [params] if isinstance(params, bytes) else params)
    report = Report()
    machine = _Machine(kernel, grid, block, layout, parameters, memory, report, hazards == "collect", observer)
    memory.begin_launch(machine.hazard)
    total = grid[0] * grid[1] * grid[2]
    per_thread = sum(max(bits // 8, 1) for _, bits in kernel.registers) + 1
    size = min(_BATCH_THREADS // threads or 1, _BATCH_BYTES // (per_thread * threads) or 1, total)
    with np.errstate(all="ignore"), _no_collection():
        for first in range(0, total, size):
            machine.run(np.arange(first, min(first + size, total)))
    machine.close()
    report.blocks, report.warps = total, total * threads // 32
    report.seconds = time.perf_counter() - start
    return report


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: binding makes closures by the ten thousand, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parameter_space(kernel: Kernel, params: Sequence[bytes]) -> Array:
    if [len(p) for p in params] != [p.size for p in kernel.params]:
        sizes = [p.size for p in kernel.params]
        raise LaunchError(f"{kernel.name} takes parameters of {sizes} bytes, got {[len(p) for p in params]}")
    space = np.zeros(-(-kernel.param_bytes // 16) * 16, np.uint8)
    for param, value in zip(kernel.params, params, strict=True):
        space[param.offset : param.offset + param.size] = np.frombuffer(value, np.uint8)
    return space


def narrowest_shared_access(kernel: Kernel) -> int:
    """Bytes of the narrowest access that may go to shared memory: the granule of the hazard tables."""
    width = 16
    for instruction in kernel.instructions:
        modifiers = instruction.modifiers
        elsewhere = {"global", "param", "const", "local"} & set(modifiers) and instruction.base != "cp"
        if instruction.base in ("ld", "st") and not elsewhere:
            vector = next((int(m[1]) for m in modifiers if m in ("v2", "v4")), 1)
            width = min(width, TYPE_BYTES.get(modifiers[-1], 1) * vector)
        elif instruction.base == "mbarrier":
            width = min(width, BYTES)
        elif instruction.base == "cp" and len(instruction.operands) >= 3 and isinstance(instruction.operands[2], Imm):
            width = min(width, instruction.operands[2].value)
    return width


class _Machine:
    """One launch: what its batches share, and the batch that runs."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        layout: SharedLayout,
        params: Array,
        memory: GlobalMemory,
        report: Report,
        collect: bool,
        observer: Observer | None,
    ) -> None:
        self.kernel, self.grid, self.block, self.layout = kernel, grid, block, layout
        self.params, self.memory, self.report, self.observer = params, memory, report, observer
        self.collected: set[tuple[type[HazardError], int]] | None = set() if collect else None
        self.block_threads = block[0] * block[1] * block[2]
        self.granule = narrowest_shared_access(kernel)
        self.blocks: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.scheduler: Scheduler | None = None
        self.binding = 0
        self.bound: idle.Bound | None = None

    def run(self, blocks: npt.NDArray[np.int64]) -> None:
        """Run some blocks to their end."""
        self.blocks, self.scheduler = blocks, None
        try:
            if self.bound is None or self.bound.size != blocks.size:
                self.close()
                self.bound = self._bind()
            batch, steps = self.bound.batch, self.bound.steps
            self._occupy(batch)
            watch = self._watch(batch)
            self.scheduler = Scheduler(self.kernel.instructions, steps, batch, self.block_threads, watch)
            self.scheduler.run()
        except SimulationError as error:
            self._locate(error)
            raise
        for instruction, number in zip(self.kernel.instructions, self.scheduler.counts.tolist(), strict=True):
            if number:
                self.report.instructions[instruction.opcode] += number

    def _watch(self, batch: Batch) -> Watch | None:
        if self.observer is None:
            return None
        x, y, _ = self.grid
        places = np.stack([self.blocks % x, self.blocks // x % y, self.blocks // (x * y)], axis=1)
        view = BatchView(self.kernel, self.grid, self.block, places, batch)
        return Watch(self.observer, view, batch, self.block_threads)

    def close(self) -> None:
        """Leave the batch to later launches, with nothing of this one but its registers."""
        if self.bound is not None:
            batch = self.bound.batch
            batch.memory, batch.report = GlobalMemory(), Report()
            batch.hazard = batch.shared.hazards.report = _nobody
            idle.keep(self.kernel, self.bound)
            self.bound = None

    def _bind(self) -> idle.Bound:
        key = (self.blocks.size, self.block, self.layout.dynamic_bytes)
        if (bound := idle.take(self.kernel, key)) is not None:
            return bound
        batch = self._new_batch()
        return idle.Bound(key, batch, self._new_steps(batch))

    def hazard(self, error: HazardError) -> None:
        """Raise a hazard, or keep the first of each kind and instruction."""
        self._locate(error)
        if self.collected is None:
            raise error
        if (key := (type(error), error.line)) not in self.collected:
            self.collected.add(key)
            self.report.hazards.append(error)

    def _locate(self, error: SimulationError) -> None:
        if not error.line:
            instruction = self.kernel.instructions[self.scheduler.pc if self.scheduler else self.binding]
            error.line, error.text, error.frames = instruction.line, instruction.text, instruction.frames
        if error.lanes and error.block is None:
            first = error.lanes[0] // self.block_threads
            x, y, _ = self.grid
            block = int(self.blocks[first])
            error.block = (block % x, block // x % y, block // (x * y))
            inside = sorted({n % self.block_threads for n in error.lanes if n // self.block_threads == first})
            error.threads = tuple(inside)

    def _new_steps(self, batch: Batch) -> list[Step]:
        steps: list[Step] = []
        for index, instruction in enumerate(self.kernel.instructions):
            self.binding = index
            # The scheduler runs these itself.
            itself = is_control(instruction) and not is_wait(instruction)
            steps.append(_never if itself else bind(instruction, batch))
        return steps

    def _new_batch(self) -> Batch:
        threads = self.blocks.size * self.block_threads
        words = {1: np.dtype(np.bool_), **UNSIGNED}
        symbols = dict(self.layout.addresses)
        symbols.update((param.name, param.offset) for param in self.kernel.params)
        registers = Registers(
            names=[name for name, _ in self.kernel.registers],
            values=[np.zeros(threads, words[bits]) for _, bits in self.kernel.registers],
            specials=self._specials(),
            symbols=symbols,
            threads=threads,
        )
        barriers = any(
            instruction.base == "mbarrier" or may_be_partial(instruction, self.block_threads)
            for instruction in self.kernel.instructions
        )
        shared = SharedMemory(self.layout, self.granule, self.blocks.size, self.block_threads, self.hazard, barriers)
        lanes = np.arange(threads)
        return Batch(
            registers, shared, self.memory, self.params, self.report, self.hazard, lanes, lanes.astype(np.uint32)
        )

    def _specials(self) -> dict[str, Array]:
        return special_registers(self.blocks, self.block, self.grid, self.layout.dynamic_bytes)

    def _occupy(self, batch: Batch) -> None:
        """Let this launch's blocks take a batch over: new numbers, nothing defined, nothing written."""
        batch.memory, batch.params, batch.report = self.memory, self.params, self.report
        batch.hazard = batch.shared.hazards.report = self.hazard
        batch.registers.forget()
        batch.shared.forget()
        for name, value in self._specials().items():
            batch.registers.specials[name][:] = value
        first = int(self.blocks[0]) * self.block_threads + 1
        batch.grid_threads[:] = (batch.lanes + first).astype(np.uint32)


def _nobody(error: HazardError) -> None:
    raise AssertionError("a hazard in a batch that no launch uses")


def _never(sel: object) -> None:
    raise AssertionError("a control instruction has no step")
