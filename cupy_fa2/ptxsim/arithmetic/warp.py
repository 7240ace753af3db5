"""What a warp does together: ``mma.sync``, ``ldmatrix``, shuffles, votes and reductions.

All functions are pure and take whole warps: registers are arrays of ``warps * 32`` values, in thread order.
In the fragment layouts a lane is ``4 * group + member``, as in the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..types import DTYPES, Array


def _halves(registers: Sequence[Array], t: str) -> Array:
    """32-bit registers of two 16-bit floats -> float32 of shape (register, warp, group, member, half)."""
    halves = np.concatenate(registers).view(np.uint16)
    if t == "bf16":
        # A bfloat16 is the upper half of a float32.
        values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = halves.view(np.float16).astype(np.float32)
    return values.reshape(len(registers), -1, 8, 4, 2)


def a_matrix(registers: Sequence[Array], t: str) -> Array:
    """A fragments (row-major 16 x K) -> (warp, 16, K): registers go down the rows first, then along K."""
    parts = _halves(registers, t)
    k = 4 * len(registers)
    parts = parts.reshape(-1, 2, *parts.shape[1:])
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, k)


def b_matrix(registers: Sequence[Array], t: str) -> Array:
    """B fragments (column-major K x 8) -> (warp, 8, K), transposed: row n holds the column n of B."""
    parts = _halves(registers, t)
    return parts.transpose(1, 2, 0, 3, 4).reshape(-1, 8, 8 * len(registers))


def c_matrix(registers: Sequence[Array]) -> Array:
    """Accumulator fragments, four float32 registers -> (warp, 16, 8)."""
    parts = np.concatenate(registers).reshape(2, 2, -1, 8, 4)
    return parts.transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)


def c_registers(matrix: Array) -> list[Array]:
    """The inverse of `c_matrix`."""
    parts = matrix.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return list(np.ascontiguousarray(parts).reshape(4, -1))


def unpack_accumulators(registers: Sequence[Array]) -> list[Array]:
    """Two registers of float16 pairs -> four float32 registers."""
    halves = [word.view(np.float16).reshape(-1, 2).astype(np.float32) for word in registers]
    return [half[:, column] for half in halves for column in (0, 1)]


def pack_accumulators(values: Sequence[Array]) -> list[Array]:
    """The inverse of `unpack_accumulators`, rounding."""
    return [
        np.ascontiguousarray(np.stack(values[i : i + 2], axis=1).astype(np.float16)).view(np.uint32).reshape(-1)
        for i in (0, 2)
    ]


def mma(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array], t: str) -> list[Array]:
    """D = A B + C of ``m16n8k16`` or ``m16n8k8``; products are exact, sums are float32 in NumPy's order."""
    product = np.matmul(a_matrix(a, t), b_matrix(b, t).transpose(0, 2, 1))
    return c_registers(product + c_matrix(c))


def ldmatrix(rows: Array, transposed: bool) -> list[Array]:
    """Distribute 8 x 8 matrices of 16-bit elements.

    Parameters
    ----------
    rows : ndarray
        uint32 of shape (warp, matrix, 8, 4): the 16 bytes of each row.
    transposed : bool
        Whether lane ``4 i + j`` gets column i instead of row i.

    Returns
    -------
    list of ndarray
        One register per matrix: lane ``4 i + j`` holds elements ``2 j`` and ``2 j + 1`` of its row.
    """
    if transposed:
        elements = rows.view(np.uint16).transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(elements).view(np.uint32)
    return [rows[:, matrix].reshape(-1) for matrix in range(rows.shape[1])]


def shuffle_source(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """Source lane of ``shfl.sync`` and whether it is in range, by the pseudocode of the PTX ISA."""
    lane, b, c = (x.astype(np.int64) for x in (lane, b, c))
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = lane & segment | clamp & ~segment
    if mode == "up":
        source = lane - b
        inside = source >= last
    elif mode == "down":
        source = lane + b
        inside = source <= last
    elif mode == "bfly":
        source = lane ^ b
        inside = source <= last
    else:
        source = lane & segment | b & ~segment
        inside = source <= last
    return np.where(inside, source, lane), inside


def reduce(operation: str, t: str, values: Array) -> Array:
    """``redux.sync`` of shape (warp, 32): the reduction, one per warp."""
    functions = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    result: Array = functions[operation].reduce(values.view(DTYPES[t]), axis=1, dtype=DTYPES[t])
    return result


def ballot(predicate: Array) -> Array:
    """Predicates of shape (warp, 32) -> one 32-bit word per warp, lane 0 lowest."""
    return np.packbits(predicate, axis=1, bitorder="little").view(np.uint32).reshape(-1)
