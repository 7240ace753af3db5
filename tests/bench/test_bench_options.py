"""The bench of options: its calls, torch's in their place, what a cost is."""

import contextlib
import time

import numpy as np
import pytest
from bench_tools import make_options, small_case, small_inputs
from harness.arrays import Arrays
from harness.case import visible_share
from harness.launch import plan_of
from peers import Unavailable
from peers.torch_flex import as_flex, time_limit
from peers.torch_sdpa import as_sdpa
from rows import BENCHES
from rows.options import OPTIONS, best_of_torch, check

import cupy_fa2
from cupy_fa2 import reference
from cupy_fa2.device import named_device

H200 = named_device("H200")
BENCH = BENCHES["options"]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_has_a_plan_and_stand_ins_are_shaped_like_its_arrays(option):
    (launch,) = BENCH.plan(option, H200).kernels
    features = launch.spec.features
    assert all(
        getattr(features, name) for name in {"softcap", "alibi", "sinks", "padded", "dropout"} & {*option.pieces}
    )
    (plain,) = plan_of(small_case(seqlen=8192, num_heads=16, head_dim=128), H200).kernels
    assert (launch.spec.name == plain.spec.name) == option.plain
    case = small_case()
    real, empty = option.given(Arrays(np), case), option.given(Arrays(), case)
    assert real.keys() == empty.keys()
    for name, x in real.items():
        if isinstance(x, np.ndarray):
            y = empty[name]
            assert (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)


def test_everything_together_is_right_and_wrong_results_are_found():
    case = small_case()
    q, k, v = small_inputs(case)
    (option,) = (option for option in OPTIONS if option.name == "everything")
    given = option.given(Arrays(np), case)
    out, lse = cupy_fa2.flash_attention(q, k, v, return_lse=True, **given)
    check(out, lse, q, k, v, False, given)
    with pytest.raises(AssertionError):
        check(out, lse, q, k, v, False, {**given, "softcap": 1.0})


def test_pairs_are_counted():
    row, key = np.ogrid[:50, :50]
    for causal, window in ((False, (7, 0)), (False, (3, 4)), (True, (9, 9)), (False, (50, 50))):
        seen = (row - key <= window[0]) & (key - row <= (0 if causal else window[1]))
        share = visible_share(small_case(causal=causal, seqlen=50), window)
        assert share == pytest.approx(seen.mean())
    assert visible_share(small_case(causal=True)) == 0.5  # as FLOPs are counted
    assert visible_share(small_case()) == 1


def test_costs_are_over_the_plain_time_of_the_round_and_the_share():
    rows = {row["name"]: row for row in make_options()["rows"]}
    assert rows["plain"]["cost"] == 1
    for name in ("causal", "bias", "window"):
        row = rows[name]
        assert row["cost"] == pytest.approx(1.1, abs=1e-3)
        assert row["spread"] == 0  # the clocks cancel
        assert row["torch"]["cudnn"]["own"] == pytest.approx(2, abs=1e-3)
        assert row["torch"]["cudnn"]["ratio"] == pytest.approx(3 / 2.2, abs=1e-3)
        assert best_of_torch(row) == "cudnn"
        assert [mark.met for mark in BENCH.marks(row)] == [True]
    assert rows["bias"]["yardstick"] == pytest.approx(2.5 / 2.2, abs=1e-4)
    assert best_of_torch(rows["softcap"]) is best_of_torch(rows["alibi"]) is None
    assert [mark.met for mark in BENCH.marks(rows["alibi"])] == [False]  # it has no time
    assert BENCH.marks(rows["sinks"]) == []
    assert [mark.met for mark in BENCH.marks({**rows["bias"], "cost": 1.46})] == [False]


def test_a_table_has_every_row_and_says_why_one_failed():
    result = make_options()
    lines = BENCH.table(result).splitlines()
    assert "alibi: RuntimeError: no kernel" in lines
    assert lines[-1] == "no FlashAttention-2 in 13 rows: no mask"
    assert len(lines) == len(OPTIONS) + 3
    (bias,) = (line for line in lines if line.startswith("bias (1, h, s, s), bfloat16"))
    assert bias.split()[6:] == ["8,192", "2.420", "1.100", "1.45", "met", "cudnn", "3.300", "2.00", "1.36", "rounded"]
    assert len({line.index("8,192") for line in lines if "8,192" in line}) == 1
    assert "no kernel" in BENCH.line(result["rows"][3])
    assert "no flash2: no mask" in BENCH.line(result["rows"][4])


def test_time_limits_end_and_leave_nothing_behind():
    with pytest.raises(TimeoutError, match="were left"), time_limit(0.05):
        time.sleep(5)
    with time_limit(0.05):
        pass
    time.sleep(0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_torch_is_asked_the_same(option):
    torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    case = small_case("f16", option.causal)
    q, k, v = small_inputs(case, np.float32)
    given = option.given(Arrays(np), case)
    if "bias" in given:
        given["bias"] = given["bias"].astype(np.float32)
    if "window" in given:
        given["window"] = (20, 0)
    asked = {name: x for name, x in given.items() if not name.startswith("dropout")}
    expected, _ = reference.attention(q, k, v, causal=option.causal, **asked)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    answered = 0
    try:
        wanted, settings, note = as_sdpa(case, *tensors, given)
    except Unavailable:
        assert "softcap" in given
    else:
        settings.pop("dropout_p", None)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in wanted), **settings)
        np.testing.assert_allclose(theirs.transpose(1, 2).numpy(), expected, atol=1e-5)
        assert bool(note) == (option.name == "alibi")
        answered += 1
    with contextlib.suppress(Unavailable):
        theirs = as_flex(case, *tensors, given, attention.flex_attention)()
        np.testing.assert_allclose(theirs.numpy(), expected, atol=1e-5)
        answered += 1
    assert (answered == 0) == (option.name == "everything")
