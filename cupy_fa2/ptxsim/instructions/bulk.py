"""The steps of ``cp``: copies by threads, which are in `memory`, and bulk copies, which an mbarrier counts."""

from __future__ import annotations

import math

import numpy as np

from ..arithmetic.operation import Modifiers
from ..errors import LaunchError, MisalignedAddressError, OutOfBoundsError, UnsupportedInstruction
from ..memory.tensor_map import MAP_BYTES, TensorMap, decode
from ..ptx.kernel import Instruction, Operand, Vector
from ..state.batch import Batch, Step
from ..state.registers import Selection
from ..types import Array
from .mbarrier import barrier_words
from .memory import PARAM_WINDOW, SHARED_WINDOW, bind_cp_async

_ALIGNMENT = 16
_TENSOR_ALIGNMENT = 128
_MAP_ALIGNMENT = 64


def bind_copy(instruction: Instruction, batch: Batch) -> Step:
    """All kinds of ``cp.async``."""
    if "bulk" not in instruction.modifiers:
        return bind_cp_async(instruction, batch)
    m = Modifiers(instruction.modifiers)
    supported = all(
        (
            m.flag("async"),
            m.flag("bulk"),
            m.choice(("shared_cluster", "shared_cta")),
            m.flag("global"),
            m.flag("mbarrier_complete_tx_bytes"),
        )
    )
    if not supported:
        raise UnsupportedInstruction(f"{instruction.opcode} is not supported")
    m.flag("L2_cache_hint")
    if not m.flag("tensor"):
        m.done()
        return _bind_plain(instruction, batch)
    rank = int(m.choice(("1d", "2d", "3d", "4d", "5d"), "0d")[0])
    m.flag("tile")
    m.done()
    return _bind_tensor(instruction, batch, rank)


def _bind_plain(instruction: Instruction, batch: Batch) -> Step:
    target, source, size, barrier, *_ = instruction.operands
    registers = batch.registers
    to, from_, mbar = (registers.address_reader(x) for x in (target, source, barrier))  # type: ignore[arg-type]
    amount = registers.reader(size, "u32")

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        sizes = np.broadcast_to(amount(sel), lanes.shape)
        for lane, where, address, nbytes, at in zip(
            *(x.tolist() for x in (lanes, to(sel), from_(sel), sizes, mbar(sel))), strict=True
        ):
            if nbytes % _ALIGNMENT or address % _ALIGNMENT or where % _ALIGNMENT:
                message = f"bulk copy of {nbytes} bytes from {address:#x} to {where:#x}: multiples of {_ALIGNMENT}"
                raise MisalignedAddressError(message, lanes=[lane])
            chunks = np.arange(0, nbytes, _ALIGNMENT)
            rows = batch.memory.load(address + chunks, 4, 4, np.full(chunks.size, lane))
            batch.report.on_bulk_load(address + chunks, _ALIGNMENT)
            _land(batch, _shared(where) + chunks, rows, at, lane, instruction)

    return step


def _bind_tensor(instruction: Instruction, batch: Batch, rank: int) -> Step:
    target, source, barrier, *_ = instruction.operands
    if not isinstance(source, Vector) or len(source.items) != 2:
        raise UnsupportedInstruction(f"{instruction.opcode} with these operands is not supported")
    place, coordinates = source.items
    parts: tuple[Operand, ...] = coordinates.items if isinstance(coordinates, Vector) else (coordinates,)
    if len(parts) != rank:
        raise UnsupportedInstruction(f"{instruction.opcode} with {len(parts)} coordinates")
    registers = batch.registers
    to, map_at, mbar = (registers.address_reader(x) for x in (target, place, barrier))  # type: ignore[arg-type]
    readers = [registers.reader(x, "s32") for x in parts]

    def step(sel: Selection) -> None:
        lanes = batch.chosen(sel)
        index = [np.broadcast_to(read(sel), lanes.shape).tolist() for read in readers]
        operands = zip(*(x.tolist() for x in (lanes, to(sel), map_at(sel), mbar(sel))), *index, strict=True)
        for lane, where, map_address, at, *first in operands:
            tensor = _map(batch, map_address, rank, lane)
            if where % _TENSOR_ALIGNMENT:
                message = f"bulk tensor copy to shared address {where:#x}, not a multiple of {_TENSOR_ALIGNMENT}"
                raise MisalignedAddressError(message, lanes=[lane])
            linear = _shared(where) + np.arange(0, tensor.box_bytes, _ALIGNMENT)
            rows = _gather(batch, tensor, first, lane)
            _land(batch, tensor.swizzled(linear), rows, at, lane, instruction)

    return step


def _shared(address: int) -> int:
    return address - SHARED_WINDOW if address >= SHARED_WINDOW else address


def _map(batch: Batch, address: int, rank: int, lane: int) -> TensorMap:
    """The map at a generic address: a parameter of the kernel, or global memory."""
    if address % _MAP_ALIGNMENT:
        message = f"a tensor map at {address:#x}, not a multiple of {_MAP_ALIGNMENT}"
        raise MisalignedAddressError(message, lanes=[lane])
    if PARAM_WINDOW <= address < SHARED_WINDOW:
        first = address - PARAM_WINDOW
        encoded = batch.params[first : first + MAP_BYTES].tobytes()
        if len(encoded) < MAP_BYTES:
            raise OutOfBoundsError(f"a tensor map at byte {first} of the parameters", lanes=[lane])
    else:
        words = address + np.arange(0, MAP_BYTES, 16)
        encoded = batch.memory.load(words, 4, 4, np.full(words.size, lane)).tobytes()
    if (tensor := decode(encoded)) is None:
        raise LaunchError("a bulk tensor copy by something that is no tensor map", lanes=[lane])
    if tensor.rank != rank:
        raise LaunchError(f"a bulk copy of {rank} dimensions by a map of {tensor.rank}", lanes=[lane])
    if tensor.swizzle > tensor.row_bytes:
        raise UnsupportedInstruction(f"rows of {tensor.row_bytes} bytes in a swizzle of {tensor.swizzle}")
    return tensor


def _gather(batch: Batch, tensor: TensorMap, first: list[int], lane: int) -> Array:
    """The chunks of 16 bytes of a box, zeros where it leaves the tensor."""
    box = tensor.at(first)
    rows = np.zeros((box.first.size, tensor.row_bytes), np.uint8)
    width = math.gcd(_ALIGNMENT, int(box.first[0]), box.end - box.begin)
    inside = box.first[box.inside]
    if box.end > box.begin and inside.size:
        address = (inside[:, None] + np.arange(0, box.end - box.begin, width)).reshape(-1)
        unit = min(width, 4)
        words = batch.memory.load(address, unit, width // unit, np.full(address.size, lane))
        rows[box.inside, box.begin : box.end] = words.view(np.uint8).reshape(inside.size, -1)
        batch.report.on_bulk_load(address, width)
    return rows.reshape(-1).view(np.uint32).reshape(-1, 4)


def _land(batch: Batch, address: Array, rows: Array, barrier: int, lane: int, by: Instruction) -> None:
    barriers, lanes = batch.barriers, np.array([lane])
    place = int(barriers.find(barrier_words(batch, np.array([barrier]), lanes), lanes)[0])
    landing = barriers.copy(place, rows.nbytes, lane, by)
    offsets = batch.shared.land(address, rows, lane, landing)
    batch.report.on_bulk_write(offsets)
    barriers.landed(place, lane)
