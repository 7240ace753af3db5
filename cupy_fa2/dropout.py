"""Which probabilities dropout keeps: the one definition, in NumPy, that kernels reproduce bit for bit.

Counter-based random numbers [1]_: the value of (batch, head, row, column) is a function of those four and the seed
alone, whatever the tile, the order of the loop, the direction or the device. Philox-4x32 with 7 rounds, the fewest
that pass BigCrush, turns a key of 64 bits (the seed, low word first) and a counter of four words into four words, and
each word is two values of 16 bits, the low half first. The counter is ``(call, row, head, batch)``, and the eight
values of one call lie on columns that stand together in a lane of an ``mma`` fragment::

    column = 32 group + 8 n + 2 t + half        call = 4 group + t        value = half `half` of word n

where n and t are 0 to 3. A probability is kept where its value is below ``threshold(dropout_p)``, and is then
multiplied by ``65536 / threshold``, so that the expectation is exact although the rate is a multiple of 2^-16.

References
----------
.. [1] J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
   doi:10.1145/2063384.2063405, sections 3.3 and 4.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

VALUES = 1 << 16  # a value has 16 bits
ROUNDS = 7

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))  # golden ratio and sqrt(3) - 1, as fractions of 2^32
_GROUP = 32  # columns that four calls cover


def philox_4x32(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Four random words of each counter, for many counters at once.

    Parameters
    ----------
    counter : tuple of 4 array_like of uint32
        The words of the counters; they broadcast against each other.
    key : tuple of 2 int
        Words of 32 bits.
    rounds : int
        Rounds of the bijection.

    Returns
    -------
    tuple of 4 ndarray of uint32
        All of the broadcast shape.

    Examples
    --------
    >>> [hex(word) for word in philox_4x32((0, 0, 0, 0), (0, 0))]
    ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, np.uint32) for word in counter))
    keys = [np.asarray(word, np.uint32) for word in key]
    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = (_multiply(x, m) for x, m in zip((a, c), _MULTIPLIERS, strict=True))
        a, b, c, d = high_c ^ b ^ keys[0], low_c, high_a ^ d ^ keys[1], low_a
        keys = [np.add(word, step, dtype=np.uint32) for word, step in zip(keys, _WEYL, strict=True)]
    return a, b, c, d


def _multiply(x: NDArray[np.uint32], multiplier: np.uint64) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """High and low word of the product."""
    product = x.astype(np.uint64) * multiplier
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def dropout_values(batch: int, head: int, rows: ArrayLike, seqlen_k: int, dropout_seed: Any) -> NDArray[np.uint16]:
    """Random values of some rows of one head, to be compared with the threshold.

    Parameters
    ----------
    batch, head : int
        Which head.
    rows : (n,) array_like of int
        Query rows.
    seqlen_k : int
        Columns wanted.
    dropout_seed : int or 0-d array
        As for `dropout_mask`.

    Returns
    -------
    (n, seqlen_k) ndarray of uint16
    """
    seed = seed_bits(dropout_seed)
    groups = -(-seqlen_k // _GROUP)
    row = np.asarray(rows, np.uint32)[:, None]
    words = philox_4x32((np.arange(4 * groups), row, head, batch), (seed & 0xFFFFFFFF, seed >> 32))
    # (row, call, word) -> (row, group, t, n) -> columns in the order group, n, t, half
    by_call = np.stack(words, axis=-1).reshape(len(row), groups, 4, 4)
    halves = np.ascontiguousarray(by_call.swapaxes(2, 3), "<u4").view("<u2")
    return halves.reshape(len(row), groups * _GROUP)[:, :seqlen_k].astype(np.uint16, copy=False)


def threshold(dropout_p: float) -> int:
    """How many of the 65,536 values are kept.

    Parameters
    ----------
    dropout_p : float
        Probability of being dropped, at least 0 and less than 1.

    Returns
    -------
    int
        ``round((1 - dropout_p) * 65536)``, 1 to 65,536.

    Raises
    ------
    ValueError
        `dropout_p` is out of range, or so close to 1 that nothing would be kept.

    Examples
    --------
    >>> threshold(0.0), threshold(0.1), threshold(0.5)
    (65536, 58982, 32768)
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")
    kept = round((1 - dropout_p) * VALUES)
    if kept < 1:
        raise ValueError(f"dropout_p must be less than 1 - 2**-17, or nothing is kept; got {dropout_p}")
    return kept


def seed_bits(dropout_seed: Any) -> int:
    """The 64 bits of a seed, as a number.

    Parameters
    ----------
    dropout_seed : int or 0-d array
        An int in [0, 2^64), or an array of int64 or uint64, NumPy's or CuPy's, whose bits are taken as they are.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        The seed is neither.
    ValueError
        The int is out of range.

    Examples
    --------
    >>> seed_bits(7), seed_bits(np.array(-1, np.int64)) == 2**64 - 1
    (7, True)
    """
    if hasattr(dropout_seed, "dtype"):
        if dropout_seed.dtype not in (np.int64, np.uint64) or dropout_seed.ndim:
            raise TypeError(
                f"a dropout_seed array must be 0-d, int64 or uint64; "
                f"got {dropout_seed.ndim} axes of {dropout_seed.dtype}"
            )
        return int(dropout_seed) & 0xFFFFFFFFFFFFFFFF
    if isinstance(dropout_seed, bool):
        raise TypeError("dropout_seed must be an int, got a bool")
    seed = operator.index(dropout_seed)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"dropout_seed must be in [0, 2**64), got {seed}")
    return seed


def dropout_mask(shape: tuple[int, int, int, int], dropout_p: float, dropout_seed: Any) -> NDArray[np.bool_]:
    """Tell which probabilities an attention call keeps.

    Parameters
    ----------
    shape : tuple of int
        (batch, num_heads, seqlen_q, seqlen_k) of the call. The value of an element does not depend on it.
    dropout_p : float
        Probability of being dropped, in [0, 1); realised as a multiple of 2^-16.
    dropout_seed : int or 0-d array
        An int in [0, 2^64); or an array of int64 or uint64, NumPy's or CuPy's.

    Returns
    -------
    ndarray of bool
        True where the probability is kept and multiplied by 65536 / round((1 - dropout_p) * 65536).

    Raises
    ------
    TypeError, ValueError
        `dropout_p` or `dropout_seed` is not what it may be.

    Notes
    -----
    Random numbers are Philox-4x32-7's [1]_; the module's text says which value falls to which element.

    References
    ----------
    .. [1] J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
       SC 2011, doi:10.1145/2063384.2063405.

    Examples
    --------
    >>> kept = dropout_mask((1, 2, 64, 64), 0.25, dropout_seed=7)
    >>> kept.shape, bool(abs(kept.mean() - 0.75) < 0.01)
    ((1, 2, 64, 64), True)
    """
    kept_values, seed = threshold(dropout_p), seed_bits(dropout_seed)
    batch, num_heads, seqlen_q, seqlen_k = shape
    kept = np.empty(shape, np.bool_)
    for b in range(batch):
        for h in range(num_heads):
            kept[b, h] = dropout_values(b, h, np.arange(seqlen_q), seqlen_k, seed) < kept_values
    return kept
