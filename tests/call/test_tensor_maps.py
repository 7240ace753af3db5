"""Keys and values through tensor maps: the plan of an H200, in the simulator and on a GPU that has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import example
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_tools import problem_of
from sampling import sampled

import cupy_fa2
from cupy_fa2.call import flow
from cupy_fa2.device import named_device
from cupy_fa2.plan import plan_forward
from cupy_fa2.testing import DTYPES, Example, assert_attention_close, poisoned

H200 = named_device("H200")


def simulate(e: Example, arrays=None, **options):
    """Out, lse and whether tensor maps were taken."""
    q, k, v = arrays or e.arrays()
    options = {**e.options, **options}
    plan = plan_forward(problem_of(q, k, v, **options).structure, H200)
    with cupy_fa2.simulator("H200"):
        out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True, **options)
    return out, lse, plan.kernels[0].spec.transport == "tensor"


@settings(max_examples=settings().max_examples // 2)
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    batch=st.integers(1, 2),
    seqlen_q=st.sampled_from([1, 2, 17, 63, 64, 65, 127, 129, 140]),
    seqlen_k=st.sampled_from([1, 3, 47, 48, 49, 80, 127, 128, 129, 200]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    head_dim=st.sampled_from([56, 64, 120, 128]),
    causal=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd"]),
    softmax_scale=st.sampled_from([None, 0.3, -0.2, 0.0]),
    mean=st.sampled_from([0.0, 1.0]),
)
def test_agrees_with_the_definition(
    dtype, batch, seqlen_q, seqlen_k, heads, head_dim, causal, layout, softmax_scale, mean
):
    e = Example(
        dtype, batch, seqlen_q, seqlen_k, heads[0], heads[1], head_dim, head_dim,
        causal=causal, layout=layout, softmax_scale=softmax_scale, mean=mean,
    )  # fmt: skip
    q, k, v = e.arrays()
    out, lse, tensor = simulate(e, (q, k, v))
    assert tensor
    if out.size >= 64:  # the rule compares maxima, and means little for a handful of numbers
        assert_attention_close(out, lse, q, k, v, **e.options)


@pytest.mark.parametrize("head_dim", sampled([64, 128, 256], 64, 256))
@pytest.mark.parametrize("causal", sampled([False, True], True))
def test_more_tiles_than_buffers(head_dim, causal):
    """The ring turns several times, and warps run ahead of each other."""
    e = example("bfloat16", 1, 140, 700, 1, head_dim, causal=causal)
    q, k, v = e.arrays()
    out, lse, tensor = simulate(e, (q, k, v))
    assert tensor
    assert_attention_close(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_ends_of_arrays_are_not_read_past(causal):
    """Rows, heads and the end of the buffer are surrounded by NaN; a box that reaches there brings zeros."""
    e = example("float16", 2, 70, 90, 2, 64, causal=causal)
    plain = e.arrays()
    expected = simulate(e, plain)
    for storage in ("padded rows", "fused qkv", "cache"):
        arrays = [poisoned(x.shape, x.dtype, storage, values=x) for x in plain]
        out, lse, tensor = simulate(e, arrays)
        assert tensor
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.parametrize("causal", sampled([False, True], False))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_maps_cannot_describe_goes_by_cp_async_with_the_same_bits(head_dim, causal):
    e = example("bfloat16", 2, 70, 150, 2, head_dim, causal=causal)
    q, k, v = e.arrays()
    out, lse, tensor = simulate(e, (q, k, v))
    assert tensor
    backwards = k[:, ::-1].copy()[:, ::-1]
    out_2, lse_2, tensor_2 = simulate(e, (q, backwards, v))
    assert not tensor_2
    np.testing.assert_array_equal(out, out_2)
    np.testing.assert_array_equal(lse, lse_2)


def test_which_keys_maps_can_describe():
    q, k, v = example("float16", 2, 8, 16, 4, 64).arrays()
    assert problem_of(q, k, v).tensor_maps
    assert not problem_of(q, k[:, ::-1], v).tensor_maps
    assert not problem_of(q, k, v[:, :, ::-1]).tensor_maps
    assert not problem_of(q, np.broadcast_to(k[:1], k.shape), v).tensor_maps
    assert not problem_of(q, k[:, :0], v[:, :0]).tensor_maps
    assert problem_of(q[:1], k[:1, ::2], v[:1, ::2]).tensor_maps
    one_head = k[:, :, :1]
    assert problem_of(q, one_head, one_head).tensor_maps


def test_a_map_says_what_the_array_is():
    """Sizes and byte strides over (head_dim, seqlen, heads, batch), in either layout."""
    for layout, order in (("bshd", (3, 1, 2, 0)), ("bhsd", (3, 2, 1, 0))):
        e = example("float16", 2, 8, 16, 4, 64, num_heads_k=2, head_dim_v=64, layout=layout)
        q, k, v = e.arrays()
        p = problem_of(q, k, v, layout=layout)
        (launch,) = plan_forward(p.structure, H200).launches
        for box, x in zip(launch.boxes(p).values(), (k, v), strict=True):
            assert box.dims == tuple(x.shape[axis] for axis in order)
            assert box.strides == tuple(x.strides[axis] for axis in order[1:])
            assert box.box == (64, launch.spec.tile.block_n, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 120, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_tensor_and_dense_agree_bit_for_bit_on_a_gpu(cp, head_dim, causal):
    q, k, v = example("bfloat16", 3, 517, 1031, 6, head_dim, num_heads_k=2, causal=causal).arrays(cp)
    out, lse = cupy_fa2.flash_attention(q, k, v, causal=causal, return_lse=True)
    backwards = cp.ascontiguousarray(k[:, ::-1])[:, ::-1]
    out_2, lse_2 = cupy_fa2.flash_attention(q, backwards, v, causal=causal, return_lse=True)
    assert out.get().tobytes() == out_2.get().tobytes()
    assert lse.get().tobytes() == lse_2.get().tobytes()
    assert_attention_close(out, lse, q, k, v, causal=causal, rows=200)


@pytest.mark.gpu
def test_maps_follow_the_addresses(cp):
    """The same call on other buffers must not read the old ones; and remembered maps do not grow without bound."""
    arrays = [example("float16", 1, 64, 96, 2, 64, seed=seed).arrays(cp) for seed in range(80)]
    outs = [cupy_fa2.flash_attention(*x) for x in arrays]
    for x, out in zip(arrays, outs, strict=True):
        assert cupy_fa2.flash_attention(*x).get().tobytes() == out.get().tobytes()
    for (a, out_a), (b, out_b) in itertools.pairwise(zip(arrays, outs, strict=True)):
        assert a[1].data.ptr != b[1].data.ptr
        assert out_a.get().tobytes() != out_b.get().tobytes()
    assert all(len(step.maps) <= 64 for call in flow._calls.values() if call.prepared for step in call.prepared.steps)
