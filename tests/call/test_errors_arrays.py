"""Arrays among the options that no kernel could read are refused by name."""

import numpy as np
import pytest
from error_tools import arguments, refused

import cupy_fa2


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "sinks"])
def test_option_arrays_at_odd_addresses(name):
    q = np.zeros((1, 8, 2, 32), np.float16)
    odd = np.zeros(9, np.uint8)[1:].view(np.float32)
    array = {"bias": odd.reshape(2, 1, 1)}.get(name, odd)
    refused(lambda: cupy_fa2.flash_attention(q, q, q, **{name: array}), ValueError, rf"\b{name} & address & copy\(\)")


def test_option_arrays_with_broken_strides():
    q = np.zeros((1, 8, 2, 32), np.float16)
    odd = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2,), (6,))
    for name, array in (("alibi_slopes", odd), ("sinks", odd), ("bias", odd.reshape(2, 1, 1))):
        refused(
            lambda name=name, array=array: cupy_fa2.flash_attention(q, q, q, **{name: array}),
            ValueError,
            rf"\b{name} & strides & copy\(\)",
        )


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "mask", "sinks", "seqlens_q", "dropout_seed"])
def test_option_arrays_that_are_on_neither_side(name):
    """Beside NumPy arrays, an array of another library is refused by name."""

    class Foreign:
        shape, dtype = (2,), np.dtype(np.float32)

    q = np.zeros((1, 8, 2, 32), np.float16)
    refused(lambda: cupy_fa2.flash_attention(q, q, q, **{name: Foreign()}), TypeError, rf"\b{name} & numpy & Foreign")


@pytest.mark.parametrize("name", ["bias", "mask", "align"])
def test_large_option_arrays_must_be_on_the_device(cp, name):
    array = {"bias": np.zeros(7, np.float16), "mask": np.ones(7, np.bool_), "align": np.zeros(2, np.int32)}[name]
    refused(
        lambda: cupy_fa2.flash_attention(**arguments(cp), **{name: array}), TypeError, rf"\b{name}\b & cupy.asarray"
    )


def test_byte_swapped_option_arrays():
    for name, dtype in (("bias", ">f4"), ("sinks", ">f4"), ("alibi_slopes", ">f4")):
        array = np.ones(4 if name != "bias" else 7, dtype)
        refused(
            lambda name=name, array=array: cupy_fa2.flash_attention(**arguments(np), **{name: array}),
            TypeError,
            rf"\b{name} & >f4",
        )


def test_align_of_the_wrong_length_after_one_of_the_right(xp):
    q, k, v = (xp.zeros((2, 8, 1, 64), np.float16) for _ in range(3))
    cupy_fa2.flash_attention(q, k, v, causal=True, align=xp.zeros(2, np.int32))
    for length in (1, 3):
        with pytest.raises(ValueError, match="align"):
            cupy_fa2.flash_attention(q, k, v, causal=True, align=xp.zeros(length, np.int32))


def test_align_at_an_odd_address():
    q, k, v = (np.ones((2, 4, 1, 8), np.float16) for _ in range(3))
    align = np.zeros(9, np.uint8)[1:].view(np.int32)
    align[:] = (0, -4)
    lse = cupy_fa2.flash_attention(q, k, v, causal=True, align=align, return_lse=True)[1]
    assert np.isfinite(lse[0]).all()
    assert (lse[1] == -np.inf).all()
