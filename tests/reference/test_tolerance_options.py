"""The tools of `cupy_fa2.testing` with options: right kernels are accepted and wrong ones are not."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from sampling import sampled

from cupy_fa2 import reference, testing
from cupy_fa2.dropout import dropout_mask
from cupy_fa2.testing import (
    SCORE_ARRAY_AXES,
    SCORE_ARRAY_STORAGES,
    Example,
    assert_attention_close,
    random_bias,
    random_mask,
)

TANH_ERROR = 2.0**-11
ERRORS_OF_TANH = {
    "none": lambda t: 0 * t,
    "up": lambda t: 1 + 0 * t,
    "down": lambda t: -1 + 0 * t,
    "random": lambda t: np.random.default_rng(0).uniform(-1, 1, t.shape),
    "changing fast": lambda t: np.sign(np.sin(40 * t)),
    "by size": lambda t: np.sign(np.abs(t) - np.median(np.abs(t))),
}


def emulated(q, k, v, *, tanh_error="none", mistake=None, **options):
    """A kernel's arithmetic with every option: float32, and probabilities in the inputs' dtype before their division.

    All arrays are expanded, which no kernel would do. `mistake` plants an error.
    """
    f32, get = np.float32, options.get
    if get("layout") == "bhsd":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    (batch, m, heads, head_dim), n = q.shape, k.shape[1]
    lens_q = np.full(batch, m) if get("seqlens_q") is None else np.asarray(get("seqlens_q"), np.int64)
    lens_k = np.full(batch, n) if get("seqlens_k") is None else np.asarray(get("seqlens_k"), np.int64)
    i, j = np.arange(m)[:, None], np.arange(n)
    exists_q, exists_k = (i < lens_q[:, None, None])[:, None], (j < lens_k[:, None, None])[:, None]
    align = get("align", "bottom-right")
    if mistake == "bottom-right of the full lengths":
        align = n - m
    offset = np.broadcast_to(
        {"bottom-right": lens_k - lens_q, "top-left": 0}[align] if isinstance(align, str) else align, batch
    )
    distance = (i + offset[:, None, None] - j)[:, None]
    qs, ks, vs = (x.astype(f32).transpose(0, 2, 1, 3) for x in (q, k, v))
    ks, vs = (np.repeat(x, heads // k.shape[2], axis=1) for x in (ks, vs))
    ks, vs = (np.where(exists_k.swapaxes(2, 3), x, f32(0)) for x in (ks, vs))
    qs = np.where(exists_q, qs, f32(0))
    s = f32(head_dim**-0.5 if get("softmax_scale") is None else get("softmax_scale")) * (qs @ ks.swapaxes(2, 3))
    bias = f32(0) if get("bias") is None else get("bias").astype(f32)
    if mistake == "bias before softcap":
        s, bias = s + bias, f32(0)
    if get("softcap") and mistake != "no softcap":
        t = np.tanh(s / f32(get("softcap")))
        s = f32(get("softcap")) * t * (1 + f32(TANH_ERROR) * ERRORS_OF_TANH[tanh_error](t)).astype(f32)
    if get("alibi_slopes") is not None:
        slopes = np.broadcast_to(get("alibi_slopes"), (batch, heads))[:, :, None, None]
        s = s - slopes * np.abs(distance + (mistake == "alibi one key on")).astype(f32)
    s = s + (f32(0) if mistake == "no bias" else bias)
    visible = exists_q & exists_k
    left, right = get("window") or (None, None)
    if get("causal"):
        right = 0 if right is None else min(right, 0)
    if left is not None:
        visible = visible & (distance <= left - (mistake == "window exclusive"))
    if right is not None:
        visible = visible & (-distance <= right)
    if get("mask") is not None:
        visible = visible & (~get("mask") if mistake == "mask turned round" else get("mask"))
    s = np.where(visible, s, f32(-np.inf))
    sinks = np.full(heads, -np.inf, f32) if get("sinks") is None else get("sinks")
    sink = np.where(exists_q, sinks[:, None, None] * f32(0.5 if mistake == "sink scaled" else 1), f32(-np.inf))
    if mistake == "sinks where no row is":
        sink = np.broadcast_to(sinks[:, None, None], (*exists_q.shape[:1], heads, m, 1))
    row_max = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), sink)
    shift = np.where(row_max == -np.inf, f32(0), row_max)
    p = np.exp(s - shift)
    row_sum = p.sum(axis=3, keepdims=True) + (0 if mistake == "sink left out" else np.exp(sink - shift))
    with np.errstate(divide="ignore"):
        lse = (shift + np.log(row_sum))[..., 0].astype(f32)
    if get("dropout_p"):
        kept = dropout_mask((batch, heads, m, n), get("dropout_p"), get("dropout_seed"))
        if mistake == "sum after dropout":
            row_sum = (p * kept).sum(axis=3, keepdims=True)
        p = np.where(kept, p, f32(0)) * f32(1 if mistake == "dropout not scaled up" else 1 / (1 - get("dropout_p")))
    p = p.astype(q.dtype).astype(f32)
    out = ((p @ vs) / np.where(row_sum == 0, f32(1), row_sum)).astype(q.dtype)
    return (out if get("layout") == "bhsd" else out.transpose(0, 2, 1, 3)), lse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@settings(max_examples=3 * settings().max_examples // 2)
@given(testing.attention_examples(max_seqlen=70, max_head_dim=70, max_work=1 << 20, options=True))
def test_accepts_a_right_kernel(dtype, example):
    example = replace(example, dtype=dtype)
    q, k, v = example.arrays()
    assert_attention_close(*emulated(q, k, v, **example.options), q, k, v, **example.options)


def example(**fields):
    return Example("float16", 2, 70, 90, 4, 2, 48, 40, **fields)


MISTAKES = {
    "no softcap": {"softcap": 5.0},
    "bias before softcap": {"softcap": 5.0, "bias": "bhqk"},
    "no bias": {"bias": "k"},
    "alibi one key on": {"alibi": "bh"},
    "window exclusive": {"window": (20, None)},
    "mask turned round": {"mask": "bhqk"},
    "sink scaled": {"sinks": True, "window": (8, 0)},
    "sink left out": {"sinks": True, "window": (8, 0)},
    "sum after dropout": {"dropout_p": 0.1},
    "dropout not scaled up": {"dropout_p": 0.1},
    "bottom-right of the full lengths": {"seqlens_k": (80, 90), "seqlens_q": (70, 60), "causal": True},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("mistake", "fields"), MISTAKES.items(), ids=MISTAKES)
def test_rejects_a_wrong_kernel(mistake, fields, dtype):
    e = replace(example(**fields), dtype=dtype)
    q, k, v = e.arrays()
    assert_attention_close(*emulated(q, k, v, **e.options), q, k, v, **e.options)
    out, _ = emulated(q, k, v, mistake=mistake, **e.options)
    with pytest.raises(AssertionError, match=r"out: .* are wrong"):
        assert_attention_close(out, None, q, k, v, **e.options)


@pytest.mark.parametrize(
    ("mistake", "fields"),
    [
        ("sinks where no row is", {"sinks": True, "seqlens_q": (70, 30)}),
        ("sink left out", {"sinks": True, "bias": "bhqk f32 far"}),
        ("alibi one key on", {"alibi": "h", "bias": "11qk far", "softcap": 30.0}),
        ("no bias", {"bias": "hq1"}),  # a constant of the row: out does not change
        ("no softcap", {"softcap": 20.0}),
    ],
)
def test_rejects_a_wrong_lse(mistake, fields):
    e = example(**fields)
    q, k, v = e.arrays()
    out, lse = emulated(q, k, v, **e.options)
    assert_attention_close(out, lse, q, k, v, **e.options)
    _, lse = emulated(q, k, v, mistake=mistake, **e.options)
    with pytest.raises(AssertionError, match=r"lse: .* are wrong"):
        assert_attention_close(out, lse, q, k, v, **e.options)


@pytest.mark.parametrize("softcap", sampled([2.0, 50.0], 2.0))
@pytest.mark.parametrize("dtype", sampled(["float16", "bfloat16"], "float16"))
@pytest.mark.parametrize("tanh_error", ERRORS_OF_TANH)
def test_accepts_an_approximate_tanh(tanh_error, dtype, softcap):
    """However the error of tanh is spread, up to scores as large as the cap."""
    for gain in (1, 6):
        q, k, v = testing.random_qkv(1, 64, 300, 2, 64, dtype=dtype)
        q = (q.astype(np.float32) * gain).astype(q.dtype)
        options = {"softcap": softcap, "tanh_error": tanh_error}
        assert_attention_close(*emulated(q, k, v, **options), q, k, v, softcap=softcap)


def test_the_term_of_softcap_is_needed_and_not_wide():
    """float16: without the term a tanh within its promise is refused; with it, one that errs 8 times as much is."""
    q, k, v = testing.random_qkv(1, 64, 512, 2, 64)
    q = q * np.float16(6)
    options = {"softcap": 50.0}
    out, _ = emulated(q, k, v, tanh_error="changing fast", **options)
    exact, _ = reference.attention(q, k, v, **options)
    rough, _ = reference.naive(q, k, v, **options)
    assert np.any(np.abs(out - exact) > testing.tolerance(exact, rough, q.dtype))
    assert_attention_close(out, None, q, k, v, **options)
    try:
        globals()["TANH_ERROR"] = 2.0**-8
        out, lse = emulated(q, k, v, tanh_error="changing fast", **options)
    finally:
        globals()["TANH_ERROR"] = 2.0**-11
    with pytest.raises(AssertionError, match="out: "):
        assert_attention_close(out, None, q, k, v, **options)
    with pytest.raises(AssertionError, match="lse: "):
        assert_attention_close(*emulated(q, k, v, **options)[:1], lse, q, k, v, **options)


def test_lse_tolerance_in_numbers():
    np.testing.assert_allclose(testing.lse_tolerance(np.array([0.0, 300.0]), np.array([0.5, 0.0])), [0.50001, 3e-3])


# Biases and masks.

SIZES = {"b": 3, "h": 2, "q": 5, "k": 7}


@pytest.mark.parametrize("storage", SCORE_ARRAY_STORAGES)
@pytest.mark.parametrize("axes", SCORE_ARRAY_AXES)
def test_score_arrays_broadcast_and_stand_among_poison(axes, storage):
    rng = np.random.default_rng(0)
    for made, dtype in (
        (random_bias(axes, SIZES, "bfloat16", storage, rng=rng), ml_dtypes.bfloat16),
        (random_bias(axes + " f32", SIZES, "float16", storage, rng=rng), np.float32),
        (random_mask(axes, SIZES, storage, rng=rng), np.bool_),
    ):
        assert isinstance(made, np.ndarray)
        assert made.dtype == dtype
        assert made.shape == tuple(1 if axis == "1" else SIZES[axis] for axis in axes)
        np.broadcast_to(made, (3, 2, 5, 7))
        if dtype is not np.bool_:
            buffer = made
            while buffer.base is not None:
                buffer = buffer.base
            assert np.isfinite(made).all()
            stored = math.prod(n for n, stride in zip(made.shape, made.strides, strict=True) if stride)
            assert np.isnan(buffer.astype(np.float32)).sum() == buffer.size - stored


def test_contents_of_score_arrays():
    rng = np.random.default_rng(0)
    sizes = {"b": 2, "h": 3, "q": 40, "k": 50}
    assert 0.1 < np.isneginf(random_bias("bhqk holes", sizes, "float16", rng=rng)).mean() < 0.3
    assert 0.1 < (random_bias("bhqk f32 far", sizes, "float16", rng=rng) == -1e4).mean() < 0.3
    bias = random_bias("b11k", sizes, "float16", rng=rng, seqlens_k=(50, 7))
    assert np.isnan(bias).sum() == np.isnan(bias[1, ..., 7:]).sum() == 43
    assert not np.isnan(random_bias("1hqk", sizes, "float16", rng=rng, seqlens_k=(50, 7))).any()
    assert 0.6 < random_mask("bhqk", sizes, rng=rng).mean() < 0.75
    rows = random_mask("bhqk rows", sizes, rng=rng).any(axis=3)
    assert 0.15 < 1 - rows.mean() < 0.35
    assert random_mask("bhqk sparse", sizes, rng=rng).mean() < 0.2
    assert random_mask("rows", sizes, rng=rng).shape == ()


@pytest.mark.parametrize("words", ["bhk", "kq", "xbhqk", "bbhqk", "bhqk dense", "holes f64"])
def test_words_that_mean_nothing(words):
    with pytest.raises(ValueError, match="is not some of the last axes of bhqk"):
        random_bias(words, SIZES, "float16", rng=np.random.default_rng(0))


# Examples.


@settings(max_examples=15 * settings().max_examples // 2)
@given(testing.attention_examples(max_seqlen=40, max_head_dim=70, max_work=1 << 18, options=True))
def test_examples_are_legal_calls(example):
    q, k, v = example.arrays()
    out, lse = reference.attention(q, k, v, **example.options)
    assert out.size >= 64 or out.size == 0
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()
    again, contiguous = eval(repr(example)).options, example.contiguous().options
    for name, array in example.option_arrays().items():
        np.testing.assert_array_equal(array.astype(np.float64), again[name].astype(np.float64))
        assert array.dtype == contiguous[name].dtype
        if "repeated" not in example.bias_storage + example.mask_storage:
            np.testing.assert_array_equal(array.astype(np.float64), contiguous[name].astype(np.float64))


@pytest.mark.full
def test_examples_draw_everything():
    seen, together = set(), set()

    @settings(max_examples=400, deadline=None, database=None)
    @given(testing.attention_examples(max_seqlen=40, options=True))
    def collect(example):
        used = example.options.keys() - {"causal", "align", "softmax_scale", "layout"}
        seen.update(used)
        together.add(len(used))

    collect()
    assert seen == {
        *("window", "softcap", "alibi_slopes", "bias", "mask", "sinks", "seqlens_q", "seqlens_k"),
        *("dropout_p", "dropout_seed"),
    }
    assert {0, 1, 4} <= together


@settings(max_examples=5 * settings().max_examples // 4)
@given(testing.attention_examples())
def test_examples_are_plain_unless_asked(example):
    assert example.options.keys() == {"causal", "align", "softmax_scale", "layout"}


@pytest.mark.parametrize("storage", testing.STORAGES)
def test_what_does_not_exist_is_poisoned(storage):
    e = Example(
        *("float16", 3, 6, 8, 2, 1, 8, 8), storage=(storage,) * 3, seqlens_q=(6, 0, 4), seqlens_k=(3, 7, 0), bias="bhqk"
    )
    q, k, v = e.arrays()
    bias = e.options["bias"]
    longest = (7, 7, 7) if storage == "one batch repeated" else e.seqlens_k
    for b in range(3):
        if storage != "one row repeated":
            assert np.isnan(k[b]).all(axis=(1, 2)).sum() == 8 - longest[b]
            assert np.isnan(k[b, longest[b] :]).all()
            assert np.isnan(v[b, longest[b] :]).all()
        assert np.isnan(bias[b, :, :, e.seqlens_k[b] :]).all()
        assert np.isfinite(q[b, : e.seqlens_q[b]]).all()
        assert np.isfinite(k[b, : e.seqlens_k[b]]).all()
    assert np.isfinite(reference.attention(q, k, v, **e.options)[0]).all()
