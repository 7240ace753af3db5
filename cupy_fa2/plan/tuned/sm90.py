"""Tiles measured on one NVIDIA H200; written by bench/tune.py, which says what the fields mean.

Ties within 1 % were settled by hand afterwards: two stages rather than three, keys last to first, no spills with any
NVRTC, one tile for all lengths where it wins or ties at 512 too. The pairs of warps at head_dim 256 and the causal tile at
128 are of later runs on the same card (docs/notebook.md, 26 and 28). TFLOP/s are the bench's, at 8,192 in bfloat16.
"""

# ruff: noqa: E501
from typing import Any

CARD = "NVIDIA H200"
DATE = "2026-11-30"
COMMIT = "3d4fc74"
MEASURED = True

# fmt: off
#: (head_dim, head_dim_v, causal, min_seqlen) -> fields of FwdTile, fields of KernelSpec, TFLOP/s.
ENTRIES: dict[tuple[int, int, bool, int], dict[str, Any]] = {
    (64, 64, False, 0): {
        "tile": {"block_m": 128, "block_n": 128, "num_warps": 4, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 0, "team": 1},
        "spec": {"transport": "tensor"},
        "tflops": 370.7,
    },
    (64, 64, True, 0): {
        "tile": {"block_m": 128, "block_n": 128, "num_warps": 4, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 0, "team": 1},
        "spec": {"transport": "tensor"},
        "tflops": 371.2,
    },
    (128, 128, False, 0): {
        "tile": {"block_m": 128, "block_n": 48, "num_warps": 4, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 0, "team": 1},
        "spec": {"transport": "tensor"},
        "tflops": 405.7,
    },
    (128, 128, True, 0): {
        "tile": {"block_m": 128, "block_n": 64, "num_warps": 4, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 0, "team": 1, "mask_by_warp": True},
        "spec": {"transport": "tensor"},
        "tflops": 407.7,
    },
    (256, 256, False, 0): {
        "tile": {"block_m": 128, "block_n": 64, "num_warps": 8, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 16, "team": 2},
        "spec": {"transport": "tensor"},
        "tflops": 430.8,
    },
    (256, 256, True, 0): {
        "tile": {"block_m": 128, "block_n": 64, "num_warps": 8, "stages": 2, "slack": 8, "last_to_first": True, "q_kept": 16, "team": 2},
        "spec": {"transport": "tensor"},
        "tflops": 419.2,
    },
}
