"""Cases (see test_cases.py): softcap, ALiBi, and options together."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from case_tools import weights
from conftest import example, gpu_count
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.testing import (
    DTYPES,
    OPTION_EXAMPLES,
    Storage,
    assert_attention_close,
    host,
    poisoned,
    random_qkv,
    with_options,
)

# --- softcap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loudness", [1, 20])
@pytest.mark.parametrize("softcap", sampled([1.0, 5, 30, 50], 1.0, 50))
def test_softcap_comes_before_the_mask(fa, softcap, loudness):
    """B021: against float64, also where tanh saturates; and lse within the cap of the logarithm of the keys' number."""
    batch, heads, heads_k, seqlen = fa.size((1, 2, 1, 50), (2, 8, 2, 150))
    for dtype in fa.size([list(DTYPES)[loudness % 2]], DTYPES):
        for head_dim, window in fa.size([(64, None)], [(64, None), (64, (30, 0)), (256, None), (256, (30, 0))]):
            q, k, v = random_qkv(batch, seqlen, seqlen, heads, head_dim, num_heads_k=heads_k, dtype=dtype)
            q, k, v = (fa.xp.asarray(x) for x in ((q.astype(np.float32) * loudness).astype(q.dtype), k, v))
            options = {"causal": True, "window": window, "softcap": softcap}
            out, lse = fa.call(q, k, v, **options)
            assert_attention_close(out, lse, q, k, v, **options)
            seen = np.minimum(np.arange(seqlen), np.inf if window is None else window[0]) + 1
            assert np.all(np.abs(host(lse) - np.log(seen)) <= softcap + 1e-3)


@pytest.mark.parametrize(
    "options", sampled([{"causal": True}, {"window": (3, 0)}], {"causal": True}), ids=["causal", "window"]
)
def test_softcap_leaks_nothing_of_later_keys(fa, options):
    """B021: with a cap of 1 and eight keys, a cap after the mask would leave most of row 0's weight to them."""
    e = example("bfloat16", 1, 8, 8, fa.size(1, 2), 64, softcap=1.0, **options)
    result = fa.check(e)
    q, k, v = e.arrays()
    for row in fa.size((0, 4), range(7)):
        later_k, later_v = k.copy(), v.copy()
        later_k[:, row + 1 :], later_v[:, row + 1 :] = 5, 100
        changed = fa.call(*map(fa.xp.asarray, (q, later_k, later_v)), softcap=1.0, **options)
        fa.same_bits(*((out[:, : row + 1], lse[..., : row + 1]) for out, lse in (changed, result)))


@pytest.mark.parametrize("softcap", [0, 0.0, -1.0])
def test_softcap_of_zero(fa, softcap):
    """B021: no cap is None; 0, which means that elsewhere, is refused and says so."""
    with pytest.raises(ValueError, match="None is for no cap"):
        cupy_fa2.flash_attention(*example().arrays(fa.xp), softcap=softcap)


# --- ALiBi --------------------------------------------------------------------------------------------------


def geometric(heads):
    """The slopes of the method's authors, for any number of heads by the same rule."""
    return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), sampled_rows([(1, 11), (3, 40), (40, 11)], (3, 40)))
def test_alibi_distance_from_the_last_key(fa, seqlen_q, seqlen_k, causal):
    """B052: -slope |i + seqlen_k - seqlen_q - j|, seen in the weights and in lse; slopes of any sign, and 0."""
    slopes = np.array([0.5, 0.0625, -0.25, 0], np.float32)
    found, lse = weights(fa, seqlen_q, seqlen_k, num_heads=4, dtype="bfloat16", causal=causal, alibi_slopes=slopes)
    distance = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - np.arange(seqlen_k)
    score = -slopes[:, None, None].astype(float) * np.abs(distance)
    exp = np.where(causal & (distance < 0), 0, np.exp(score))
    total = exp.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found[0], exp / np.where(total == 0, 1, total), rtol=2**-7)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0], np.log(total[..., 0]), atol=1e-5)


@pytest.mark.parametrize("heads", [8, 12, 40])
def test_alibi_per_head_and_per_sample(fa, heads):
    """B052: geometric slopes, of either sign and 0, in both shapes; slopes of 0 are as none."""
    if not fa.on_gpu and heads > 8:
        pytest.skip("many heads are for the GPU")
    heads = fa.size(3, heads)
    sign = np.array([[1], [-1]], np.float32)
    for seqlen_q, seqlen_k in fa.size([(3, 40)], [(1, 11), (3, 200), (200, 333), (333, 200)]):
        for causal, dtype in fa.size([(True, "bfloat16")], list(itertools.product([False, True], DTYPES))):
            q, k, v = random_qkv(2, seqlen_q, seqlen_k, heads, 64, num_heads_k=fa.size(1, heads), dtype=dtype, xp=fa.xp)
            for slopes in (*fa.size([], [geometric(heads)]), sign * geometric(heads), np.zeros(heads, np.float32)):
                out, lse = fa.call(q, k, v, causal=causal, alibi_slopes=slopes)
                assert_attention_close(out, lse, q, k, v, causal=causal, alibi_slopes=slopes)
            assert_attention_close(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize(("heads", "heads_k", "head_dim"), [(40, 8, 64), (48, 8, 72), (7, 1, 72)])
def test_slopes_of_some_heads_and_ragged_samples(fa, heads, heads_k, head_dim):
    """B053: three samples of different lengths; slopes cut out of those of more heads, which lie apart."""
    if not fa.on_gpu and heads > 7:
        pytest.skip("many heads are for the GPU")
    lengths = fa.size((5, 70, 33), (5, 130, 64))
    e = example(
        *("bfloat16", 3, max(lengths), max(lengths), heads, head_dim),
        **{"num_heads_k": heads_k, "causal": True, "seqlens_q": lengths, "seqlens_k": lengths},
    )
    arrays = e.arrays(fa.xp)
    everyone = np.random.default_rng(0).exponential(0.1, (3, 2 * heads + 8)).astype(np.float32)
    device = fa.xp.asarray(everyone)
    more = fa.size([], [np.s_[:, 4 : 4 + heads], np.s_[::-1, :heads]])
    for cut in (np.s_[::-1, 4 : 4 + heads], np.s_[1, 8 : 2 * heads + 8 : 2], *more):
        out, lse = fa.call(*arrays, alibi_slopes=device[cut], **e.options)
        assert_attention_close(out, lse, *arrays, alibi_slopes=everyone[cut], **e.options)


def test_slopes_that_are_refused(fa):
    """B053: half and double precision, one slope per sample, one too many, none per batch element."""
    arrays = example(batch=3, num_heads=2).arrays(fa.xp)
    for dtype in (np.float16, np.float64, np.int32):
        with pytest.raises(TypeError, match=r"alibi_slopes must be float32"):
            cupy_fa2.flash_attention(*arrays, alibi_slopes=fa.xp.ones(2, dtype))
    for shape in [(3,), (1,), (1, 2), (2, 3), (3, 2, 1), ()]:
        with pytest.raises(ValueError, match=r"alibi_slopes must have shape"):
            cupy_fa2.flash_attention(*arrays, alibi_slopes=fa.xp.ones(shape, np.float32))


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason="needs two CUDA devices")
def test_slopes_on_another_device(cp):
    """B053: refused before anything is launched."""
    arrays = example(num_heads=2).arrays(cp)
    with cp.cuda.Device(1):
        slopes = cp.ones(2, np.float32)
    with pytest.raises(ValueError, match="alibi_slopes must be on q's CUDA device"):
        cupy_fa2.flash_attention(*arrays, alibi_slopes=slopes)


# --- together -----------------------------------------------------------------------------------------------

# "out" is an out that is given.
OPTIONS = (*OPTION_EXAMPLES, "out")

# All four states of every pair in few calls: none, and some in which each option has places of its own, more than half.
_CALLS = next(calls for calls in itertools.count(1) if math.comb(calls, calls // 2 + 1) >= len(OPTIONS))
_PLACES = dict(zip(OPTIONS, itertools.combinations(range(_CALLS), _CALLS // 2 + 1), strict=False))
COVERING = [set(), *({name for name, places in _PLACES.items() if call in places} for call in range(_CALLS))]


def test_few_calls_have_every_pair_in_every_state():
    """B067: of options on or off."""
    for a, b in itertools.combinations(OPTIONS, 2):
        assert {(a in on, b in on) for on in COVERING} == set(itertools.product([False, True], repeat=2))


def check_together(fa, on):
    plain = example("bfloat16", 2, fa.size(20, 70), fa.size(70, 130), fa.size(2, 4), 64, num_heads_k=fa.size(1, 2))
    e = with_options(plain, *(OPTION_EXAMPLES[name] for name in on if name != "out"))
    out = None
    if "out" in on:
        out = poisoned((2, e.seqlen_q, e.num_heads, 64), DTYPES[e.dtype], Storage(pad=(0, 3, 0, 8)), xp=fa.xp)
    expected, _ = fa.check(e, out=out)
    q, k, v = e.arrays()
    k, v = k.copy(), v.copy()
    rows = e.seqlens_q or (e.seqlen_q,) * 2
    if "causal" in on:
        rows = tuple(n // 2 for n in rows)
        for b in range(2):
            offset = (e.seqlens_k or (e.seqlen_k,) * 2)[b] - (e.seqlens_q or (e.seqlen_q,) * 2)[b]
            k[b, rows[b] + offset :], v[b, rows[b] + offset :] = 5, 100
    arrays = map(fa.xp.asarray, (q, k, v))
    again = cupy_fa2.flash_attention(*arrays, **e.options | e.option_arrays(fa.xp))
    for b in range(2):
        fa.same_bits(again[b, : rows[b]], expected[b, : rows[b]])


@pytest.mark.parametrize("on", COVERING, ids=lambda on: "+".join(sorted(on)) or "none")
def test_options_together(fa, on):
    """B067: against float64, dropout included; causal rows see nothing of later keys; lse need not be asked for."""
    check_together(fa, on)


@pytest.mark.parametrize("on", list(itertools.combinations(OPTIONS, 2)), ids="+".join)
def test_pairs_of_options(fa, on):
    """B067: and nothing else."""
    if not fa.on_gpu:
        pytest.skip("few calls have them in the simulator")
    check_together(fa, on)
