"""The blocks that run together: everything that an instruction works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UninitializedReadError
from .hazards import Reporter
from .kernel import Instruction, Vector
from .memory import GlobalMemory
from .operands import Registers, Selection
from .report import Report
from .shared import SharedMemory
from .types import Array


@dataclass
class Batch:
    """The blocks that run together: everything a step works on."""

    registers: Registers
    shared: SharedMemory
    memory: GlobalMemory
    params: Array
    report: Report
    hazard: Reporter
    #: 0 .. threads - 1, and each thread's number in the grid, from 1.
    lanes: npt.NDArray[np.int64]
    grid_threads: npt.NDArray[np.uint32]

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
Binder = Callable[[Instruction, Batch], Step]


def items(operand: Any) -> tuple[Any, ...]:
    """The elements of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, Vector) else (operand,)
