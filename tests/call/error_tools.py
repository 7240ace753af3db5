"""What the tests of errors share."""

from __future__ import annotations

import re

import numpy as np
import pytest


def arguments(xp):
    """A legal call: 2 x 5 queries over 7 keys, 4 heads over 2, head_dim 16, head_dim_v 24."""
    return {
        "q": xp.ones((2, 5, 4, 16), np.float16),
        "k": xp.ones((2, 7, 2, 16), np.float16),
        "v": xp.ones((2, 7, 2, 24), np.float16),
    }


def refused(call, kind, patterns):
    """The call raises an error that mentions all that it should."""
    with pytest.raises(kind) as caught:
        call()
    for pattern in patterns.split(" & "):
        assert re.search(f"(?i){pattern}", str(caught.value)), f"{pattern!r} is not in {caught.value!r}"
