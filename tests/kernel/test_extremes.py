"""Magnitudes at the ends of what float32 scores and float32 results can tell apart."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import example
from sampling import sampled

from cupy_fa2.testing import DTYPES, assert_attention_close, host


@pytest.mark.parametrize(("dtype", "value"), [
    ("float16", 1e4), ("float16", 15000), ("float16", 20000), ("float16", 25000), ("float16", 65504),
    ("bfloat16", 3e4), ("bfloat16", 1e5), ("bfloat16", 1e9), ("bfloat16", 1e16),
])  # fmt: skip
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_scores_of_any_size_weigh_alike(fa, dtype, value, sign):
    """Every score is about 16 value^2: the maximum subtracts to exactly 0, and out is the mean of the values."""
    shape = (1, 64, 1, 16)
    q = np.full(shape, value).astype(DTYPES[dtype])
    k = np.full(shape, sign * value).astype(DTYPES[dtype])
    v = np.ones(shape, DTYPES[dtype])
    out, lse = fa.call(*(fa.xp.asarray(x) for x in (q, k, v)))
    np.testing.assert_array_equal(host(out).astype(float), 1)
    score = float(q.astype(float)[0, 0, 0, 0] * k.astype(float)[0, 0, 0, 0] * 4)
    np.testing.assert_allclose(host(lse), score, rtol=1e-5)


@pytest.mark.parametrize("scale", sampled([1e5, 1e7, 1e8, -1e8, 1e10, 1e20, 1e30, -1e30], 1e7, -1e30))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_huge_scale_picks_the_largest_score(fa, dtype, scale):
    """Scores are small integers, so that float32 has them exactly and the winner wins by far, or ties exactly."""
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-3, 4, (1, n, 2, 32)).astype(DTYPES[dtype]) for n in (40, 200))
    v = rng.standard_normal((1, 200, 2, 48)).astype(DTYPES[dtype])
    out, lse = fa.call(*(fa.xp.asarray(x) for x in (q, k, v)), softmax_scale=scale)
    scores = np.einsum("bihd,bjhd->bhij", q.astype(float), k.astype(float)) * np.sign(scale)
    best = scores == scores.max(-1, keepdims=True)
    weights = best / best.sum(-1, keepdims=True)
    expected = np.einsum("bhij,bjhd->bihd", weights, v.astype(float))
    np.testing.assert_allclose(host(out).astype(float), expected, atol=2e-2, rtol=2**-7)
    assert np.isfinite(host(lse)).all()


@pytest.mark.parametrize("magnitude", sampled([1e3, 1e5, 3e6], 3e6))
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_very_different_sizes_share_a_tile(fa, magnitude, causal):
    """Large rows take another way to the exponent; their neighbours' bits must not notice."""
    e = example("float16", 1, 70, 200, 2, 64, causal=causal)
    q, k, v = e.arrays(fa.xp)
    plain = fa.call(q, k, v, causal=causal, softmax_scale=1.0)
    loud = q.copy()
    factor = fa.xp.asarray(np.array(min(magnitude, 1e4)).astype(np.float16))
    loud[:, ::7] = loud[:, ::7] * factor
    out, lse = fa.call(loud, k, v, causal=causal, softmax_scale=1.0)
    quiet = [i for i in range(70) if i % 7]
    fa.same_bits((out[:, quiet], lse[:, :, quiet]), (plain[0][:, quiet], plain[1][:, :, quiet]))
    assert np.isfinite(host(out).astype(float)).all()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("loudness", sampled([1, 10, 100], 10))
def test_a_float32_result_is_a_true_mean(fa, dtype, loudness):
    """Equal values come back to float32's precision, however their weights were rounded."""
    e = example(dtype, 1, 40, 130, 2, 64)
    q, k, v = e.arrays()
    q = (q.astype(float) * loudness).astype(q.dtype)
    v[:] = v[:, :1]
    q, k, v = (fa.xp.asarray(x) for x in (q, k, v))
    out, lse = fa.call(q, k, v, out_dtype="float32")
    expected = np.broadcast_to(host(v)[:, :1].astype(float), out.shape)
    np.testing.assert_allclose(host(out), expected, rtol=3e-6, atol=1e-6)
    assert_attention_close(out, lse, q, k, v)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_key_gives_its_value_back(fa, dtype):
    q, k, v = example(dtype, 2, 40, 1, 2, 64).arrays()
    q, k = ((x.astype(float) * 30).astype(x.dtype) for x in (q, k))
    out, _ = fa.call(*(fa.xp.asarray(x) for x in (q, k, v)), out_dtype="float32")
    np.testing.assert_allclose(host(out), np.broadcast_to(v.astype(float), out.shape), rtol=1e-6)
