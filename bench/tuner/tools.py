"""What the tuner takes from the rest of the bench, in one place."""

from options import PIECES, Arrays, visible_share
from timing import (
    DTYPES,
    ROOT,
    bare_call,
    commit,
    compile_all,
    describe_machine,
    first_line,
    interleaved,
    need_gpu,
    write_result,
)

__all__ = [
    "DTYPES",
    "PIECES",
    "ROOT",
    "Arrays",
    "bare_call",
    "commit",
    "compile_all",
    "describe_machine",
    "first_line",
    "interleaved",
    "need_gpu",
    "visible_share",
    "write_result",
]
