"""Cases (see test_cases.py): padded sequences, `seqlens_q` and `seqlens_k`.

Reported of packed sequences and of caches; lengths of a padded batch ask the same of the kernel.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.testing import DTYPES, assert_attention_close, host, poisoned, random_qkv


def filled(x, lengths, value):
    """A copy whose rows at or beyond each batch element's length are `value`."""
    x = x.copy()
    for b, length in enumerate(lengths):
        x[b, length:] = value
    return x


@pytest.mark.parametrize("poison", sampled(POISONS := [np.nan, np.inf, -np.inf], POISONS[0]))
def test_unused_rows_of_each_sample(fa, poison):
    """B006: as with zeros in their place, bit for bit."""
    for size, used in ((128, (32, 64, 96, 48)), (128, (1, 13, 0, 128)), (3, (1, 3))):
        q, k, v = random_qkv(len(used), 1, size, fa.size(2, 8), 64, num_heads_k=fa.size(1, 2), dtype="bfloat16")
        if size == 3:
            q[...] = 0.5
        results = [
            fa.call(*(fa.xp.asarray(x) for x in (q, filled(k, used, value), filled(v, used, value))), seqlens_k=used)
            for value in (poison, 0)
        ]
        fa.same_bits(*results)
        assert np.isfinite(host(results[0][0]).astype(float)).all()


@pytest.mark.parametrize(("num_heads", "num_heads_k"), sampled_rows([(8, 2), (14, 2), (64, 8), (8, 1)], (8, 2)))
def test_single_query_of_grouped_heads_over_mixed_lengths(fa, num_heads, num_heads_k):
    """B007: every head of every sample, with lse."""
    if not fa.on_gpu and num_heads > 8:
        pytest.skip("many heads are for the GPU")
    lengths = fa.size((5, 70, 130), (5, 300, 4097))
    for causal in fa.size([True], [False, True]):
        sizes = 3, 1, max(lengths), num_heads, 128
        fa.check(example("bfloat16", *sizes, num_heads_k=num_heads_k, causal=causal, seqlens_k=lengths))


@pytest.mark.parametrize("loudness", [3, 5])
def test_many_queries_over_one_key(fa, loudness):
    """B011: the last query of each sample returns the only value, the others see nothing."""
    lengths = (76, 34, 146)
    for dtype in fa.size(["bfloat16"], DTYPES):
        q, k, v = (loudness * x for x in random_qkv(3, 146, 3, 1, 32, dtype=dtype))
        arrays = (fa.xp.asarray(x) for x in (filled(q, lengths, np.nan), filled(k, [1] * 3, np.nan), v))
        out, lse = (host(x) for x in fa.call(*arrays, causal=True, seqlens_q=lengths, seqlens_k=[1] * 3))
        expected = np.zeros_like(out)
        for b, length in enumerate(lengths):
            expected[b, length - 1] = v[b, 0]
            assert np.isfinite(lse[b, 0, length - 1])
            lse[b, 0, length - 1] = -np.inf
        np.testing.assert_array_equal(out, expected)
        assert np.all(lse == -np.inf)


@pytest.mark.parametrize(
    ("heads", "heads_k", "head_dim", "causal", "scale"),
    sampled_rows([(9, 3, 64, True, 1.0), (21, 7, 120, False, 120**0.5)], (9, 3, 64, True, 1.0)),
)
def test_empty_samples_among_single_queries(fa, heads, heads_k, head_dim, causal, scale):
    """B012: with room for one query or two; and a batch of which one token exists."""
    heads, heads_k, head_dim = fa.size((3, 1, head_dim // 2), (heads, heads_k, head_dim))
    options = {"causal": causal, "softmax_scale": scale, "num_heads_k": heads_k}
    lengths = {"seqlens_q": (1, 0, 1), "seqlens_k": (3, 0, 5)}
    two = example("bfloat16", 3, 2, 5, heads, head_dim, **options, **lengths)
    q, k, v = two.arrays(fa.xp)
    out, lse = fa.check(two)
    one = fa.call(q[:, :1], k, v, causal=causal, softmax_scale=scale, **lengths)
    fa.same_bits(one, (out[:, :1], lse[..., :1]))
    lengths = {"seqlens_q": (0, 0, 0, 1), "seqlens_k": (0, 0, 0, 1)}
    fa.check(example("bfloat16", 4, 1, 1, heads, head_dim, **options, **lengths))


def test_queries_beyond_their_length(fa):
    """B036: their rows of out are 0, of lse -inf, also in an out that was given and held NaN."""
    used = fa.size((10, 0, 20), (100, 0, 200))
    e = example("bfloat16", 3, fa.size(30, 512), fa.size(40, 512), fa.size(1, 8), 64, seqlens_q=used)
    out = poisoned((3, e.seqlen_q, e.num_heads, 64), DTYPES[e.dtype], xp=fa.xp)
    _, lse = fa.check(e, out=out)
    for b, length in enumerate(used):
        assert not host(out)[b, length:].astype(float).any()
        assert np.all(host(lse)[b, :, length:] == -np.inf)


def test_nan_stays_in_its_sample(fa):
    """B071: NaN beyond a sample's keys is not there, NaN all over one sample leaves the others alone."""
    seqlen, length = fa.size((64, 40), (256, 107))
    q, k, v = random_qkv(2, length, seqlen, fa.size(2, 32), 128, num_heads_k=fa.size(1, 8), dtype="bfloat16")
    lengths = (length, length)
    options = {"causal": True, "seqlens_k": lengths}
    expected = fa.call(*(fa.xp.asarray(filled(x, lengths, 0)) for x in (q, k, v)), **options)
    clean = fa.call(*(fa.xp.asarray(filled(x, lengths, np.nan)) for x in (q, k, v)), **options)
    fa.same_bits(clean, expected)
    q[1], k[1], v[1] = np.nan, np.nan, np.nan
    loud = fa.call(*map(fa.xp.asarray, (q, k, v)), **options)
    fa.same_bits(*((out[:1], lse[:1]) for out, lse in (loud, expected)))
    assert np.isnan(host(loud[0])[1].astype(float)).all()
    assert np.isnan(host(loud[1])[1]).all()


@pytest.mark.parametrize("heads_k", sampled([4, 1], 1))
@pytest.mark.parametrize("chunk", sampled([1, 2, 5, 64], 5))
def test_new_tokens_after_ragged_beginnings(fa, chunk, heads_k):
    """B050: sequences that grow by chunks come out as the whole run does; the newest token sees itself.

    Keys and values lie in longer arrays, whose tokens beyond those so far are NaN.
    """
    if not fa.on_gpu and heads_k > 1:
        pytest.skip("other groups of heads are for the GPU")
    batch, heads, steps = fa.size((2, 1, 128 if chunk == 64 else 3 * chunk), (16, 4, 200 // chunk * chunk))
    starts = np.arange(batch) * 7 % 11 + 3
    rows = np.arange(batch)[:, None]
    for dtype in fa.size(["bfloat16"], DTYPES):
        q, k, v = random_qkv(batch, 14 + steps, 14 + steps + 37, heads, 64, num_heads_k=heads_k, dtype=dtype)

        def attend(tokens, q=q, k=k, v=v):
            lengths = tokens[:, -1] + 1
            arrays = q[rows, tokens], filled(k, lengths, np.nan), filled(v, lengths, np.nan)
            return fa.call(*map(fa.xp.asarray, arrays), causal=True, seqlens_k=lengths)

        out, lse = np.zeros_like(q), np.zeros((batch, q.shape[1], heads), np.float32)
        for done in range(0, steps, chunk):
            tokens = starts[:, None] + np.arange(done, done + chunk)
            parts = attend(tokens)
            out[rows, tokens], lse[rows, tokens] = host(parts[0]), host(parts[1]).transpose(0, 2, 1)
        computed = [(b, h, i) for b in range(batch) for h in range(heads) for i in starts[b] + np.arange(steps)]
        whole = k[:, : q.shape[1]], v[:, : q.shape[1]]
        assert_attention_close(out, lse.transpose(0, 2, 1), q, *whole, rows=computed, causal=True)

        v[rows[:, 0], tokens[:, -1]] = 100
        changed = host(attend(tokens)[0])
        fa.same_bits(changed[:, :-1], host(parts[0])[:, :-1])
        assert np.all(np.any(changed[:, -1] != host(parts[0])[:, -1], axis=-1))


def test_forms_of_lengths(fa):
    """B049, B070: int arrays and lists, one number per sample; the rest is refused.

    One number for all samples is refused too: it is easily written as a list.
    """
    e = example("bfloat16", batch=3, seqlen_q=4, num_heads=1)
    q, k, v = e.arrays(fa.xp)
    lengths = [30, 70, 0]
    expected = fa.call(q, k, v, seqlens_k=fa.xp.asarray(lengths, np.int32))
    apart = fa.xp.asarray([30, 9, 70, 9, 0], np.int32)[::2]
    for form in (lengths, np.array(lengths), fa.xp.asarray(lengths, np.uint8), apart):
        fa.same_bits(fa.call(q, k, v, seqlens_k=form), expected)
    for name in ("seqlens_q", "seqlens_k"):
        for wrong in (30, np.int32(30), 30.0, [3.0, 4.0, 0.0], fa.xp.asarray(lengths, np.float32)):
            with pytest.raises(TypeError, match=name):
                cupy_fa2.flash_attention(q, k, v, **{name: wrong})
        for wrong in (fa.xp.asarray(30), [3, 4], [3, 4, 0, 0], [[3], [4], [0]], [3, 71, 0], [-1, 3, 0]):
            with pytest.raises(ValueError, match=name):
                cupy_fa2.flash_attention(q, k, v, **{name: wrong})


@pytest.mark.gpu
def test_lengths_on_a_device_are_clamped(cp):
    """B070: nobody has looked at them, and nothing is read beyond the arrays."""
    q, k, v = example(batch=3, seqlen_q=4).arrays(cp)
    given, meant = (cp.asarray(lengths, cp.int32) for lengths in ([-5, 71, 2**31 - 1], [0, 70, 70]))
    for a, b in zip(
        *(cupy_fa2.flash_attention(q, k, v, seqlens_k=x, return_lse=True) for x in (given, meant)), strict=True
    ):
        assert host(a).tobytes() == host(b).tobytes()
