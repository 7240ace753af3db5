"""What a launch does to memory, counted by the simulator: no bank conflict, no sector that was not asked for."""

from __future__ import annotations

import numpy as np
import pytest
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.testing import DTYPES

DIMS = range(16, 257, 16)


def aligned(shape, dtype):
    """Random numbers at a multiple of 256 bytes, as a GPU's allocator places them."""
    size = int(np.prod(shape))
    buffer = np.empty(size + 128, np.float16)
    begin = -buffer.ctypes.data % 256 // 2
    x = buffer[begin : begin + size].view(dtype).reshape(shape)
    x[...] = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return x


def launch(card, batch, seqlen_q, seqlen_k, heads, head_dim, head_dim_v, **options):
    q = aligned((batch, seqlen_q, heads, head_dim), DTYPES["float16"])
    k = aligned((batch, seqlen_k, heads, head_dim), DTYPES["float16"])
    v = aligned((batch, seqlen_k, heads, head_dim_v), DTYPES["float16"])
    with cupy_fa2.simulator(card) as simulator:
        cupy_fa2.flash_attention(q, k, v, return_lse=True, **options)
    return simulator.report


@pytest.mark.parametrize("card", ["A100", "H200"])
@pytest.mark.parametrize("head_dim", sampled(DIMS, 64, 256))
def test_no_conflicts_and_whole_sectors(card, head_dim):
    report = launch(card, 1, 72, 136, 2, head_dim, head_dim)
    assert report.bank_conflicts == 0
    assert report.ldmatrix > 0
    assert report.global_load_sectors == report.global_load_sectors_ideal > 0
    assert report.global_store_sectors == report.global_store_sectors_ideal > 0


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), sampled_rows([(192, 128), (64, 256), (16, 80), (48, 112)], (64, 256))
)
def test_head_dims_that_differ(head_dim, head_dim_v):
    report = launch("A100", 1, 40, 72, 2, head_dim, head_dim_v, causal=True)
    assert report.bank_conflicts == 0
    assert report.global_load_sectors == report.global_load_sectors_ideal
    assert report.global_store_sectors == report.global_store_sectors_ideal


@pytest.mark.parametrize("head_dim", sampled([64, 80], 64))
def test_float32_results_fill_sectors_too(head_dim):
    report = launch("A100", 1, 40, 72, 2, head_dim, head_dim, out_dtype=np.float32)
    assert report.global_store_sectors == report.global_store_sectors_ideal


@pytest.mark.parametrize("card", ["A100", "H200"])
def test_every_byte_is_loaded_once_per_tile(card):
    """Q once, K and V once for each query tile; stored: out and lse."""
    seqlen, head_dim = 384, 128  # whole tiles of 128 x 48
    report = launch(card, 1, seqlen, seqlen, 1, head_dim, head_dim)
    array = seqlen * head_dim * 2
    assert report.bytes_loaded == array + report.blocks * 2 * array
    assert report.bytes_stored == array + seqlen * 4
    assert report.mma == 2 * (seqlen // 16) * (seqlen // 8) * (head_dim // 16)  # 16 x 8 x 16 each, two products


def test_tensor_copies_leave_no_barrier_in_the_loop():
    """With cp.async and two stages a block meets once per key tile; with tensor maps once in all."""
    few, many = (launch("H200", 1, 40, seqlen_k, 1, 128, 128) for seqlen_k in (48, 480))
    assert few.barriers == many.barriers
    few, many = (launch("A100", 1, 40, seqlen_k, 1, 64, 64) for seqlen_k in (64, 640))
    assert many.barriers - few.barriers == 9
