"""The layouts of tile.cuh, asked of the C++ itself in the simulator, against NumPy and the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
from cpp_tools import run
from sampling import sampled

ROWS = 64
DIMS = range(16, 257, 16)


def chunk_offsets(cols: int) -> np.ndarray:
    """Byte of every chunk of a tile, (rows, cols / 8), as the C++ computes it."""
    out = np.empty((ROWS, cols // 8), np.int32)
    run(
        f"""using Tile = SharedTile<{ROWS}, {cols}>;
        for (int row = threadIdx.x; row < {ROWS}; row += 32)
          for (int chunk = 0; chunk < {cols // 8}; ++chunk) {{
            const int col = chunk * 8, width = Tile::panel_width(col);
            out0[row * {cols // 8} + chunk] =
                Tile::panel_offset(col) + Tile::chunk_offset(width, row, (col - Tile::panel_begin(col)) / 8);
          }}""",
        out,
    )
    return out


def panels(cols: int) -> list[tuple[int, int]]:
    """(first column, width) of each panel: as many of 64 as fit, then 32, then 16."""
    found, begin = [], 0
    while begin < cols:
        width = next(width for width in (64, 32, 16) if begin + width <= cols)
        found.append((begin, width))
        begin += width
    return found


@pytest.mark.parametrize("cols", sampled(DIMS, 16, 112, 256))
def test_the_swizzle_is_a_bijection(cols):
    offsets = chunk_offsets(cols)
    assert sorted(offsets.ravel()) == list(range(0, ROWS * cols * 2, 16))


@pytest.mark.parametrize("cols", sampled(DIMS, 16, 112, 256))
def test_the_swizzle_leaves_no_bank_conflict(cols):
    """ldmatrix reads 8 rows of one chunk column at a time, cp.async writes 8 neighbouring chunks: 8 bank groups."""
    groups = chunk_offsets(cols) // 16 % 8
    for first_row in range(0, ROWS, 8):
        for chunk in range(cols // 8):
            assert len(set(groups[first_row : first_row + 8, chunk])) == 8
    for begin, width in panels(cols):
        written = groups[:, begin // 8 : (begin + width) // 8].reshape(-1, 8)
        assert all(len(set(row)) == 8 for row in written)


@pytest.mark.parametrize("cols", sampled(DIMS, 16, 112, 256))
def test_a_lanes_one_base_reaches_the_whole_tile(cols):
    """LaneAddress: exclusive or and immediates give what the definition of the tile gives."""
    steps = [(row, col) for row in range(0, ROWS - 15, 8) for col in range(0, cols, 16)]
    got = {kind: np.empty((len(steps), 32), np.int32) for kind in ("row", "col")}
    text = "".join(
        f"out0[{index * 32} + threadIdx.x] = rows.at({row}, {col}); "
        f"out1[{index * 32} + threadIdx.x] = cols.at({row}, {col});"
        for index, (row, col) in enumerate(steps)
    )
    run(
        f"using Tile = SharedTile<{ROWS}, {cols}>;"
        "const auto rows = row_operand<Tile>(0, 0); const auto cols = col_operand<Tile>(0, 0);" + text,
        got["row"],
        got["col"],
    )
    offsets = chunk_offsets(cols)
    lane = np.arange(32)
    for index, (row, col) in enumerate(steps):
        # The PTX ISA: lane l addresses row l % 8 of matrix l / 8. Matrices run down first for A and transposed B
        # (rows 0-7, 8-15), and across first for B.
        assert (got["row"][index] == offsets[row + lane % 16, col // 8 + lane // 16]).all()
        assert (got["col"][index] == offsets[row + lane // 16 * 8 + lane % 8, col // 8 + lane // 8 % 2]).all()


def test_the_accumulators_rows_and_columns():
    """fragment_row and fragment_col against the PTX ISA's layout of mma.m16n8k16's C and D."""
    rows, cols = np.empty((4, 32), np.int32), np.empty(32, np.int32)
    run(
        "for (int r = 0; r < 4; ++r) out0[r * 32 + threadIdx.x] = fragment_row(r); out1[threadIdx.x] = fragment_col();",
        rows,
        cols,
    )
    group, in_group = np.arange(32) >> 2, np.arange(32) % 4
    for r in range(4):  # c0, c1: row = groupID; c2, c3: groupID + 8; the next 16 x 8 block 16 rows below
        assert (rows[r] == group + 8 * (r % 2) + 16 * (r // 2)).all()
    assert (cols == 2 * in_group).all()


def test_the_quad_transposes():
    four, two = np.empty((4, 32), np.int32), np.empty((2, 32), np.int32)
    run(
        "u32 x[4]; for (int i = 0; i < 4; ++i) x[i] = threadIdx.x * 4 + i; transpose_quad(x);"
        "for (int i = 0; i < 4; ++i) out0[i * 32 + threadIdx.x] = x[i];"
        "u32 y[2]; for (int i = 0; i < 2; ++i) y[i] = threadIdx.x * 2 + i; transpose_pair(y);"
        "for (int i = 0; i < 2; ++i) out1[i * 32 + threadIdx.x] = y[i];",
        four,
        two,
    )
    lane = np.arange(32)
    quad, t = lane // 4 * 4, lane % 4
    for i in range(4):
        assert (four[i] == (quad + i) * 4 + t).all()
    for i in range(2):
        assert (two[i] == (quad + t // 2 * 2 + i) * 2 + t % 2).all()
