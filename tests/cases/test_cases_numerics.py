"""Cases (see test_cases.py): what comes out: shifted and extreme scores, empty rows, NaN, accuracy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.testing import DTYPES, assert_attention_close, host, random_qkv


def shifted_scores(e, constant, xp):
    """Inputs whose every score is about `constant`: the first feature carries it."""
    q, k, v = random_qkv(
        *(e.batch, e.seqlen_q, e.seqlen_k, e.num_heads, e.head_dim), num_heads_k=e.num_heads_k, dtype=e.dtype
    )
    q, k = ((x.astype(np.float32) * 0.1).astype(x.dtype) for x in (q, k))
    q[..., 0], k[..., 0] = 1, constant * math.sqrt(e.head_dim)
    return tuple(map(xp.asarray, (q, k, v)))


@pytest.mark.parametrize("constant", sampled([-120, -1000], -1000))
@pytest.mark.parametrize("head_dim", sampled([64, 128], 64))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), sampled_rows([(88, 448), (200, 130)], (200, 130)))
def test_first_visited_block_masked_and_scores_far_below_zero(fa, seqlen_q, seqlen_k, head_dim, constant):
    """B001: a row maximum that starts at 0 makes these rows zero."""
    heads = fa.size((1, 1), (14, 2))
    for dtype in fa.size(["float16" if constant == -120 else "bfloat16"], DTYPES):
        e = example(dtype, 1, seqlen_q, seqlen_k, heads[0], head_dim, num_heads_k=heads[1])
        q, k, v = shifted_scores(e, constant, fa.xp)
        out, lse = fa.call(q, k, v, causal=True)
        assert_attention_close(out, lse, q, k, v, causal=True)
        seen = np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q
        rows = seen > 0
        assert np.all(np.any(host(out)[0, rows, 0].astype(float) != 0, axis=-1))
        first = float(host(k)[0, 0, 0, 0].astype(float)) / math.sqrt(head_dim)
        np.testing.assert_allclose(host(lse)[0, 0, rows], first + np.log(seen[rows]), atol=0.3)


@pytest.mark.parametrize("constant", sampled([-120, -1000], -1000))
def test_first_visited_block_beyond_the_window_and_scores_far_below_zero(fa, constant):
    """B001: as above, with blocks that a window hides from some rows of a tile on either side."""
    heads = fa.size((1, 1), (14, 2))
    for seqlen_q, seqlen_k in [(88, 448), (200, 130)]:
        e = example(fa.size("float16", "bfloat16"), 1, seqlen_q, seqlen_k, heads[0], 64, num_heads_k=heads[1])
        q, k, v = shifted_scores(e, constant, fa.xp)
        out, lse = fa.call(q, k, v, window=(20, 0))
        assert_attention_close(out, lse, q, k, v, window=(20, 0))
        seen = np.clip(np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q, 0, 21)
        first = float(host(k)[0, 0, 0, 0].astype(float)) / 8
        np.testing.assert_allclose(host(lse)[0, 0, seen > 0], first + np.log(seen[seen > 0]), atol=0.3)


@pytest.mark.parametrize("sign", sampled([1, -1], -1))
@pytest.mark.parametrize("seqlen_k", sampled([1, 64, 300], 64))
def test_scores_below_any_finite_filler(fa, seqlen_k, sign):
    """B014: raw scores of about -262144, where a running maximum that starts at -50000 gives zeros."""
    for seqlen_q in (1, 4, 64):
        heads = fa.size((1, 1), (8, 2))
        q, k, v = random_qkv(1, seqlen_q, seqlen_k, heads[0], 128, num_heads_k=heads[1], dtype="bfloat16")
        q[..., 0], k[..., 0] = 256, sign * -1024
        exact, exact_lse = reference.attention(q, k, v)
        out, lse = fa.call(*map(fa.xp.asarray, (q, k, v)))
        np.testing.assert_allclose(host(out).astype(float), exact, atol=2e-2, rtol=2**-8)
        assert np.all(np.abs(host(lse) - exact_lse) <= 1e-6 * np.abs(exact_lse) + 1e-2)


@pytest.mark.full
def test_boundary_of_the_last_key_block(fa):
    """B016: with q = 0 the output is the mean of the values, lse the logarithm of their number."""
    lengths = [*range(1, 18), 31, 32, 33, 47, 48, 63, 64, 65, 79, 81, 127, 128, 129, 130, 255, 256, 257, 300]
    for seqlen_k in fa.size(lengths, [*range(1, 131), 255, 256, 257, 300, 511, 513]):
        for seqlen_q in fa.size([17 if seqlen_k % 2 else 1], [1, 17]):
            e = example("bfloat16", 1, seqlen_q, seqlen_k, fa.size(1, 8), 128)
            q, k, v = e.arrays()
            q, k, v = (
                fa.xp.asarray((x.astype(np.float32) * f).astype(x.dtype)) for x, f in ((q, 0), (k, 0.1), (v, 0.1))
            )
            out, lse = fa.call(q, k, v)
            mean = host(v).astype(float).mean(axis=1, keepdims=True)
            np.testing.assert_allclose(host(out).astype(float), np.broadcast_to(mean, q.shape), atol=1e-3, rtol=2**-7)
            np.testing.assert_allclose(host(lse), math.log(seqlen_k), atol=1e-5)


@pytest.mark.parametrize("seqlen_k", [0, 2, 100])
@pytest.mark.parametrize("seqlen_q", sampled([5, 130], 5))
def test_lse_of_empty_rows(fa, seqlen_q, seqlen_k):
    """B026: out is 0 and lse -inf in rows that see nothing, which is what makes merging two halves work."""
    e = example("bfloat16", 2, seqlen_q, seqlen_k, fa.size(2, 8), 128, num_heads_k=2, causal=True)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.check(e)
    empty = max(0, seqlen_q - seqlen_k)
    assert not host(out)[:, :empty].astype(float).any()
    assert np.all(host(lse)[:, :, :empty] == -np.inf)
    assert np.isfinite(host(lse)[:, :, empty:]).all()
    half = seqlen_k // 2
    offset = seqlen_k - seqlen_q
    parts = [
        cupy_fa2.flash_attention(
            q, k[:, s], v[:, s], causal=True, align=offset - start, out_dtype=np.float32, return_lse=True
        )
        for s, start in ((slice(0, half), 0), (slice(half, None), half))
    ]
    both = np.stack([host(part_lse).astype(float) for _, part_lse in parts])
    whole = np.logaddexp(*both)
    np.testing.assert_allclose(whole, host(lse), atol=1e-4)
    weights = np.exp(both - np.where(whole == -np.inf, 0, whole)).transpose(0, 1, 3, 2)[..., None]
    merged = sum(w * host(part_out) for w, (part_out, _) in zip(weights, parts, strict=True))
    assert_attention_close(merged.astype(np.float32), None, q, k, v, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_or_loud_inputs(fa, dtype):
    """B065: one key gives its value exactly; 3 * randn and scores of about -128 stay finite and right."""
    for seed in range(fa.size(5, 100)):
        q, k, v = (fa.xp.asarray(3 * x) for x in random_qkv(1, 1, 1, 1, 16, dtype=dtype, seed=seed))
        out, _ = fa.call(q, k, v)
        fa.same_bits(out, v)
    q, k, v = (fa.xp.asarray(3 * x) for x in random_qkv(1, *[fa.size(100, 1024)] * 2, 1, 128, dtype=dtype))
    assert_attention_close(*fa.call(q, k, v, causal=True), q, k, v, causal=True)
    for seqlen_k in (97, 128):
        e = example(dtype, 1, 1, seqlen_k, 1, 128)
        q, k, v = shifted_scores(e, -128, fa.xp)
        assert_attention_close(*fa.call(q, k, v), q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_the_rows_that_see_it(fa, dtype):
    """B071: NaN in one query row, and in keys and values that a causal row sees.

    Earlier rows lose nothing to a masked key. A masked value may reach them as 0 x NaN where their block of
    keys holds it, which is documented, so of values only the other sample's rows are checked.
    """
    seqlen, head_dim = fa.size((70, 40), (107, 128))
    q, k, v = random_qkv(2, seqlen, seqlen, fa.size(2, 32), head_dim, num_heads_k=fa.size(1, 8), dtype=dtype)
    out, lse = fa.call(*map(fa.xp.asarray, (q, k, v)), causal=True)
    out, lse = host(out), host(lse)

    loud = q.copy()
    loud[1, 33, 1] = np.nan
    changed, changed_lse = map(host, fa.call(*map(fa.xp.asarray, (loud, k, v)), causal=True))
    hit = np.zeros(out.shape[:3], bool)
    hit[1, 33, 1] = True
    assert np.isnan(changed[hit].astype(float)).all()
    assert np.isnan(changed_lse.transpose(0, 2, 1)[hit]).all()
    fa.same_bits(changed[~hit], out[~hit])
    fa.same_bits(changed_lse.transpose(0, 2, 1)[~hit], lse.transpose(0, 2, 1)[~hit])

    loud_k, loud_v = k.copy(), v.copy()
    loud_k[1, 50] = np.nan
    changed, changed_lse = map(host, fa.call(*map(fa.xp.asarray, (q, loud_k, v)), causal=True))
    assert np.isnan(changed[1, 50:].astype(float)).all()
    assert np.isnan(changed_lse[1, :, 50:]).all()
    fa.same_bits((changed[0], changed_lse[0]), (out[0], lse[0]))
    fa.same_bits((changed[1, :50], changed_lse[1, :, :50]), (out[1, :50], lse[1, :, :50]))

    loud_v[1, 50] = np.nan
    changed, changed_lse = map(host, fa.call(*map(fa.xp.asarray, (q, k, loud_v)), causal=True))
    assert np.isnan(changed[1, 50:].astype(float)).all()
    fa.same_bits(changed[0], out[0])
    fa.same_bits(changed_lse, lse)


@pytest.mark.parametrize("dtype", sampled(DTYPES, "bfloat16"))
@pytest.mark.parametrize("loudness", sampled([1, 4], 4))
def test_agreed_measure_of_accuracy(fa, loudness, dtype):
    """B073: shapes at which strict tolerances were reported as failures, by the tolerance rule."""
    shapes = [(2, 256, 2, 64, False), (1, 900, 8, 64, False), (4, 10, 8, 64, True), (1, 256, 2, 256, True)]
    small = [(1, 130, 1, 64, False), (2, 10, 2, 64, True), (1, 70, 1, 256, True)]
    for batch, seqlen, heads, head_dim, causal in fa.size(small, shapes):
        q, k, v = random_qkv(batch, seqlen, seqlen, heads, head_dim, dtype=dtype)
        q, k, v = (fa.xp.asarray(x * np.array(f, x.dtype)) for x, f in ((q, loudness), (k, loudness), (v, 10)))
        assert_attention_close(*fa.call(q, k, v, causal=causal), q, k, v, causal=causal)
