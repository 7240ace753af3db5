"""Plans: pure, cached by structure, feasible on every card."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest

from cupy_fa2.device import NAMED_DEVICES, named_device
from cupy_fa2.kernel.forward import Features, FwdTile, KernelSpec, Operand
from cupy_fa2.kernel.params import FWD_PARAMS
from cupy_fa2.plan.feasible import accumulator_registers, blocks_by_shared_memory, infeasible
from cupy_fa2.plan.forward import MOST_HEADS_PER_GROUP, encode_forward, forward_spec, heads_per_group, plan_forward
from cupy_fa2.plan.pick import forward_candidates, pick_forward
from cupy_fa2.problem import Problem

DIMS = range(16, 257, 16)


class Shaped:
    """As much of an array as a problem looks at."""

    def __init__(self, *shape, dtype=np.float16, strides=None):
        self.shape, self.dtype = shape, np.dtype(dtype)
        packed = [2 * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        self.strides = tuple(packed) if strides is None else strides


def problem(
    batch=2, seqlen_q=300, seqlen_k=500, heads=4, heads_k=2, head_dim=64, head_dim_v=None, dtype=np.float16, **kw
):
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return Problem.from_arrays(
        Shaped(batch, seqlen_q, heads, head_dim, dtype=dtype),
        Shaped(batch, seqlen_k, heads_k, head_dim, dtype=dtype),
        Shaped(batch, seqlen_k, heads_k, head_dim_v, dtype=dtype),
        addresses=(4096, 8192, 16384, 0),
        **kw,
    )


@pytest.mark.parametrize("device", NAMED_DEVICES.values(), ids=lambda device: device.name)
def test_every_head_dim_has_a_tile_on_every_card(device):
    for head_dim, head_dim_v in itertools.product(DIMS, DIMS):
        for causal, tensor_maps in itertools.product((False, True), (False, True)):
            choice = pick_forward(head_dim, head_dim_v, device, causal=causal, seqlen_q=1000, tensor_maps=tensor_maps)
            tile = choice.tile
            assert infeasible(tile, device) is None
            assert tile.shared_bytes <= device.shared_per_block
            assert blocks_by_shared_memory(tile, device) >= 1
            assert tile.head_dim >= head_dim
            assert tile.head_dim_v >= head_dim_v
            assert choice.kv == "dense" or (tensor_maps and device.arch >= 90)
            assert choice.reason


def test_how_keys_lie_in_memory_does_not_show_in_the_bits():
    """With tensor maps or without: the same keys per tile, in the same order, by the same rule."""
    for head_dim, causal, seqlen_q in itertools.product(DIMS, (False, True), (1, 1000, 100_000)):
        dense, tensor = (
            pick_forward(
                head_dim, head_dim, named_device("H200"), causal=causal, seqlen_q=seqlen_q, tensor_maps=tensor_maps
            ).tile
            for tensor_maps in (False, True)
        )
        assert dense == replace(tensor, stages=dense.stages, q_kept=dense.q_kept, mask_by_warp=dense.mask_by_warp)


def test_what_does_not_fit_is_refused_with_a_number():
    big = FwdTile(128, 128, 256, 256, 8)
    assert "needs 327680 bytes of shared memory, RTX 4090 gives 101376" in infeasible(big, named_device("RTX 4090"))
    wide = FwdTile(64, 64, 64, 256, 2)
    assert accumulator_registers(wide) == 320
    assert "320 registers" in infeasible(wide, named_device("H200"))


def test_candidates_differ():
    for head_dim in DIMS:
        tiles = [choice.tile for choice in forward_candidates(head_dim, head_dim)]
        assert len(set(tiles)) == len(tiles)


FEATURES = {
    "causal": {"causal": True},
    "window": {"window": True},
    "negate": {"negate": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias_bf16": {"bias": Operand("bf16")},
    "bias_float_row": {"bias": Operand("float", rows=False)},
    "bias_bf16_single": {"bias": Operand("bf16", pairs=False)},
    "mask": {"mask": Operand("bool")},
    "mask_row_single": {"mask": Operand("bool", rows=False, pairs=False)},
    "sinks": {"sinks": True},
    "padded": {"padded": True},
    "dropout": {"dropout": True},
}


def test_features_are_fields_of_a_kernel_and_of_its_name():
    assert {f.name for f in fields(Features)} <= {f.name for f in fields(KernelSpec)}
    names = {"": forward_spec(64, 64, named_device("A100"))[0].name}
    for name, feature in FEATURES.items():
        names[name] = forward_spec(64, 64, named_device("A100"), **feature)[0].name
        assert names[name].endswith("_" + name)
    assert len(set(names.values())) == len(names)


def test_a_window_makes_one_kernel_with_causal_or_without():
    spec = forward_spec(64, 64, named_device("A100"), causal=True, window=True)[0]
    assert spec == forward_spec(64, 64, named_device("A100"), window=True)[0]
    assert "WindowMask" in spec.render()


def test_score_modifiers_come_in_their_order():
    both = forward_spec(
        64, 64, named_device("A100"), mask=Operand("bool", rows=False), bias=Operand("float", pairs=False), alibi=True,
        softcap=True, scaled=True,
    )[0]  # fmt: skip
    assert (
        both.score_modifiers()
        == "ScoreMods<Softcap, Scaled, Alibi<false>, Bias<float, true, false>, BoolMask<false, true>>"
    )
    for name, expected in (
        ("causal", "ScoreMods<>"),
        ("negate", "ScoreMods<Negate>"),
        ("softcap", "ScoreMods<Softcap>"),
        ("alibi", "ScoreMods<Alibi<true>>"),
        ("bias_bf16", "ScoreMods<Bias<bf16, true, true>>"),
        ("mask", "ScoreMods<BoolMask<true, true>>"),
    ):
        assert forward_spec(64, 64, named_device("A100"), **FEATURES[name])[0].score_modifiers() == expected


def test_each_feature_is_a_type_of_its_own():
    def types(card="A100", **features):
        """What a unit's `Config` says beside the tile: only what is not as in `FwdDefaults`."""
        text = forward_spec(64, 64, named_device(card), "bf16", **features)[0].render()
        return dict(re.findall(r"^  using (\w+) = (.*);$", text, re.MULTILINE))

    assert types() == {"T": "bf16", "Epilogue": "WriteOut<bf16>"}
    assert types("H200") == {**types(), "Params": "FwdTensorParams", "Transport": "TensorCopies"}
    assert types(window=True, out_dtype="float") == {"T": "bf16", "Epilogue": "WriteOut<float>", "Mask": "WindowMask"}
    assert types(
        causal=True, padded=True, sinks=True, dropout=True, mask=Operand("bool", pairs=False), out_vectors=False
    ) == {
        "T": "bf16",
        "Epilogue": "WriteOut<bf16, false, true>",
        "Lengths": "PaddedLengths",
        "Mask": "CausalMask",
        "Score": "ScoreMods<BoolMask<true, false>>",
        "Dropout": "PhiloxDropout",
    }


@pytest.mark.parametrize("device", NAMED_DEVICES.values(), ids=lambda device: device.name)
def test_every_feature_has_a_tile_on_every_card(device):
    for head_dim, feature in itertools.product(DIMS, FEATURES.values()):
        spec, _ = forward_spec(head_dim, head_dim, device, **feature)
        assert infeasible(spec.tile, device) is None
        if spec.dropout:
            assert spec.tile.block_n % 32 == 0
        if spec.padded:
            assert spec.kv == "dense"


def test_kernels_that_cannot_be_are_refused():
    spec = forward_spec(64, 64, named_device("H200"), "f16")[0]
    assert spec.kv == "tensor"
    for changed, message in (
        ({"padded": True}, "tensor maps"),
        ({"bias": Operand("bf16")}, "bias of f16 or float, got bf16"),
        ({"mask": Operand("f16")}, "a mask is bool, got f16"),
        ({"negate": True, "softcap": True}, "nothing is left to negate"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(spec, **changed)


def test_plans_are_cached_by_structure():
    """A growing cache, another scale, other strides: the same plan, by identity."""
    device = named_device("H200")
    first = plan_forward(problem(causal=True), device)
    assert plan_forward(problem(causal=True, seqlen_k=501), device) is first
    assert plan_forward(problem(causal=True, softmax_scale=0.3), device) is first
    assert plan_forward(problem(causal=True, align=7), device) is first
    assert plan_forward(problem(causal=True, batch=1, heads=8), device) is first
    assert plan_forward(problem(), device) is not first
    assert plan_forward(problem(causal=True, seqlen_q=301), device) is not first
    assert plan_forward(problem(causal=True, softmax_scale=-0.3), device).spec.negate
    assert plan_forward(problem(causal=True), named_device("A100")).device.target == "sm_80"


def test_the_grid_covers_every_row_once():
    plan = plan_forward(problem(batch=3, heads=6, seqlen_q=300), named_device("H200"))
    rows = plan.spec.tile.block_m
    assert plan.num_m_blocks * rows >= 300 > (plan.num_m_blocks - 1) * rows
    assert plan.grid == (plan.num_m_blocks * 18, 1, 1)


def test_a_grid_beyond_the_hardware_is_refused():
    with pytest.raises(ValueError, match="batch x heads x query tiles must be at most 2147483647"):
        plan_forward(problem(batch=2**20, heads=2**12, heads_k=1, seqlen_q=1), named_device("H200"))


def test_a_plan_explains_itself():
    text = plan_forward(problem(head_dim=128), named_device("H200")).explain()
    for part in ("H200", "query rows", "bytes of shared memory", "blocks per SM", "registers"):
        assert part in text


def test_the_arguments_say_what_the_problem_says():
    p = problem(
        batch=2, seqlen_q=5, seqlen_k=9, heads=6, heads_k=3, head_dim=40, head_dim_v=24,
        dtype=ml_dtypes.bfloat16, causal=True, softmax_scale=-0.5, align=-3,
    )  # fmt: skip
    plan = plan_forward(p, named_device("A100"))
    args = np.frombuffer(
        encode_forward(p, plan, {"q": 1, "k": 2, "v": 3, "out": 4, "lse": 5, "diagonal_offsets": 6}), FWD_PARAMS.dtype
    )[0]
    assert [args[name] for name in ("q", "k", "v", "out", "lse", "diagonal_offsets")] == [1, 2, 3, 4, 5, 6]
    assert [args[f"q_stride_{axis}"] for axis in ("batch", "seq", "head")] == [5 * 6 * 40, 6 * 40, 40]
    assert [args[f"k_stride_{axis}"] for axis in ("batch", "seq", "head")] == [9 * 3 * 40, 3 * 40, 40]
    assert [args[f"v_stride_{axis}"] for axis in ("batch", "seq", "head")] == [9 * 3 * 24, 3 * 24, 24]
    assert [args[f"out_stride_{axis}"] for axis in ("batch", "seq", "head", "dim")] == [5 * 6 * 24, 6 * 24, 24, 1]
    assert [args[f"lse_stride_{axis}"] for axis in ("batch", "head", "seq")] == [30, 5, 1]
    assert args["diagonal_offset"] == -3
    assert (args["num_heads"], args["heads_per_kv"], args["batch"]) == (6, 2, 2)
    assert args["scale_log2"] == np.float32(0.5 * np.log2(np.e))
    assert args["softmax_scale"] == np.float32(-0.5)


def test_a_zero_scale_stays_out_of_the_exponent():
    p = problem(softmax_scale=0)
    args = encode_forward(p, plan_forward(p, named_device("A100")), {})
    assert np.frombuffer(args, FWD_PARAMS.dtype)[0]["scale_log2"] == np.finfo(np.float32).tiny


def test_out_is_stored_by_vectors_only_where_it_can_be():
    assert problem(head_dim=64).out_vectors
    assert not problem(head_dim=64, head_dim_v=20).out_vectors
    assert problem(head_dim=64, head_dim_v=24).out_vectors
    out = Shaped(2, 300, 4, 64, strides=(300 * 4 * 130, 4 * 130, 130, 2))  # rows 130 bytes apart
    assert not problem(out=out).out_vectors


def test_strides_of_single_steps_mean_nothing():
    q = Shaped(1, 1, 4, 64, strides=(12345, 777, 128, 2))
    k = Shaped(1, 500, 1, 64, strides=(-8, 128, 3, 2))
    p = Problem.from_arrays(q, k, k, addresses=(0, 16, 16, 0))
    assert p.copied == (False, False, False)
    assert p.strides_q == (0, 0, 64)
    assert p.strides_k == (0, 64, 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seqlen"), [(16, 16, 8192), (16, 2, 4096), (15, 5, 65536), (64, 64, 512), (7, 1, 100)]
)
def test_heads_take_turns_in_equal_groups(heads, kv_heads, seqlen):
    """Under a causal mask; all heads are in one, and those that share keys stay close."""
    q, k = (np.empty((3, seqlen, n, 64), np.float16) for n in (heads, kv_heads))
    addresses = (0, 0, 0, 0)
    for causal in (False, True):
        problem = Problem.from_arrays(q, k, k, causal=causal, addresses=addresses)
        group = heads_per_group(problem, plan_forward(problem, named_device("H200")))
        if not causal:
            assert group == 1
            continue
        groups = -(-3 * heads // group)
        assert 1 <= group <= max(MOST_HEADS_PER_GROUP, heads // kv_heads)
        assert groups * group - 3 * heads < groups  # the last one is short of less than one head per group
