"""The ranges of policy/mask.cuh, asked of the C++ itself in the simulator, against every pair of row and key."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cpp_tools import run

TILE = 16  # rows, or keys, of a tile
COUNT = 8  # tiles of either kind that are asked about, some of them beyond every end

#: (seqlen_q, seqlen_k, diagonal), and (window_left, window_right).
SHAPES = [(1, 1, 0), (40, 70, 30), (70, 40, -30), (64, 64, 0), (33, 97, 5), (97, 33, 60), (20, 20, -25), (20, 20, 25)]
WINDOWS = [(0, 0), (3, 0), (20, 9), (500, 2), (1, 500)]
#: (mask, padded, seqlen_q, seqlen_k, diagonal, window_left, window_right).
CASES = [
    *[("NoMask", padded, q, k, d, 0, 0) for q, k, d in SHAPES for padded in (False, True)],
    *[("CausalMask", padded, q, k, d, 0, r) for q, k, d in SHAPES for r in (0, 9) for padded in (False, True)],
    *[("WindowMask", padded, q, k, d, *w) for q, k, d in SHAPES for w in WINDOWS for padded in (False, True)],
    ("NoMask", True, 0, 50, 0, 0, 0),
    ("NoMask", True, 50, 0, 0, 0, 0),
    ("CausalMask", True, 0, 50, 0, 0, 0),
    ("CausalMask", True, 50, 0, 0, 0, 0),
    ("WindowMask", True, 0, 0, 0, 2, 2),
]


@functools.cache
def ranges() -> np.ndarray:
    """What the C++ says of each case, two numbers at a time.

    For each row its keys, for each key its rows; then for each tile of rows the key tiles that it sees something of
    and those that it sees whole, for each tile of keys the row tiles that see something of it and all of it.
    """
    size = COUNT * TILE
    out = np.full((len(CASES), 2 * size + 4 * COUNT, 2), -99, np.int32)
    kinds = sorted({case[:2] for case in CASES})
    calls = "".join(
        f"if (kind == {kind}) {{ const {lengths} lengths(p, 0); ask({mask}::Of<{lengths}>(p, lengths), lengths, at); }}"
        for kind, (mask, padded) in enumerate(kinds)
        for lengths in ("PaddedLengths" if padded else "FullLengths",)
    )
    run(
        f"""const auto ask = [](const auto& mask, const auto& lengths, int* at) {{
          const auto put = [&](int slot, int begin, int end) {{ at[slot * 2] = begin, at[slot * 2 + 1] = end; }};
          {{
            const int i = threadIdx.x;
            put(i, mask.key_begin(i), mask.key_end(i));
            put({size} + i, mask.row_begin(i), mask.row_end(i));
          }}
          if (threadIdx.x < {COUNT}) {{
            const int tile = threadIdx.x, slot = {2 * size} + tile * 4;
            const Span span{{tile * {TILE}, {TILE}}};
            const auto keys = KeyTiles<{TILE}>::of(mask, lengths, span, span);
            const auto rows = RowTiles<{TILE}>::of(mask, lengths, span);
            put(slot, keys.begin, keys.end), put(slot + 1, keys.whole_begin, keys.whole_end);
            put(slot + 2, rows.begin, rows.end), put(slot + 3, rows.whole_begin, rows.whole_end);
          }}
        }};
        for (int index = 0; index < {len(CASES)}; ++index) {{
          const int* x = in0 + index * 6;
          const int kind = x[5];
          AttentionParams p{{}};
          p.seqlen_q = x[0], p.seqlen_k = x[1], p.diagonal_offset = x[2], p.window_left = x[3], p.window_right = x[4];
          int* at = out0 + index * {out[0].size};
          {calls}
        }}""",
        out,
        inputs=(np.array([(*case[2:], kinds.index(case[:2])) for case in CASES], np.int32),),
        threads=size,
    )
    return out


def visible(case) -> np.ndarray:
    """Whether row i sees key j, for rows and keys that exist."""
    mask, _, seqlen_q, seqlen_k, diagonal, left, right = case
    distance = np.arange(seqlen_k) - (np.arange(seqlen_q)[:, None] + diagonal)
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if mask != "NoMask":
        seen &= distance <= right
    if mask == "WindowMask":
        seen &= distance >= -left
    return seen


def sets(begins_and_ends) -> list[set[int]]:
    return [set(range(begin, end)) for begin, end in begins_and_ends]


def assert_covers(named, seen) -> None:
    """The tiles named are those of which something is seen; where nothing is, one at an end may be named."""
    named = set(range(*named))
    assert named == set(np.flatnonzero(seen)) or (not seen.any() and len(named) == 1)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: "-".join(map(str, CASES[index])))
def test_rows_keys_and_tiles(index):
    seen = visible(CASES[index])
    seqlen_q, seqlen_k = seen.shape
    size = COUNT * TILE
    answer = ranges()[index]
    assert sets(answer[:seqlen_q]) == [set(np.flatnonzero(row)) for row in seen]
    assert sets(answer[size : size + seqlen_k]) == [set(np.flatnonzero(column)) for column in seen.T]

    # Tiles, of which some are ragged and some beyond the end. Rows that do not exist are not asked, keys that do not
    # exist are seen by none: so a ragged tile of rows may be whole, one of keys never is.
    rows_exist = np.arange(size) < seqlen_q
    full = np.zeros((size, size), bool)
    full[:seqlen_q, :seqlen_k] = seen
    some = full.reshape(COUNT, TILE, COUNT, TILE).any((1, 3))
    every = (full | ~rows_exist[:, None]).reshape(COUNT, TILE, COUNT, TILE).all((1, 3))
    strict = full.reshape(COUNT, TILE, COUNT, TILE).all((1, 3))
    tiles = answer[2 * size :].reshape(COUNT, 4, 2)
    for tile in range(-(-seqlen_q // TILE)):
        assert_covers(tiles[tile, 0], some[tile])
        assert set(range(*tiles[tile, 1])) == set(np.flatnonzero(every[tile]))
    for tile in range(-(-seqlen_k // TILE)):
        assert_covers(tiles[tile, 2], some[:, tile])
        assert set(range(*tiles[tile, 3])) == set(np.flatnonzero(strict[:, tile]))
    for tile in range(COUNT):  # beyond the last key no row sees anything, beyond the last row of a padded batch none is
        if tile * TILE >= seqlen_k:
            assert not range(*tiles[tile, 2])
            assert not range(*tiles[tile, 3])
        if tile * TILE >= seqlen_q and CASES[index][1]:
            assert not range(*tiles[tile, 0])
