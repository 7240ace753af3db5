"""Tiles for sm_80. Written by bench/tune.py, which says how; the fastest row first.

164 KiB of shared memory per multiprocessor: two blocks of up to 81 KiB each.
"""

from cupy_fa2.plan.row import Row, Rows

#: Where rows are from.
ORIGINS = {
    "expected": "the order of tuner/model.py, not timed; room by registers of NVRTC 12.9",
    "limits": "derived from the limits of an A100, not timed",
    "options": "where options take registers: room by spills of NVRTC 12.9, 13.0 and 13.5, found by hand",
}

# fmt: off
#: head_dim, head_dim_v, whether a band hides keys, transport -> the fastest row first.
ROWS: Rows = {
    (64, 64, False, "cp_async"): (
        Row(128, 64, 4, 2, room=1, origin="limits"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (64, 64, True, "cp_async"): (
        Row(128, 64, 4, 2, room=1, origin="limits"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (80, 80, False, "cp_async"): (
        Row(128, 96, 4, 2, room=1, origin="expected"),
        Row(128, 64, 4, 2, room=3, but_not=("bias_float",), origin="expected"),
        Row(128, 48, 4, 2, room=15, origin="expected"),
        Row(128, 32, 4, 2, origin="expected"),
    ),
    (80, 80, True, "cp_async"): (
        Row(128, 96, 4, 2, room=1, but_not=("window",), origin="expected"),
        Row(128, 96, 4, 1, room=1, origin="expected"),
        Row(128, 64, 4, 2, room=4, but_not=("bias_float",), origin="expected"),
        Row(128, 48, 4, 2, room=15, origin="expected"),
        Row(128, 32, 4, 2, origin="expected"),
    ),
    (96, 96, False, "cp_async"): (
        Row(128, 80, 4, 1, room=1, but_not=("padded",), origin="expected"),
        Row(128, 64, 4, 2, room=1, origin="expected"),
        Row(128, 64, 4, 1, room=2, origin="expected"),
        Row(128, 48, 4, 2, room=3, but_not=("bias_float",), origin="expected"),
        Row(128, 32, 4, 2, origin="expected"),
    ),
    (96, 96, True, "cp_async"): (
        Row(128, 64, 4, 2, room=1, but_not=("padded",), origin="expected"),
        Row(128, 64, 4, 1, room=1, but_not=("window",), origin="expected"),
        Row(128, 48, 4, 2, room=4, origin="expected"),
        Row(128, 32, 4, 2, room=9, origin="expected"),
        Row(64, 64, 4, 1, origin="expected"),
    ),
    (112, 112, False, "cp_async"): (
        Row(128, 64, 4, 1, room=1, origin="expected"),
        Row(128, 32, 4, 2, room=9, origin="expected"),
        Row(64, 64, 4, 1, origin="expected"),
    ),
    (112, 112, True, "cp_async"): (
        Row(128, 64, 4, 1, room=1, origin="expected"),
        Row(128, 48, 4, 1, room=2, but_not=("bias",), origin="expected"),
        Row(128, 32, 4, 2, room=3, origin="expected"),
        Row(128, 32, 4, 1, room=5, origin="expected"),
        Row(128, 128, 8, 2, room=9, origin="expected"),
        Row(64, 64, 4, 1, origin="expected"),
    ),
    (128, 128, False, "cp_async"): (
        Row(128, 64, 4, 1, room=1, origin="limits"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (128, 128, True, "cp_async"): (
        Row(128, 48, 4, 1, room=1, but_not=("padded",), origin="limits"),
        Row(128, 32, 4, 1, room=1, origin="options"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (160, 160, False, "cp_async"): (
        Row(128, 96, 8, 2, room=4, but_not=("bias_float",), origin="expected"),
        Row(128, 80, 8, 2, room=3, origin="expected"),
        Row(64, 96, 4, 1, room=9, origin="expected"),
        Row(128, 64, 8, 2, origin="expected"),
    ),
    (160, 160, True, "cp_async"): (
        Row(128, 96, 8, 2, room=5, origin="expected"),
        Row(64, 96, 4, 1, room=9, origin="expected"),
        Row(128, 64, 8, 2, origin="expected"),
    ),
    (192, 128, False, "cp_async"): (
        Row(128, 48, 4, 1, room=1, origin="expected"),
        Row(128, 32, 4, 1, room=2, origin="expected"),
        Row(128, 96, 8, 1, room=4, team=2, origin="expected"),
        Row(128, 64, 8, 2, team=2, origin="expected"),
    ),
    (192, 128, True, "cp_async"): (
        Row(128, 48, 4, 1, room=1, but_not=("window",), origin="expected"),
        Row(128, 32, 4, 1, room=1, origin="expected"),
        Row(128, 128, 8, 1, room=2, team=2, origin="expected"),
        Row(128, 96, 8, 1, room=15, team=2, origin="expected"),
        Row(128, 64, 8, 2, room=9, team=2, origin="expected"),
        Row(64, 64, 4, 1, team=2, origin="expected"),
    ),
    (192, 192, False, "cp_async"): (
        Row(128, 128, 8, 1, room=2, origin="expected"),
        Row(128, 64, 8, 2, room=9, origin="expected"),
        Row(64, 64, 4, 1, origin="expected"),
    ),
    (192, 192, True, "cp_async"): (
        Row(128, 128, 8, 1, room=1, origin="expected"),
        Row(128, 64, 8, 2, origin="expected"),
    ),
    (256, 256, False, "cp_async"): (
        Row(128, 64, 8, 1, room=3, origin="limits"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (256, 256, True, "cp_async"): (
        Row(128, 64, 8, 1, room=3, origin="limits"),
        Row(128, 32, 8, 1, origin="options"),
    ),
}
