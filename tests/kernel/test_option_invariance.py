"""What must not change the result of a call with options, and mostly not one bit of it."""

import numpy as np
import pytest
from conftest import example
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import FULL, by_turns, sampled

from cupy_fa2.plan import plan_forward
from cupy_fa2.testing import (
    EVERYTHING,
    SCORE_ARRAY_STORAGES,
    assert_attention_close,
    attention_examples,
    host,
    with_options,
)

SIMULATED = attention_examples(max_seqlen=70, max_heads=4, max_head_dim=32, max_work=1 << 19, options=True)
ON_GPU = attention_examples(max_seqlen=1000, max_heads=40, max_batch=5, max_work=1 << 29, options=True)


def close(a, b):
    """Two results of one problem: as far apart as a different order of float32 sums, and rounding, may put them."""
    for x, y, tolerance in zip(a, b, (2.0**-9, 1e-5), strict=True):
        x, y = host(x).astype(float), host(y).astype(float)
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


# --- options that change nothing ----------------------------------------------------------------------------

#: They ask for another kernel, but the order of its sums is the same.
SAME_BITS = {
    "a window without bounds": {"window": (None, None)},
    "no dropout": {"dropout_p": 0.0, "dropout_seed": 3},
    "sinks of -inf": {"sinks": np.full(2, -np.inf, np.float32)},
}
CLOSE = {
    "a window that is wider": {"window": (10**6, 10**6)},
    "a mask of True": {"mask": np.ones((70,), np.bool_)},
    "a bias of 0": {"bias": np.zeros((40, 1), np.float32)},
    "slopes of 0": {"alibi_slopes": np.zeros(2, np.float32)},
    "full lengths": {"seqlens_q": np.array([40], np.int32), "seqlens_k": np.array([70], np.int32)},
}


def moved(fa, options):
    return {name: fa.xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@pytest.mark.parametrize(("cards", "name"), by_turns(SAME_BITS), indirect=["cards"])
def test_neutral_options_change_no_bit(cards, name):
    for head_dim in {"A100": [64], "H200": [128]}.get(cards.card, [64, 128, 256]):
        for causal in cards.size([True], [False, True]):
            arrays = example("bfloat16", head_dim=head_dim).arrays(cards.xp)
            plain = cards.call(*arrays, causal=causal)
            cards.same_bits(cards.call(*arrays, causal=causal, **moved(cards, SAME_BITS[name])), plain)


@pytest.mark.parametrize("name", sampled(CLOSE, "a mask of True", "slopes of 0"))
def test_neutral_options_change_nothing(fa, name):
    """Their kernels may work on other tiles."""
    arrays = example().arrays(fa.xp)
    close(fa.call(*arrays, **moved(fa, CLOSE[name])), fa.call(*arrays))


def test_causal_is_a_window_that_ends_at_the_diagonal(cards):
    for options in ({}, {"align": -9}, {"softmax_scale": -0.3}):
        arrays = example("bfloat16", 1, 70, 150).arrays(cards.xp)
        causal = cards.call(*arrays, causal=True, **options)
        cards.same_bits(cards.call(*arrays, window=(None, 0), **options), causal)
        cards.same_bits(cards.call(*arrays, window=(None, 5), causal=True, **options), causal)


def test_three_ways_to_hide_the_same_keys(fa):
    """A window, a boolean mask, and a bias of -inf that hide the same keys."""
    e = example(seqlen_q=140, seqlen_k=150, head_dim=16)
    arrays = e.arrays(fa.xp)
    for left, right, align in ((40, 3, 10), (0, 0, 10), (60, None, -80), (5, 70, 130)):
        diagonal = np.arange(140)[:, None] + align
        key = np.arange(150)
        seen = (key >= diagonal - left) & (key <= diagonal + (1000 if right is None else right))
        window = fa.call(*arrays, window=(left, right), align=align)
        close(fa.call(*arrays, mask=fa.xp.asarray(seen)), window)
        bias = np.where(seen, 0, -np.inf).astype(np.float16)
        close(fa.call(*arrays, bias=fa.xp.asarray(bias)), window)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"causal": True}, marks=FULL), {"window": (30, 4)}], ids=["full", "causal", "window"]
)
def test_lengths_are_calls_on_what_exists(fa, options):
    """Each batch element of a padded batch is the call on its own rows and keys, cut out."""
    lengths_q, lengths_k = (150, 1, 77), (70, 129, 200)
    e = example("bfloat16", 3, 150, 200, 1, 16, seqlens_q=lengths_q, seqlens_k=lengths_k)
    q, k, v = e.arrays(fa.xp)
    out, lse = fa.call(q, k, v, **{**e.options, **e.option_arrays(fa.xp), **options})
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        alone = fa.call(q[b : b + 1, :rows], k[b : b + 1, :keys], v[b : b + 1, :keys], **options)
        close(alone, (out[b : b + 1, :rows], lse[b : b + 1, :, :rows]))
        assert (host(lse)[b, :, rows:] == -np.inf).all()
        assert not host(out)[b, rows:].any()


# --- batch elements, heads and rows are strangers -----------------------------------------------------------


def taken(e, arrays, options, xp, *, batch=None, heads=None):
    """The call on some batch elements or heads, in any order: arrays and options, each cut or permuted alike."""
    batch = list(range(e.batch)) if batch is None else batch
    heads = list(range(e.num_heads)) if heads is None else heads
    group = e.num_heads // e.num_heads_k
    heads_k = [h // group for h in heads[::group]] if len(heads) > 1 else [heads[0] // group]
    bshd = [x.transpose(0, 2, 1, 3) if e.layout == "bhsd" else x for x in arrays]
    cut = [x[batch][:, :, h] for x, h in zip(bshd, (heads, heads_k, heads_k), strict=True)]
    result = dict(options, layout="bshd")
    for name in ("align", "seqlens_q", "seqlens_k"):
        if hasattr(options.get(name), "shape"):
            result[name] = options[name][batch]
    if "sinks" in options:
        result["sinks"] = options["sinks"][heads]
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"]
        result["alibi_slopes"] = slopes[heads] if slopes.ndim == 1 else slopes[batch][:, heads]
    for name in ("bias", "mask"):
        x = options.get(name)
        if x is not None and x.ndim == 4 and x.shape[0] > 1:
            x = x[batch]
        if x is not None and x.ndim >= 3 and x.shape[-3] > 1:
            x = xp.moveaxis(xp.moveaxis(x, -3, 0)[heads], 0, -3)
        if x is not None:
            result[name] = x
    return cut, result


def without_dropout(e):
    return {name: x for name, x in e.options.items() if not name.startswith("dropout")}


@settings(max_examples=max(2, settings().max_examples // 5))
@given(data=st.data())
def test_batch_elements_and_heads_are_strangers(fa, data):
    """A batch element, a head, and all of them in reverse order, have the bits that they had."""
    e = data.draw(ON_GPU if fa.on_gpu else SIMULATED)
    arrays, options = e.arrays(fa.xp), {**without_dropout(e), **e.option_arrays(fa.xp)}
    if "align" in options and hasattr(options["align"], "shape"):
        options["align"] = fa.xp.asarray(options["align"])
    out, lse = fa.call(*arrays, **options)
    if e.layout == "bhsd":
        out = out.transpose(0, 2, 1, 3)
    picks = [{"batch": list(range(e.batch))[::-1]}, {"heads": list(range(e.num_heads))[::-1]}]
    picks += [{"batch": [b]} for b in range(min(e.batch, 2))] + [{"heads": [h]} for h in range(min(e.num_heads, 2))]
    for pick in picks if e.batch else []:
        cut, cut_options = taken(e, arrays, options, fa.xp, **pick)
        batch, heads = pick.get("batch", slice(None)), pick.get("heads", slice(None))
        fa.same_bits(fa.call(*cut, **cut_options), (out[batch][:, :, heads], lse[batch][:, heads]))


@pytest.mark.parametrize("loud", sampled(LOUD := [30.0, 1000.0, np.nan], *LOUD[1:]))
def test_row_does_not_depend_on_other_rows(fa, loud):
    """Other queries, and what biases and masks say to them, are theirs alone."""
    e = with_options(example("bfloat16", 2, 150, 200, 1, 16), EVERYTHING, {"softcap": None, "softmax_scale": None})
    q, k, v = e.arrays()
    options = e.options
    expected, expected_lse = fa.call(*map(fa.xp.asarray, (q, k, v)), **moved(fa, options))
    rng = np.random.default_rng(7)
    for kept in (np.arange(150) % 2 == 0, np.arange(150) == 37):
        other, changed = (rng.standard_normal(q.shape) * loud).astype(q.dtype), dict(options)
        other[:, kept] = q[:, kept]
        changed["bias"] = np.where(kept[:, None], options["bias"], np.float32(3) * loud)
        changed["mask"] = np.where(kept[:, None], options["mask"], rng.random((150, 200)) < 0.5)
        out, lse = fa.call(*map(fa.xp.asarray, (other, k, v)), **moved(fa, changed))
        fa.same_bits(host(out)[:, kept], host(expected)[:, kept])
        fa.same_bits(host(lse)[..., kept], host(expected_lse)[..., kept])


@pytest.mark.parametrize("beyond", sampled([0.0, np.inf, 7.0], np.inf))
def test_nothing_beyond_a_length_matters(fa, beyond):
    """NaN there or anything else, in queries, keys, values and bias: the bits are the same."""
    e = with_options(example("float16", 2, 150, 200, 1, 16), EVERYTHING, {"bias": "bhqk"})
    q, k, v = (x.copy() for x in e.arrays())
    options = e.options
    expected = fa.call(*map(fa.xp.asarray, (q, k, v)), **moved(fa, options))
    bias = options["bias"].copy()
    for b in range(2):
        q[b, e.seqlens_q[b] :], bias[b, :, e.seqlens_q[b] :] = beyond, beyond
        for x in (k, v, bias.transpose(0, 3, 1, 2)):
            x[b, e.seqlens_k[b] :] = beyond
    assert not np.isnan(bias.astype(float)).any()
    fa.same_bits(fa.call(*map(fa.xp.asarray, (q, k, v)), **moved(fa, {**options, "bias": bias})), expected)


# --- how things lie in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "storage", sampled(SCORE_ARRAY_STORAGES, "transposed", "odd rows, odd start", "one row repeated")
)
def test_strided_score_arrays_are_contiguous_ones(fa, storage):
    """Read in pairs or one by one; where all rows are one, on another tile, perhaps."""
    e = example("bfloat16", 2, 40, 134, 2, 16, bias="bhqk f32", mask="bhqk", bias_storage=storage, mask_storage=storage)
    arrays, options = e.arrays(fa.xp), {**e.options, **e.option_arrays(fa.xp)}
    copies = {name: fa.xp.array(options[name], order="C") for name in ("bias", "mask")}
    results = fa.call(*arrays, **options), fa.call(*arrays, **{**options, **copies})
    if storage != "one row repeated":
        fa.same_bits(*results)
    for out, lse in results:
        assert_attention_close(out, lse, *arrays, **e.options)


@pytest.mark.full
def test_broadcast_score_arrays_are_expanded_ones(fa):
    for bias, mask in (("b11k", "hq1"), ("k", "q1"), ("1hqk", "b111"), ("", "qk")):
        e = example("float16", 2, 40, 134, 2, 16, bias=bias, mask=mask)
        arrays, options = e.arrays(fa.xp), {**e.options, **e.option_arrays(fa.xp)}
        full = {n: fa.xp.array(fa.xp.broadcast_to(options[n], (2, 2, 40, 134)), order="C") for n in ("bias", "mask")}
        fa.same_bits(fa.call(*arrays, **options), fa.call(*arrays, **{**options, **full}))


@pytest.mark.full
def test_however_keys_come(cards):
    """Through tensor maps or cp.async, where lengths do not decide that."""
    if cards.card == "A100":
        pytest.skip("has no tensor maps")
    for head_dim in cards.size([64, 256], [64, 128, 256]):
        e = with_options(
            example("bfloat16", 2, 70, 150, 1, head_dim), EVERYTHING, {"seqlens_q": None, "seqlens_k": None}
        )
        q, k, v = e.arrays(cards.xp)
        options = {**e.options, **e.option_arrays(cards.xp)}
        backwards = cards.xp.array(k[:, ::-1], order="C")[:, ::-1]
        cards.same_bits(cards.call(q, backwards, v, **options), cards.call(q, k, v, **options))


def test_layouts_are_one(fa):
    lengths = {"seqlens_q": (140, 11), "seqlens_k": (80, 150)}
    e = with_options(example("bfloat16", 2, 40, 134, 2, 16), EVERYTHING, lengths)
    arrays, options = e.arrays(fa.xp), {**e.options, **e.option_arrays(fa.xp)}
    out, lse = fa.call(*arrays, **options)
    turned = [fa.xp.array(x.transpose(0, 2, 1, 3), order="C") for x in arrays]
    other, other_lse = fa.call(*turned, **{**options, "layout": "bhsd"})
    fa.same_bits((other.transpose(0, 2, 1, 3), other_lse), (out, lse))


def test_same_call_same_bits(fa):
    e = with_options(example("bfloat16", 2, 150, 200, 1, 16), EVERYTHING)
    arrays, options = e.arrays(fa.xp), {**e.options, **e.option_arrays(fa.xp)}
    first = fa.call(*arrays, **options)
    for _ in range(fa.size(1, 20)):
        fa.same_bits(fa.call(*arrays, **options), first)


def test_widths_caps_and_rates_ask_for_no_other_plan(fa):
    """They are numbers of the argument struct: neither plan nor kernel is made for them."""
    arrays = example(num_heads=1, head_dim=16).arrays(fa.xp)
    fa.call(*arrays, window=(3, 4), align=7, softcap=2.0, dropout_p=0.1, dropout_seed=1)
    misses = plan_forward.cache_info().misses
    fa.call(*arrays, window=(50, 0), align=-1, softcap=9, dropout_p=0.7, dropout_seed=2**60, softmax_scale=-1)
    assert plan_forward.cache_info().misses == misses
