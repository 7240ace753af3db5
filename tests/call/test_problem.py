"""What options become: bounds, strides over the scores' axes, how a kernel may read them. No GPU, no kernel."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cupy_fa2.device import named_device
from cupy_fa2.kernel.features import ScoreArray
from cupy_fa2.kernel.params import FWD_PARAMS, MAX_WINDOW
from cupy_fa2.plan import encode, plan_forward
from cupy_fa2.problem import Problem

BATCH, SEQLEN_Q, SEQLEN_K, HEADS = 2, 6, 8, 4
A100, H200 = named_device("A100"), named_device("H200")


def array(*shape, dtype=np.float32, strides=None):
    """As much of an array as a problem looks at; strides in elements."""
    host = np.broadcast_to(np.zeros((), dtype), shape)
    packed = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    steps = packed if strides is None else strides
    return SimpleNamespace(shape=shape, dtype=host.dtype, strides=tuple(host.itemsize * step for step in steps))


def problem(batch=BATCH, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, dtype=np.float16, **options):
    q, k = (array(batch, n, heads, 64, dtype=dtype) for n, heads in ((seqlen_q, HEADS), (seqlen_k, 2)))
    return Problem.from_arrays(q, k, k, addresses=(0, 0, 0, 0), **options)


def arguments(p, **bindings):
    (launch,) = plan_forward(p.structure, A100).launches
    return np.frombuffer(encode(launch, p, A100, **bindings), FWD_PARAMS.dtype)[0]


@pytest.mark.parametrize(("options", "left", "right", "kernel"), [
    ({}, None, None, "NoMask"),
    ({"causal": True}, None, 0, "CausalMask"),
    ({"window": (None, None)}, None, None, "NoMask"),
    ({"window": (None, 3)}, None, 3, "CausalMask"),
    ({"window": (2, None)}, 2, None, "WindowMask"),
    ({"window": [np.int64(2), np.uint8(0)]}, 2, 0, "WindowMask"),
    ({"window": (0, 0)}, 0, 0, "WindowMask"),
    ({"window": (2, 3), "causal": True}, 2, 0, "WindowMask"),
    ({"window": (2, None), "causal": True}, 2, 0, "WindowMask"),
    ({"window": (10**20, 10**20)}, MAX_WINDOW, MAX_WINDOW, "WindowMask"),
], ids=str)  # fmt: skip
def test_windows(options, left, right, kernel):
    p = problem(**options)
    assert (p.window_left, p.window_right) == (left, right)
    unit = plan_forward(p.structure, A100).kernels[0].spec.render()
    assert f"using Mask = {kernel};" in unit if kernel != "NoMask" else "using Mask" not in unit
    args = arguments(p)
    assert args["window_left"] == (MAX_WINDOW if left is None else left)
    assert args["window_right"] == (MAX_WINDOW if right is None else right)


def test_the_diagonal_of_padded_batches_counts_from_the_ends():
    lengths = array(BATCH, dtype=np.int32)
    for given in ({"seqlens_q": lengths}, {"seqlens_k": lengths}, {"seqlens_q": lengths, "seqlens_k": lengths}):
        p = problem(causal=True, **given)
        assert p.features.padded
        assert (p.diagonal, p.diagonal_from_end) == (0, True)
        for align, diagonal in (("top-left", 0), (3, 3), (array(BATCH, dtype=np.int64), None)):
            p = problem(causal=True, align=align, **given)
            assert (p.diagonal, p.diagonal_from_end) == (diagonal, False)
    p = problem(causal=True)
    assert (p.diagonal, p.diagonal_from_end) == (2, False)


def test_padded_batches_do_without_tensor_maps():
    assert plan_forward(problem().structure, H200).kernels[0].spec.transport == "tensor"
    plan = plan_forward(problem(seqlens_k=array(BATCH, dtype=np.int32)).structure, H200)
    assert plan.kernels[0].spec.transport == "cp_async"
    assert "cp.async" in plan.explain()


FULL = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
PACKED = (HEADS * 48, 48, 8, 1)


@pytest.mark.parametrize(("bias", "strides", "rows", "pairs"), [
    (array(*FULL), PACKED, True, True),
    (array(HEADS, SEQLEN_Q, SEQLEN_K), (0, 48, 8, 1), True, True),
    (array(SEQLEN_Q, SEQLEN_K), (0, 0, 8, 1), True, True),
    (array(SEQLEN_K), (0, 0, 0, 1), False, True),
    (array(1), (0, 0, 0, 0), False, False),
    (array(), (0, 0, 0, 0), False, False),
    (array(BATCH, 1, 1, SEQLEN_K), (8, 0, 0, 1), False, True),
    (array(BATCH, 1, SEQLEN_Q, 1), (6, 0, 1, 0), True, False),
    (array(1, 1, 1, SEQLEN_K, strides=(7, 5, 3, 1)), (0, 0, 0, 1), False, True),
    (array(*FULL, strides=(0, 0, 0, 1)), (0, 0, 0, 1), False, True),
    (array(*FULL, strides=(0, 0, -8, 1)), (0, 0, -8, 1), True, True),
    (array(*FULL, strides=(0, 0, 9, 1)), (0, 0, 9, 1), True, False),
    (array(*FULL, strides=(0, 7, 8, 1)), (0, 7, 8, 1), True, False),
    (array(*FULL, strides=(0, 0, 8, -1)), (0, 0, 8, -1), True, False),
    (array(*FULL, strides=(0, 0, 1, 6)), (0, 0, 1, 6), True, False),
    (array(*FULL, strides=(1 << 40, 0, 16, 2)), (1 << 40, 0, 16, 2), True, False),
], ids=str)  # fmt: skip
def test_what_broadcasts_is_read_through_strides_of_zero(bias, strides, rows, pairs):
    p = problem(bias=bias)
    assert (p.bias, p.strides_bias) == (ScoreArray("float", rows, pairs), strides)
    args = arguments(p, bias=99)
    assert [args[f"bias_stride_{axis}"] for axis in ("batch", "head", "seq", "key")] == list(strides)
    assert args["bias"] == 99


def test_pairs_want_even_lengths_and_aligned_addresses():
    for dtype in (np.float16, np.float32):
        bias = array(SEQLEN_Q, SEQLEN_K, dtype=dtype)
        item = np.dtype(dtype).itemsize
        assert problem(bias=bias, option_addresses={"bias": 2 * item}).bias.pairs
        assert not problem(bias=bias, option_addresses={"bias": item}).bias.pairs
    assert not problem(seqlen_k=7, bias=array(7)).bias.pairs
    assert not problem(seqlen_k=7, bias=array(SEQLEN_Q, 7, strides=(8, 1))).bias.pairs
    assert not problem(mask=array(SEQLEN_K, dtype=np.bool_), option_addresses={"mask": 1}).mask.pairs


def test_dtypes_of_bias_and_mask():
    bfloat16 = ml_dtypes.bfloat16
    assert problem(bias=array(SEQLEN_K, dtype=np.float16)).bias.dtype == "f16"
    assert problem(dtype=bfloat16, bias=array(SEQLEN_K, dtype=bfloat16)).bias.dtype == "bf16"
    assert problem(dtype=bfloat16, bias=array(SEQLEN_K)).bias.dtype == "float"
    p = problem(mask=array(BATCH, 1, 1, SEQLEN_K, dtype=np.bool_))
    assert (p.mask, p.strides_mask) == (ScoreArray("bool", rows=False), (8, 0, 0, 1))
    assert arguments(p, mask=5)["mask"] == 5
    assert arguments(p)["mask_stride_batch"] == 8


def test_nothing_to_broadcast_to():
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}):
        p = problem(**sizes)
        shape = (p.batch, HEADS, p.seqlen_q, p.seqlen_k)
        for full in (shape, tuple(min(size, 1) for size in shape), (1, 1, 1, 1)):
            assert problem(**sizes, bias=array(*full), mask=array(*full, dtype=np.bool_)).bias
        assert problem(
            **sizes, alibi_slopes=array(p.batch, HEADS), seqlens_k=array(p.batch, dtype=np.int32), sinks=array(HEADS)
        )


def test_slopes_and_sinks():
    p = problem(alibi_slopes=array(HEADS, strides=(3,)), sinks=array(HEADS, strides=(-2,)))
    assert (p.strides_alibi, p.stride_sinks) == ((0, 3), -2)
    p = problem(alibi_slopes=array(BATCH, HEADS, strides=(0, -5)))
    assert p.strides_alibi == (0, -5)
    args = arguments(p, alibi_slopes=1, sinks=2)
    assert [args[f"alibi_{name}"] for name in ("slopes", "stride_batch", "stride_head")] == [1, 0, -5]
    assert args["sinks"] == 2


def test_scales_keep_their_sign_where_something_else_takes_it():
    assert problem(softmax_scale=-1).features.negate
    for given in ({"softcap": 5}, {"alibi_slopes": array(HEADS)}, {"bias": array(1)}):
        assert not problem(softmax_scale=-1, **given).features.negate
    assert problem(softmax_scale=-1, mask=array(1, dtype=np.bool_)).features.negate
    args = arguments(problem(softmax_scale=-0.5, softcap=30))
    assert (args["softmax_scale"], args["softcap"]) == (-0.5, 30)
    assert args["scale_log2"] == np.float32(0.5 * np.log2(np.e))


@pytest.mark.parametrize(("p", "threshold"), [(0.0, 65536), (0, 65536), (1e-9, 65536), (0.1, 58982), (0.5, 32768),
                                              (np.float32(0.25), 49152), (1 - 2**-16, 1)])  # fmt: skip
def test_dropout_keeps_so_many_of_65536(p, threshold):
    found = problem(dropout_p=p, dropout_seed=3)
    assert found.dropout_threshold == threshold
    assert found.features.dropout == (threshold < 65536)
    args = arguments(found, dropout_seed=2**64 - 1)
    assert args["dropout_threshold"] == threshold
    assert args["dropout_rescale"] == np.float32(65536 / threshold)
    assert args["dropout_seed"] == 2**64 - 1


def test_seeds():
    for seed in (0, 2**64 - 1, np.uint64(2**64 - 1), np.int64(-1), np.int32(7), np.array(-1), np.array(3, np.uint64)):
        assert problem(dropout_p=0.5, dropout_seed=seed).features.dropout
        assert not problem(dropout_seed=seed).features.dropout


def test_widths_lengths_and_numbers_do_not_replan():
    """A plan is cached by what it depends on."""
    bias = array(SEQLEN_K)
    first = plan_forward(
        problem(window=(3, 4), softcap=5, bias=bias, sinks=array(HEADS), dropout_p=0.1, dropout_seed=1).structure, H200
    )
    assert first is plan_forward(
        problem(
            window=(8, 1), softcap=6, bias=array(SEQLEN_K + 2), sinks=array(HEADS, strides=(5,)), dropout_p=0.3,
            dropout_seed=2, seqlen_k=SEQLEN_K + 2, align=-3,
        ).structure,
        H200,
    )  # fmt: skip
    for other in ({"window": (3, 4)}, {"softcap": 5}, {"bias": bias}, {"bias": array(SEQLEN_K, dtype=np.float16)}):
        assert plan_forward(problem(**other).structure, H200) is not plan_forward(problem().structure, H200)
