"""The tools of `cupy_fa2.testing`: the rule accepts what is right and rejects what is wrong."""

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sampled

from cupy_fa2 import reference, testing
from cupy_fa2.testing import STORAGES, Storage, assert_attention_close, poisoned, random_qkv

BLOCK = 32


def tiled(q, k, v, *, causal=False, align=None, softmax_scale=None, out_dtype=None, mistake=None):
    """Attention as a kernel does it: key blocks, running maximum, unnormalised low-precision P, float32 sums.

    `mistake` plants one of the errors that kernels have had.
    """
    dtype = q.dtype
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = np.float32(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    offset = seqlen_k - seqlen_q if align is None else align
    offset += {"diagonal too far": 1, "diagonal too near": -1}.get(mistake, 0)
    if mistake == "top-left":
        offset = 0
    if mistake == "scale of the padded head_dim":
        scale = np.float32((head_dim + 8) ** -0.5)
    out = np.zeros((batch, seqlen_q, num_heads, head_dim_v), out_dtype or dtype)
    lse = np.zeros((batch, num_heads, seqlen_q), np.float32)
    padding = -seqlen_k % BLOCK
    rows = np.arange(seqlen_q)[:, None]
    for b, h in np.ndindex(batch, num_heads):
        hk = h % num_heads_k if mistake == "round robin of heads" else h // (num_heads // num_heads_k)
        qs, ks, vs = (x.astype(np.float32) for x in (q[b, :, h], k[b, :, hk], v[b, :, hk]))
        ks, vs = (np.pad(x, ((0, padding), (0, 0))) for x in (ks, vs))
        floor = {"maximum starts at zero": 0, "finite floor": -50}.get(mistake, -np.inf)
        row_max = np.full((seqlen_q, 1), floor, np.float32)
        row_sum = np.zeros((seqlen_q, 1), np.float32)
        acc = np.zeros((seqlen_q, head_dim_v), np.float32)
        for start in range(0, len(ks), BLOCK):
            columns = np.arange(start, start + BLOCK)[None, :]
            s = scale * (qs @ ks[start : start + BLOCK].T)
            if mistake == "float16 scores":
                s = s.astype(np.float16).astype(np.float32)
            masked = np.zeros(s.shape, bool) if mistake == "tail not masked" else columns >= seqlen_k
            if mistake == "last key lost":
                masked = masked | (columns == seqlen_k - 1)
            if causal:
                masked = masked | (columns > rows + offset)
            s = np.where(masked, np.float32(-np.inf), s)
            old, row_max = row_max, np.maximum(row_max, s.max(axis=1, keepdims=True))
            shift = np.where(row_max == -np.inf, np.float32(0), row_max)
            rescale = np.exp(old - shift)
            p = np.exp(s - shift)
            row_sum = row_sum * rescale + p.sum(axis=1, keepdims=True)
            if mistake == "sum of the last block only":
                row_sum = p.sum(axis=1, keepdims=True)
            p = p.astype(dtype).astype(np.float32)
            if mistake != "accumulator not rescaled":
                acc = acc * rescale
            if mistake == "float16 accumulation":
                for j in range(BLOCK):
                    acc = (acc + p[:, j : j + 1] * vs[start + j]).astype(dtype).astype(np.float32)
            else:
                acc += p @ vs[start : start + BLOCK]
        with np.errstate(divide="ignore"):
            lse[b, h] = (np.where(row_max == -np.inf, 0, row_max) + np.log(row_sum))[:, 0]
        safe = np.where(row_sum == 0, 1, row_sum)
        out[b, :, h] = acc / (1 if mistake == "not normalised" else safe)
    if mistake == "lse in base 2":
        lse *= np.float32(math.log2(math.e))
    if mistake == "lse of an empty row":
        lse[lse == -np.inf] = np.inf
    if mistake == "output stored twice rounded":
        out = out.astype(ml_dtypes.float8_e5m2).astype(out.dtype)
    return out, lse


def example(dtype=np.float16, mean=0.0, seed=0, seqlen_q=70, seqlen_k=90):
    return random_qkv(2, seqlen_q, seqlen_k, 4, 48, num_heads_k=2, head_dim_v=40, dtype=dtype, mean=mean, seed=seed)


@pytest.mark.parametrize("out_dtype", [None, np.float32])
@pytest.mark.parametrize("mean", sampled([0.0, 1.0, -3.0], -3.0))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accepts_a_right_kernel(dtype, causal, mean, out_dtype):
    for seed in range(5):
        q, k, v = example(dtype, mean, seed)
        out, lse = tiled(q, k, v, causal=causal, out_dtype=out_dtype)
        assert_attention_close(out, lse, q, k, v, causal=causal)


def test_accepts_empty_rows():
    q, k, v = example(seqlen_q=90, seqlen_k=50)
    out, lse = tiled(q, k, v, causal=True)
    assert np.all(lse[:, :, :40] == -np.inf)
    assert_attention_close(out, lse, q, k, v, causal=True)


CAUSAL_MISTAKES = ["diagonal too far", "diagonal too near", "top-left"]
MISTAKES = [
    "tail not masked",
    "last key lost",
    "round robin of heads",
    "sum of the last block only",
    "accumulator not rescaled",
    "not normalised",
    "scale of the padded head_dim",
    "output stored twice rounded",
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mistake", MISTAKES + CAUSAL_MISTAKES)
def test_rejects_a_wrong_kernel(mistake, dtype):
    causal = mistake in CAUSAL_MISTAKES
    q, k, v = example(dtype)
    out, _ = tiled(q, k, v, causal=causal, mistake=mistake)
    with pytest.raises(AssertionError, match=r"out: .* are wrong"):
        assert_attention_close(out, None, q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rejects_low_precision_accumulation(dtype):
    q, k, v = random_qkv(1, 64, 1024, 1, 64, dtype=dtype, mean=0.5)
    assert_attention_close(*tiled(q, k, v), q, k, v)
    out, _ = tiled(q, k, v, mistake="float16 accumulation")
    with pytest.raises(AssertionError, match=r"out: .* are wrong"):
        assert_attention_close(out, None, q, k, v)


@pytest.mark.parametrize("mistake", ["maximum starts at zero", "finite floor"])
def test_rejects_a_maximum_that_starts_too_high(mistake):
    """Every score is far below zero, as in rows whose first block is masked."""
    q, k, v = example()
    q, k = (x * np.float16(0.1) for x in (q, k))
    q[..., 0], k[..., 0] = 1, -120 * 48**0.5
    assert_attention_close(*tiled(q, k, v), q, k, v)
    out, lse = tiled(q, k, v, mistake=mistake)
    with pytest.raises(AssertionError, match=r"out: .* are wrong"):
        assert_attention_close(out, None, q, k, v)
    if mistake == "maximum starts at zero":  # a floor of -50 leaves float32 sums, but no float16 probabilities
        with pytest.raises(AssertionError, match=r"lse: .* are wrong"):
            assert_attention_close(tiled(q, k, v)[0], lse, q, k, v)


@pytest.mark.parametrize("mistake", ["lse in base 2", "lse of an empty row", "float16 scores", "last key lost"])
def test_rejects_a_wrong_lse(mistake):
    q, k, v = example(seqlen_q=90, seqlen_k=50)
    out, _ = tiled(q, k, v, causal=True)
    _, lse = tiled(q, k, v, causal=True, mistake=mistake)
    with pytest.raises(AssertionError, match=r"lse: .* are wrong"):
        assert_attention_close(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_rejects_one_wrong_element_and_names_it(value):
    q, k, v = example()
    out, lse = tiled(q, k, v)
    out[1, 69, 3, 39] = value
    with pytest.raises(AssertionError, match=r"1 of 22400 elements") as caught:
        assert_attention_close(out, lse, q, k, v)
    message = str(caught.value)
    assert "batch 1, head 3, row 69, column 39" in message
    assert "allowed" in message
    assert "wrong (batch, head, row): (1, 3, 69)" in message
    lse[0, 2, 5] = value
    with pytest.raises(AssertionError, match=r"lse: 1 of 560 elements .*\n  worst: batch 0, head 2, row 5:"):
        assert_attention_close(tiled(q, k, v)[0], lse, q, k, v)


def test_rejects_a_number_where_nan_is_due():
    q, k, v = example()
    out, lse = tiled(q, k, v)
    q[0, 3, 1, 0] = np.nan
    with pytest.raises(AssertionError, match=r"row 3.*expected nan"):
        assert_attention_close(out, lse, q, k, v)
    out[0, 3, 1], lse[0, 1, 3] = np.nan, np.nan
    assert_attention_close(out, lse, q, k, v)


def test_rejects_wrong_shapes_and_a_low_precision_lse():
    q, k, v = example()
    out, lse = tiled(q, k, v)
    with pytest.raises(AssertionError, match="out has shape"):
        assert_attention_close(out[..., :-1], lse, q, k, v)
    with pytest.raises(AssertionError, match="lse has shape"):
        assert_attention_close(out, lse.transpose(0, 2, 1), q, k, v)
    with pytest.raises(AssertionError, match="lse is float64"):
        assert_attention_close(out, lse.astype(np.float64), q, k, v)


WRONG = """
import numpy as np
from cupy_fa2 import reference, testing
q, k, v = testing.random_qkv(1, 8, 8, 2, 16)
out, lse = reference.attention(q, k, v)
out, lse = out.astype(q.dtype), lse.astype(np.float32)
testing.assert_attention_close(out, lse, q, k, v)
array = testing.poisoned((1, 2, 1, 4), np.float16)
testing.assert_poison_intact(array)
array.base[0] = 0
for call in (
    lambda: testing.assert_attention_close(out[:, :1], lse, q, k, v),
    lambda: testing.assert_attention_close(out, lse[..., :1], q, k, v),
    lambda: testing.assert_attention_close(out, lse.astype(np.float64), q, k, v),
    lambda: testing.assert_attention_close(out + out.dtype.type(1), lse, q, k, v),
    lambda: testing.assert_attention_close(out, lse + np.float32(1), q, k, v),
    lambda: testing.assert_poison_intact(array),
):
    try:
        call()
    except AssertionError as error:
        print(error)
    else:
        raise SystemExit("accepted")
assert False, "left out by -O"
"""


def test_rejects_under_python_o():
    process = subprocess.run([sys.executable, "-O", "-c", WRONG], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for said in ("out has", "lse has", "lse is float64", "out: ", "lse: ", "1 elements beside the array"):
        assert said in process.stdout


@pytest.mark.parametrize("rows", [5, np.int64(5), np.array(5, np.int32)])
def test_a_number_of_rows(rows):
    q, k, v = example()
    out, lse = tiled(q, k, v)
    assert_attention_close(out, lse, q, k, v, rows=rows)
    out[...] = 9
    with pytest.raises(AssertionError, match="in 5 of 5 rows"):
        assert_attention_close(out, lse, q, k, v, rows=rows)


def test_no_negative_number_of_rows():
    q, k, v = example()
    out, lse = tiled(q, k, v)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        testing.sample_rows(q, -1)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        assert_attention_close(out, lse, q, k, v, rows=-1)
    with pytest.raises(TypeError):
        assert_attention_close(out, lse, q, k, v, rows=5.0)


def test_layout():
    q, k, v = example()
    out, lse = tiled(q, k, v)
    out, q, k, v = (x.transpose(0, 2, 1, 3) for x in (out, q, k, v))
    assert_attention_close(out, lse, q, k, v, layout="bhsd")
    out = out.copy()
    out[1, 3, 7, 0] += 1
    with pytest.raises(AssertionError, match="batch 1, head 3, row 7, column 0"):
        assert_attention_close(out, lse, q, k, v, layout="bhsd")
    with pytest.raises(AssertionError, match="batch 1, head 3, row 7, column 0"):
        assert_attention_close(out, lse, q, k, v, layout="bhsd", rows=[(0, 0, 0), (1, 3, 7)])
    assert_attention_close(out, lse, q, k, v, layout="bhsd", rows=[(0, 0, 0), (1, 3, 8)])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 20, 59, 60, 1000])
def test_sampled_rows_exist_and_include_the_corners(count, layout):
    q = np.empty((2, 3, 10, 4) if layout == "bhsd" else (2, 10, 3, 4))
    rows = [tuple(row) for row in testing.sample_rows(q, count, layout=layout)]
    assert len(set(rows)) == len(rows) == min(count, 60)
    assert set(rows) <= set(np.ndindex(2, 3, 10))
    assert set([(0, 0, 0), (0, 0, 9), (1, 2, 0), (1, 2, 9)][:count]) <= set(rows)


def test_the_rule_in_numbers():
    exact = np.array([0.0, 1.0, 1000.0])
    rough = exact + np.array([0.0, 0.25, -0.5])
    np.testing.assert_allclose(
        testing.tolerance(exact, rough, np.float16),
        1 + 1e-5 + np.array([2.0**-24, 2.0**-10, 0.5]),
        rtol=1e-12,
    )
    rough[2] = np.inf
    np.testing.assert_allclose(testing.tolerance(exact, rough, np.float32)[1], 0.5 + 1e-5 + 2.0**-23, rtol=1e-12)
    np.testing.assert_allclose(testing.lse_tolerance(np.array([0.0, 1.0, 300.0])), [1e-5, 1e-5, 3e-3])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@given(value=st.floats(-6e4, 6e4))
def test_ulp_is_the_distance_of_neighbours(dtype, value):
    rounded = np.array(value).astype(dtype)
    step = float(testing.ulp(float(rounded), dtype))
    away = float(np.nextafter(np.abs(rounded), np.array(np.inf, dtype)).astype(np.float64))
    assert step == away - abs(float(rounded))


@pytest.mark.parametrize("name", STORAGES)
def test_storages_hold_their_values_among_poison(name):
    values = np.arange(2 * 5 * 3 * 8, dtype=np.float16).reshape(2, 5, 3, 8)
    array = poisoned(values.shape, values.dtype, name, values=values)
    steps = STORAGES[name](values.shape).step
    expected = np.broadcast_to(values[tuple(slice(0, 1) if s == 0 else slice(None) for s in steps)], values.shape)
    np.testing.assert_array_equal(array, expected)
    assert [np.sign(s) for s, n in zip(array.strides, values.shape, strict=True)] == [np.sign(s) for s in steps]
    buffer = array
    while buffer.base is not None:
        buffer = buffer.base
    assert np.isnan(buffer).sum() == buffer.size - len(np.unique(expected))
    assert np.isnan(buffer[:64]).all()
    assert np.isnan(buffer[-64:]).all()


def test_storages_are_what_their_names_say():
    made = {name: poisoned((2, 5, 3, 8), np.float16, name) for name in STORAGES}
    in_elements = {name: tuple(s // 2 for s in array.strides) for name, array in made.items()}
    assert in_elements["contiguous"] == (120, 24, 8, 1)
    assert in_elements["heads first"] == (120, 8, 40, 1)
    assert in_elements["fused qkv"] == (5 * 72, 72, 8, 1)
    assert in_elements["cache"] == (42 * 24, 24, 8, 1)
    assert in_elements["odd rows"] == (135, 27, 9, 1)
    assert in_elements["every other row"] == (240, 48, 8, 1)
    assert in_elements["reversed"] == (-120, -24, 8, 1)
    assert in_elements["strided last axis"] == (240, 48, 16, 2)
    assert in_elements["Fortran order"] == (1, 2, 10, 30)
    assert in_elements["one batch repeated"][0] == 0
    addresses = {name: array.__array_interface__["data"][0] % 16 for name, array in made.items()}
    assert addresses["contiguous"] == addresses["cache"] == 0
    assert addresses["odd start"] == 2


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8), (1, 1, 1, 1)])
def test_storages_of_nothing_and_of_one(name, shape):
    assert poisoned(shape, np.float16, name, values=np.zeros(shape)).shape == shape


def test_poison_tells_a_write():
    array = poisoned((2, 3, 1, 4), ml_dtypes.bfloat16, Storage(pad=(0, 0, 0, 1)))
    array[...] = 1
    testing.assert_poison_intact(array)
    assert np.all(array == 1)
    array.base[64 + 4] = 0
    with pytest.raises(AssertionError, match="1 elements beside the array were written, the first at 68"):
        testing.assert_poison_intact(array)
    with pytest.raises(ValueError, match="4 axes"):
        poisoned((3, 4), np.float16, Storage())


@settings(max_examples=5 * settings().max_examples)
@given(testing.attention_examples(max_seqlen=40, max_head_dim=70, max_work=1 << 18))
def test_examples_are_legal_calls(example):
    q, k, v = example.arrays()
    assert example.num_heads % example.num_heads_k == 0
    assert example.batch * example.num_heads <= 6
    assert example.work <= 1 << 18
    out, lse = reference.attention(q, k, v, **example.options)
    assert out.size >= 64 or out.size == 0
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()
    again = example.contiguous().arrays()
    if example.layout == "bhsd":
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    for drawn, same, storage in zip((q, k, v), again, example.storage, strict=True):
        if "repeated" not in storage:
            np.testing.assert_array_equal(drawn, same)


BOUNDS = {
    "tiny": {"max_seqlen": 5, "max_head_dim": 1, "max_batch": 1, "max_heads": 1, "max_work": 10},
    "no work": {"max_work": 1},
    "more batches than heads": {"max_batch": 3, "max_heads": 2},
    "short rows": {"max_head_dim": 3, "max_heads": 1, "max_batch": 1},
    "few rows": {"max_seqlen": 1, "max_heads": 1},
}


@pytest.mark.parametrize("bounds", sampled(BOUNDS.values(), BOUNDS["short rows"]), ids=BOUNDS)
def test_examples_keep_their_bounds(bounds):
    limit = {"max_seqlen": 150, "max_head_dim": 256, "max_batch": 3, "max_heads": 6, "max_work": 1 << 26} | bounds

    @settings(max_examples=200, deadline=None, database=None)
    @given(testing.attention_examples(**bounds))
    def check(example):
        assert max(example.seqlen_q, example.seqlen_k) <= limit["max_seqlen"]
        assert max(example.head_dim, example.head_dim_v) <= limit["max_head_dim"]
        assert example.batch <= limit["max_batch"]
        assert example.batch * example.num_heads <= limit["max_heads"]
        assert example.work <= limit["max_work"]
        elements = example.batch * example.num_heads * example.seqlen_q * example.head_dim_v
        assert elements >= min(64, limit["max_seqlen"] * limit["max_head_dim"]) or elements == 0

    check()


def test_hypothesis_is_not_needed_to_import():
    code = "import sys; sys.modules['hypothesis'] = None; from cupy_fa2 import testing; testing.ulp(1, 'f4')"
    subprocess.run([sys.executable, "-c", code], check=True)
