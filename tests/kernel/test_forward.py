"""Forward attention against its definition, by the tolerance rule."""

import itertools

import numpy as np
import pytest
from conftest import example
from hypothesis import given
from hypothesis import strategies as st
from sampling import sampled, sampled_rows

import cupy_fa2
from cupy_fa2.reference import attention
from cupy_fa2.testing import (
    DTYPES,
    STORAGES,
    Storage,
    assert_attention_close,
    assert_poison_intact,
    attention_examples,
    host,
    poisoned,
    random_qkv,
)

SIMULATED = attention_examples(max_seqlen=140, max_heads=4, max_work=1 << 21)
ON_GPU = attention_examples(max_seqlen=1100, max_batch=5, max_heads=40, max_work=1 << 31)


@given(data=st.data())
def test_agrees_with_the_definition(fa, data):
    fa.check(data.draw(ON_GPU if fa.on_gpu else SIMULATED))


EDGES = [0, 1, 2, 3, 5, 13, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 127, 128, 129]
STRONG_EDGES = (0, 1, 2, 15, 17, 33, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("causal", sampled([False, True], True), ids=["full", "causal"])
@pytest.mark.parametrize("seqlen", sampled(EDGES, *STRONG_EDGES))
def test_edge_lengths_of_queries(fa, seqlen, causal):
    for dtype in fa.size([list(DTYPES)[seqlen % 2]], DTYPES):
        for seqlen_k in fa.size([50], [1, 50, 65, 300]):
            fa.check(example(dtype, seqlen_q=seqlen, seqlen_k=seqlen_k, num_heads=1, causal=causal))


@pytest.mark.parametrize("causal", sampled([False, True], False), ids=["full", "causal"])
@pytest.mark.parametrize("seqlen", sampled(EDGES, *STRONG_EDGES))
def test_edge_lengths_of_keys(fa, seqlen, causal):
    for dtype in fa.size([list(DTYPES)[seqlen % 2]], DTYPES):
        for seqlen_q in fa.size([18], [1, 18, 65, 300]):
            fa.check(example(dtype, seqlen_q=seqlen_q, seqlen_k=seqlen, num_heads=1, causal=causal))


HEAD_DIMS = [*range(8, 257, 8), 1, 2, 3, 7, 9, 12, 33, 63, 65, 100, 127, 129, 201, 255]


@pytest.mark.parametrize("head_dim", sampled(HEAD_DIMS, 8, 64, 80, 128, 256, 1, 63))
def test_head_dims(fa, head_dim):
    """Every multiple of 8 and odd ones between, the dtypes in turn."""
    for dtype in fa.size([list(DTYPES)[head_dim // 8 % 2]], list(DTYPES)):
        for causal in fa.size([head_dim % 16 == 8], [False, True]):
            fa.check(
                example(
                    dtype,
                    seqlen_q=fa.size(19, 200),
                    seqlen_k=fa.size(37, 333),
                    num_heads=fa.size(1, 4),
                    head_dim=head_dim,
                    causal=causal,
                    storage=("fused qkv",) * 3,
                )
            )


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    sampled_rows(
        [(64, 128), (128, 64), (192, 128), (1, 64), (64, 1), (256, 8), (8, 256), (40, 72), (65, 33), (16, 17)],
        *[(192, 128), (64, 1), (65, 33)],
    ),
)
@pytest.mark.parametrize("dtype", sampled(DTYPES, "bfloat16"))
def test_values_of_another_head_dim(fa, dtype, head_dim, head_dim_v):
    fa.check(
        example(
            dtype,
            seqlen_q=fa.size(66, 300),
            seqlen_k=fa.size(70, 500),
            num_heads=1,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=True,
        )
    )


@pytest.mark.parametrize(
    ("num_heads", "num_heads_k"), sampled_rows([(1, 1), (2, 1), (6, 2), (6, 3), (7, 1), (8, 8)], (6, 2), (7, 1))
)
def test_grouped_heads(fa, num_heads, num_heads_k):
    fa.check(
        example("bfloat16", fa.size(1, 3), seqlen_q=fa.size(20, 200), num_heads=num_heads, num_heads_k=num_heads_k)
    )


@pytest.mark.parametrize("layout", sampled(["bshd", "bhsd"], "bhsd"))
@pytest.mark.parametrize("storage", STORAGES)
def test_storages(fa, storage, layout):
    """Each of q, k and v in every way of lying in memory; NaN is all around."""
    each = [(storage, "contiguous", "fused qkv"), ("contiguous", storage, storage)]
    for storages in fa.size([(storage, "fused qkv", storage)], each):
        fa.check(
            example(
                "bfloat16",
                2,
                seqlen_q=fa.size(20, 150),
                num_heads=2,
                head_dim=40,
                layout=layout,
                storage=storages,
            )
        )


@pytest.mark.parametrize(
    "align",
    sampled(
        ["bottom-right", "top-left", 0, 1, -1, 5, -45, 40, 100, 2**30, -(2**30), (7, -7), (-50, 3)],
        *["bottom-right", "top-left", -1, 100, -(2**30), (-50, 3)],
    ),
)
def test_alignments(fa, align):
    batch = len(align) if isinstance(align, tuple) else 1
    fa.check(example(batch=batch, num_heads=1, causal=True, align=align))
    fa.check(example(batch=batch, seqlen_q=70, seqlen_k=40, num_heads=1, causal=True, align=align))


def test_alignment_without_causal_changes_nothing(fa):
    q, k, v = example().arrays(fa.xp)
    fa.same_bits(fa.call(q, k, v, align=-3), fa.call(q, k, v))


@pytest.mark.parametrize("kind", sampled([np.int8, np.int32, np.int64, np.uint8], np.int64, np.uint8))
def test_alignment_array_kinds(fa, kind):
    q, k, v = example(batch=3, num_heads=1).arrays(fa.xp)
    for step in (1, 2, -1):
        offsets = [4, 0, 9, 30, 2, 17] if kind == np.uint8 else [4, -6, -1, 30, 2, -40]
        align = fa.xp.array(offsets, kind)[: 3 * abs(step)][::step]
        out, lse = fa.call(q, k, v, causal=True, align=align)
        assert_attention_close(out, lse, q, k, v, causal=True, align=host(align))


SCALES = [0, 0.0, 1, -1, -0.125, 1e-8, 3.5, np.float64(0.1), np.float32(-0.5), np.int64(1)]


@pytest.mark.parametrize("scale", sampled(SCALES, 0.0, 1e-8, 3.5, np.float32(-0.5)))
def test_scales(fa, scale):
    for dtype in fa.size(["float16"], DTYPES):
        fa.check(example(dtype, softmax_scale=scale, num_heads=1, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", sampled([1.0, -4.0, 30.0], -4.0))
def test_mean_offset(fa, mean, dtype):
    fa.check(example(dtype, mean=mean, seqlen_k=fa.size(150, 3000), num_heads=1))


@pytest.mark.parametrize(
    ("causal", "head_dim_v", "dtype"),
    sampled_rows(itertools.product([False, True], [64, 33], DTYPES), (False, 64, "float16"), (True, 33, "bfloat16")),
)
def test_out_in_float32(fa, dtype, head_dim_v, causal):
    """The same rule, one ulp being float32's now; and no further from the truth than the usual output is."""
    e = example(dtype, seqlen_k=fa.size(70, 2000), num_heads=1, head_dim_v=head_dim_v, causal=causal)
    out, _ = fa.check(e, out_dtype=np.float32)
    usual, _ = fa.call(*e.arrays(fa.xp), causal=causal)
    exact, _ = attention(*e.arrays(fa.xp), causal=causal)
    # Its tile may be another one, and with it how probabilities are rounded: a quarter more at most.
    assert np.abs(host(out) - exact).max() <= 1.25 * np.abs(host(usual).astype(float) - exact).max()


@pytest.mark.parametrize("out_dtype", ["float32", np.float32, np.dtype("float32"), np.float16, "float16"])
def test_out_dtype_kinds(fa, out_dtype):
    q, k, v = example().arrays(fa.xp)
    assert cupy_fa2.flash_attention(q, k, v, out_dtype=out_dtype).dtype == np.dtype(out_dtype)


def test_lse_only_on_request(fa):
    q, k, v = example().arrays(fa.xp)
    out = cupy_fa2.flash_attention(q, k, v)
    assert isinstance(out, fa.xp.ndarray)
    fa.same_bits(out, fa.call(q, k, v)[0])


@pytest.mark.parametrize("out_dtype", sampled([None, "float32"], None))
@pytest.mark.parametrize(
    "storage",
    sampled(
        [name for name in STORAGES if "repeated" not in name], "fused qkv", "odd rows", "odd start", "Fortran order"
    ),
)
def test_out_is_written_in_place_and_nothing_beside_it(fa, storage, out_dtype):
    e = example("bfloat16", 2, seqlen_q=37, num_heads=2, head_dim=40, causal=True)
    q, k, v = e.arrays(fa.xp)
    expected = fa.call(q, k, v, causal=True, out_dtype=out_dtype)
    out = poisoned(q.shape, out_dtype or q.dtype, storage, xp=fa.xp)
    result, lse = cupy_fa2.flash_attention(q, k, v, causal=True, out=out, out_dtype=out_dtype, return_lse=True)
    assert result is out
    fa.same_bits((out, lse), expected)
    assert_poison_intact(out)


def test_out_in_another_layout(fa):
    """Rows of out may be any distance apart, in either layout."""
    q, k, v = example(layout="bhsd", head_dim=24).arrays(fa.xp)
    out = poisoned(q.shape, q.dtype, Storage(pad=(1, 2, 3, 5), offset=3), xp=fa.xp)
    cupy_fa2.flash_attention(q, k, v, layout="bhsd", out=out)
    assert_attention_close(out, None, q, k, v, layout="bhsd")
    assert_poison_intact(out)


def test_out_in_float32_says_so_itself(fa):
    q, k, v = example().arrays(fa.xp)
    out = fa.xp.zeros(q.shape, np.float32)
    cupy_fa2.flash_attention(q, k, v, out=out)
    fa.same_bits(out, cupy_fa2.flash_attention(q, k, v, out_dtype=np.float32))
    assert_attention_close(out, None, q, k, v)


def test_inputs_are_left_alone(fa):
    arrays = example("bfloat16", 2, causal=True, storage=("odd rows", "fused qkv", "odd start")).arrays(fa.xp)
    before = fa.bits(*arrays)
    fa.call(*arrays, causal=True)
    assert fa.bits(*arrays) == before


def test_read_only_inputs():
    q, k, v = random_qkv(1, 5, 9, 1, 16)
    for x in (q, k, v):
        x.flags.writeable = False
    assert_attention_close(cupy_fa2.flash_attention(q, k, v), None, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_k", "head_dim"),
    [
        (2, 8192, 8192, 16, 16, 128),
        (4, 4096, 4096, 32, 8, 64),
        (1, 8191, 8209, 4, 1, 256),
        (1, 65536, 65536, 2, 2, 64),
        (2, 1, 65536, 32, 4, 128),
        (1, 65536, 1, 4, 4, 96),
    ],
)
def test_large(cp, dtype, causal, batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim):
    q, k, v = random_qkv(
        batch, seqlen_q, seqlen_k, num_heads, head_dim, num_heads_k=num_heads_k, dtype=dtype, mean=0.5, xp=cp
    )
    out, lse = cupy_fa2.flash_attention(q, k, v, causal=causal, return_lse=True)
    assert_attention_close(out, lse, q, k, v, rows=64, causal=causal)
