"""Tiles for sm_80, derived and not measured.

164 KiB of shared memory per multiprocessor: two blocks of up to 81 KiB each.
"""

from typing import Any

CARD = "the limits of an A100"
DATE = "2026-11-30"
MEASURED = False

#: (head_dim, head_dim_v, causal, min_seqlen) -> fields of FwdTile, fields of KernelSpec.
ENTRIES: dict[tuple[int, int, bool, int], dict[str, Any]] = {
    (64, 64, False, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 2}, "spec": {}},
    (64, 64, True, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 2}, "spec": {}},
    (128, 128, False, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 1}, "spec": {}},
    (128, 128, True, 0): {"tile": {"block_m": 128, "block_n": 48, "num_warps": 4, "stages": 1}, "spec": {}},
    (256, 256, False, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 8, "stages": 1}, "spec": {}},
    (256, 256, True, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 8, "stages": 1}, "spec": {}},
}
