"""Tiles for sm_90. Written by bench/tune.py, which says how; the fastest row first.

Of plain calls TFLOP/s are the bench's, at 8,192 in bfloat16.
"""

from cupy_fa2.plan.row import Row, Rows

#: Where rows are from.
ORIGINS = {
    "measured": "measured on NVIDIA H200, 2026-11-30, 3d4fc74",
    "options": "where options take registers: room by spills of NVRTC 12.9, 13.0 and 13.5, found by hand",
    "same": "the tile that tensor maps have, for keys that they cannot describe",
    "timed": "timed on NVIDIA H200, 2026-12-01, 3f274ba; room by registers of NVRTC 12.9, 13.0",
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
        Row(128, 80, 4, 1, room=1, q_kept=16, origin="timed", tflops=363.1),
        Row(128, 64, 4, 1, room=2, origin="timed", tflops=355.0),
        Row(128, 48, 4, 2, room=4, but_not=("bias_float",), origin="timed", tflops=335.3),
        Row(128, 48, 4, 1, room=15, origin="timed", tflops=337.8),
        Row(128, 32, 4, 2, origin="timed", tflops=323.4),
    ),
    (80, 80, True, "cp_async"): (
        Row(128, 80, 4, 2, room=1, q_kept=32, but_not=("window",), origin="timed", tflops=353.8),
        Row(128, 64, 4, 1, room=2, origin="timed", tflops=344.3),
        Row(128, 48, 4, 2, room=15, but_not=("bias_float",), origin="timed", tflops=321.6),
        Row(128, 48, 4, 1, room=15, origin="timed", tflops=324.6),
        Row(128, 32, 4, 2, origin="timed", tflops=313.8),
    ),
    (96, 96, False, "cp_async"): (
        Row(128, 64, 4, 2, room=1, origin="timed", tflops=376.9),
        Row(128, 48, 4, 2, room=4, q_kept=32, but_not=("bias_float",), origin="timed", tflops=373.9),
        Row(128, 32, 4, 2, room=9, origin="timed", tflops=348.6),
        Row(64, 32, 4, 2, origin="timed", tflops=295.9),
    ),
    (96, 96, True, "cp_async"): (
        Row(128, 64, 4, 2, room=1, last_to_first=False, but_not=("padded",), origin="timed", tflops=362.8),
        Row(128, 64, 4, 2, room=1, but_not=("window",), origin="timed", tflops=363.4),
        Row(128, 64, 4, 1, room=1, q_kept=32, origin="timed", tflops=363.4),
        Row(128, 32, 4, 2, room=9, origin="timed", tflops=337.4),
        Row(64, 32, 4, 2, origin="timed", tflops=284.0),
    ),
    (112, 112, False, "cp_async"): (
        Row(128, 64, 4, 1, room=1, origin="timed", tflops=377.4),
        Row(128, 32, 4, 1, room=2, origin="timed", tflops=333.9),
        Row(64, 128, 4, 1, room=9, origin="timed", tflops=307.7),
        Row(64, 32, 4, 2, origin="timed", tflops=254.8),
    ),
    (112, 112, True, "cp_async"): (
        Row(128, 48, 4, 1, room=1, q_kept=32, origin="timed", tflops=363.9),
        Row(128, 32, 4, 2, room=2, origin="timed", tflops=330.6),
        Row(64, 128, 4, 1, room=9, origin="timed", tflops=297.2),
        Row(64, 32, 4, 2, origin="timed", tflops=249.0),
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
        Row(64, 96, 4, 1, room=4, but_not=("bias_float",), origin="timed", tflops=342.2),
        Row(64, 96, 4, 1, room=3, q_kept=16, origin="timed", tflops=339.1),
        Row(64, 64, 4, 2, origin="timed", tflops=322.4),
    ),
    (160, 160, True, "cp_async"): (
        Row(64, 96, 4, 1, room=9, but_not=("bias_float",), origin="timed", tflops=328.9),
        Row(64, 96, 4, 1, room=3, q_kept=32, origin="timed", tflops=321.5),
        Row(64, 32, 4, 2, origin="timed", tflops=269.3),
    ),
    (192, 128, False, "tensor"): (
        Row(128, 32, 4, 2, room=1, q_kept=32, origin="timed", tflops=423.7),
        Row(128, 96, 8, 2, room=14, q_kept=32, team=2, origin="timed", tflops=416.3),
        Row(128, 32, 4, 2, room=2, last_to_first=False, origin="timed", tflops=409.7),
        Row(64, 64, 4, 2, team=2, origin="timed", tflops=376.0),
    ),
    (192, 128, False, "cp_async"): (
        Row(128, 32, 4, 2, room=1, q_kept=32, origin="timed", tflops=401.5),
        Row(128, 32, 4, 1, room=2, origin="timed", tflops=376.9),
        Row(128, 128, 8, 1, room=4, team=2, but_not=("bias_float",), origin="timed", tflops=357.3),
        Row(64, 96, 4, 1, room=15, team=2, origin="timed", tflops=355.3),
        Row(64, 64, 4, 1, team=2, origin="timed", tflops=331.2),
    ),
    (192, 128, True, "tensor"): (
        Row(128, 96, 8, 2, room=14, q_kept=16, team=2, mask_by_warp=True, origin="timed", tflops=392.7),
        Row(64, 64, 4, 2, team=2, origin="timed", tflops=360.1),
    ),
    (192, 128, True, "cp_async"): (
        Row(128, 96, 8, 2, room=15, team=2, origin="timed", tflops=328.0),
        Row(64, 64, 4, 1, team=2, origin="timed", tflops=321.1),
    ),
    (192, 192, False, "tensor"): (
        Row(128, 112, 8, 2, room=2, q_kept=16, origin="timed", tflops=397.5),
        Row(128, 96, 8, 2, room=3, origin="timed", tflops=388.2),
        Row(128, 64, 8, 2, room=8, origin="timed", tflops=363.6),
        Row(64, 32, 4, 2, origin="timed", tflops=313.6),
    ),
    (192, 192, False, "cp_async"): (
        Row(128, 112, 8, 2, room=1, q_kept=16, origin="timed", tflops=350.6),
        Row(128, 112, 8, 2, room=2, q_kept=32, origin="timed", tflops=349.6),
        Row(64, 64, 4, 1, last_to_first=False, origin="timed", tflops=346.9),
    ),
    (192, 192, True, "tensor"): (
        Row(128, 112, 8, 2, room=1, q_kept=16, mask_by_warp=True, origin="timed", tflops=373.2),
        Row(128, 96, 8, 2, room=3, mask_by_warp=True, but_not=("bias_float",), origin="timed", tflops=369.4),
        Row(128, 96, 8, 2, room=2, q_kept=16, mask_by_warp=True, origin="timed", tflops=370.1),
        Row(128, 80, 8, 2, room=14, mask_by_warp=True, origin="timed", tflops=360.4),
        Row(128, 64, 8, 2, room=8, mask_by_warp=True, origin="timed", tflops=349.0),
        Row(64, 32, 4, 2, mask_by_warp=True, origin="timed", tflops=301.3),
    ),
    (192, 192, True, "cp_async"): (
        Row(128, 112, 8, 2, room=1, origin="timed", tflops=324.6),
        Row(64, 80, 4, 1, room=3, q_kept=32, origin="timed", tflops=338.6),
        Row(64, 64, 4, 1, room=9, last_to_first=False, origin="timed", tflops=331.7),
        Row(64, 32, 4, 2, origin="timed", tflops=299.9),
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
