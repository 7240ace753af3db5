"""Cases (see test_cases.py): where arrays lie in memory, and what lies beside them."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import example
from sampling import sampled

from cupy_fa2.testing import DTYPES, STORAGES, Storage, host, poisoned, random_qkv


@pytest.mark.parametrize("poison", sampled(POISONS := [np.nan, np.inf, -np.inf], *POISONS[:2]))
@pytest.mark.parametrize("used", sampled([1, 13, 32, 48, 64, 96], 13, 64))
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


@pytest.mark.parametrize("storage", sampled(STORAGES, "fused qkv", "odd rows", "reversed", "one row repeated"))
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


@pytest.mark.parametrize("head_dim", sampled([64, 128, 256], 64))
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


@pytest.mark.parametrize("stride", sampled([0, 1, 3, 2**40 + 1, -7], 2**40 + 1))
@pytest.mark.parametrize("batch", sampled([1, 2], 1))
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


@pytest.mark.parametrize("head_dim", sampled([64, 40, 20], 40, 20))
@pytest.mark.parametrize("dtype", sampled(DTYPES, "float16"))
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
