"""Cases in which attention kernels in production have been wrong, as far as today's call can express them.

Each test names the ids of its cases in its docstring; `PENDING` says what the others, or the rest of these,
wait for.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import example, gpu_count

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.testing import (
    DTYPES,
    STORAGES,
    Storage,
    assert_attention_close,
    host,
    poisoned,
    random_qkv,
)

KNOWN = [
    f"B{number:03}"
    for number in (
        *range(1, 13), *range(14, 28), 29, 32, *range(34, 38), 39, 40, 41, 43, 45, *range(47, 51), 52, 53, 54,
        58, 59, 60, 62, 63, 65, 67, 69, 70, 71, 73, 75, 76, 77, 81, 82, 84, 85, 87, 88, 89,
    )
]  # fmt: skip

# Case, or the rest of a case that is tested below in part: the feature it waits for.
PENDING = {
    "B001": "backward, varlen, window",
    "B002": "backward",
    "B003": "backward",
    "B004": "backward, varlen, kvcache",
    "B005": "backward, varlen, kvcache",
    "B006": "kvcache, paged",
    "B007": "kvcache, varlen",
    "B008": "paged varlen",
    "B009": "backward, split-KV",
    "B010": "backward",
    "B011": "varlen, backward",
    "B012": "varlen",
    "B014": "varlen, paged, split-KV",
    "B015": "backward, varlen, kvcache",
    "B016": "varlen, kvcache, paged",
    "B017": "dropout, backward",
    "B018": "backward, varlen",
    "B019": "paged",
    "B020": "kvcache",
    "B021": "softcap",
    "B022": "window",
    "B023": "window",
    "B024": "backward",
    "B025": "backward, dropout, kvcache",
    "B026": "varlen, paged, split-KV",
    "B027": "backward",
    "B029": "backward, split-KV",
    "B032": "varlen, kvcache, backward",
    "B034": "kvcache",
    "B035": "backward",
    "B036": "varlen",
    "B037": "dropout",
    "B039": "dropout",
    "B040": "dropout",
    "B041": "paged, split-KV",
    "B043": "window, paged",
    "B045": "paged",
    "B047": "paged",
    "B048": "paged",
    "B049": "paged",
    "B050": "kvcache",
    "B052": "ALiBi",
    "B053": "ALiBi",
    "B054": "backward",
    "B058": "backward",
    "B059": "kvcache, paged",
    "B060": "backward, kvcache",
    "B062": "window",
    "B063": "window",
    "B065": "backward",
    "B067": "window, softcap, ALiBi, dropout",
    "B069": "varlen",
    "B070": "varlen",
    "B071": "varlen, paged, backward",
    "B073": "backward, varlen",
    "B075": "kvcache",
    "B089": "backward, varlen, kvcache",
}


def test_every_case_is_tested_or_pending():
    tested = set()
    for name, function in globals().items():
        if name.startswith("test_") and function.__doc__:
            tested |= set(re.findall(r"\bB\d{3}\b", function.__doc__))
    assert tested | set(PENDING) == set(KNOWN)
    assert len(KNOWN) == 65
    assert all(PENDING.values())


# --- numbers ------------------------------------------------------------------------------------------------


def shifted_scores(e, constant, xp):
    """Inputs whose every score is about `constant`: the first feature carries it."""
    q, k, v = random_qkv(
        *(e.batch, e.seqlen_q, e.seqlen_k, e.num_heads, e.head_dim), num_heads_k=e.num_heads_k, dtype=e.dtype
    )
    q, k = ((x.astype(np.float32) * 0.1).astype(x.dtype) for x in (q, k))
    q[..., 0], k[..., 0] = 1, constant * math.sqrt(e.head_dim)
    return tuple(map(xp.asarray, (q, k, v)))


@pytest.mark.parametrize("constant", [-120, -1000])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(88, 448), (200, 130)])
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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("seqlen_k", [1, 64, 300])
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


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("used", [1, 13, 32, 48, 64, 96])
def test_unused_rows_of_a_buffer(fa, used, poison):
    """B006: keys and values cut out of a longer buffer whose other rows are NaN or infinite."""
    q, k, v = random_qkv(fa.size(1, 4), 1, used, fa.size(2, 8), 64, num_heads_k=2, dtype="bfloat16")
    held = Storage(pad=(0, 128 - used, 0, 0))
    poisoned_kv = [poisoned(x.shape, x.dtype, held, values=x, poison=poison, xp=fa.xp) for x in (k, v)]
    clean_kv = [poisoned(x.shape, x.dtype, held, values=x, poison=0, xp=fa.xp) for x in (k, v)]
    q = fa.xp.asarray(q)
    result = fa.call(q, *poisoned_kv)
    fa.same_bits(result, fa.call(q, *clean_kv))
    assert np.isfinite(host(result[0]).astype(float)).all()


@pytest.mark.parametrize(("num_heads", "num_heads_k"), [(8, 2), (14, 2), (64, 8), (8, 1)])
def test_single_query_of_grouped_heads(fa, num_heads, num_heads_k):
    """B007: every head of a group gets its output and its lse; also as many queries as heads in a group."""
    if not fa.on_gpu:
        num_heads, num_heads_k = num_heads // num_heads_k, 1
    for batch in fa.size([1], [1, 3, 17]):
        for seqlen_q in (1, num_heads // num_heads_k):
            for causal in fa.size([True], [False, True]):
                for dtype in fa.size(["bfloat16"], DTYPES):
                    sizes = batch, seqlen_q, fa.size(70, 300), num_heads, 128
                    fa.check(example(dtype, *sizes, num_heads_k=num_heads_k, causal=causal))


@pytest.mark.parametrize("seqlen_k", [0, 2, 100])
@pytest.mark.parametrize("seqlen_q", [5, 130])
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


@pytest.mark.parametrize(("num_heads", "num_heads_k"), [(64, 8), (6, 2), (12, 3), (14, 2)])
def test_kv_head_of_a_query_head(fa, num_heads, num_heads_k):
    """B054: h // group, not h % num_heads_k; every kv head has a value of its own."""
    if not fa.on_gpu and num_heads > 14:
        pytest.skip("many heads are for the GPU")
    q, k, v = random_qkv(1, fa.size(5, 256), fa.size(9, 256), num_heads, fa.size(16, 128), num_heads_k=num_heads_k)
    v[...] = np.arange(num_heads_k)[:, None]
    out, lse = fa.call(*map(fa.xp.asarray, (q, k, v)))
    expected = np.repeat(np.arange(num_heads_k), num_heads // num_heads_k)
    np.testing.assert_array_equal(host(out).astype(float), np.broadcast_to(expected[:, None], q.shape))
    assert_attention_close(out, lse, q, k, v)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loudness", [1, 4])
def test_agreed_measure_of_accuracy(fa, loudness, dtype):
    """B073: shapes at which strict tolerances were reported as failures, by the tolerance rule."""
    shapes = [(2, 256, 2, 64, False), (1, 900, 8, 64, False), (4, 10, 8, 64, True), (1, 256, 2, 256, True)]
    small = [(1, 130, 1, 64, False), (2, 10, 2, 64, True), (1, 70, 1, 256, True)]
    for batch, seqlen, heads, head_dim, causal in fa.size(small, shapes):
        q, k, v = random_qkv(batch, seqlen, seqlen, heads, head_dim, dtype=dtype)
        q, k, v = (fa.xp.asarray(x * np.array(f, x.dtype)) for x, f in ((q, loudness), (k, loudness), (v, 10)))
        assert_attention_close(*fa.call(q, k, v, causal=causal), q, k, v, causal=causal)


def test_short_sequences_at_the_end_of_an_allocation(fa):
    """B089: every pair of short lengths, the next bytes NaN."""
    full = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129]
    pairs = [(m, n) for m in full for n in full]
    if not fa.on_gpu:
        pairs = [(n, full[(7 * i + 3) % len(full)]) for i, n in enumerate(full)] + [(12, 12), (9, 9), (1, 20)]
    for index, (m, n) in enumerate(pairs):
        for dtype in fa.size([list(DTYPES)[index % 2]], DTYPES):
            fa.check(example(dtype, 1, m, n, fa.size(1, 3), 64, causal=index % 3 == 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k"),
    [(9, 20, 12, 12), (1, 20, 9, 9), (4, 32, 1, 20), (1, 8, 1, 512)],
)
def test_short_sequences_as_reported(cp, batch, heads, seqlen_q, seqlen_k, head_dim, dtype):
    """B089."""
    q, k, v = example(dtype, batch, seqlen_q, seqlen_k, heads, head_dim).arrays(cp)
    out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True)
    assert_attention_close(out, lse, q, k, v)


# --- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (0, 2)])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"),
    [(0, 64, 40), (2, 0, 40), (2, 64, 0), (2, 0, 0), (0, 0, 0), (2, 0, 4096)],
)
def test_nothing_to_do(fa, batch, seqlen_q, seqlen_k, heads, causal):
    """B032: empty axes give empty or zero outputs of the right shape and no error afterwards."""
    for dtype in DTYPES:
        fa.check(example(dtype, batch, seqlen_q, seqlen_k, heads[0], 64, num_heads_k=heads[1], causal=causal))
    if fa.on_gpu:
        fa.xp.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [17476, 17477])
def test_offsets_beyond_32_bits(cp, seqlen):
    """B003: the last sample of 2^31 elements and more, alone and in its place."""
    x = cp.zeros((16, seqlen, 64, 128), DTYPES["bfloat16"])
    rng = np.random.default_rng(0)
    for b in (0, 15):
        for h in (0, 63):
            x[b, :, h] = cp.asarray(rng.standard_normal((seqlen, 128), np.float32).astype(x.dtype))
    out, lse = cupy_fa2.flash_attention(x, x, x, causal=True, return_lse=True)
    alone = x[15:, :, 63:].copy()
    alone_out, alone_lse = cupy_fa2.flash_attention(alone, alone, alone, causal=True, return_lse=True)
    for a, b in ((out[15:, :, 63:], alone_out), (lse[15:, 63:], alone_lse)):
        assert host(a).tobytes() == host(b).tobytes()
    rows = [(b, h, i) for b in (0, 15) for h in (0, 63) for i in rng.integers(0, seqlen, 16)]
    assert_attention_close(out, lse, x, x, x, rows=rows, causal=True)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_strides_beyond_32_bits(fa, name):
    """B003: two samples that lie more than 2^31 elements apart, most of the memory between never touched."""
    e = example("bfloat16", 2, 20, 40, 1, 64)
    given = dict(zip("qkv", e.arrays(fa.xp), strict=True))
    expected = fa.call(**given)
    x = given[name]
    gap = 2**31 + 64
    buffer = fa.xp.empty(gap + x[0].size, x.dtype)
    apart = fa.xp.lib.stride_tricks.as_strided(buffer, x.shape, (2 * gap, *x[0].copy().strides))
    apart[...] = x
    given[name] = apart
    fa.same_bits(fa.call(**given), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (65536, 1), (70000, 1), (1, 65536), (1, 70000), (300, 300)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "head_dim"), [(16, 16, 80), (1, 10, 16)])
def test_more_than_65535(cp, batch, heads, seqlen_q, seqlen_k, head_dim):
    """B004: batch, heads and their product beyond what a grid's y and z hold; unlaunched blocks leave NaN."""
    q, k, v = random_qkv(batch, seqlen_q, seqlen_k, heads, head_dim, xp=cp)
    out = cp.full(q.shape, np.nan, q.dtype)
    _, lse = cupy_fa2.flash_attention(q, k, v, out=out, return_lse=True)
    assert not bool(cp.isnan(out).any())
    assert not bool(cp.isnan(lse).any())
    picked = [n for n in (0, 65534, 65535, batch * heads - 1) if n < batch * heads]
    rows = [(n // heads, n % heads, i) for n in picked for i in range(seqlen_q)]
    assert_attention_close(out, lse, q, k, v, rows=rows)


@pytest.mark.parametrize("causal", [False, True])
def test_sample_of_a_batch_is_the_sample_alone(fa, causal):
    """B075: bit for bit."""
    e = example("bfloat16", fa.size(3, 8), fa.size(40, 500), fa.size(130, 3000), fa.size(1, 12), 64, causal=causal)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.call(q, k, v, causal=causal)
    for b in range(e.batch):
        alone = fa.call(*(x[b : b + 1].copy() for x in (q, k, v)), causal=causal)
        fa.same_bits(alone, (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.gpu
def test_350000_keys(cp):
    """B075: 2.15e9 elements of keys, sampled rows against float64."""
    batch, seqlen_k, heads, head_dim = 8, 350_000, 12, 64
    q, k, v = random_qkv(1, 500, seqlen_k, heads, head_dim, dtype="bfloat16", xp=cp)
    q, k, v = (cp.concatenate([x] * batch) for x in (q, k, v))
    q[-1] = q[-1, ::-1].copy()
    out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True)
    alone = cupy_fa2.flash_attention(q[-1:].copy(), k[-1:].copy(), v[-1:].copy(), return_lse=True)
    assert host(alone[0]).tobytes() == host(out[-1:]).tobytes()
    assert host(alone[1]).tobytes() == host(lse[-1:]).tobytes()
    assert_attention_close(out, lse, q, k, v, rows=[(b, h, i) for b in (0, 7) for h in (0, 11) for i in (0, 250, 499)])


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_views_of_one_array_or_all(fa, storage):
    """B005: each of q, k and v alone in every storage, and all of them: the bits of contiguous copies."""
    batch, heads, heads_k, seqlen_q, seqlen_k = fa.size((2, 2, 1, 20, 33), (2, 8, 2, 200, 333))
    for head_dim in fa.size([24], [64, 128, 256]):
        sizes = batch, seqlen_q, seqlen_k, heads, head_dim
        plain = example("bfloat16", *sizes, num_heads_k=heads_k).arrays(fa.xp)
        for which in fa.size([(0, 1, 2)], [(0,), (1,), (2,), (0, 1, 2)]):
            arrays = list(plain)
            for i in which:
                arrays[i] = poisoned(plain[i].shape, plain[i].dtype, storage, values=plain[i], xp=fa.xp)
            fa.same_bits(fa.call(*arrays), fa.call(*(fa.xp.ascontiguousarray(x) for x in arrays)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_and_values_of_different_layouts(fa, head_dim):
    """B029: k addressed by v's strides is right only while both lie alike."""
    seqlens = fa.size([(33, 65), (1, 65)], [(513, 513), (1, 513)])
    for seqlen_q, seqlen_k in seqlens:
        q, k, v = example("float16", 2, seqlen_q, seqlen_k, fa.size(1, 16), head_dim).arrays(fa.xp)
        expected = fa.call(q, k, v)
        double = [Storage(pad=(0, 0, 0, head_dim)), Storage(pad=(0, 0, 0, head_dim))]
        for storage_k, storage_v in [
            ("contiguous", "heads first"),
            ("every other row", "contiguous"),
            double,
        ]:
            placed = [poisoned(x.shape, x.dtype, s, values=x, xp=fa.xp) for x, s in ((k, storage_k), (v, storage_v))]
            fa.same_bits(fa.call(q, *placed), expected)


@pytest.mark.parametrize("stride", [0, 1, 3, 2**40 + 1, -7])
@pytest.mark.parametrize("batch", [1, 2])
def test_strides_of_axes_of_length_one(fa, batch, stride):
    """B059: they mean nothing, and array libraries put anything there."""
    for seqlen_q in (1, 7):
        q, k, v = example("bfloat16", batch, seqlen_q, fa.size(70, 130), fa.size(2, 8), 128, num_heads_k=1).arrays(
            fa.xp
        )
        expected = fa.call(q, k, v)
        odd = []
        for x in (q, k, v):
            copy = fa.xp.ascontiguousarray(x)
            strides = [2 * stride if n == 1 else s for n, s in zip(copy.shape, copy.strides, strict=True)]
            odd.append(fa.xp.lib.stride_tricks.as_strided(copy, copy.shape, strides))
        fa.same_bits(fa.call(*odd), expected)
        for b in range(batch):
            alone = fa.call(*(x[b : b + 1] for x in odd))
            fa.same_bits(alone, (expected[0][b : b + 1], expected[1][b : b + 1]))


@pytest.mark.parametrize("head_dim", [64, 40, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_starts_and_rows_off_16_bytes(fa, dtype, head_dim):
    """B060: 2 and 6 bytes off, and rows one element longer, for each array and out."""
    q, k, v = example(dtype, fa.size(1, 2), fa.size(33, 70), fa.size(40, 90), fa.size(1, 3), head_dim).arrays(fa.xp)
    expected = fa.call(q, k, v)
    for storage in (Storage(offset=1), Storage(offset=3), Storage(pad=(0, 0, 0, 1))):
        for odd in fa.size(["qkv"], ["q", "k", "v", "qkv"]):
            arrays = [
                poisoned(x.shape, x.dtype, storage, values=x, xp=fa.xp) if name in odd else x
                for name, x in zip("qkv", (q, k, v), strict=True)
            ]
            out = poisoned(q.shape, q.dtype, storage, xp=fa.xp)
            fa.same_bits((out, fa.call(*arrays, out=out)[1]), expected)


# --- arguments ----------------------------------------------------------------------------------------------


def test_value_longer_than_key(fa):
    """B070: five keys and six values."""
    q, k, v = example(seqlen_k=6).arrays(fa.xp)
    with pytest.raises(ValueError, match=r"\bv\b"):
        cupy_fa2.flash_attention(q, k[:, :5], v)


def test_byte_swapped_data(fa):
    """B076: refused. (`cupy.asarray` keeps the bytes: the numbers are others before anyone can see it.)"""
    q, k, v = example(seqlen_q=4, seqlen_k=4, num_heads=1).arrays()
    swapped = q.astype(">f2")
    with pytest.raises(TypeError, match=r"\bq\b"):
        cupy_fa2.flash_attention(swapped, k, v)
    if fa.on_gpu:
        with pytest.raises(TypeError):
            cupy_fa2.flash_attention(swapped, fa.xp.asarray(k), fa.xp.asarray(v))


class ForeignDLPack:
    """A device array of another library, by DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class ForeignInterface:
    """A device array of another library, by `__cuda_array_interface__`."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self._array = array


def test_bfloat16_of_numpy(fa):
    """B077: `ml_dtypes.bfloat16` is taken; its bits as uint16 are not silently taken for numbers."""
    e = example("bfloat16", seqlen_q=33, seqlen_k=65)
    out, _ = fa.check(e)
    assert out.dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="uint16"):
        cupy_fa2.flash_attention(*(x.view(np.uint16) for x in e.arrays(fa.xp)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [("float16", ForeignDLPack), ("bfloat16", ForeignDLPack), ("float16", ForeignInterface)],
)
def test_arrays_of_other_libraries(cp, dtype, wrap):
    """B077: the same bits in give the same bits out, as CuPy arrays."""
    q, k, v = example(dtype, seqlen_q=33, seqlen_k=65).arrays(cp)
    expected = cupy_fa2.flash_attention(q, k, v)
    out = cupy_fa2.flash_attention(wrap(q), wrap(k), wrap(v))
    assert isinstance(out, cp.ndarray)
    assert out.dtype == expected.dtype
    assert host(out).tobytes() == host(expected).tobytes()


@pytest.mark.gpu
def test_bfloat16_by_the_array_interface_is_refused(cp):
    """B077: the interface loses the type; an error says so rather than reading the bits as something else."""
    q, k, v = example("bfloat16").arrays(cp)
    with pytest.raises(TypeError, match=r"\bq\b"):
        cupy_fa2.flash_attention(ForeignInterface(q), ForeignInterface(k), ForeignInterface(v))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.complex64])
def test_unsupported_dtypes(fa, dtype):
    """B088: a TypeError that names what was given and what may be."""
    arrays = (fa.xp.ones((1, 8, 1, 8), dtype) for _ in range(3))
    with pytest.raises(TypeError, match="float16") as caught:
        cupy_fa2.flash_attention(*arrays)
    assert np.dtype(dtype).name in str(caught.value)


@pytest.mark.parametrize("head_dim", [1, 7, 12, 63, 64, 120, 224, 256, 257, 512])
def test_every_head_dim_is_right_or_refused(fa, head_dim):
    """B088."""
    for dtype in fa.size([list(DTYPES)[head_dim % 2]], DTYPES):
        e = example(dtype, fa.size(1, 3), 8, 8, fa.size(1, 5), head_dim)
        if head_dim <= 256:
            fa.check(e if head_dim > 7 else example(dtype, 1, 65, 8, 1, head_dim))
        else:
            with pytest.raises(ValueError, match="head_dim"):
                cupy_fa2.flash_attention(*e.arrays(fa.xp))


@pytest.mark.parametrize("scale", [0.5, 2, np.float64(0.25), np.float32(0.25), 0, -1.0])
def test_softmax_scales_of_every_kind(fa, scale):
    """B088: 0 is the mean of the values, a negative one turns the order."""
    e = example(seqlen_q=8, seqlen_k=8, num_heads=1, softmax_scale=scale)
    out, _ = fa.check(e)
    v = host(e.arrays(fa.xp)[2]).astype(float)
    if scale == 0:
        np.testing.assert_allclose(
            host(out).astype(float), np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape), atol=2e-3
        )


# --- streams, devices, graphs -------------------------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("external", [False, True])
def test_runs_on_the_current_stream(cp, external):
    """B009: inputs that are written late on a non-blocking stream are awaited, in each of 200 calls."""
    q, k, v = random_qkv(2, 512, 512, 8, 64, xp=cp)
    expected = [host(x).tobytes() for x in cupy_fa2.flash_attention(q, k, v, return_lse=True)]
    spin = cp.RawKernel(SPIN, "spin")
    stream = cp.cuda.Stream(non_blocking=True)
    used = cp.cuda.Stream.from_external(stream) if external else stream
    for repeat in range(200):
        late = [cp.zeros_like(x) for x in (q, k, v)]
        cp.cuda.Device().synchronize()
        with used:
            spin((1,), (1,), (np.int64(50_000_000 if repeat < 2 else 200_000),))
            for there, x in zip(late, (q, k, v), strict=True):
                cp.copyto(there, x)
            result = [x.copy() for x in cupy_fa2.flash_attention(*late, return_lse=True)]
        used.synchronize()
        assert [host(x).tobytes() for x in result] == expected, f"call {repeat}"


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_the_arrays(cp):
    """B010: ones on device 1, with either device current."""
    with cp.cuda.Device(1):
        x = cp.ones((4, 16, 32, 64), np.float16)
    for current in (0, 1):
        with cp.cuda.Device(current):
            out, lse = cupy_fa2.flash_attention(x, x, x, softmax_scale=1, return_lse=True)
            assert cp.cuda.runtime.getDevice() == current
        assert out.device.id == lse.device.id == 1
        assert float(host(out).astype(float).sum()) == 131072
        np.testing.assert_allclose(host(lse), 64 + math.log(16), rtol=1e-6)


@pytest.mark.gpu
def test_captured_in_a_graph(cp):
    """B025: warm, the replay computes on what the arrays then hold."""
    q, k, v = random_qkv(2, 2048, 2048, 12, 64, xp=cp)
    out = cp.empty_like(q)
    cupy_fa2.flash_attention(q, k, v, causal=True, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupy_fa2.flash_attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
    for seed in (1, 2):
        for there, x in zip((q, k, v), random_qkv(2, 2048, 2048, 12, 64, seed=seed, xp=cp), strict=True):
            there[...] = x
        eager = host(cupy_fa2.flash_attention(q, k, v, causal=True)).tobytes()
        out[...] = np.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert host(out).tobytes() == eager


COLD_CAPTURE = """
import cupy as cp, numpy as np, cupy_fa2
q = cp.ones((1, 64, 1, 64), np.float16)
out = cp.zeros_like(q)
stream = cp.cuda.Stream(non_blocking=True)
cp.cuda.Device().synchronize()
with stream:
    stream.begin_capture()
    try:
        cupy_fa2.flash_attention(q, q, q, out=out)
        error = None
    except Exception as caught:
        error = str(caught)
    graph = stream.end_capture()
if error is None:
    graph.launch(stream)
    stream.synchronize()
    assert bool((out == 1).all()), "the graph did nothing"
else:
    assert "captur" in error.lower(), error
cupy_fa2.flash_attention(q, q, q, out=out)
assert bool((out == 1).all())
"""


@pytest.mark.gpu
def test_captured_cold(cp, tmp_path):
    """B025: the first call of a process inside a capture works, or says what to do; the process survives."""
    run_python(COLD_CAPTURE, tmp_path)


# --- installation and the compiler --------------------------------------------------------------------------

FIRST_CALL = """
import sys
import numpy as np, cupy_fa2
q = np.ones((1, 16, 1, 16), np.float16)
out = cupy_fa2.flash_attention(q, q, q)
assert bool((out == 1).all())
"""


def run_python(code, cache, *, check=True, **environment):
    """Run code in a fresh interpreter with a cache of its own."""
    root = str(Path(cupy_fa2.__file__).resolve().parents[1])
    env = {**os.environ, "CUPY_FA2_CACHE_DIR": str(cache), "PYTHONPATH": root, **environment}
    # Not here: the current folder comes first in the path of `python -c`.
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def entries(cache):
    return [path for path in Path(cache).rglob("*") if path.is_file()]


def test_sources_include_nothing_but_each_other():
    """B081: no header of a toolkit is needed to compile, hence none to find."""
    from cupy_fa2.compile import source_root

    files = [path for path in source_root().rglob("*") if path.suffix in (".cuh", ".cu", ".h")]
    assert files
    for path in files:
        for line in re.findall(r"^\s*#\s*include\s+(.*)", path.read_text(), re.MULTILINE):
            target = re.fullmatch(r'"([^"]+)"(?:\s*//.*)?', line.strip())
            assert target, f"{path}: #include {line}"
            assert target[1] == "params.cuh" or (source_root() / target[1]).is_file(), f"{path}: {line}"


def test_first_use_by_many_at_once(tmp_path):
    """B082: processes and threads that start together on an empty cache; no temporary file stays."""
    threads = (
        FIRST_CALL.replace("out = ", "import threading\nout = ")
        + """
results = []
workers = [
    threading.Thread(target=lambda: results.append(cupy_fa2.flash_attention(q, q, q, causal=True)))
    for _ in range(4)
]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert len(results) == 4 and all((r == 1).all() for r in results)
"""
    )
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run_python, threads, tmp_path) for _ in range(4)]:
            done.result()
    assert entries(tmp_path)
    assert not [path for path in entries(tmp_path) if "tmp" in path.name]


def test_damaged_cache_entries_are_rebuilt(tmp_path):
    """B082: emptied, cut in half, one byte changed."""
    run_python(FIRST_CALL, tmp_path)
    whole = {path: path.read_bytes() for path in entries(tmp_path)}
    assert whole
    for damage in (
        lambda blob: b"",
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob[: len(blob) // 2] + bytes([blob[len(blob) // 2] ^ 1]) + blob[len(blob) // 2 + 1 :],
    ):
        for path, blob in whole.items():
            path.write_bytes(damage(blob))
        run_python(FIRST_CALL, tmp_path)
        assert {path: path.read_bytes() for path in entries(tmp_path)} == whole


def test_cache_that_cannot_be_written(tmp_path):
    """B082: a folder that cannot be made; everything works from memory."""
    (tmp_path / "file").write_text("")
    run_python(FIRST_CALL, tmp_path / "file" / "cache")


def test_changed_header_is_seen(tmp_path):
    """B084: another text in an included file is another kernel, although the unit that includes it stays."""
    package = Path(cupy_fa2.__file__).resolve().parent
    from cupy_fa2.compile import source_root

    shutil.copytree(package, tmp_path / "cupy_fa2", ignore=shutil.ignore_patterns("__pycache__", "cuda_src"))
    shutil.copytree(source_root(), tmp_path / "cuda_src")
    cache = tmp_path / "cache"
    here = {"PYTHONPATH": str(tmp_path)}
    run_python(FIRST_CALL, cache, **here)
    header = tmp_path / "cuda_src" / "core" / "softmax.cuh"
    text = header.read_text()
    header.write_text(text + "\n#error this header has changed\n")
    done = run_python(FIRST_CALL, cache, check=False, **here)
    assert done.returncode != 0
    assert "this header has changed" in done.stderr
    header.write_text(text)
    run_python(FIRST_CALL, cache, **here)


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (7, 5)])
def test_gpus_that_are_too_old(monkeypatch, capability):
    """B085: one error that names the card and the minimum."""
    import cupy

    from cupy_fa2 import device

    properties = {"name": b"Old Card", "major": capability[0], "minor": capability[1]}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: properties)
    device.cuda_device.cache_clear()
    with pytest.raises(RuntimeError, match=r"Old Card.*8\.0"):
        device.cuda_device(0)
    device.cuda_device.cache_clear()


@pytest.mark.parametrize("name", ["A100", "RTX 3090", "RTX 4090", "H200", "B200", "RTX 5090"])
def test_known_gpus_get_machine_code_that_fits_them(name):
    """B085: an ELF file for the card's own architecture, within its shared memory."""
    from cupy_fa2.compile import build
    from cupy_fa2.device import named_device
    from cupy_fa2.plan import plan_forward
    from cupy_fa2.problem import Problem

    device = named_device(name)
    for head_dim in (64, 256):
        q = np.zeros((1, 300, 2, head_dim), np.float16)
        plan = plan_forward(Problem.from_arrays(q, q, q, causal=True, addresses=(0, 0, 0, 0)), device)
        binary = build(plan.spec, device.target)
        assert binary.cubin.startswith(b"\x7fELF")
        assert plan.spec.tile.shared_bytes <= device.shared_per_block


NO_CUPY = """
import sys
sys.modules["cupy"] = None
import numpy as np, cupy_fa2, cupy_fa2.testing
q = np.ones((1, 16, 1, 16), np.float16)
try:
    cupy_fa2.flash_attention(q, q, q)
except Exception as error:
    assert "pip install" in str(error) and "cupy" in str(error), error
else:
    raise SystemExit("it compiled without CuPy?")
"""


def test_import_without_cupy(tmp_path):
    """B087: importing needs neither CuPy nor a GPU; a call then says what to install."""
    run_python(NO_CUPY, tmp_path)


def test_import_without_a_gpu(tmp_path):
    """B087: no device is visible, and NumPy arrays run all the same."""
    run_python(FIRST_CALL, tmp_path, CUDA_VISIBLE_DEVICES="")


FORK = """
import os, sys
import cupy_fa2
child = os.fork()
if child == 0:
    import cupy as cp, numpy as np
    q = cp.ones((1, 16, 1, 16), np.float16)
    os._exit(0 if bool((cupy_fa2.flash_attention(q, q, q) == 1).all()) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.gpu
def test_import_then_fork(cp, tmp_path):
    """B087: importing makes no CUDA context, so a forked child may make its own."""
    run_python(FORK, tmp_path)
