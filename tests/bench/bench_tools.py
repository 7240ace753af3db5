"""Results as a bench would store them, and small calls, for the tests of the bench."""

from types import SimpleNamespace

import numpy as np
from harness.arrays import DTYPES
from harness.results import RESULTS
from rows import BENCHES


def stored_results():
    """Files of stored benches; the tuner's lie beside them."""
    return [path for path in RESULTS.glob("*.json") if path.stem.rsplit("-", 1)[-1] in BENCHES]


def make_result():
    """The forward's, every row alike."""

    def row(case):
        return {
            **BENCHES["forward"].describe(case),
            "ms": 2.0,
            "tflops": 400.0,
            "ceiling_share": 0.64,
            "ratios": {"flash2": 1.25, "cupy": 40.0},
            "messages": {"triton": "no triton"},
        }

    return {
        "schema": 1,
        "kind": "forward",
        "card": "NVIDIA H200",
        "driver": "580",
        "date": "2026-11-30",
        "commit": "0123456789ab",
        "versions": {"torch": "2.11", "triton": None},
        "mma_ceiling_tflops": {"bf16": 629.0},
        "rows": [row(case) for case in BENCHES["forward"].rows],
    }


def make_options():
    """Every row as if options cost a tenth and torch's cuDNN twice as much; ALiBi fails."""
    bench = BENCHES["options"]
    result = {**make_result(), "kind": bench.kind, "rows": []}
    for option in bench.rows:
        row = bench.describe(option)
        result["rows"].append(row)
        if option.name == "alibi":
            row["error"] = "RuntimeError: no kernel"
            continue
        clocks = np.array([1.0, 1.1, 1.3])  # of a card that slows down
        ours = 2.0 * row["share"] * (1.0 if option.plain else 1.1) * clocks
        times = {"plain": 2.0 * clocks, "ours": ours, "yardstick": 2.5 * clocks}
        if "softcap" not in option.pieces:
            times["cudnn"] = 1.5 * clocks * (1.0 if option.plain else 2.0 * row["share"])
            times["efficient"] = 9.0 * clocks
        row["notes"], row["messages"] = {"cudnn": "rounded"} if option.name == "bias" else {}, {"flash2": "no mask"}
        bench.summarise(option, row, times, None)
    bench.finish(result["rows"])
    return result


def small_case(dtype="bf16", causal=False, batch=2, seqlen=64, num_heads=2, head_dim=32):
    """The sizes of a call that the simulator makes at once."""
    shape = (batch, seqlen, num_heads, head_dim)
    return SimpleNamespace(
        **{"dtype": dtype, "causal": causal, "batch": batch, "seqlen": seqlen, "num_heads": num_heads, "shape": shape}
    )


def small_inputs(case, dtype=None):
    """Q, k and v of such a call."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(case.shape, np.float32).astype(dtype or DTYPES[case.dtype]) for _ in range(3)]
