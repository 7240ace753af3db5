"""Forward kernels for sm_90, the fastest of those measured on one card. Written by ``bench/tune.py``."""

from typing import Any

CARD = "NVIDIA H200"
DATE = "2026-11-30"
COMMIT = ""
MEASURED = True

# fmt: off
#: (head_dim, head_dim_v, causal, min_seqlen) -> fields of FwdTile, fields of KernelSpec, TFLOP/s.
ENTRIES: dict[tuple[int, int, bool, int], dict[str, Any]] = {
    (64, 64, False, 0): {
        "tile": {"block_m": 128, "block_n": 96, "num_warps": 4, "q_in_registers": True},
        "spec": {"kv": "tensor"},
        "tflops": 389.0,
    },
    (64, 64, True, 0): {
        "tile": {"block_m": 128, "block_n": 96, "num_warps": 4, "q_in_registers": True},
        "spec": {"kv": "tensor"},
        "tflops": 359.0,
    },
    (128, 128, False, 0): {
        "tile": {"block_m": 128, "block_n": 48, "num_warps": 4},
        "spec": {"kv": "tensor"},
        "tflops": 442.0,
    },
    (128, 128, True, 0): {
        "tile": {"block_m": 128, "block_n": 48, "num_warps": 4},
        "spec": {"kv": "tensor"},
        "tflops": 397.0,
    },
}
