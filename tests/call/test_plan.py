"""Plans: pure, cached by structure, feasible on every card."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest

from cupy_fa2.device import NAMED_DEVICES, named_device
from cupy_fa2.kernel.features import Features, ScoreArray, score_modifiers
from cupy_fa2.kernel.forward import FwdTile
from cupy_fa2.kernel.params import FWD_PARAMS
from cupy_fa2.plan import encode, forward_plan_with, forward_spec, plan_forward
from cupy_fa2.plan.feasible import accumulator_registers, blocks_by_shared_memory, infeasible
from cupy_fa2.plan.forward import MOST_HEADS_PER_GROUP, heads_per_group
from cupy_fa2.plan.pick import pick_forward
from cupy_fa2.problem import Problem, Structure

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


def arguments(p, **given):
    """The argument struct of a problem's launch on an A100."""
    device = named_device("A100")
    (launch,) = plan_forward(p.structure, device).launches
    return np.frombuffer(encode(launch, p, device, **given), FWD_PARAMS.dtype)[0]


def typical(head_dim, head_dim_v, causal, tensor_maps, seqlen_q):
    features = Features("causal" if causal else "full")
    return Structure.typical(head_dim, head_dim_v, features=features, tensor_maps=tensor_maps, seqlen_q=seqlen_q)


def spec_with(card="A100", **features):
    """The kernel of a typical call at head_dim 64."""
    return forward_spec(Structure.typical(64, features=Features(**features)), named_device(card))[0]


@pytest.mark.parametrize("device", NAMED_DEVICES.values(), ids=lambda device: device.name)
def test_every_head_dim_has_a_tile_on_every_card(device):
    for head_dim, head_dim_v in itertools.product(DIMS, DIMS):
        for causal, tensor_maps in itertools.product((False, True), (False, True)):
            choice = pick_forward(typical(head_dim, head_dim_v, causal, tensor_maps, 1000), device)
            tile = choice.tile
            assert infeasible(tile, device) is None
            assert tile.shared_bytes <= device.shared_per_block
            assert blocks_by_shared_memory(tile, device) >= 1
            assert tile.head_dim >= head_dim
            assert tile.head_dim_v >= head_dim_v
            assert choice.transport == "cp_async" or (tensor_maps and device.arch >= 90)
            assert choice.reason


def test_how_keys_lie_in_memory_does_not_show_in_the_bits():
    """With tensor maps or without: the same keys per tile, in the same order, by the same rule."""
    for head_dim, causal, seqlen_q in itertools.product(DIMS, (False, True), (1, 1000, 100_000)):
        dense, tensor = (
            pick_forward(typical(head_dim, head_dim, causal, tensor_maps, seqlen_q), named_device("H200")).tile
            for tensor_maps in (False, True)
        )
        assert dense == replace(tensor, stages=dense.stages, q_kept=dense.q_kept, mask_by_warp=dense.mask_by_warp)


def test_what_does_not_fit_is_refused_with_a_number():
    big = FwdTile(128, 128, 256, 256, 8)
    assert "needs 327680 bytes of shared memory, RTX 4090 gives 101376" in infeasible(big, named_device("RTX 4090"))
    wide = FwdTile(64, 64, 64, 256, 2)
    assert accumulator_registers(wide) == 320
    assert "320 registers" in infeasible(wide, named_device("H200"))


FEATURES = {
    "causal": {"band": "causal"},
    "window": {"band": "window"},
    "negate": {"negate": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias_bf16": {"bias": ScoreArray("bf16")},
    "bias_float_row": {"bias": ScoreArray("float", rows=False)},
    "bias_bf16_single": {"bias": ScoreArray("bf16", pairs=False)},
    "mask": {"mask": ScoreArray("bool")},
    "mask_row_single": {"mask": ScoreArray("bool", rows=False, pairs=False)},
    "sinks": {"sinks": True},
    "padded": {"padded": True},
    "dropout": {"dropout": True},
}


def test_each_feature_is_in_a_kernel_and_in_its_name():
    assert {f.name for f in fields(Features)} - {"scaled"} == {name for one in FEATURES.values() for name in one}
    names = {"": spec_with().name}
    for name, feature in FEATURES.items():
        spec = spec_with(**feature)
        assert spec.features == Features(**feature)
        assert spec.name.endswith("_" + name)
        names[name] = spec.name
    assert len(set(names.values())) == len(names)


def test_score_modifiers_come_in_their_order():
    both = Features(
        mask=ScoreArray("bool", rows=False),
        bias=ScoreArray("float", pairs=False),
        alibi=True,
        softcap=True,
        scaled=True,
    )
    assert (
        score_modifiers(both)
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
        assert score_modifiers(Features(**FEATURES[name])) == expected


def test_each_feature_is_a_type_of_its_own():
    def types(card="A100", **fields):
        """What a unit's `Config` says beside the tile: only what is not as in `FwdDefaults`."""
        structure = {name: fields.pop(name) for name in ("out_dtype", "out_vectors") if name in fields}
        asked = Structure.typical(64, features=Features(**fields), **structure)
        text = forward_spec(asked, named_device(card))[0].render()
        return dict(re.findall(r"^  using (\w+) = (.*);$", text, re.MULTILINE))

    assert types() == {"T": "bf16", "Epilogue": "WriteOut<bf16>"}
    assert types("H200") == {**types(), "Params": "FwdTensorParams", "Transport": "TensorCopies"}
    assert types(band="window", out_dtype="float") == {
        "T": "bf16",
        "Epilogue": "WriteOut<float>",
        "Mask": "WindowMask",
    }
    assert types(
        band="causal", padded=True, sinks=True, dropout=True, mask=ScoreArray("bool", pairs=False), out_vectors=False
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
        spec, _ = forward_spec(Structure.typical(head_dim, features=Features(**feature)), device)
        assert infeasible(spec.tile, device) is None
        if spec.features.dropout:
            assert spec.tile.block_n % 32 == 0
        if spec.features.padded:
            assert spec.transport == "cp_async"


def test_kernels_that_cannot_be_are_refused():
    spec = forward_spec(Structure.typical(64, dtype="f16"), named_device("H200"))[0]
    assert spec.transport == "tensor"
    for features, message in (
        ({"padded": True}, "tensor maps"),
        ({"bias": ScoreArray("bf16")}, "of f16 or float, got bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(spec, features=Features(**features))
    for features, message in (
        ({"mask": ScoreArray("f16")}, "a mask is bool, got f16"),
        ({"negate": True, "softcap": True}, "nothing is left to negate"),
        ({"band": "diagonal"}, "band must be one of full, causal, window, got 'diagonal'"),
    ):
        with pytest.raises(ValueError, match=message):
            Features(**features)


def test_a_given_kernel_must_be_able_to_do_what_is_asked():
    device = named_device("H200")
    structure = Structure.typical(64, dtype="f16")
    spec, _ = forward_spec(structure, device)
    assert forward_plan_with(spec, structure, device).launches == plan_forward(structure, device).launches
    for other, message in (
        (replace(structure, dtype="bf16", out_dtype="bf16"), "dtypes"),
        (replace(structure, head_dim=128), "head dims"),
        (replace(structure, features=Features("causal")), "features"),
        (replace(structure, out_vectors=False), "by 16 bytes"),
        (replace(structure, tensor_maps=False), "tensor maps"),
    ):
        with pytest.raises(ValueError, match=message):
            forward_plan_with(spec, other, device)
    with pytest.raises(ValueError, match="tensor maps, which A100"):
        forward_plan_with(spec, structure, named_device("A100"))
    huge = replace(spec, tile=FwdTile(128, 128, 64, 64, 4, stages=3), transport="tensor")
    with pytest.raises(ValueError, match="bytes of shared memory, H200 gives 1000"):
        forward_plan_with(huge, structure, replace(device, shared_per_block=1000))


def test_plans_are_cached_by_structure():
    """A growing cache, another scale, other strides: the same plan, by identity."""
    device = named_device("H200")
    first = plan_forward(problem(causal=True).structure, device)
    assert plan_forward(problem(causal=True, seqlen_k=501).structure, device) is first
    assert plan_forward(problem(causal=True, softmax_scale=0.3).structure, device) is first
    assert plan_forward(problem(causal=True, align=7).structure, device) is first
    assert plan_forward(problem(causal=True, batch=1, heads=8).structure, device) is first
    assert plan_forward(problem().structure, device) is not first
    assert plan_forward(problem(causal=True, seqlen_q=301).structure, device) is not first
    assert plan_forward(problem(causal=True, softmax_scale=-0.3).structure, device).kernels[0].spec.features.negate


def test_the_grid_covers_every_row_once():
    (launch,) = plan_forward(problem(batch=3, heads=6, seqlen_q=300).structure, named_device("H200")).launches
    rows = launch.spec.tile.block_m
    assert launch.num_m_blocks * rows >= 300 > (launch.num_m_blocks - 1) * rows
    assert launch.grid == (launch.num_m_blocks * 18, 1, 1)
    assert launch.block == (launch.spec.tile.threads, 1, 1)


def test_a_grid_beyond_the_hardware_is_refused():
    with pytest.raises(ValueError, match="batch x heads x query tiles must be at most 2147483647"):
        plan_forward(problem(batch=2**20, heads=2**12, heads_k=1, seqlen_q=1).structure, named_device("H200"))


def test_a_plan_explains_itself():
    text = plan_forward(problem(head_dim=128).structure, named_device("H200")).explain()
    for part in ("H200", "query rows", "bytes of shared memory", "blocks per SM", "registers"):
        assert part in text


def test_the_arguments_say_what_the_problem_says():
    p = problem(
        batch=2, seqlen_q=5, seqlen_k=9, heads=6, heads_k=3, head_dim=40, head_dim_v=24,
        dtype=ml_dtypes.bfloat16, causal=True, softmax_scale=-0.5, align=-3,
    )  # fmt: skip
    bindings = {"q": 1, "k": 2, "v": 3, "out": 4, "lse": 5, "diagonal_offsets": 6}
    args = arguments(p, **bindings)
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
    assert arguments(p)["scale_log2"] == np.finfo(np.float32).tiny


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
        group = heads_per_group(problem, named_device("H200"), problem.band)
        if not causal:
            assert group == 1
            continue
        groups = -(-3 * heads // group)
        assert 1 <= group <= max(MOST_HEADS_PER_GROUP, heads // kv_heads)
        assert groups * group - 3 * heads < groups  # the last one is short of less than one head per group
