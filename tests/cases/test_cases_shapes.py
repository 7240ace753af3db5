"""Cases (see test_cases.py): sizes: none, short, odd, more than 32 bits can count; and heads in groups."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.testing import DTYPES, assert_attention_close, host, random_qkv


@pytest.mark.parametrize(("num_heads", "num_heads_k"), sampled_rows([(8, 2), (14, 2), (64, 8), (8, 1)], (14, 2)))
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


@pytest.mark.parametrize(("num_heads", "num_heads_k"), sampled_rows([(64, 8), (6, 2), (12, 3), (14, 2)], (12, 3)))
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


@pytest.mark.parametrize("head_dim", sampled([1, 7, 12, 63, 64, 120, 224, 256, 257, 512], 7, 64, 257, 512))
def test_every_head_dim_is_right_or_refused(fa, head_dim):
    """B088."""
    for dtype in fa.size([list(DTYPES)[head_dim % 2]], DTYPES):
        e = example(dtype, fa.size(1, 3), 8, 8, fa.size(1, 5), head_dim)
        if head_dim <= 256:
            fa.check(e if head_dim > 7 else example(dtype, 1, 65, 8, 1, head_dim))
        else:
            with pytest.raises(ValueError, match="head_dim"):
                cupy_fa2.flash_attention(*e.arrays(fa.xp))
