"""Cases (see test_cases.py): dropout.

The rate is a multiple of 2^-16, and kept probabilities are divided by what is realised: `dropout_p = 0.3` keeps 45875
of 65536, and multiplies them by 65536 / 45875.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from case_tools import weights
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.dropout import dropout_values
from cupy_fa2.testing import DTYPES, assert_attention_close, host, random_qkv


def threshold(p):
    return round((1 - p) * 65536)


@pytest.mark.parametrize(
    ("causal", "window", "p"),
    sampled_rows([(False, None, 0.5), (True, None, 0.1), (False, (40, 0), 0.3)], (False, (40, 0), 0.3)),
)
def test_mask_is_the_public_one_whatever_is_skipped(fa, causal, window, p):
    """B017: the mask that one-hot values show is `dropout_mask`'s, and what random values give is exact under it."""
    batch, heads, heads_k = fa.size((2, 2, 1), (2, 4, 2))
    lengths = fa.size([(70, 100)], [(128, 128), (200, 333), (257, 128)])
    for (seqlen_q, seqlen_k), head_dim in itertools.product(lengths, fa.size([64], [64, 128])):
        options = {"causal": causal, "window": window, "dropout_p": p, "dropout_seed": 2**63 + 12345}
        sizes = {"batch": batch, "num_heads": heads, "num_heads_k": heads_k, "head_dim": head_dim}
        found, _ = weights(fa, seqlen_q, seqlen_k, **sizes, **options)
        distance = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k)
        visible = (distance >= 0) & (distance <= 40) if window else distance >= (0 if causal else -np.inf)
        kept = cupy_fa2.dropout_mask((batch, heads, seqlen_q, seqlen_k), p, 2**63 + 12345) & visible
        expected = kept / np.maximum(visible.sum(axis=1), 1)[:, None] * (65536 / threshold(p))
        np.testing.assert_allclose(found, expected, rtol=2**-9)
        for dtype in fa.size([], DTYPES):
            q, k, v = random_qkv(
                *(batch, seqlen_q, seqlen_k, heads, head_dim), num_heads_k=heads_k, dtype=dtype, xp=fa.xp
            )
            assert_attention_close(*fa.call(q, k, v, **options), q, k, v, **options)


def test_mask_where_pairs_of_warps_share_rows():
    """B017: the plan of an H200 at head_dim 256, in the simulator; each warp of a pair has half of a tile's keys."""
    q, k = np.zeros((1, 20, 1, 256), np.float16), np.zeros((1, 64, 1, 256), np.float16)
    with cupy_fa2.simulator("H200"):
        v = np.eye(64, 256, dtype=np.float16)[None, :, None]
        out = cupy_fa2.flash_attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    np.testing.assert_array_equal(out[0, :, 0, :64] > 0, cupy_fa2.dropout_mask((1, 1, 20, 64), 0.5, 1)[0, 0])


def assert_unlike(a, b):
    """The signs, or normalised counts, of two places are not correlated."""
    assert abs(np.mean(a * b)) < 4 / np.sqrt(a.size)


def test_places_have_masks_of_their_own(fa):
    """B037: samples, heads, and rows 16, 32 and 64 apart."""
    found, _ = weights(fa, 80, 64, batch=2, num_heads=3, dropout_p=0.5, dropout_seed=1)
    kept = found > 0
    np.testing.assert_array_equal(kept, cupy_fa2.dropout_mask(kept.shape, 0.5, 1))
    signs = np.where(kept, 1, -1).reshape(6, 80, 64)
    for a, b in itertools.combinations(signs, 2):
        assert_unlike(a, b)
    for step in (1, 16, 32, 64):
        assert_unlike(signs[:, step:], signs[:, :-step])


FAR_APART = [(0, 4096), (63, 4159), (0, 1), (64, 65), (17, 4113), (4095, 4096)]


@pytest.mark.gpu
def test_heads_2_to_the_32_numbers_apart(cp):
    """B037: heads n and n + 4096 of 64 x 65, with 1,024 queries and keys each; counted in groups of 16 keys."""
    shape = 64, 1024, 65, 64
    zeros = cp.zeros(shape, np.float16)
    v = cp.asarray(np.repeat(np.eye(64, dtype=np.float16), 16, axis=0)[None, :, None])
    out = cupy_fa2.flash_attention(zeros, zeros, cp.broadcast_to(v, shape), dropout_p=0.5, dropout_seed=1)
    for pair in FAR_APART:
        counts = []
        for n in pair:
            kept = dropout_values(n // 65, n % 65, np.arange(1024), 1024, 1) < 32768
            counts.append(kept.reshape(1024, 64, 16).sum(axis=2))
            np.testing.assert_array_equal(host(out[n // 65, :, n % 65]).astype(float) * 512, counts[-1])
        assert_unlike(*((count - 8) / 2 for count in counts))


@pytest.mark.parametrize("p", sampled([0.5, 0.9, 0.99], 0.99))
def test_rows_of_which_everything_is_dropped(fa, p):
    """B039: are 0; others are what is left of weights that were normalised before, and lse knows nothing of it."""
    shape = 2, 64, 4, 64
    zeros, ones = fa.xp.zeros(shape, np.float16), fa.xp.ones(shape, np.float16)
    out, lse = fa.call(zeros, zeros, ones, causal=True, dropout_p=p, dropout_seed=5)
    kept = np.tril(cupy_fa2.dropout_mask((2, 4, 64, 64), p, 5)).sum(axis=-1)
    assert (kept == 0).any()
    expected = kept / np.arange(1, 65) * (65536 / threshold(p))
    np.testing.assert_allclose(host(out).astype(float)[..., 0].transpose(0, 2, 1), expected, rtol=2**-9)
    np.testing.assert_allclose(host(lse), np.broadcast_to(np.log(np.arange(1, 65)), lse.shape), atol=1e-5)


@pytest.mark.parametrize("p", sampled([0.001, 0.002, 0.01, 0.1, 0.5, 0.999], 0.001, 0.1))
def test_rate_is_that_asked_for(fa, p):
    """B040: to 2^-17, and so is the factor that makes up for it: the mean stays 1."""
    batch, heads, seqlen = fa.size((1, 2, 192), (8, 16, 1024))
    shape = batch, seqlen, heads, 64
    zeros, ones = fa.xp.zeros(shape, DTYPES["bfloat16"]), fa.xp.asarray(np.ones(shape, DTYPES["bfloat16"]))
    out, _ = fa.call(zeros, zeros, ones, dropout_p=p, dropout_seed=11, out_dtype=np.float32)
    out = host(out[..., 0]).astype(float)
    kept = out * seqlen * threshold(p) / 65536
    np.testing.assert_allclose(kept, np.rint(kept), atol=0.01)
    rate, sigma = 1 - kept.mean() / seqlen, np.sqrt(p * (1 - p) / (out.size * seqlen))
    assert abs(rate - (1 - threshold(p) / 65536)) < 5 * sigma
    assert abs(threshold(p) / 65536 - (1 - p)) <= 2**-17
    assert abs(out.mean() - 1) < max(1e-3, 5 * sigma / (1 - p))


def test_rate_of_zero_and_rates_that_are_none(fa):
    """B040: 0 is no dropout, to the bit; what is no probability, or drops everything, is refused."""
    q, k, v = example("bfloat16", causal=True).arrays(fa.xp)
    fa.same_bits(fa.call(q, k, v, dropout_p=0.0, dropout_seed=3), fa.call(q, k, v))
    for p in (-0.1, 1.0, 1.5, np.nan, np.inf, 1 - 2**-20):
        with pytest.raises(ValueError, match="dropout_p"):
            cupy_fa2.flash_attention(q, k, v, dropout_p=p, dropout_seed=3)
