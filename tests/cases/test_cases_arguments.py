"""Cases (see test_cases.py): what may be passed, and how the rest is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest import example
from sampling import sampled

import cupy_fa2
from cupy_fa2.testing import host


def test_value_longer_than_key(fa):
    """B070: five keys and six values."""
    q, k, v = example(seqlen_k=6).arrays(fa.xp)
    with pytest.raises(ValueError, match=r"\bv\b"):
        cupy_fa2.flash_attention(q, k[:, :5], v)


def test_byte_swapped_data(fa):
    """B076: refused. (`cupy.asarray` keeps the bytes: the numbers are others before anyone can see it.)"""
    q, k, v = example(seqlen_q=4, seqlen_k=4, num_heads=1).arrays()
    swapped = q.astype(">f2")
    with pytest.raises(TypeError, match=r"\bq\b"):
        cupy_fa2.flash_attention(swapped, k, v)
    if fa.on_gpu:
        with pytest.raises(TypeError):
            cupy_fa2.flash_attention(swapped, fa.xp.asarray(k), fa.xp.asarray(v))


class ForeignDLPack:
    """A device array of another library, by DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class ForeignInterface:
    """A device array of another library, by `__cuda_array_interface__`."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self._array = array


def test_bfloat16_of_numpy(fa):
    """B077: `ml_dtypes.bfloat16` is taken; its bits as uint16 are not silently taken for numbers."""
    e = example("bfloat16", seqlen_q=33, seqlen_k=65)
    out, _ = fa.check(e)
    assert out.dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="uint16"):
        cupy_fa2.flash_attention(*(x.view(np.uint16) for x in e.arrays(fa.xp)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "wrap"),
    [("float16", ForeignDLPack), ("bfloat16", ForeignDLPack), ("float16", ForeignInterface)],
)
def test_arrays_of_other_libraries(cp, dtype, wrap):
    """B077: the same bits in give the same bits out, as CuPy arrays."""
    q, k, v = example(dtype, seqlen_q=33, seqlen_k=65).arrays(cp)
    expected = cupy_fa2.flash_attention(q, k, v)
    out = cupy_fa2.flash_attention(wrap(q), wrap(k), wrap(v))
    assert isinstance(out, cp.ndarray)
    assert out.dtype == expected.dtype
    assert host(out).tobytes() == host(expected).tobytes()


@pytest.mark.gpu
def test_bfloat16_by_the_array_interface_is_refused(cp):
    """B077: the interface loses the type; an error says so rather than reading the bits as something else."""
    q, k, v = example("bfloat16").arrays(cp)
    with pytest.raises(TypeError, match=r"\bq\b"):
        cupy_fa2.flash_attention(ForeignInterface(q), ForeignInterface(k), ForeignInterface(v))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.complex64])
def test_unsupported_dtypes(fa, dtype):
    """B088: a TypeError that names what was given and what may be."""
    arrays = (fa.xp.ones((1, 8, 1, 8), dtype) for _ in range(3))
    with pytest.raises(TypeError, match="float16") as caught:
        cupy_fa2.flash_attention(*arrays)
    assert np.dtype(dtype).name in str(caught.value)


@pytest.mark.parametrize("scale", sampled([0.5, 2, np.float64(0.25), np.float32(0.25), 0, -1.0], 0, -1.0))
def test_softmax_scales_of_every_kind(fa, scale):
    """B088: 0 is the mean of the values, a negative one turns the order."""
    e = example(seqlen_q=8, seqlen_k=8, num_heads=1, softmax_scale=scale)
    out, _ = fa.check(e)
    v = host(e.arrays(fa.xp)[2]).astype(float)
    if scale == 0:
        np.testing.assert_allclose(
            host(out).astype(float), np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape), atol=2e-3
        )
