"""The definition itself, against formulations that share nothing with it; and what its functions take."""

import inspect
import math

import ml_dtypes
import numpy as np
import pytest

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.reference import definition
from cupy_fa2.testing import assert_attention_close


def direct(q, k, v, *, causal=False, align="bottom-right", softmax_scale=None):
    """Attention by scalar loops: key j weighs w_j = 1 / sum_l exp(s_l - s_j), and lse = s_0 - log(w_0)."""
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((batch, seqlen_q, num_heads, head_dim_v))
    lse = np.full((batch, num_heads, seqlen_q), -np.inf)
    for b in range(batch):
        if isinstance(align, str):
            last = {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}[align]
        else:
            last = align[b] if np.ndim(align) else align
        for h in range(num_heads):
            hk = [g for g in range(num_heads_k) for _ in range(num_heads // num_heads_k)][h]
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_k) if not causal or j <= i + last]
                if not seen:
                    continue
                s = [scale * math.fsum(q[b, i, h, c] * k[b, j, hk, c] for c in range(head_dim)) for j in seen]
                w = [1 / math.fsum(math.exp(t - u) for t in s) for u in s]
                lse[b, h, i] = s[0] - math.log(w[0])
                for c in range(head_dim_v):
                    out[b, i, h, c] = math.fsum(w[n] * v[b, j, hk, c] for n, j in enumerate(seen))
    return out, lse


def draw(shape_q, shape_k, head_dim_v, dtype=np.float64, seed=0, mean=0.0):
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(mean, 1, s) for s in (shape_q, shape_k, (*shape_k[:3], head_dim_v)))
    return [x.astype(dtype) for x in arrays]


@pytest.mark.parametrize("align", ["bottom-right", "top-left", 3, -4, np.array([-2, 5])], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads", "head_dim", "head_dim_v", "scale"),
    [
        (5, 7, (4, 2), 3, 5, None),
        (7, 5, (6, 2), 8, 1, -0.7),
        (1, 9, (3, 3), 1, 2, 2.5),
        (4, 1, (2, 1), 2, 2, 0.0),
    ],
)
def test_equals_scalar_loops(seqlen_q, seqlen_k, heads, head_dim, head_dim_v, scale, causal, align):
    q, k, v = draw((2, seqlen_q, heads[0], head_dim), (2, seqlen_k, heads[1], head_dim), head_dim_v, mean=0.5)
    options = {"causal": causal, "align": align, "softmax_scale": scale}
    out, lse = reference.attention(q, k, v, **options)
    expected_out, expected_lse = direct(q, k, v, **options)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


def test_weights_one_to_three():
    k = np.log([1.0, 3.0]).reshape(1, 2, 1, 1)
    out, lse = reference.attention(np.ones((1, 1, 1, 1)), k, np.array([0.0, 4.0]).reshape(1, 2, 1, 1))
    assert out.item() == pytest.approx(3, abs=1e-15)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


def test_default_scale_is_one_over_root_head_dim():
    q = np.ones((1, 1, 1, 16))
    k = np.zeros((1, 2, 1, 16))
    k[0, 1] = math.log(3) / 4  # 16 products of log(3) / 4, over sqrt(16)
    out, _ = reference.attention(q, k, np.array([0.0, 4.0]).reshape(1, 2, 1, 1))
    assert out.item() == pytest.approx(3, abs=1e-14)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "align", "seen"),
    [
        (2, 5, "bottom-right", [4, 5]),
        (5, 2, "bottom-right", [0, 0, 0, 1, 2]),
        (2, 5, "top-left", [1, 2]),
        (5, 2, "top-left", [1, 2, 2, 2, 2]),
        (3, 4, 2, [3, 4, 4]),
        (3, 4, -2, [0, 0, 1]),
        (2, 3, 10**9, [3, 3]),
        (2, 3, -(10**9), [0, 0]),
    ],
)
def test_diagonal(seqlen_q, seqlen_k, align, seen):
    """With equal scores and one-hot values the output is the mask itself, each row over its count."""
    q, k = np.zeros((1, seqlen_q, 1, 2)), np.zeros((1, seqlen_k, 1, 2))
    out, lse = reference.attention(q, k, np.eye(seqlen_k)[None, :, None], causal=True, align=align)
    for row, count in enumerate(seen):
        assert out[0, row, 0].tolist() == pytest.approx([1 / max(1, count)] * count + [0] * (seqlen_k - count))
        assert lse[0, 0, row] == (pytest.approx(math.log(count)) if count else -math.inf)


def test_alignment_of_each_batch():
    q, k = np.zeros((3, 1, 1, 1)), np.zeros((3, 4, 1, 1))
    v = np.broadcast_to(np.eye(4)[None, :, None], (3, 4, 1, 4))
    out, _ = reference.attention(q, k, v, causal=True, align=[-1, 0, 2])
    assert (out[:, 0, 0] > 0).sum(axis=1).tolist() == [0, 1, 3]


def test_heads_of_a_group_are_neighbours():
    """Query heads 0..2 read kv head 0 and 3..5 read kv head 1; a round robin would alternate."""
    q, k = np.zeros((1, 1, 6, 4)), np.zeros((1, 1, 2, 4))
    out, _ = reference.attention(q, k, np.array([10.0, 20.0]).reshape(1, 1, 2, 1))
    assert out.ravel().tolist() == [10, 10, 10, 20, 20, 20]


@pytest.mark.parametrize("elements", [1, 7, 40, 1 << 22])
def test_block_size_does_not_matter(monkeypatch, elements):
    q, k, v = draw((2, 9, 4, 5), (2, 13, 2, 5), 3)
    whole = reference.attention(q, k, v, causal=True)
    monkeypatch.setattr(definition, "BLOCK_ELEMENTS", elements)
    for a, b in zip(reference.attention(q, k, v, causal=True), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)


def test_memory_is_bounded_by_the_block(monkeypatch):
    """No array of scores is larger than one block."""
    largest = 0
    scores = definition.Call.scores

    def measured(*args):
        nonlocal largest
        result = scores(*args)
        largest = max(largest, result.size)
        return result

    monkeypatch.setattr(definition.Call, "scores", measured)
    monkeypatch.setattr(definition, "BLOCK_ELEMENTS", 1 << 12)
    q, k, v = draw((1, 300, 2, 2), (1, 500, 1, 2), 2)
    reference.attention(q, k, v)
    assert 0 < largest <= 1 << 12


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("function", ["attention", "naive"])
def test_rows_are_those_of_the_whole(function, layout):
    q, k, v = draw((2, 9, 4, 5), (2, 13, 2, 5), 3, dtype=np.float16)
    if layout == "bhsd":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    options = {"causal": True, "align": [1, -3], "layout": layout, "softmax_scale": 0.3}
    out, lse = getattr(reference, function)(q, k, v, **options)
    assert out.shape == ((2, 4, 9, 3) if layout == "bhsd" else (2, 9, 4, 3))
    rows = np.array([(1, 3, 8), (0, 0, 0), (1, 0, 2), (0, 2, 5), (1, 3, 8), (1, 3, 0)])
    some_out, some_lse = getattr(reference, function + "_rows")(q, k, v, rows, **options)
    b, h, i = rows.T
    np.testing.assert_array_equal(some_lse, lse[b, h, i])
    np.testing.assert_allclose(
        some_out.astype(float), (out[b, h, i] if layout == "bhsd" else out[b, i, h]).astype(float), rtol=1e-14
    )


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_k"),
    [(0, 3, 4, 2, 1), (2, 0, 4, 2, 1), (2, 3, 0, 2, 1), (2, 0, 0, 2, 2), (2, 3, 4, 0, 2), (2, 3, 4, 0, 0)],
)
def test_nothing_to_do(batch, seqlen_q, seqlen_k, num_heads, num_heads_k):
    q, k, v = draw((batch, seqlen_q, num_heads, 8), (batch, seqlen_k, num_heads_k, 8), 5)
    for causal in (False, True):
        out, lse = reference.attention(q, k, v, causal=causal)
        assert out.shape == (batch, seqlen_q, num_heads, 5)
        assert lse.shape == (batch, num_heads, seqlen_q)
        if seqlen_k == 0:
            assert not out.any()
            assert np.all(lse == -np.inf)


def test_scores_of_minus_infinity_are_no_weight():
    q, k, v = draw((1, 2, 1, 4), (1, 6, 1, 4), 4, dtype=np.float16)
    q = np.abs(q)
    k[..., 0] = -np.inf
    out, lse = reference.attention(q, k, v)
    assert not out.any()
    assert np.all(lse == -np.inf)


def test_some_scores_of_minus_infinity():
    k = np.array([-np.inf, 0.0, -np.inf, 0.0]).reshape(1, 4, 1, 1)
    out, lse = reference.attention(np.ones((1, 1, 1, 1)), k, np.arange(4.0).reshape(1, 4, 1, 1))
    assert out.item() == 2
    assert lse.item() == pytest.approx(math.log(2))


def test_nan_is_seen_where_it_is_visible_and_only_there():
    q, k, v = draw((1, 6, 1, 4), (1, 6, 1, 4), 4)
    clean_out, clean_lse = reference.attention(q, k, v, causal=True)
    k[0, 3] = np.nan
    out, lse = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[0, :3], clean_out[0, :3])
    np.testing.assert_array_equal(lse[..., :3], clean_lse[..., :3])
    assert np.isnan(out[0, 3:]).all()
    assert np.isnan(lse[..., 3:]).all()


@pytest.mark.parametrize("constant", [1000.0, -1000.0, 1e6])
def test_a_constant_moves_lse_and_nothing_else(constant):
    """No exponential of the raw score is ever taken."""
    q, k, v = draw((1, 4, 1, 3), (1, 9, 1, 3), 2)
    plain_out, plain_lse = reference.attention(q, k, v, softmax_scale=1)
    q = np.concatenate([q, np.ones((1, 4, 1, 1))], axis=3)
    k = np.concatenate([k, np.full((1, 9, 1, 1), constant)], axis=3)
    out, lse = reference.attention(q, k, v, softmax_scale=1)
    np.testing.assert_allclose(out, plain_out, atol=1e-9)
    np.testing.assert_allclose(lse - constant, plain_lse, atol=1e-9)


def test_scale_zero_is_the_mean_and_a_negative_scale_turns_the_order():
    q, k, v = draw((1, 3, 1, 4), (1, 8, 1, 4), 2)
    out, lse = reference.attention(q, k, v, softmax_scale=0)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=1, keepdims=True), out.shape), atol=1e-15)
    np.testing.assert_allclose(lse, math.log(8))
    turned, _ = reference.attention(q, k, v, softmax_scale=-3)
    np.testing.assert_allclose(turned, reference.attention(-q, k, v, softmax_scale=3)[0], atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_inputs_are_taken_as_the_numbers_they_are(dtype):
    q, k, v = draw((1, 4, 2, 8), (1, 6, 2, 8), 8, dtype=dtype)
    low = reference.attention(q, k, v)
    high = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    for a, b in zip(low, high, strict=True):
        np.testing.assert_array_equal(a, b)


def test_naive_rounds_scores_probabilities_and_result():
    """2049 and 2048 are one number in float16, 1/3 is rounded, and so is a result between two numbers."""
    q, k = np.ones((1, 1, 1, 2), np.float16), np.array([[2048, 1], [2048, 0]], np.float16).reshape(1, 2, 1, 2)
    v = np.array([0, 1], np.float16).reshape(1, 2, 1, 1)
    out, _ = reference.naive(q, k, v, softmax_scale=1)
    assert out.item() == 0.5  # exact: 1 / (1 + e)
    # Three equal weights: float16(1 / 3) is one part in 4096 low, which takes this sum to the number below.
    v = np.array([2, 1, 3.3 / 2048], np.float16).reshape(1, 3, 1, 1)
    zeros = np.zeros((1, 3, 1, 1), np.float16)
    out, _ = reference.naive(zeros[:, :1], zeros, v)
    exact, _ = reference.attention(zeros[:, :1], zeros, v)
    assert np.float16(exact.item()) == 1 + 2.0**-10
    assert out.dtype == np.float16
    assert out.item() == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_naive_is_near_and_not_exact(dtype):
    q, k, v = draw((1, 40, 2, 32), (1, 50, 1, 32), 16, dtype=dtype)
    out, lse = reference.attention(q, k, v, causal=True)
    rough, rough_lse = reference.naive(q, k, v, causal=True)
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert rough.dtype == dtype
    assert rough_lse.dtype == np.float32
    assert 0.1 * eps < np.abs(rough.astype(float) - out).max() < 10 * eps
    assert np.abs(rough_lse - lse).max() < 10 * eps


def test_score_magnitude_counts_visible_keys_only():
    q = np.array([[1.0, -2.0], [3.0, 0.5]]).reshape(1, 2, 1, 2)
    k = np.array([[1.0, 1.0], [-4.0, 4.0]]).reshape(1, 2, 1, 2)
    assert reference.score_magnitude(q, k, k, softmax_scale=-0.5).tolist() == [6, 7]
    assert reference.score_magnitude(q, k, k, softmax_scale=-0.5, causal=True).tolist() == [1.5, 7]
    assert reference.score_magnitude(q, k, k, [(0, 0, 1)], softmax_scale=1).tolist() == [14]
    assert reference.score_magnitude(q, k, k, causal=True, align=-5).tolist() == [0, 0]


FUNCTIONS = [
    reference.attention, reference.attention_rows, reference.naive, reference.naive_rows, reference.score_magnitude,
    reference.softcap_error, assert_attention_close,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_take_the_options_of_a_call(function):
    """By the same names and with the same defaults, as `help` shows them."""
    call = inspect.signature(cupy_fa2.flash_attention).parameters
    shown = inspect.signature(function).parameters
    options = [name for name, x in call.items() if x.kind is x.KEYWORD_ONLY]
    taken = [name for name, x in shown.items() if x.kind is x.KEYWORD_ONLY and name in options]
    assert taken == options[: options.index("layout") + 1]
    assert all(shown[name].default == call[name].default for name in taken)
    assert "cupy_fa2.flash_attention" in reference.attention.__doc__


@pytest.mark.parametrize("function", FUNCTIONS[:2], ids=lambda function: function.__name__)
def test_unknown_options_are_refused_by_name(function):
    q = np.ones((1, 1, 1, 8))
    rows = {"rows": [(0, 0, 0)]} if function is reference.attention_rows else {}
    with pytest.raises(TypeError, match="no option casual; it has causal, window"):
        function(q, q, q, **rows, casual=True)
    with pytest.raises(TypeError, match="no option out, return_lse; it has"):
        function(q, q, q, **rows, out=q, return_lse=True)
