"""Teams of two warps (core/team.cuh), whatever the tables choose: results, bits, bank conflicts, spills."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import example
from plan_tools import attention_with
from sampling import sampled

import cupy_fa2
from cupy_fa2.compile import build, nvrtc_version
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.testing import assert_attention_close

#: card, block_m, block_n, num_warps, stages, how K and V come.
TILES = [
    ("H200", 128, 64, 8, 2, "tensor"),
    ("H200", 64, 32, 4, 2, "tensor"),
    ("H200", 128, 64, 8, 2, "cp_async"),
    ("A100", 128, 64, 8, 1, "cp_async"),
    ("A100", 128, 32, 8, 2, "cp_async"),
]


def tile_of(block_m: int, block_n: int, num_warps: int, stages: int, **options: int) -> FwdTile:
    dims = {"head_dim": 256, "head_dim_v": 256, **options}
    return FwdTile(block_m=block_m, block_n=block_n, num_warps=num_warps, stages=stages, team=2, **dims)


@pytest.mark.parametrize("causal", sampled([False, True], True), ids=["full", "causal"])
@pytest.mark.parametrize("seqlens", sampled([(1, 1), (33, 65), (130, 200), (200, 97), (65, 333)], (130, 200)), ids=str)
@pytest.mark.parametrize("case", sampled(TILES, TILES[0], TILES[3]), ids=str)
def test_teams_agree_with_the_definition(case, seqlens, causal):
    card, *sizes, transport = case
    dtype = "float16" if sum(seqlens) % 3 == causal else "bfloat16"
    e = example(dtype, 1, *seqlens, 2, 256, causal=causal)
    q, k, v = e.arrays()
    with cupy_fa2.simulator(card) as simulator:
        out, lse = attention_with(tile_of(*sizes), transport, q, k, v, causal=causal)
    assert_attention_close(out, lse, q, k, v, causal=causal)
    assert simulator.report.bank_conflicts == 0


@pytest.mark.parametrize("scale", sampled([40.0, 1000.0, -3.0], 1000.0))
def test_maxima_that_grow_and_large_scores(scale):
    """Most tiles raise some reference; at 1000 rows are large (softmax.cuh)."""
    q, k, v = example("float16", 1, 70, 400, 1, 256).arrays()
    q = (q.astype(np.float32) * abs(scale)).astype(np.float16)
    options = {"softmax_scale": -1 / 16} if scale < 0 else {}
    with cupy_fa2.simulator("H200"):
        out, lse = attention_with(tile_of(128, 64, 8, 2), "tensor", q, k, v, **options)
    assert_attention_close(out, lse, q, k, v, **options)


def test_other_outputs():
    """Sums of rounded probabilities, another head_dim_v, and a stride that is no vector's."""
    q, k, v = example("bfloat16", 2, 40, 150, 2, 80, head_dim_v=120).arrays()
    tile = tile_of(128, 64, 8, 2, head_dim=80, head_dim_v=128)
    with cupy_fa2.simulator("H200"):
        out, lse = attention_with(tile, "cp_async", q, k, v, out_dtype=np.float32)
        assert_attention_close(out, lse, q, k, v)
        room = np.zeros((2, 40, 2, 240), q.dtype)
        attention_with(tile, "cp_async", q, k, v, out=room[..., ::2])
    assert_attention_close(room[..., ::2], lse, q, k, v)
    assert not room[..., 1::2].any()


@pytest.mark.parametrize("q_kept", sampled([16, 64, 256], 64))
def test_columns_of_q_that_are_kept_change_no_bit(q_kept):
    q, k, v = example("bfloat16", 1, 70, 150, 1, 256, causal=True).arrays()
    results = []
    for kept, transport in ((0, "tensor"), (q_kept, "tensor"), (0, "cp_async")):
        tile = tile_of(128, 64, 8, 2, q_kept=kept)
        with cupy_fa2.simulator("H200") as simulator:
            results.append(attention_with(tile, transport, q, k, v, causal=True))
            assert simulator.report.ldmatrix > 0
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.full  # the compile gate has those that the tables choose
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", TILES, ids=str)
def test_teams_build_without_spills(case, causal):
    card, *sizes, transport = case
    features = Features("causal" if causal else "full")
    spec = FwdSpec(tile_of(*sizes), "bf16", "bf16", features, transport=transport)
    binary = build(spec, "sm_90" if card == "H200" else "sm_80")
    assert binary.spill_bytes == 0 or nvrtc_version() != (12, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"team": 3},
        {"num_warps": 4},  # 64 rows per team
        {"block_n": 48},  # 24 keys per warp
        {"head_dim_v": 192},  # 96 columns: not whole panels
        {"q_kept": 8},
        {"q_kept": 272},
    ],
)
def test_tiles_that_no_team_can_work_on(fields):
    good = {"block_m": 128, "block_n": 64, "head_dim": 256, "head_dim_v": 256, "num_warps": 8, "team": 2}
    FwdTile(**good)
    with pytest.raises(ValueError, match="FwdTile"):
        FwdTile(**{**good, **fields})
