"""What must not change the result, and mostly not one bit of it."""

import numpy as np
import pytest
from conftest import example
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sampled

import cupy_fa2
from cupy_fa2.reference import score_magnitude
from cupy_fa2.testing import (
    DTYPES,
    STORAGES,
    assert_attention_close,
    attention_examples,
    host,
    lse_tolerance,
    poisoned,
    random_qkv,
)

SIMULATED = attention_examples(max_seqlen=80, max_heads=4, max_head_dim=80, max_work=1 << 20)
ON_GPU = attention_examples(max_seqlen=1000, max_heads=40, max_batch=5, max_work=1 << 30)
FEWER = max(2, settings().max_examples // 4)


def drawn(fa, data):
    return data.draw(ON_GPU if fa.on_gpu else SIMULATED)


def bshd(e, arrays):
    return tuple(x.transpose(0, 2, 1, 3) for x in arrays) if e.layout == "bhsd" else tuple(arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_permuted(fa, dtype):
    """Softmax attention is a set operation on (key, value) pairs; only the order of summation may show."""
    q, k, v = random_qkv(1, 20, fa.size(150, 3000), 2, 64, dtype=dtype, mean=0.5, xp=fa.xp)
    order = np.random.default_rng(1).permutation(k.shape[1])
    plain, plain_lse = fa.call(q, k, v)
    out, lse = fa.call(q, k[:, order], v[:, order])
    assert_attention_close(out, lse, q, k, v)
    allowed = lse_tolerance(score_magnitude(q, k, v)).reshape(lse.shape)
    assert np.all(np.abs(host(lse).astype(float) - host(plain_lse)) <= allowed)
    eps = 2.0 ** (-11 if dtype == "float16" else -8)
    assert np.abs(host(out).astype(float) - host(plain).astype(float)).max() <= 2 * eps * float(
        np.abs(host(v).astype(float)).max()
    )


@pytest.mark.parametrize("constant", sampled([64.0, -64.0, 2048.0, -2048.0], 64.0, -2048.0))
@pytest.mark.parametrize("dtype", sampled(DTYPES, "bfloat16"))
def test_a_constant_added_to_all_scores(fa, dtype, constant):
    """One more feature column adds `constant` to every score: out stays, lse moves by it.

    The scores are multiples of 1/16, so that float32 holds the sums exactly, and nothing but the rounding of
    exponentials may move `out`.
    """
    rng = np.random.default_rng(0)
    q, k = (
        fa.xp.asarray((rng.integers(-2, 3, (1, n, 1, 31)) / 4).astype(DTYPES[dtype])) for n in (20, fa.size(150, 3000))
    )
    v = fa.xp.asarray(rng.standard_normal((1, k.shape[1], 1, 40)).astype(DTYPES[dtype]))
    zero_q, zero_k = (fa.xp.zeros((1, x.shape[1], 1, 1), x.dtype) for x in (q, k))
    one, shift = (fa.xp.asarray(np.full(x.shape, c, x.dtype)) for x, c in ((zero_q, 1), (zero_k, constant)))
    plain, plain_lse = fa.call(fa.xp.concatenate([q, zero_q], 3), fa.xp.concatenate([k, zero_k], 3), v, softmax_scale=1)
    out, lse = fa.call(fa.xp.concatenate([q, one], 3), fa.xp.concatenate([k, shift], 3), v, softmax_scale=1)
    eps = 2.0 ** (-11 if dtype == "float16" else -8)
    np.testing.assert_allclose(host(out).astype(float), host(plain).astype(float), atol=2 * eps, rtol=2 * eps)
    np.testing.assert_allclose(host(lse) - constant, host(plain_lse), atol=2e-5 * abs(constant))


@settings(max_examples=FEWER)
@given(data=st.data())
def test_batch_split(fa, data):
    """An element of a batch has the bits it has alone."""
    e = drawn(fa, data)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.call(q, k, v, **e.options)
    for b in range(e.batch):
        options = e.options
        if isinstance(e.align, tuple):
            options["align"] = e.align[b]
        alone = fa.call(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)
        fa.same_bits(alone, (out[b : b + 1], lse[b : b + 1]))


@settings(max_examples=FEWER)
@given(data=st.data())
def test_head_split(fa, data):
    """So has a head, with the one kv head that it reads."""
    e = drawn(fa, data)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.call(q, k, v, **e.options)
    q, k, v, out = bshd(e, (q, k, v, out))
    options = {**e.options, "layout": "bshd"}
    group = e.num_heads // e.num_heads_k
    for h in range(e.num_heads):
        hk = slice(h // group, h // group + 1)
        alone = fa.call(q[:, :, h : h + 1], k[:, :, hk], v[:, :, hk], **options)
        fa.same_bits(alone, (out[:, :, h : h + 1], lse[:, h : h + 1]))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("loud", sampled(LOUD := [30.0, 1000.0, np.nan], *LOUD[1:]))
@pytest.mark.parametrize("dtype", sampled(DTYPES, "float16"))
def test_row_does_not_depend_on_other_rows(fa, dtype, loud, causal):
    """Neighbours whose maxima jump (30, 1000) or that are NaN must not decide when this row rescales."""
    seqlen_q, seqlen_k = fa.size((70, 140), (1000, 3000))
    q, k, v = random_qkv(1, seqlen_q, seqlen_k, 1, 64, dtype=dtype, mean=0.3)
    out, lse = fa.call(*map(fa.xp.asarray, (q, k, v)), causal=causal)
    rng = np.random.default_rng(7)
    patterns = np.arange(seqlen_q) % 2 == 0, np.arange(seqlen_q) == 37, rng.random(seqlen_q) < 0.3
    for kept in fa.size(patterns[:2], patterns):
        other = (rng.standard_normal(q.shape) * loud).astype(q.dtype)
        other[:, kept] = q[:, kept]
        changed, changed_lse = fa.call(*map(fa.xp.asarray, (other, k, v)), causal=causal)
        fa.same_bits(host(changed)[:, kept], host(out)[:, kept])
        fa.same_bits(host(changed_lse)[..., kept], host(lse)[..., kept])
        if loud == 1000 and not causal:
            assert not np.array_equal(host(changed)[:, ~kept], host(out)[:, ~kept])


def test_row_whose_maximum_rises_slowly(fa):
    """A rescale that is skipped while a maximum grows by little must not be skipped for good.

    Scores climb from key to key, or fall, in every row at its own pace: up to 7 in log2 per 64 keys.
    """
    seqlen_k = fa.size(300, 4000)
    q = np.zeros((1, 64, 1, 32), np.float16)
    q[0, :, 0, 0] = np.linspace(-1, 1, 64)
    k = np.zeros((1, seqlen_k, 1, 32), np.float16)
    k[0, :, 0, 0] = np.arange(seqlen_k) * (7 * np.log(2) / 16)
    v = np.random.default_rng(0).standard_normal((1, seqlen_k, 1, 32)).astype(np.float16)
    for order in (slice(None), slice(None, None, -1)):
        arrays = [fa.xp.asarray(np.ascontiguousarray(x)) for x in (q, k[:, order], v[:, order])]
        out, lse = fa.call(*arrays, softmax_scale=0.25)
        assert_attention_close(out, lse, *arrays, softmax_scale=0.25)


@pytest.mark.parametrize("head_dim", sampled([40, 33], 40))
@pytest.mark.parametrize(
    "storage", sampled(STORAGES, "heads first", "fused qkv", "odd rows", "reversed", "Fortran order")
)
def test_strided_is_contiguous(fa, storage, head_dim):
    causal = head_dim == 40
    e = example("bfloat16", 2, seqlen_q=21, num_heads=2, head_dim=head_dim, causal=causal, storage=(storage,) * 3)
    q, k, v = e.arrays(fa.xp)
    copies = (fa.xp.ascontiguousarray(x) for x in (q, k, v))
    fa.same_bits(fa.call(q, k, v, causal=causal), fa.call(*copies, causal=causal))


def test_layouts_are_one(fa):
    q, k, v = example("bfloat16", 2, num_heads=4, num_heads_k=2, causal=True).arrays(fa.xp)
    out, lse = fa.call(q, k, v, causal=True)
    turned = [fa.xp.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    other, other_lse = fa.call(*turned, causal=True, layout="bhsd")
    fa.same_bits((other.transpose(0, 2, 1, 3), other_lse), (out, lse))


def test_shared_keys_and_values(fa):
    """Keys and values may be one array, and so may queries."""
    (x,) = random_qkv(2, 50, 0, 2, 64, xp=fa.xp)[:1]
    copies = x.copy(), x.copy(), x.copy()
    fa.same_bits(fa.call(x, x, x, causal=True), fa.call(*copies, causal=True))


def test_later_keys_do_not_exist_for_a_causal_row(fa):
    """Row i of a causal call is the bottom-right row of the call on its own keys alone."""
    e = example("float16", seqlen_q=66, seqlen_k=130, num_heads=1, causal=True)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.call(q, k, v, causal=True)
    for i in (0, 1, 20, 64, 65):
        seen = i + 1 + 130 - 66
        one, one_lse = fa.call(q[:, i : i + 1], k[:, :seen], v[:, :seen])
        assert_attention_close(one, one_lse, q[:, i : i + 1], k[:, :seen], v[:, :seen])
        eps = 2.0**-11
        np.testing.assert_allclose(
            host(one).astype(float), host(out[:, i : i + 1]).astype(float), atol=2 * eps, rtol=2 * eps
        )
        np.testing.assert_allclose(host(one_lse), host(lse[:, :, i : i + 1]), atol=1e-4, rtol=0)


def test_masked_keys_may_be_anything_finite(fa):
    """Future keys and values changed to huge ones: earlier rows keep their bits."""
    q, k, v = random_qkv(1, 70, 70, 2, 64)
    out, lse = fa.call(*map(fa.xp.asarray, (q, k, v)), causal=True)
    for first in (1, 30, 64, 69):
        k2, v2 = k.copy(), v.copy()
        k2[:, first:], v2[:, first:] = 6e4, -6e4
        changed, changed_lse = fa.call(*map(fa.xp.asarray, (q, k2, v2)), causal=True)
        fa.same_bits((changed[:, :first], changed_lse[..., :first]), (out[:, :first], lse[..., :first]))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_same_call_same_bits(fa, causal):
    q, k, v = example("bfloat16", 2, seqlen_q=fa.size(30, 2000), seqlen_k=fa.size(70, 2000), causal=causal).arrays(
        fa.xp
    )
    first = fa.call(q, k, v, causal=causal)
    for _ in range(fa.size(2, 20)):
        fa.same_bits(fa.call(q, k, v, causal=causal), first)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 0.0])
def test_nothing_depends_on_what_out_held(fa, poison):
    q, k, v = example("bfloat16", seqlen_q=70, seqlen_k=30, causal=True, head_dim=24).arrays(fa.xp)
    expected, _ = fa.call(q, k, v, causal=True)
    out = poisoned(q.shape, q.dtype, poison=poison, xp=fa.xp)
    cupy_fa2.flash_attention(q, k, v, causal=True, out=out)
    fa.same_bits(out, expected)
