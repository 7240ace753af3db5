"""Biases and masks against the definition: any axes, wherever they lie, and contents that hide whole rows."""

import ml_dtypes
import numpy as np
import pytest
from conftest import example, some
from sampling import sampled, sampled_rows

from cupy_fa2.testing import SCORE_ARRAY_AXES, SCORE_ARRAY_STORAGES, assert_attention_close, host

KINDS = ("float16", "bfloat16 f32", "bfloat16", "float16 f32")


@pytest.mark.parametrize("axes", sampled(SCORE_ARRAY_AXES, "bhqk", "b11k", "hq1", "k", ""))
def test_broadcast_biases(fa, axes):
    """Any axes, and an odd number of keys or an even one, which can be read in pairs."""
    turn = SCORE_ARRAY_AXES.index(axes)
    for kind in fa.size([KINDS[turn % 4]], KINDS):
        dtype, *words = kind.split()
        for seqlen_k in fa.size([70 + turn // 2 % 2], [70, 71, 513]):
            fa.hold(example(dtype, 2, 20, seqlen_k, 2, 16, bias=" ".join([axes, *words, "holes" if axes else ""])))


@pytest.mark.parametrize("axes", sampled(SCORE_ARRAY_AXES, "b1qk", "1h1k", "q1", ""))
def test_broadcast_masks(fa, axes):
    for seqlen_k in fa.size([(71, 70)[SCORE_ARRAY_AXES.index(axes) % 2]], [70, 71, 513]):
        fa.hold(example("bfloat16", 2, 20, seqlen_k, 2, 16, mask=axes))


@pytest.mark.parametrize(
    "storage", sampled(SCORE_ARRAY_STORAGES, "heads last", "odd rows", "odd start", "reversed", "keys reversed")
)
def test_layouts_of_biases_and_masks(fa, storage):
    """Wherever they lie, NaN or True is all around; more than one tile of rows and keys, and rows past the end."""
    turn = SCORE_ARRAY_STORAGES.index(storage)
    for axes in fa.size([("bhqk", "1hqk")[turn % 2]], ["bhqk", "1hqk", "qk", "b11k"]):
        for f32 in fa.size([("", " f32")[turn // 2 % 2]], ["", " f32"]):
            fa.hold(example("bfloat16", 1, 135, 134, 2, 16, bias=axes + f32, bias_storage=storage))
        fa.hold(example("bfloat16", 1, 135, 134, 2, 16, mask=axes, mask_storage=storage))


def test_a_mask_of_odd_bytes(fa):
    """A bool is what is not 0, as when bytes are viewed as bools."""
    rng = np.random.default_rng(0)
    numbers = rng.choice(np.array([0, 0, 1, 2, 128, 255], np.uint8), (20, 70))
    q, k, v = example().arrays(fa.xp)
    q = q[:, :20]
    odd = fa.call(q, k, v, mask=fa.xp.asarray(numbers).view(np.bool_))
    fa.same_bits(odd, fa.call(q, k, v, mask=fa.xp.asarray(numbers != 0)))


def test_rows_that_a_mask_hides(cards):
    """The first rows, a whole tile of them, the last, and one alone: 0 and -inf; the others as without."""
    for head_dim in some(cards, 0, [64, 128, 256]):
        mask = np.ones((300, 70), np.bool_)
        hidden = np.r_[0:3, 128:256, 270, 299]
        mask[hidden] = False
        e = example("bfloat16", seqlen_q=300, seqlen_k=70, num_heads=1, head_dim=head_dim)
        out, lse = cards.hold(e, mask=mask)
        assert (host(lse)[0, 0, hidden] == -np.inf).all()
        assert np.isfinite(np.delete(host(lse)[0, 0], hidden)).all()
        assert not host(out)[0, hidden].any()


def lowest(dtype):
    return float(ml_dtypes.finfo(dtype).min)


BIASES = [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")]


@pytest.mark.parametrize(("dtype", "bias_dtype"), sampled_rows(BIASES, BIASES[0], BIASES[3]))
def test_the_lowest_number_as_a_mask(fa, dtype, bias_dtype):
    """Half of the keys at finfo.min, or at half of it, or at -inf, in every row."""
    for hide in (lowest(bias_dtype), lowest(bias_dtype) / 2, -np.inf):
        bias = np.where(np.random.default_rng(0).random((40, 150)) < 0.5, hide, 0.25)
        fa.hold(example(dtype, seqlen_k=150, head_dim=16), bias=bias.astype(bias_dtype))


@pytest.mark.parametrize("hide", [-1e4, "lowest"])
@pytest.mark.parametrize(("dtype", "bias_dtype"), sampled_rows(BIASES, BIASES[1], BIASES[2]))
def test_a_row_of_nothing_but_the_lowest_number(fa, dtype, bias_dtype, hide):
    """It is no empty row: its scores are all as low, and it has their softmax, or the mean where that is all that is
    left. A row of -inf beside it is empty. (Beyond 10^37, lse says no more than that: docs/numerics.md.)"""
    low = lowest(bias_dtype) if hide == "lowest" else hide
    bias = np.zeros((40, 150), bias_dtype)
    bias[3:6], bias[7] = low, -np.inf
    e = example(dtype, seqlen_k=150, head_dim=16, num_heads=1)
    if low > -1e37:
        out, lse = fa.hold(e, bias=bias)
    else:
        arrays = e.arrays(fa.xp)
        out, lse = fa.call(*arrays, bias=fa.xp.asarray(bias))
        assert_attention_close(out, None, *arrays, bias=bias)
    assert (host(lse)[0, 0, 3:6] < max(low / 2, -1e37)).all()
    assert np.isfinite(host(lse)[0, 0, 3:6]).all()
    assert host(out)[0, 3:6].any()
    assert host(lse)[0, 0, 7] == -np.inf


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_a_bias(fa, value):
    """A row that sees it is NaN; one from which it is hidden, and every other, has its bits."""
    bias = np.zeros((40, 70), np.float16)
    expected = fa.call(*example().arrays(fa.xp), bias=fa.xp.asarray(bias), causal=True)
    bias[5, 7], bias[9, 60] = value, value  # row 9 sees the keys up to 39
    out, lse = fa.call(*example().arrays(fa.xp), bias=fa.xp.asarray(bias), causal=True)
    others = np.delete(np.arange(40), 5)
    assert np.isnan(host(out)[:, 5].astype(float)).all()
    assert np.isnan(host(lse)[..., 5]).all()
    fa.same_bits(
        (host(out)[:, others], host(lse)[..., others]), (host(expected[0])[:, others], host(expected[1])[..., others])
    )
