"""Which tests are run by default: of a product a sample, of each capability its strongest examples.

The others are marked ``full``, and Hypothesis draws more examples with them. ``-m full`` runs them, ``-m gpu`` all of
the GPU's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["FULL", "by_turns", "implies", "sampled", "sampled_rows"]

FULL = pytest.mark.full


def sampled(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of a parameter, of which all are full but those `kept`."""
    return sampled_rows(((value,) for value in values), *((value,) for value in kept))


def sampled_rows(rows: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """Tuples of values, one of each parameter, of which all are full but those `kept`."""
    rows = list(rows)
    assert all(row in rows for row in kept), "what is kept is no value"
    return [pytest.param(*row, marks=[] if row in kept else FULL) for row in rows]


def by_turns(values: Iterable[Any], *left_out: Any) -> list[Any]:
    """(card, value) for the fixture `cards`: each value on both cards and the GPU.

    By default on one card in turn; those `left_out` on none.
    """
    values, cards = list(values), ("A100", "H200")
    pairs = [
        pytest.param(card, value, marks=[] if index % 2 == turn and value not in left_out else FULL)
        for turn, card in enumerate(cards)
        for index, value in enumerate(values)
    ]
    return pairs + [pytest.param("gpu", value, marks=pytest.mark.gpu) for value in values]


def implies(expression: str, marker: str, present: bool = True) -> bool:
    """Whether ``-m expression`` selects tests with `marker` only, or without it only: "gpu", "gpu and not slow", ..."""
    names = sorted(set(re.findall(r"\w+", expression)) - {"and", "or", "not", marker})
    if not re.fullmatch(r"[\w\s()]+", expression):  # nothing, or marks with arguments
        return False
    others = (dict(zip(names, on, strict=True)) for on in itertools.product([False, True], repeat=len(names)))
    return not any(eval(expression, {"__builtins__": {}, marker: not present, **each}) for each in others)
