"""Dropout's random numbers: known answers, the layout, and whether they look random."""

import doctest
import itertools
import math

import numpy as np
import pytest

import cupy_fa2
from cupy_fa2 import dropout
from cupy_fa2.dropout import dropout_mask, dropout_values, philox_4x32, threshold

# The lines "philox4x32 7" and "philox4x32 10" of Random123's file of known answers: rounds, counter, key, result.
KNOWN_ANSWERS = """
 7 00000000 00000000 00000000 00000000 00000000 00000000 5f6fb709 0d893f64 4f121f81 4f730a48
 7 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 5207ddc2 45165e59 4d8ee751 8c52f662
 7 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 4dfccaba 190a87f0 c47362ba b6b5242a
10 00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
10 ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
10 243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def scalar_philox(counter, key, rounds=7):
    """One counter in Python's integers, as the paper's figure has it: two swapped Feistel halves per round."""
    left_0, right_0, left_1, right_1 = counter
    for r in range(rounds):
        product_0, product_1 = left_0 * 0xD2511F53, left_1 * 0xCD9E8D57
        round_key = [(word + r * weyl) % 2**32 for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        left_0, left_1 = product_1 // 2**32 ^ right_0 ^ round_key[0], product_0 // 2**32 ^ right_1 ^ round_key[1]
        right_0, right_1 = product_1 % 2**32, product_0 % 2**32
    return left_0, right_0, left_1, right_1


@pytest.mark.parametrize("line", KNOWN_ANSWERS.strip().splitlines())
def test_known_answers(line):
    rounds, *words = line.split()
    words = [int(word, 16) for word in words]
    counter, key, expected = tuple(words[:4]), tuple(words[4:6]), tuple(words[6:])
    assert tuple(int(word) for word in philox_4x32(counter, key, int(rounds))) == expected
    assert scalar_philox(counter, key, int(rounds)) == expected


def test_many_counters_at_once():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (4, 5, 7), np.uint32)
    key = (0xDEADBEEF, 0xFFFFFFFE)
    words = np.array(philox_4x32(tuple(counters), key))
    assert words.dtype == np.uint32
    assert words.shape == (4, 5, 7)
    for place in np.ndindex(5, 7):
        counter = tuple(int(word) for word in counters[:, *place])
        assert tuple(int(word) for word in words[:, *place]) == scalar_philox(counter, key)
    broadcast = philox_4x32((np.arange(3), np.arange(2)[:, None], 9, 1), (1, 2))
    assert all(word.shape == (2, 3) for word in broadcast)
    assert int(broadcast[3][1, 2]) == scalar_philox((2, 1, 9, 1), (1, 2))[3]


@pytest.mark.parametrize("seqlen_k", [0, 1, 7, 31, 32, 33, 70])
@pytest.mark.parametrize("seed", [0, 12345, 0xFEDCBA9876543210])
def test_layout(seqlen_k, seed):
    """Every element from its own formula: which call, which word, which half."""
    kept = dropout_mask((2, 3, 4, seqlen_k), 0.3, seed)
    for b, h, i, j in np.ndindex(kept.shape):
        words = scalar_philox((j // 32 * 4 + j % 8 // 2, i, h, b), (seed % 2**32, seed // 2**32))
        value = words[j % 32 // 8] >> (16 if j % 2 else 0) & 0xFFFF
        assert kept[b, h, i, j] == (value < 45875)  # 0.7 x 65536 = 45875.2
        if i == 1 and j == seqlen_k - 1:
            assert dropout_values(b, h, [i], seqlen_k, seed)[0, j] == value


def test_a_value_depends_on_its_place_alone():
    whole = dropout_mask((3, 4, 50, 90), 0.5, 99)
    np.testing.assert_array_equal(dropout_mask((2, 3, 20, 41), 0.5, 99), whole[:2, :3, :20, :41])
    values = dropout_values(2, 1, [49, 0, 7, 7], 90, 99)
    np.testing.assert_array_equal(values < 32768, whole[2, 1, [49, 0, 7, 7]])
    assert values.dtype == np.uint16


def test_more_is_dropped_by_a_higher_rate():
    masks = [dropout_mask((1, 2, 30, 60), p, 5) for p in (0.0, 0.1, 0.5, 0.9)]
    assert masks[0].all()
    for more, fewer in itertools.pairwise(masks):
        assert not (fewer & ~more).any()
        assert fewer.sum() < more.sum()


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0, 65536), (0.0, 65536), (2**-18, 65536), (2**-16, 65535), (0.1, 58982), (0.5, 32768), (1 - 2**-16, 1)],
)
def test_threshold(p, kept):
    assert threshold(p) == kept
    assert isinstance(threshold(p), int)


@pytest.mark.parametrize("p", [-0.1, -1e-9, 1.0, 1.5, math.nan, math.inf, 1 - 2**-17, 1 - 2**-20])
def test_no_threshold(p):
    with pytest.raises(ValueError, match=r"dropout_p must be .*got"):
        threshold(p)


def test_seeds():
    expected = dropout_mask((1, 1, 8, 64), 0.5, 2**64 - 3)
    for seed in (np.array(2**64 - 3, np.uint64), np.array(-3, np.int64), np.uint64(2**64 - 3), np.int64(-3)):
        np.testing.assert_array_equal(dropout_mask((1, 1, 8, 64), 0.5, seed), expected)
    assert dropout.seed_bits(np.array(5, np.int64)) == 5
    with pytest.raises(ValueError, match=r"\[0, 2\*\*64\), got -1"):
        dropout.seed_bits(-1)
    with pytest.raises(ValueError, match=r"\[0, 2\*\*64\), got 18446744073709551616"):
        dropout.seed_bits(2**64)
    for wrong in (None, 1.0, "1", True, np.array([5]), np.array(5, np.int32), np.array(5.0)):
        with pytest.raises(TypeError):
            dropout.seed_bits(wrong)


def test_nothing_to_draw():
    for shape in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        assert dropout_mask(shape, 0.5, 1).shape == shape


# The statistics below are of fixed seeds, so they pass or fail for good. Bounds are 4.5 standard deviations: a sound
# generator exceeds one of them by chance in about 1 of 150,000 cases.
SIGMAS = 4.5


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_keep_rate(p, seed):
    kept = dropout_mask((2, 3, 128, 512), p, seed)
    rate = threshold(p) / 65536
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - rate) < SIGMAS * deviation / math.sqrt(kept.size)
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # each batch element, head, row, column
        rates = kept.mean(axis=axes)
        assert np.abs(rates - rate).max() < (SIGMAS + 1) * deviation / math.sqrt(kept.size / rates.size)


def correlation(x, y):
    """In standard deviations of what independent values would give."""
    x, y = x - x.mean(), y - y.mean()
    return abs(float((x * y).mean() / (x.std() * y.std())) * math.sqrt(x.size))


NEIGHBOURS = {
    "other half of the word": (0, 0, 0, 1),
    "next lane": (0, 0, 0, 2),
    "next word": (0, 0, 0, 8),
    "next group": (0, 0, 0, 32),
    "three columns on": (0, 0, 0, 3),
    "next row": (0, 0, 1, 0),
    "sixteen rows on": (0, 0, 16, 0),
    "diagonal": (0, 0, 1, 1),
    "next head": (0, 1, 0, 0),
    "next batch": (1, 0, 0, 0),
}


@pytest.mark.parametrize("seed", [3, 2**40])
@pytest.mark.parametrize("step", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_independent(step, seed):
    values = np.array(
        [[dropout_values(b, h, np.arange(64), 256, seed) for h in range(3)] for b in range(3)], np.float64
    )
    moved = values[tuple(slice(n, None) for n in step)]
    stayed = values[tuple(slice(0, size - n) for n, size in zip(step, values.shape, strict=True))]
    assert correlation(moved, stayed) < SIGMAS
    assert correlation(moved < 6000, stayed < 6000) < SIGMAS  # what dropout looks at, at a rate of 0.9


def test_rows_heads_and_batches_do_not_stand_in_for_each_other():
    """A counter whose words were added up, or swapped, would repeat itself here."""
    values = [[[dropout_values(b, h, [i], 64, 1)[0].tobytes() for i in range(8)] for h in range(8)] for b in range(8)]
    assert len(set(np.array(values).ravel().tolist())) == 8**3


@pytest.mark.parametrize("other", [1, 1 << 31, 1 << 32, 1 << 63, 12345])
def test_seeds_are_independent(other):
    a, b = (dropout_values(0, 0, np.arange(256), 512, seed).astype(np.float64) for seed in (0, other))
    assert correlation(a, b) < SIGMAS
    assert abs((a == b).mean() * 65536 - 1) < SIGMAS * math.sqrt(65536 / a.size)


@pytest.mark.parametrize("seed", [0, 7])
def test_values_are_uniform(seed):
    """Chi-square of the high and the low byte, and of pairs (high nibble here, high nibble of the next column)."""
    values = np.stack([dropout_values(b, 1, np.arange(256), 1024, seed) for b in range(4)]).astype(np.int64)
    nibbles = values >> 12
    pairs = nibbles[..., 0::2] * 16 + nibbles[..., 1::2]
    for cells in (values >> 8, values & 255, pairs):
        expected = cells.size / 256
        chi_square = float(((np.bincount(cells.ravel(), minlength=256) - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)
    counts = np.bincount(values.ravel(), minlength=65536)
    expected = values.size / 65536
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 65535) < SIGMAS * math.sqrt(2 * 65535)


def test_every_threshold_is_exact():
    """All 65,536 values occur, so each threshold keeps exactly its share in the long run."""
    values = np.concatenate([dropout_values(b, 0, np.arange(256), 1024, 0).ravel() for b in range(5)])
    assert len(np.unique(values)) == 65536


def test_the_examples_of_the_documentation():
    result = doctest.testmod(dropout)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_mask_is_public():
    assert cupy_fa2.dropout_mask is dropout_mask
