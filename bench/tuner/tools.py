"""What the tuner takes from the rest of the bench, in one place."""

from harness.arrays import DTYPES, Arrays
from harness.case import HIDDEN, TOKENS, visible_share
from harness.launch import bare, compile_all
from harness.machine import ROOT, describe_machine, first_line, log, need_gpu
from harness.results import RESULTS, read_result, stored_path, write_result
from harness.timing import interleaved
from rows.pieces import PIECES

__all__ = [
    "DTYPES",
    "HIDDEN",
    "PIECES",
    "RESULTS",
    "ROOT",
    "TOKENS",
    "Arrays",
    "bare",
    "compile_all",
    "describe_machine",
    "first_line",
    "interleaved",
    "log",
    "need_gpu",
    "read_result",
    "stored_path",
    "visible_share",
    "write_result",
]
