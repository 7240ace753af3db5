"""Cases (see test_cases.py): which keys a query sees."""

from __future__ import annotations

import numpy as np
import pytest
from case_tools import weights
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.testing import assert_attention_close, host, random_qkv

# None is no bound in windows: some libraries write -1 for that, which is refused here.


@pytest.mark.parametrize("head_dim", sampled([64, 128], 64))
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), sampled_rows([(2, 5), (5, 2), (3, 128), (128, 3), (1, 257)], (2, 5), (5, 2), (3, 128))
)
def test_causal_diagonal_ends_at_the_last_key(fa, seqlen_q, seqlen_k, head_dim):
    """B015: equal scores and one-hot values show the mask; it lies bottom-right."""
    found, _ = weights(fa, seqlen_q, seqlen_k, head_dim=head_dim, causal=True)
    seen = np.arange(seqlen_q)[:, None] + 1 + seqlen_k - seqlen_q
    expected = np.where(np.arange(seqlen_k) < seen, 1 / np.maximum(seen, 1), 0)
    np.testing.assert_allclose(found[0, 0], expected, rtol=2**-10)


def assert_sees(found, lse, visible):
    """Equal weights on the keys that are visible, none on the others."""
    count = visible.sum(axis=-1)
    expected = visible / np.maximum(count, 1)[:, None]
    np.testing.assert_allclose(found[0, 0], expected, rtol=2**-10)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(count), atol=1e-5)


@pytest.mark.full
def test_right_bounds_beyond_the_number_of_keys(fa):
    """B022: with more queries than keys they hide nothing, or less than they would if cut at the number of keys."""
    n = fa.size(50, 100)
    everything = [(None, 3 * n - 1), (None, 2**31 - 1), (2**31 - 1, 2**31 - 1)]
    for window in [*everything, (4 * n, n)]:
        rows, keys = np.arange(3 * n)[:, None] - 2 * n, np.arange(n)
        visible = (keys >= rows - (window[0] or 0)) & (keys <= rows + window[1])
        if window in everything:
            visible = np.ones_like(visible)
        assert_sees(*weights(fa, 3 * n, n, window=window), visible)
        fa.check(example("float16", 1, 3 * n, n, fa.size(1, 2), 64, window=window))


@pytest.mark.parametrize("window", sampled([(0, 0), (1, 0), (31, 0), (128, 0), (0, 31)], (1, 0), (0, 31)))
def test_left_window_without_causal_has_a_right_bound(fa, window):
    """B023: keys i + 32 - left to i + 32 + right; what lies beyond changes no bit of the row."""
    seqlen_q = fa.size(40, 2048)
    e = example("bfloat16", fa.size(1, 2), seqlen_q, seqlen_q + 32, fa.size(1, 8), 64, window=window)
    result = fa.check(e)
    q, k, v = e.arrays()
    row = seqlen_q // 8
    k, v = k.copy(), v.copy()
    for x in (k, v):
        x[:, row + 32 + window[1] + 1 :] = 7
    changed = fa.call(*map(fa.xp.asarray, (q, k, v)), window=window)
    fa.same_bits(*((out[:, : row + 1], lse[..., : row + 1]) for out, lse in (changed, result)))
    assert np.all(np.any(host(changed[0][:, row + 1]) != host(result[0][:, row + 1]), axis=-1))


@pytest.mark.parametrize("left", sampled([0, 1, 8, 63, 64], 0, 63))
def test_window_includes_its_left_bound(fa, left):
    """B062: left + 1 keys in rows that have as many."""
    rows, keys = np.arange(64)[:, None], np.arange(64)
    assert_sees(*weights(fa, 64, 64, causal=True, window=(left, 0)), (keys <= rows) & (keys >= rows - left))


def test_rows_before_the_first_key_of_a_window(fa):
    """B063: 129 queries over 32 keys, 64 to the right: the last query lies at the last key, so 33 see nothing."""
    e = example("bfloat16", 1, 129, 32, fa.size(1, 4), 64, window=(32, 64))
    out, lse = fa.check(e)
    assert not host(out)[:, :33].astype(float).any()
    assert np.all(host(lse)[..., :33] == -np.inf)
    assert np.isfinite(host(lse)[..., 33:]).all()


@pytest.mark.parametrize("seqlen_k", sampled([256, 200, 100], 200))
def test_window_of_a_single_query(fa, seqlen_k):
    """B063: the last 129 keys; causal adds nothing."""
    visible = np.arange(seqlen_k)[None] >= seqlen_k - 129
    for causal in fa.size([seqlen_k == 200], [False, True]):
        assert_sees(*weights(fa, 1, seqlen_k, causal=causal, window=(128, 0)), visible)


def test_decoding_step_by_step_in_a_window(fa):
    """B063: step t is row t of the whole run."""
    steps, left, heads, heads_k = fa.size((20, 7, 1, 1), (200, 128, 64, 8))
    q, k, v = random_qkv(1, steps, steps, heads, 64, num_heads_k=heads_k, dtype="bfloat16", xp=fa.xp)
    options = {"causal": True, "window": (left, 0)}
    assert_attention_close(*fa.call(q, k, v, **options), q, k, v, **options)
    single = [fa.call(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], **options) for t in range(steps)]
    out = np.concatenate([host(out) for out, _ in single], axis=1)
    lse = np.concatenate([host(lse) for _, lse in single], axis=2)
    assert_attention_close(out, lse, q, k, v, **options)


@pytest.mark.parametrize("window", sampled([(0, 256), (256, 0), (0, 0)], (256, 0)))
@pytest.mark.parametrize("head_dim", sampled([56, 64], 64))
def test_window_far_from_most_keys(fa, head_dim, window):
    """B043: 16 queries at the end; the last one sees a single key if nothing is to the left."""
    e = example("float16", 1, 16, fa.size(1000, 20000), fa.size(1, 4), head_dim, window=window)
    out, lse = fa.check(e)
    assert np.isfinite(host(lse)).all()
    if window[0] == 0:
        fa.same_bits(out[:, -1], e.arrays(fa.xp)[2][:, -1])


def test_minus_one_is_no_bound(fa):
    """B022, B017: where others mean no bound by -1, this call says what to write."""
    for window in [(-1, 0), (0, -1), (-1, -1)]:
        with pytest.raises(ValueError, match="None means unbounded, not -1"):
            cupy_fa2.flash_attention(*example().arrays(fa.xp), window=window)
