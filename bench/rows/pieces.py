"""Options to measure with, one at a time: what rows of `rows.options` are made of, and kernels that the tuner tunes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness.arrays import DTYPES, Arrays
from harness.case import Case

__all__ = ["DROPOUT", "PIECES", "SOFTCAP", "WINDOW", "given"]

WINDOW = (1024, 0)
SOFTCAP = 30.0
DROPOUT = 0.1
SEED = 20_261_130


def _scores(case: Case) -> tuple[int, int, int]:
    return case.num_heads, case.seqlen, case.seqlen


def _slopes(case: Case) -> Any:
    return 2.0 ** (-8 * np.arange(1, case.num_heads + 1) / case.num_heads)


#: Name -> the options that a call gets, of (what makes arrays, the sizes).
PIECES: dict[str, Callable[[Arrays, Case], dict[str, Any]]] = {
    "window": lambda make, case: {"window": WINDOW},
    "window_all": lambda make, case: {"window": (case.seqlen, case.seqlen)},
    "softcap": lambda make, case: {"softcap": SOFTCAP},
    "alibi": lambda make, case: {"alibi_slopes": make.small(_slopes(case), np.float32)},
    "bias": lambda make, case: {"bias": make.normal((1, *_scores(case)), DTYPES[case.dtype])},
    "bias32": lambda make, case: {"bias": make.normal((1, *_scores(case)), np.float32)},
    "mask_keys": lambda make, case: {"mask": make.visible((case.batch, 1, 1, case.seqlen))},
    "mask": lambda make, case: {"mask": make.visible((1, *_scores(case)))},
    "sinks": lambda make, case: {"sinks": make.small(np.arange(case.num_heads) % 8 / 2, np.float32)},
    "padded": lambda make, case: {"seqlens_k": make.small([case.seqlen] * case.batch, np.int32)},
    "dropout": lambda make, case: {"dropout_p": DROPOUT, "dropout_seed": SEED},
}


def given(pieces: tuple[str, ...], make: Arrays, case: Case) -> dict[str, Any]:
    """The options of a call with these pieces."""
    made: dict[str, Any] = {}
    for piece in pieces:
        made |= PIECES[piece](make, case)
    return made
