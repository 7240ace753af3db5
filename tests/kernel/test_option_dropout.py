"""Dropout drops exactly what `cupy_fa2.dropout_mask` says, wherever a probability is computed.

Queries of 0 make all visible keys alike, and values that are columns of the identity show each probability by itself:
out[..., i, :, j] is 0 where (i, j) was dropped, and the rescaled 1 / n where it was kept.
"""

import numpy as np
import pytest
from conftest import example
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2 import dropout_mask
from cupy_fa2.dropout import dropout_values
from cupy_fa2.testing import DTYPES, assert_attention_close, host

SEED = 0xFEDCBA9876543210


def one_hot(fa, shape, head_dim, head_dim_v, *, first=0, dtype="float16", num_heads_k=1):
    """q, k and v of a call with `shape`, (batch, heads, seqlen_q, seqlen_k); v shows columns from `first` on."""
    batch, num_heads, seqlen_q, seqlen_k = shape
    q = np.zeros((batch, seqlen_q, num_heads, head_dim), DTYPES[dtype])
    k = np.zeros((batch, seqlen_k, num_heads_k, head_dim), DTYPES[dtype])
    v = np.eye(seqlen_k, head_dim_v, -first, DTYPES[dtype])
    v = np.ascontiguousarray(np.broadcast_to(v[None, :, None], (batch, seqlen_k, num_heads_k, head_dim_v)))
    return tuple(fa.xp.asarray(x) for x in (q, k, v))


def probabilities(fa, shape, p, seed, *, head_dim=16, head_dim_v=128, dtype="float16", **options):
    """What the probabilities became, (batch, heads, seqlen_q, seqlen_k), and lse."""
    parts = []
    for first in range(0, shape[3], head_dim_v):
        q, k, v = one_hot(fa, shape, head_dim, head_dim_v, first=first, dtype=dtype)
        out, lse = fa.call(q, k, v, dropout_p=p, dropout_seed=seed, **options)
        parts.append(host(out).astype(float).transpose(0, 2, 1, 3)[..., : shape[3] - first])
    return np.concatenate(parts, axis=3), host(lse)


def assert_kept(actual, kept, visible=True):
    wrong = np.argwhere((actual != 0) != (kept & visible))
    assert len(wrong) == 0, f"{len(wrong)} of {kept.size} differ, the first (batch, head, row, key) {wrong[0]}"


#: head_dim, head_dim_v: each has a tile of its own, of 128 rows, or teams of warps; rows and keys end inside one.
DIMS = [(16, 128), (64, 64), (40, 48), (128, 128), (64, 256), (256, 256)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), sampled_rows(DIMS, (256, 256)))
def test_what_is_kept_does_not_depend_on_the_tile(cards, head_dim, head_dim_v):
    shape = cards.size((1, 1, 135, min(150, head_dim_v)), (3, 2, 300, 517))
    actual, lse = probabilities(cards, shape, 0.4, SEED, head_dim=head_dim, head_dim_v=head_dim_v)
    assert_kept(actual, dropout_mask(shape, 0.4, SEED))
    np.testing.assert_allclose(lse, np.log(shape[3]), rtol=1e-6)
    np.testing.assert_allclose(actual[actual != 0], 65536 / 39322 / shape[3], rtol=2.0**-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_batch_element_head_row_and_column(fa, dtype):
    shape = fa.size((2, 3, 140, 150), (5, 6, 1000, 1100))
    actual, _ = probabilities(fa, shape, 0.5, 12345, dtype=dtype, head_dim_v=fa.size(160, 256))
    assert_kept(actual, dropout_mask(shape, 0.5, 12345))


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (20, 5)}, {"window": (20, 5), "align": 90}, {"seqlens_k": [101, 3]}],
    ids=["causal", "window", "shifted", "lengths"],
)
def test_hidden_keys_leave_the_others_their_numbers(fa, options):
    """A column counts from the first key, whatever the first tile is."""
    shape = (2, 1, 135, 160)
    row, key = np.arange(135)[:, None], np.arange(160)
    offset = options.get("align", 25)
    visible = np.ones((2, 1, 135, 160), np.bool_)
    if "causal" in options:
        visible &= key <= row + offset
    elif "window" in options:
        visible &= (key <= row + offset + 5) & (key >= row + offset - 20)
    else:
        visible &= key < np.array(options["seqlens_k"])[:, None, None, None]
    actual, _ = probabilities(fa, shape, 0.3, SEED, head_dim_v=160, **options)
    assert_kept(actual, dropout_mask(shape, 0.3, SEED), visible)


def test_a_part_of_a_call_drops_the_same(fa):
    """Fewer batch elements, heads, rows and keys, from the first on; and heads that share keys or not."""
    whole, _ = probabilities(fa, (2, 4, 70, 150), 0.5, 1, head_dim_v=160)
    part, _ = probabilities(fa, (1, 2, 33, 77), 0.5, 1, head_dim_v=80)
    np.testing.assert_array_equal(whole[:1, :2, :33, :77] != 0, part != 0)
    q, k, v = one_hot(fa, (2, 4, 70, 150), 16, 160, num_heads_k=2)
    grouped = host(fa.call(q, k, v, dropout_p=0.5, dropout_seed=1)[0]).transpose(0, 2, 1, 3)[..., :150]
    np.testing.assert_array_equal(grouped != 0, whole != 0)


def test_seeds_in_arrays(fa):
    """An int, a NumPy array and one of the device with the same 64 bits are one seed."""
    shape = (1, 1, 40, 70)
    for number in (0, 3, 2**32, 2**64 - 3):
        expected, lse = probabilities(fa, shape, 0.5, number)
        assert_kept(expected, dropout_mask(shape, 0.5, number))
        bits = np.array(number, np.uint64)
        for seed in (bits, fa.xp.asarray(bits), fa.xp.asarray(bits.view(np.int64)), np.uint64(number)):
            fa.same_bits(probabilities(fa, shape, 0.5, seed), (expected, lse))


def test_a_seed_at_an_odd_place(fa):
    """One number of many, and one whose address is no multiple of 8."""
    shape = (1, 1, 40, 70)
    many = fa.xp.asarray(np.arange(5, dtype=np.int64) + 40)
    assert_kept(probabilities(fa, shape, 0.5, many[3])[0], dropout_mask(shape, 0.5, 43))
    odd = fa.xp.asarray(np.frombuffer(bytes(4) + np.uint64(77).tobytes(), np.uint8))[4:].view(np.uint64)
    assert_kept(probabilities(fa, shape, 0.5, odd.reshape(()))[0], dropout_mask(shape, 0.5, 77))


@pytest.mark.parametrize("other", sampled([1, 1 << 31, 1 << 32, 1 << 63], 1, 1 << 63))
def test_other_seeds_drop_others(fa, other):
    """In all of their 64 bits: two seeds agree about half of the probabilities."""
    one, _ = probabilities(fa, (1, 1, 40, 70), 0.5, 0)
    two, _ = probabilities(fa, (1, 1, 40, 70), 0.5, other)
    assert 0.4 < ((one != 0) == (two != 0)).mean() < 0.6


def test_the_threshold_is_exact(fa):
    """A number equal to the threshold is dropped, and one just below is kept: both at each of some places."""
    shape = (1, 2, 40, 70)
    for head, row, key in [(0, 3, 5), (1, 39, 69), (1, 17, 32), (0, 20, 40)]:
        number = int(dropout_values(0, head, [row], 70, SEED)[0, key])
        for kept in (number, number + 1):
            p = 1 - kept / 65536
            actual, _ = probabilities(fa, shape, p, SEED)
            assert_kept(actual, dropout_mask(shape, p, SEED))
            assert (actual[0, head, row, key] != 0) == (kept == number + 1)


def test_the_lowest_rates(fa):
    """Below 2^-17 nothing is dropped, and the bits are those without; at 2^-16 the number 65535 alone is."""
    e = example(num_heads=1)
    arrays = e.arrays(fa.xp)
    fa.same_bits(fa.call(*arrays, dropout_p=2.0**-18, dropout_seed=1), fa.call(*arrays))
    fa.same_bits(fa.call(*arrays, dropout_p=0, dropout_seed=1), fa.call(*arrays))
    shape = (1, 2, 40, 150)
    seed = next(seed for seed in range(100) if not dropout_mask(shape, 2.0**-16, seed).all())
    actual, _ = probabilities(fa, shape, 2.0**-16, seed, head_dim_v=160)
    assert_kept(actual, dropout_mask(shape, 2.0**-16, seed))
    assert (actual == 0).sum() < 4


def test_the_highest_rate(fa):
    """The number 0 alone is kept, and multiplied by 65536; where a row keeps none, out is 0 and lse as ever."""
    shape = (1, 2, 40, 150)
    p = 1 - 2.0**-16
    seed = next(seed for seed in range(100) if dropout_mask(shape, p, seed).any())
    actual, lse = probabilities(fa, shape, p, seed, head_dim_v=160)
    assert_kept(actual, dropout_mask(shape, p, seed))
    np.testing.assert_allclose(actual[actual != 0], 65536 / 150, rtol=2.0**-10)
    np.testing.assert_allclose(lse, np.log(150), rtol=1e-6)


def test_lse_does_not_depend_on_what_is_dropped(fa):
    e = example("bfloat16", seqlen_k=150, num_heads=1, head_dim=16, causal=True, sinks=True)
    for p in (0.1, 0.5, 0.9):
        fa.hold(e, dropout_p=p, dropout_seed=4)
    lses = [fa.call(*e.arrays(fa.xp), causal=True, dropout_p=p, dropout_seed=s)[1] for p, s in ((0.1, 1), (0.9, 2))]
    fa.same_bits(lses[0], lses[1])


def test_a_row_of_nan_stays_nan(fa):
    q, k, v = example(num_heads=1, head_dim=16).arrays(fa.xp)
    q[0, 5] = np.nan
    out, _ = fa.call(q, k, v, dropout_p=0.9, dropout_seed=1)
    assert np.isnan(host(out)[0, 5].astype(float)).all()
    assert np.isfinite(np.delete(host(out)[0].astype(float), 5, axis=0)).all()


@pytest.mark.parametrize("seed_type", [np.int64, np.uint64])
def test_a_graph_drops_others_once_the_seed_has_changed(cp, seed_type):
    q, k, v = example(batch=2, seqlen_q=300, seqlen_k=500, num_heads=4, head_dim=128).arrays(cp)
    seed, out = cp.asarray(np.array(1, seed_type)), cp.empty_like(q)
    options = {"causal": True, "dropout_p": 0.3, "dropout_seed": seed, "out": out}
    cupy_fa2.flash_attention(q, k, v, **options)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupy_fa2.flash_attention(q, k, v, **options)
        graph = stream.end_capture()
    seen = set()
    for number in (1, 2, 2**40 + 5, 2**63 - 1):
        seed[...] = number
        out[...] = np.nan
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        replayed = host(out).tobytes()
        seen.add(replayed)
        eager = cupy_fa2.flash_attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=number)
        assert host(eager).tobytes() == replayed
        assert_attention_close(out, None, q, k, v, rows=200, causal=True, dropout_p=0.3, dropout_seed=number)
    assert len(seen) == 4
