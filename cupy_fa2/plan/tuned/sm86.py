"""Tiles for sm_86, derived and not measured.

100 KiB of shared memory per multiprocessor, which two blocks share at head_dim 64 and 128. Serves sm_89 and
sm_120 too, which have as much.
"""

from typing import Any

CARD = "the limits of sm_86, sm_89 and sm_120"
DATE = "2026-11-30"
MEASURED = False

#: (head_dim, head_dim_v, causal, min_seqlen) -> fields of FwdTile, fields of KernelSpec.
ENTRIES: dict[tuple[int, int, bool, int], dict[str, Any]] = {
    (64, 64, False, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 2}, "spec": {}},
    (64, 64, True, 0): {"tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 2}, "spec": {}},
    (128, 128, False, 0): {"tile": {"block_m": 128, "block_n": 32, "num_warps": 4, "stages": 1}, "spec": {}},
    (128, 128, True, 0): {"tile": {"block_m": 128, "block_n": 32, "num_warps": 4, "stages": 1}, "spec": {}},
    (256, 256, False, 0): {"tile": {"block_m": 64, "block_n": 64, "num_warps": 4, "stages": 1}, "spec": {}},
    (256, 256, True, 0): {"tile": {"block_m": 64, "block_n": 64, "num_warps": 4, "stages": 1}, "spec": {}},
}
