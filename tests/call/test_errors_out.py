"""A wrong `out` is refused before anything is launched or written; and what is odd but right is taken."""

import numpy as np
import pytest
from error_tools import arguments, refused

import cupy_fa2
from cupy_fa2.testing import poisoned


def test_out_that_overlaps_align(xp):
    q, k, v = (xp.zeros((8, 8, 2, 32), np.float16) for _ in range(3))
    out = xp.zeros((8, 8, 2, 32), np.float16)
    align = out.reshape(-1)[:16].view(np.int32)
    with pytest.raises(ValueError, match="out must not overlap align"):
        cupy_fa2.flash_attention(q, k, v, causal=True, align=align, out=out)


OPTION_ARRAYS = {
    "align": lambda flat: flat[:16].view(np.int32),
    "bias": lambda flat: flat[:64].reshape(8, 8),
    "mask": lambda flat: flat[:4].view(np.bool_),
    "alibi_slopes": lambda flat: flat[:4].view(np.float32),
    "sinks": lambda flat: flat[:4].view(np.float32),
    "seqlens_q": lambda flat: flat[:16].view(np.int32),
    "seqlens_k": lambda flat: flat[:16].view(np.int32),
    "dropout_seed": lambda flat: flat[:4].view(np.int64)[0:1].reshape(()),
}


@pytest.mark.parametrize("name", OPTION_ARRAYS)
def test_out_that_overlaps_an_option_array(xp, name):
    q = xp.zeros((8, 8, 2, 32), np.float16)
    out = xp.zeros((8, 8, 2, 32), np.float16)
    array = OPTION_ARRAYS[name](out.reshape(-1))
    with pytest.raises(ValueError, match=f"out must not overlap {name}"):
        cupy_fa2.flash_attention(q, q, q, **{name: array}, out=out)


def test_out_at_an_odd_address():
    q, k, v = (np.zeros((1, 8, 2, 32), np.float16) for _ in range(3))
    buffer = np.zeros(q.nbytes + 1, np.uint8)
    with pytest.raises(ValueError, match="out must begin at a multiple of its item size 2"):
        cupy_fa2.flash_attention(q, k, v, out=buffer[1:].view(np.float16).reshape(q.shape))
    assert not buffer.any()


def test_out_with_a_meaningless_stride():
    q, k, v = (np.ones((1, 8, 2, 64), np.float16) for _ in range(3))
    out = np.zeros(q.shape, np.float16)
    odd = np.lib.stride_tricks.as_strided(out, q.shape, (7, *out.strides[1:]))
    cupy_fa2.flash_attention(q, k, v, out=odd)
    assert (out == 1).all()


WRONG_OUT = {
    "shape": (lambda xp, a: xp.full((2, 5, 4, 16), 7, np.float16), ValueError, r"\bout\b & 24"),
    "layout": (lambda xp, a: xp.full((2, 4, 5, 24), 7, np.float16), ValueError, r"\bout\b"),
    "rank": (lambda xp, a: xp.full((2, 5, 4 * 24), 7, np.float16), ValueError, r"\bout\b"),
    "broadcast batch": (lambda xp, a: xp.full((1, 5, 4, 24), 7, np.float16), ValueError, r"\bout\b"),
    "the other half": (lambda xp, a: xp.full((2, 5, 4, 24), 7, np.int16), TypeError, r"\bout\b & int16"),
    "one row seen again": (
        lambda xp, a: (
            np.lib.stride_tricks.as_strided(xp.full((2, 1, 4, 24), 7, np.float16), (2, 5, 4, 24), (192, 0, 48, 2))
            if xp is np
            else xp.lib.stride_tricks.as_strided(xp.full((2, 1, 4, 24), 7, np.float16), (2, 5, 4, 24), (192, 0, 48, 2))
        ),
        ValueError,
        r"\bout\b & overlap",
    ),
    "rows that overlap": (
        lambda xp, a: xp.lib.stride_tricks.as_strided(xp.full(4096, 7, np.float16), (2, 5, 4, 24), (960, 192, 40, 2)),
        ValueError,
        r"\bout\b & overlap",
    ),
}


@pytest.mark.parametrize("name", WRONG_OUT)
def test_wrong_out(xp, name):
    make, kind, pattern = WRONG_OUT[name]
    given = arguments(xp)
    out = make(xp, given)
    refused(lambda: cupy_fa2.flash_attention(**given, out=out), kind, pattern)
    assert bool((out == 7).all()), "out was written"


@pytest.mark.parametrize("wrong", [[1.0], "out", object(), 3], ids=["list", "str", "object", "int"])
def test_out_that_is_no_array(xp, wrong):
    refused(lambda: cupy_fa2.flash_attention(**arguments(xp), out=wrong), TypeError, r"\bout\b")


def test_out_of_the_input_dtype_when_float32_is_asked_for(xp):
    out = xp.full((2, 5, 4, 24), 7, np.float16)
    refused(
        lambda: cupy_fa2.flash_attention(**arguments(xp), out=out, out_dtype=np.float32),
        TypeError,
        r"\bout\b & float16",
    )
    assert bool((out == 7).all())


def test_read_only_out():
    out = np.full((2, 5, 4, 24), 7, np.float16)
    out.flags.writeable = False
    refused(lambda: cupy_fa2.flash_attention(**arguments(np), out=out), ValueError, r"\bout\b & read-only")
    assert (out == 7).all()


@pytest.mark.parametrize("victim", ["q", "k", "v"])
@pytest.mark.parametrize("shift", [0, 8, 100])
def test_out_over_an_input(xp, victim, shift):
    """Whole or in part: some block would read what another has already written."""
    buffer = xp.ones(2 * 5 * 4 * 16 * 4, np.float16)
    q, k, v = (buffer[i * 640 : (i + 1) * 640].reshape(2, 5, 4, 16) for i in range(3))
    place = {"q": 0, "k": 1, "v": 2}[victim] * 640 + shift
    out = buffer[place : place + 640].reshape(2, 5, 4, 16)
    refused(lambda: cupy_fa2.flash_attention(q, k, v, out=out), ValueError, r"\bout\b & overlap")
    assert bool((buffer == 1).all())


def test_out_beside_the_inputs_in_one_buffer(xp):
    """Interleaved with the inputs, sharing no element: legal."""
    fused = poisoned((2, 5, 4 * 4, 16), np.float16, values=np.ones((2, 5, 16, 16)), xp=xp)
    q, k, v, out = (fused[:, :, 4 * i : 4 * i + 4] for i in range(4))
    v[...] = 3
    assert cupy_fa2.flash_attention(q, k, v, out=out) is out
    assert bool((out == 3).all())
    assert bool((fused[:, :, :8] == 1).all())
