"""Tiles for sm_90. Written by bench/tune.py, which says how; the fastest row first.

Of plain calls TFLOP/s are the bench's, at 8,192 in bfloat16.
"""

from cupy_fa2.plan.row import Row, Rows

#: Where rows are from.
ORIGINS = {
    "expected": "the order of tuner/model.py, not timed; room by registers of NVRTC 12.9",
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
    (80, 80, False, "cp_async"): (
        Row(128, 96, 4, 1, room=1, origin="expected"),
        Row(128, 64, 4, 2, room=2, origin="expected"),
        Row(128, 48, 4, 2, room=4, but_not=("bias_float",), origin="expected"),
        Row(128, 48, 4, 1, room=15, origin="expected"),
        Row(128, 32, 4, 2, origin="expected"),
    ),
    (80, 80, True, "cp_async"): (
        Row(128, 96, 4, 2, room=1, origin="expected"),
        Row(128, 64, 4, 2, room=2, origin="expected"),
        Row(128, 48, 4, 2, room=15, but_not=("bias_float",), origin="expected"),
        Row(128, 48, 4, 1, room=15, origin="expected"),
        Row(128, 32, 4, 2, origin="expected"),
    ),
    (96, 96, False, "cp_async"): (
        Row(128, 64, 4, 2, room=1, origin="expected"),
        Row(128, 48, 4, 2, room=15, but_not=("bias_float",), origin="expected"),
        Row(128, 32, 4, 2, room=9, origin="expected"),
        Row(64, 32, 4, 2, origin="expected"),
    ),
    (96, 96, True, "cp_async"): (
        Row(128, 80, 4, 2, room=1, but_not=("padded",), origin="expected"),
        Row(128, 64, 4, 2, room=1, but_not=("window",), origin="expected"),
        Row(128, 64, 4, 1, room=1, origin="expected"),
        Row(128, 32, 4, 2, room=9, origin="expected"),
        Row(64, 32, 4, 2, origin="expected"),
    ),
    (112, 112, False, "cp_async"): (
        Row(128, 64, 4, 1, room=1, origin="expected"),
        Row(128, 32, 4, 2, room=2, origin="expected"),
        Row(128, 128, 8, 2, room=9, but_not=("bias_float",), origin="expected"),
        Row(128, 96, 8, 2, room=3, origin="expected"),
        Row(64, 64, 4, 2, origin="expected"),
    ),
    (112, 112, True, "cp_async"): (
        Row(128, 48, 4, 2, room=1, but_not=("window",), origin="expected"),
        Row(128, 32, 4, 2, room=2, origin="expected"),
        Row(128, 96, 8, 2, room=5, origin="expected"),
        Row(64, 128, 4, 1, room=9, origin="expected"),
        Row(64, 64, 4, 2, origin="expected"),
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
    (160, 160, False, "cp_async"): (
        Row(128, 128, 8, 2, room=2, origin="expected"),
        Row(128, 96, 8, 2, room=4, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=3, origin="expected"),
        Row(128, 64, 8, 2, room=9, origin="expected"),
        Row(64, 64, 4, 2, origin="expected"),
    ),
    (160, 160, True, "cp_async"): (
        Row(128, 128, 8, 2, room=1, origin="expected"),
        Row(128, 112, 8, 2, room=3, but_not=("bias",), origin="expected"),
        Row(128, 96, 8, 2, room=3, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=4, origin="expected"),
        Row(128, 112, 8, 1, room=15, origin="expected"),
        Row(64, 96, 4, 1, room=9, origin="expected"),
        Row(64, 32, 4, 2, origin="expected"),
    ),
    (192, 128, False, "tensor"): (
        Row(128, 48, 4, 2, room=1, origin="expected"),
        Row(128, 32, 4, 2, room=2, origin="expected"),
        Row(128, 96, 8, 2, room=14, team=2, origin="expected"),
        Row(64, 64, 4, 2, team=2, origin="expected"),
    ),
    (192, 128, False, "cp_async"): (
        Row(128, 48, 4, 2, room=1, origin="expected"),
        Row(128, 32, 4, 2, room=2, origin="expected"),
        Row(128, 96, 8, 2, room=15, team=2, origin="expected"),
        Row(128, 128, 8, 1, room=3, team=2, origin="expected"),
        Row(128, 64, 8, 2, room=9, team=2, origin="expected"),
        Row(64, 64, 4, 1, team=2, origin="expected"),
    ),
    (192, 128, True, "tensor"): (
        Row(128, 32, 4, 2, room=2, mask_by_warp=True, origin="expected"),
        Row(128, 96, 8, 2, room=14, team=2, mask_by_warp=True, origin="expected"),
        Row(64, 64, 4, 2, team=2, mask_by_warp=True, origin="expected"),
    ),
    (192, 128, True, "cp_async"): (
        Row(128, 32, 4, 2, room=1, origin="expected"),
        Row(128, 96, 8, 2, room=15, team=2, origin="expected"),
        Row(128, 128, 8, 1, room=3, team=2, origin="expected"),
        Row(128, 64, 8, 2, room=9, team=2, origin="expected"),
        Row(64, 64, 4, 1, team=2, origin="expected"),
    ),
    (192, 192, False, "tensor"): (
        Row(128, 112, 8, 2, room=14, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=14, origin="expected"),
        Row(128, 64, 8, 2, room=8, origin="expected"),
        Row(64, 32, 4, 2, origin="expected"),
    ),
    (192, 192, False, "cp_async"): (
        Row(128, 112, 8, 2, room=2, origin="expected"),
        Row(128, 96, 8, 2, room=4, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=3, origin="expected"),
        Row(128, 64, 8, 2, room=5, origin="expected"),
        Row(128, 96, 8, 1, room=9, origin="expected"),
        Row(64, 64, 4, 1, origin="expected"),
    ),
    (192, 192, True, "tensor"): (
        Row(128, 112, 8, 2, room=2, mask_by_warp=True, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=14, mask_by_warp=True, origin="expected"),
        Row(128, 64, 8, 2, room=8, mask_by_warp=True, origin="expected"),
        Row(64, 32, 4, 2, mask_by_warp=True, origin="expected"),
    ),
    (192, 192, True, "cp_async"): (
        Row(128, 112, 8, 2, room=1, origin="expected"),
        Row(128, 112, 8, 1, room=3, but_not=("bias_float",), origin="expected"),
        Row(128, 64, 8, 2, room=5, origin="expected"),
        Row(128, 96, 8, 1, room=9, origin="expected"),
        Row(64, 32, 4, 2, origin="expected"),
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
