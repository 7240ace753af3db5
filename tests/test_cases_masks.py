"""Cases (see test_cases.py): which keys a query sees."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_fa2.testing import host


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (5, 2), (3, 128), (128, 3), (1, 257)])
def test_causal_diagonal_ends_at_the_last_key(fa, seqlen_q, seqlen_k, head_dim):
    """B015: equal scores and one-hot values show the mask; it lies bottom-right."""
    q, k = (
        fa.xp.zeros((1, seqlen_q, 1, head_dim), np.float16),
        fa.xp.zeros((1, seqlen_k, 1, head_dim), np.float16),
    )
    for start in range(0, seqlen_k, 256):
        v = np.eye(seqlen_k, dtype=np.float16)[:, start : start + 256]
        out, _ = fa.call(q, k, fa.xp.asarray(v[None, :, None]), causal=True)
        seen = np.arange(seqlen_q)[:, None] + 1 + seqlen_k - seqlen_q
        expected = np.where(np.arange(seqlen_k) < seen, 1 / np.maximum(seen, 1), 0)[:, start : start + 256]
        np.testing.assert_allclose(host(out)[0, :, 0].astype(float), expected, rtol=2**-10)
