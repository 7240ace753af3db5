"""What a prepared call is remembered by: stand-ins for CuPy and its arrays, so that no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cupy_fa2 import call
from cupy_fa2.options import Options


class Array:
    """As much of a CuPy array as a launch looks at before it launches."""

    def __init__(self, *shape, dtype=np.float16, address=4096):
        host = np.zeros(shape, dtype)
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.ndim, self.size, self.itemsize, self.flags = host.ndim, host.size, host.itemsize, host.flags
        self.data = SimpleNamespace(ptr=address, device_id=0)


CUPY = SimpleNamespace(ndarray=Array, empty=lambda shape, dtype: Array(*shape, dtype=dtype))


@pytest.fixture
def preparations(monkeypatch):
    """How many calls had to be validated and planned; the launch itself is left out."""
    seen = []

    def prepare(key, *arguments):
        seen.append(arguments)
        problem = SimpleNamespace(out_shape=(2, 8, 1, 64), lse_shape=(2, 1, 8), out_dtype="f16")
        call._prepared[key] = SimpleNamespace(problem=problem, empty=True, spans=((0, 1),) * 4)
        return call._prepared[key]

    monkeypatch.setattr(call, "_prepare", prepare)
    monkeypatch.setattr(call, "_prepared", {})
    return seen


def launch(align="bottom-right", seqlen_k=8, causal=True, scale=None, address=4096):
    q, k = Array(2, 8, 1, 64, address=address), Array(2, seqlen_k, 1, 64)
    call._launch(CUPY, q, k, k, Options(causal=causal, align=align, softmax_scale=scale))


def test_the_same_signature_is_prepared_once(preparations):
    for address in (4096, 8192, 1 << 40):
        launch(address=address)
    assert len(preparations) == 1


@pytest.mark.parametrize("change", [
    {"seqlen_k": 9}, {"causal": False}, {"causal": 1}, {"scale": 1.0}, {"scale": True}, {"align": 0}, {"align": False},
    {"align": "top-left"}, {"address": 4098},
], ids=str)  # fmt: skip
def test_another_signature_is_prepared_anew(preparations, change):
    launch()
    launch(**change)
    assert len(preparations) == 2


def test_the_shape_of_align_belongs_to_the_signature(preparations):
    """An array of the wrong length must reach the validation, also after a call with one of the right length."""
    for batch in (2, 2, 3, 1):
        launch(align=Array(batch, dtype=np.int32))
    assert len(preparations) == 3
