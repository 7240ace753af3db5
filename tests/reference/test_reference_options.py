"""The options of the definition, each against a formulation that shares nothing with it."""

import doctest
import math

import numpy as np
import pytest
from scalar_loops import DV, HEADS, HEADS_K, HOLES, OPTIONS, SOME, SPARSE, B, D, M, N, assert_same, direct, draw

from cupy_fa2 import reference, testing
from cupy_fa2.dropout import dropout_mask
from cupy_fa2.testing import Example, with_options

TABLE = {**testing.OPTION_EXAMPLES, **testing.OPTION_VARIANTS, "everything": testing.EVERYTHING}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_scalar_loops(options):
    q, k, v = draw()
    assert_same(reference.attention(q, k, v, **options), direct(q, k, v, **options))


@pytest.mark.parametrize("fields", [*TABLE.values()], ids=TABLE)
def test_options_of_the_table_equal_scalar_loops(fields):
    e = with_options(Example("float16", B, M, N, HEADS, HEADS_K, D, DV), fields)
    float32 = ("alibi_slopes", "sinks")  # a scalar of that type would take the others down with it
    options = {name: x.astype(float) if name in float32 else x for name, x in e.options.items()}
    q, k, v = draw()
    assert_same(reference.attention(q, k, v, **options), direct(q, k, v, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", ["attention", "naive"])
def test_rows_are_those_of_the_whole(function, options):
    q, k, v = (x.astype(np.float16) for x in draw())
    out, lse = getattr(reference, function)(q, k, v, **options)
    rows = np.array([(1, 3, 5), (0, 0, 0), (1, 0, 2), (0, 2, 4), (1, 3, 5), (1, 3, 0)])
    some_out, some_lse = getattr(reference, function + "_rows")(q, k, v, rows, **options)
    b, h, i = rows.T
    np.testing.assert_allclose(some_lse, lse[b, h, i], rtol=1e-6)
    np.testing.assert_allclose(some_out.astype(float), out[b, i, h].astype(float), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_naive_is_near(options):
    q, k, v = (x.astype(np.float16) for x in draw())
    out, lse = reference.attention(q, k, v, **options)
    rough, rough_lse = reference.naive(q, k, v, **options)
    assert rough.dtype == np.float16
    assert np.abs(rough - out).max() < 0.02
    np.testing.assert_allclose(rough_lse, lse, atol=0.02)


class Elsewhere:
    """What a CuPy array is to the definition: shape, slices, transpose, and `get` to bring it to the host."""

    def __init__(self, array):
        self.array, self.dtype, self.ndim, self.shape = array, array.dtype, array.ndim, array.shape

    def __getitem__(self, index):
        return Elsewhere(self.array[index])

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array")

    def __int__(self):
        return int(self.array)

    def transpose(self, *axes):
        return Elsewhere(self.array.transpose(*axes))

    def get(self):
        return self.array


def test_arrays_may_be_elsewhere():
    options = OPTIONS["all"] | {"dropout_seed": np.array(3, np.int64), "seqlens_k": np.array([9, 8])}
    away = {name: Elsewhere(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for function in (reference.attention, reference.naive, reference.score_magnitude, reference.softcap_error):
        q, k, v = (x.astype(np.float16) for x in draw())
        here = function(q, k, v, **options)
        assert_same(function(*map(Elsewhere, (q, k, v)), **away), here)


# Equivalences.


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 1), (None, 2), (3, None), (10**9, 0), (1, 10**12)])
@pytest.mark.parametrize("align", ["bottom-right", "top-left", -4, np.array([0, 6])], ids=str)
def test_window_is_a_mask(left, right, align):
    q, k, v = draw()
    offset = {"bottom-right": N - M, "top-left": 0}[align] if isinstance(align, str) else np.reshape(align, (-1, 1, 1))
    distance = np.arange(N) - (np.arange(M)[:, None] + offset)
    mask = np.ones(distance.shape, bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    mask = mask.reshape(-1, 1, M, N)
    windowed = reference.attention(q, k, v, window=(left, right), align=align)
    assert_same(windowed, reference.attention(q, k, v, mask=mask))


def test_no_window():
    q, k, v = draw()
    for window in (None, (None, None), (10**9, 10**9), (M + N, M + N)):
        assert_same(reference.attention(q, k, v, window=window), reference.attention(q, k, v))


def test_causal_closes_the_right_of_a_window():
    q, k, v = draw()
    for right in (None, 0, 3):
        windowed = reference.attention(q, k, v, causal=True, window=(2, right))
        assert_same(windowed, reference.attention(q, k, v, window=(2, 0)))
    assert_same(reference.attention(q, k, v, causal=True), reference.attention(q, k, v, window=(None, 0)))


def test_alibi_is_a_bias():
    q, k, v = draw()
    distance = np.abs(np.arange(M)[:, None] + (N - M) - np.arange(N))
    bias = -SOME[:, :, None, None] * distance
    assert_same(reference.attention(q, k, v, alibi_slopes=SOME), reference.attention(q, k, v, bias=bias))
    assert_same(reference.attention(q, k, v, alibi_slopes=SOME[0]), reference.attention(q, k, v, bias=bias[:1]))


def test_alibi_below_the_diagonal_is_a_bias_of_the_key():
    """Under a causal mask, a slope times the distance is a slope times the key, up to a constant of the row."""
    q, k, v = draw()
    by_key = SOME[0][:, None, None] * np.arange(N)
    out, _ = reference.attention(q, k, v, alibi_slopes=SOME[0], causal=True)
    np.testing.assert_allclose(out, reference.attention(q, k, v, bias=by_key, causal=True)[0], atol=1e-12)


def test_a_mask_is_a_bias_of_minus_infinity():
    q, k, v = draw()
    bias = np.where(SPARSE, 0, -np.inf).astype(np.float16)
    assert_same(reference.attention(q, k, v, mask=SPARSE), reference.attention(q, k, v, bias=bias))


def test_a_mask_is_the_keys_left_out():
    q, k, v = draw()
    keep = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1], bool)
    assert_same(reference.attention(q, k, v, mask=keep), reference.attention(q, k[:, keep], v[:, keep]))


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_are_slices(causal):
    q, k, v = draw()
    lengths_q, lengths_k = [4, 6], [7, 3]
    q[0, 4:], k[0, 7:], v[0, 7:], k[1, 3:], v[1, 3:] = [np.nan] * 5
    bias = HOLES.copy()
    bias[0, :, 4:], bias[0, :, :, 7:], bias[1, :, :, 3:] = np.nan, np.nan, np.nan
    options = {"causal": causal, "softcap": 3.0, "sinks": SOME[0], "alibi_slopes": SOME[0]}
    out, lse = reference.attention(q, k, v, bias=bias, seqlens_q=lengths_q, seqlens_k=lengths_k, **options)
    for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        alone = [x[b : b + 1] for x in (q[:, :m], k[:, :n], v[:, :n], bias[:, :, :m, :n])]
        expected = reference.attention(*alone[:3], bias=alone[3], **options)
        assert_same((out[b : b + 1, :m], lse[b : b + 1, :, :m]), expected)
        assert not out[b, m:].any()
        assert np.all(lse[b, :, m:] == -np.inf)


def test_lengths_out_of_range_are_clamped():
    q, k, v = draw()
    clamped = reference.attention(q, k, v, causal=True, seqlens_q=[6, 0], seqlens_k=[0, 9])
    assert_same(reference.attention(q, k, v, causal=True, seqlens_q=[99, -3], seqlens_k=[-1, 10]), clamped)


def test_a_sink_is_a_key_without_a_value():
    q, k, v = draw()
    sinks = SOME[0] * 2
    out, lse = reference.attention(q, k, v, sinks=sinks, softmax_scale=0.7, softcap=2.0)
    k, v = (np.concatenate([x, np.zeros((B, 1, HEADS_K, x.shape[3]))], axis=1) for x in (k, v))
    bias = np.zeros((HEADS, 1, N + 1))
    bias[:, 0, N] = sinks  # beside a score of 0
    assert_same((out, lse), reference.attention(q, k, v, bias=bias, softmax_scale=0.7, softcap=2.0))


def test_a_sink_alone():
    q, k, v = draw()
    out, lse = reference.attention(q, k, v, sinks=SOME[0], mask=np.zeros((1, 1), bool))
    assert not out.any()
    np.testing.assert_allclose(lse, np.broadcast_to(SOME[0][:, None], lse.shape))
    for gone in (np.full(HEADS, -np.inf), np.full(HEADS, -1e4)):
        assert_same(reference.attention(q, k, v, sinks=gone), reference.attention(q, k, v))
    out, lse = reference.attention(q, k, v, sinks=np.full(HEADS, 1e4))
    assert np.abs(out).max() < 1e-300
    np.testing.assert_allclose(lse, 1e4)


def test_a_large_cap_is_none_and_a_small_one_flattens():
    q, k, v = draw()
    assert_same(reference.attention(q, k, v, softcap=1e9), reference.attention(q, k, v))
    out, _ = reference.attention(q, k, v, softcap=1e-9)
    mean = np.repeat(v.mean(axis=1, keepdims=True), HEADS // HEADS_K, axis=2)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-8)


def test_the_order_of_steps():
    """One query, two keys with scores 0 and x; each step after the one before it."""
    q, k, v = np.ones((1, 1, 1, 1)), np.array([0.0, 3.0]).reshape(1, 2, 1, 1), np.array([0.0, 1]).reshape(1, 2, 1, 1)

    def second_score(**options):
        return float(np.log(1 / reference.attention(q, k, v, **options)[0].item() - 1) * -1)

    cap = 2.0
    capped = cap * math.tanh(-6 / cap)
    assert second_score(softmax_scale=-2) == pytest.approx(-6)
    assert second_score(softmax_scale=-2, softcap=cap) == pytest.approx(capped)  # the scale is inside the cap
    bias = np.array([0, 5.0])
    assert second_score(softmax_scale=-2, softcap=cap, bias=bias) == pytest.approx(capped + 5)  # the bias outside
    slope = np.array([0.5])  # the first key lies on the diagonal, the second one after it
    options = {"softmax_scale": -2, "softcap": cap, "alibi_slopes": slope, "align": 0}
    assert second_score(**options) == pytest.approx(capped - 0.5)  # ALiBi outside too, and neither scaled
    options |= {"bias": bias}
    assert second_score(**options) == pytest.approx(capped - 0.5 + 5)
    out, lse = reference.attention(q, k, v, mask=np.array([True, False]), **options)
    assert (out.item(), lse.item()) == (0, 0)  # hidden is hidden: no cap makes a finite score of it
    out, lse = reference.attention(q, k, v, sinks=np.array([100.0]), **options)
    assert lse.item() == pytest.approx(100)  # the sink is not capped


@pytest.mark.parametrize("sinks", [None, SOME[0]], ids=["no sinks", "sinks"])
def test_dropout_multiplies_probabilities(sinks):
    """Unit values show the probabilities; dropped or scaled up, they make the output."""
    q, k, v = draw()
    options = {"causal": True, "sinks": sinks, "softcap": 4.0}
    units = np.broadcast_to(np.eye(N)[None, :, None], (B, N, HEADS_K, N))
    p, lse = reference.attention(q, k, units, **options)
    kept = dropout_mask((B, HEADS, M, N), 0.25, 77).transpose(0, 2, 1, 3)
    values = np.repeat(v, HEADS // HEADS_K, axis=2)
    expected = np.einsum("bihj,bjhc->bihc", p * kept / 0.75, values)
    assert_same(reference.attention(q, k, v, dropout_p=0.25, dropout_seed=77, **options), (expected, lse))


def test_dropout_of_nothing():
    q, k, v = draw()
    for p in (0.0, 2**-18):
        assert_same(reference.attention(q, k, v, dropout_p=p, dropout_seed=1), reference.attention(q, k, v))
    with pytest.raises(TypeError):
        reference.attention(q, k, v, dropout_p=0.1)


def test_dropout_keeps_the_expectation():
    q, k, v = draw(batch=1, heads=1, heads_k=1)
    exact, _ = reference.attention(q, k, v)
    outs = np.array([reference.attention(q, k, v, dropout_p=0.3, dropout_seed=s)[0] for s in range(2000)])
    sigma = outs.std(axis=0) / math.sqrt(len(outs))
    assert np.all(np.abs(outs.mean(axis=0) - exact) < 4.5 * sigma)


def test_nan_is_seen_where_it_is_visible_and_only_there():
    q, k, v = draw()
    clean_out, clean_lse = reference.attention(q, k, v, window=(2, 1), align="top-left", sinks=SOME[0])
    bias = np.zeros((M, N))
    bias[:, 4] = np.nan  # rows 3 to 6 of the window see key 4
    out, lse = reference.attention(q, k, v, window=(2, 1), align="top-left", sinks=SOME[0], bias=bias)
    assert_same((out[:, :3], lse[..., :3]), (clean_out[:, :3], clean_lse[..., :3]))
    assert np.isnan(out[:, 3:]).all()
    assert np.isnan(lse[..., 3:]).all()


def test_nothing_to_do():
    for batch, m, n, heads in ((0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)):
        q, k, v = draw(batch, m, n, heads, max(1, heads // 2))
        options = {
            "window": (1, 1),
            "softcap": 1.0,
            "alibi_slopes": np.ones((batch, heads)),
            "bias": np.zeros((batch, heads, m, n)),
            "mask": np.ones((batch, 1, 1, n), bool),
            "sinks": np.ones(heads),
            "seqlens_q": np.full(batch, m),
            "seqlens_k": np.full(batch, n),
            "dropout_p": 0.5,
            "dropout_seed": 0,
        }
        out, lse = reference.attention(q, k, v, **options)
        assert out.shape == (batch, m, heads, DV)
        assert not out.any() or n
        if n == 0:
            np.testing.assert_array_equal(lse, 1)
        assert reference.score_magnitude(q, k, v, **options).shape == (batch * heads * m,)
        assert reference.softcap_error(q, k, v, **options)[0].shape == (batch * heads * m, DV)


# What tolerances are made of.


def test_naive_rounds_once_after_the_bias_and_once_after_dropout():
    """2048 + 1 is 2048 in float16, but 1 - 1 + 2048 + 1 - 2048 done in float32 loses nothing."""
    q, k = np.ones((1, 1, 1, 1), np.float16), np.array([2048, 0], np.float16).reshape(1, 2, 1, 1)
    v = np.array([0, 1], np.float16).reshape(1, 2, 1, 1)
    out, _ = reference.naive(q, k, v, softmax_scale=1, bias=np.array([1 - 2048, 0], np.float32))
    assert out.item() == pytest.approx(1 / (1 + math.e), rel=1e-3)
    seed = next(s for s in range(99) if dropout_mask((1, 1, 1, 2), 0.25, s).all())
    zeros = np.zeros((1, 2, 1, 1), np.float16)
    out, _ = reference.naive(q, zeros, np.ones_like(zeros), dropout_p=0.25, dropout_seed=seed)
    assert out.item() == np.float16(2 * float(np.float16(0.5 / 0.75)))


def test_naive_rows_that_overflow_downwards_are_nan():
    q, k, v = (x.astype(np.float16) for x in draw())
    bias = np.zeros((M, N), np.float32)
    bias[2], bias[3, 1:] = -1e6, -1e6
    out, _ = reference.attention(q, k, v, bias=bias)
    rough, _ = reference.naive(q, k, v, bias=bias)
    assert np.isnan(rough[:, 2]).all()
    assert np.isfinite(np.delete(rough, 2, axis=1)).all()
    assert np.isfinite(out).all()


def test_score_magnitude_counts_what_is_summed_where_it_matters():
    q = np.array([[1.0, -2.0], [3.0, 0.5]]).reshape(1, 2, 1, 2)
    k = np.array([[1.0, 1.0], [-4.0, 4.0]]).reshape(1, 2, 1, 2)

    def magnitude(**options):
        return reference.score_magnitude(q, k, k, softmax_scale=-0.5, **options).tolist()

    assert magnitude() == [6, 7]
    assert magnitude(softcap=6.5) == [6, 6.5]
    assert magnitude(alibi_slopes=np.array([-2.0])) == [8, 7]
    assert magnitude(bias=np.array([-20.0, 5.0])) == [11, 12]
    assert magnitude(mask=np.array([True, False])) == [1.5, 1.75]
    assert magnitude(seqlens_k=[1], seqlens_q=[1], sinks=np.array([2.0])) == [2, 0]
    assert magnitude(sinks=np.array([-9.0])) == [9, 9]
    for hidden in (-1e9, -np.inf):
        assert magnitude(bias=np.array([hidden, 0])) == [6, 7]
    assert magnitude(bias=np.array(-1e9)) == [1e9 + 6, 1e9 + 7]
    assert magnitude(causal=True, align=-5) == [0, 0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("wrong", ["up", "down", "at random", "by the value"])
def test_softcap_error_bounds_what_tanh_does(monkeypatch, wrong, options):
    """A tanh that errs by as much as it may, in each way; the bound holds, and is not far from what happens."""
    relative = 2.0**-6
    options = options | {"softcap": options.get("softcap", 3.0)}
    q, k, v = draw()
    out, lse = reference.attention(q, k, v, **options)
    bound_out, bound_lse = reference.softcap_error(q, k, v, tanh_error=relative, **options)
    generator, tanh = np.random.default_rng(0), np.tanh
    kinds = {
        "up": lambda x: 1,
        "down": lambda x: -1,
        "at random": lambda x: generator.uniform(-1, 1, x.shape),
        "by the value": lambda x: np.sign(x - 0.3),
    }
    monkeypatch.setattr(np, "tanh", lambda x: tanh(x) * (1 + relative * kinds[wrong](x)))
    off_out, off_lse = reference.attention(q, k, v, **options)
    with np.errstate(invalid="ignore"):
        error_out = np.abs(off_out - out).transpose(0, 2, 1, 3).reshape(bound_out.shape)
        error_lse = np.nan_to_num(np.abs(off_lse - lse)).reshape(bound_lse.shape)
    assert np.all(error_out <= bound_out + 1e-14)
    assert np.all(error_lse <= bound_lse + 1e-14)
    if error_out.any():
        assert bound_out.max() < 12 * error_out.max()


def test_no_softcap_no_error():
    q, k, v = draw()
    out, lse = reference.softcap_error(q, k, v, [(0, 0, 1), (1, 2, 3)])
    assert out.shape == (2, DV)
    assert not out.any()
    assert not lse.any()


def test_the_examples_of_the_documentation():
    result = doctest.testmod(reference)
    assert result.attempted > 0
    assert result.failed == 0
