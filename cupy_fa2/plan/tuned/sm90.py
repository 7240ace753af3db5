"""Tiles for sm_90. Written by bench/tune.py, which says how; the fastest row first.

Of plain calls TFLOP/s are the bench's, at 8,192 in bfloat16.
"""

from cupy_fa2.plan.row import Row, Rows

#: Where rows are from.
ORIGINS = {
    "measured": "measured on NVIDIA H200, 2026-11-30, 3d4fc74",
    "options": "where options take registers: room by spills of NVRTC 12.9, 13.0 and 13.5, found by hand",
    "same": "the tile that tensor maps have, for keys that they cannot describe",
}

# fmt: off
#: head_dim, head_dim_v, whether a band hides keys, transport -> the fastest row first.
ROWS: Rows = {
    (64, 64, False, "tensor"): (
        Row(128, 128, 4, 2, room=0, origin="measured", tflops=370.7),
        Row(128, 96, 4, 2, room=1, mask_by_warp=True, origin="options"),
        Row(128, 64, 4, 2, room=2, mask_by_warp=True, origin="options"),
        Row(128, 48, 4, 2, room=3, mask_by_warp=True, origin="options"),
        Row(128, 32, 4, 2, room=9, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (64, 64, False, "cp_async"): (
        Row(128, 128, 4, 2, room=1, origin="same"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (64, 64, True, "tensor"): (
        Row(128, 128, 4, 2, room=0, origin="measured", tflops=371.2),
        Row(128, 96, 4, 2, room=1, mask_by_warp=True, origin="options"),
        Row(128, 64, 4, 2, room=2, mask_by_warp=True, origin="options"),
        Row(128, 48, 4, 2, room=3, mask_by_warp=True, origin="options"),
        Row(128, 32, 4, 2, room=9, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (64, 64, True, "cp_async"): (
        Row(128, 128, 4, 2, room=1, origin="same"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (128, 128, False, "tensor"): (
        Row(128, 48, 4, 2, room=0, origin="measured", tflops=405.7),
        Row(128, 48, 4, 2, room=1, mask_by_warp=True, origin="options"),
        Row(128, 128, 8, 2, room=2, team=2, mask_by_warp=True, but_not=("bias_float",), origin="options"),
        Row(128, 96, 8, 2, room=2, team=2, mask_by_warp=True, origin="options"),
        Row(128, 64, 8, 2, room=11, team=2, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (128, 128, False, "cp_async"): (
        Row(128, 48, 4, 1, room=1, origin="same"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (128, 128, True, "tensor"): (
        Row(128, 64, 4, 2, room=0, mask_by_warp=True, origin="measured", tflops=407.7),
        Row(128, 128, 8, 2, room=2, team=2, mask_by_warp=True, but_not=("bias",), origin="options"),
        Row(128, 64, 8, 2, room=11, team=2, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (128, 128, True, "cp_async"): (
        Row(128, 64, 4, 1, room=1, but_not=("padded",), origin="same"),
        Row(128, 32, 4, 1, room=1, origin="options"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (256, 256, False, "tensor"): (
        Row(128, 64, 8, 2, room=0, q_kept=16, team=2, origin="measured", tflops=430.8),
        Row(128, 64, 8, 2, room=2, team=2, mask_by_warp=True, origin="options"),
        Row(128, 48, 8, 2, room=4, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (256, 256, False, "cp_async"): (
        Row(128, 64, 8, 2, room=1, team=2, origin="same"),
        Row(128, 64, 8, 1, room=2, team=2, origin="options"),
        Row(128, 48, 8, 1, room=4, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (256, 256, True, "tensor"): (
        Row(128, 64, 8, 2, room=0, q_kept=16, team=2, origin="measured", tflops=419.2),
        Row(128, 64, 8, 2, room=2, team=2, mask_by_warp=True, origin="options"),
        Row(128, 48, 8, 2, room=4, mask_by_warp=True, origin="options"),
        Row(128, 32, 8, 2, mask_by_warp=True, origin="options"),
    ),
    (256, 256, True, "cp_async"): (
        Row(128, 64, 8, 2, room=1, team=2, origin="same"),
        Row(128, 64, 8, 1, room=2, team=2, origin="options"),
        Row(128, 48, 8, 1, room=4, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
}
