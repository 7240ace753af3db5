"""Tiles for sm_100. Written by bench/tune.py, which says how; the fastest row first.

Shared memory and registers of sm_90, whose tiles it follows; with cp.async, since tensor copies have not run there.
"""

from cupy_fa2.plan.row import Row, Rows

#: Where rows are from.
ORIGINS = {
    "limits": "derived from the table of sm_90, not timed",
    "options": "where options take registers: room by spills of NVRTC 12.9, 13.0 and 13.5, found by hand",
}

# fmt: off
#: head_dim, head_dim_v, whether a band hides keys, transport -> the fastest row first.
ROWS: Rows = {
    (64, 64, False, "cp_async"): (
        Row(128, 96, 4, 2, room=1, origin="limits"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (64, 64, True, "cp_async"): (
        Row(128, 96, 4, 2, room=1, origin="limits"),
        Row(128, 64, 4, 1, room=2, origin="options"),
        Row(128, 48, 4, 1, room=3, origin="options"),
        Row(128, 32, 4, 1, room=9, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (128, 128, False, "cp_async"): (
        Row(128, 48, 4, 1, room=1, origin="limits"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (128, 128, True, "cp_async"): (
        Row(128, 48, 4, 1, room=1, but_not=("padded",), origin="limits"),
        Row(128, 32, 4, 1, room=1, origin="options"),
        Row(128, 64, 8, 1, room=11, team=2, origin="options"),
        Row(128, 32, 8, 1, origin="options"),
    ),
    (256, 256, False, "cp_async"): (
        Row(64, 64, 4, 1, room=3, origin="limits"),
        Row(64, 32, 4, 1, origin="options"),
    ),
    (256, 256, True, "cp_async"): (
        Row(64, 64, 4, 1, room=3, origin="limits"),
        Row(64, 32, 4, 1, origin="options"),
    ),
}
