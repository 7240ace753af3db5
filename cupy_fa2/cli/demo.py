"""The main job of ``python -m cupy_fa2``: draw a problem, check a result, measure it on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupy_fa2 import reference
from cupy_fa2.api import flash_attention
from cupy_fa2.cli.ceiling import mma_ceiling
from cupy_fa2.cli.measure import attention_by_hand, attention_flop, median_ms, peak_bytes
from cupy_fa2.compile import build
from cupy_fa2.device import Device
from cupy_fa2.kernel.base import target
from cupy_fa2.plan import plan_forward
from cupy_fa2.problem import Problem
from cupy_fa2.testing import lse_tolerance, random_qkv, sample_rows, tolerance

__all__ = ["Check", "Sizes", "aligned", "check_result", "draw", "run_on_gpu"]

CHECKED_ROWS = 512  # of each call; all, where there are no more
REPEAT = 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    heads_k: int | None = None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.heads_k is None else self.heads_k

    def __str__(self) -> str:
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        heads += "" if self.heads_k is None else f" over {self.heads_k}"
        return f"batch {self.batch}, seqlen {self.seqlen}, {heads}, head_dim {self.head_dim}"


@dataclass(frozen=True)
class Check:
    """How far a result is from float64, and how far it may be."""

    passed: bool
    rows: int
    out_error: float
    out_allowed: float
    lse_error: float
    lse_allowed: float

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{'right' if self.passed else 'WRONG'}: {self.rows} rows against float64, largest error of out "
            f"{self.out_error:.1e} (allowed {self.out_allowed:.1e}), of lse {self.lse_error:.1e} "
            f"({self.lse_allowed:.1e})"
        )


def draw(sizes: Sizes, dtype: str) -> tuple[Any, Any, Any]:
    """Normally distributed q, k and v, as NumPy arrays."""
    q, k, v = random_qkv(
        sizes.batch, sizes.seqlen, sizes.seqlen, sizes.heads, sizes.head_dim, num_heads_k=sizes.kv_heads, dtype=dtype
    )
    return aligned(q), aligned(k), aligned(v)


def aligned(x: Any) -> Any:
    """A copy of a NumPy array that starts at a multiple of 256 bytes, as every allocation on a GPU does.

    NumPy's own start anywhere, and the simulator would count the sectors that straddle.
    """
    buffer = np.empty(x.nbytes + 256, np.uint8)
    begin = -buffer.__array_interface__["data"][0] % 256
    copy = buffer[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def check_result(out: Any, lse: Any, q: Any, k: Any, v: Any, *, causal: bool) -> Check:
    """Hold sampled rows to the rule of `cupy_fa2.testing.tolerance`.

    Parameters
    ----------
    out, lse : array
        NumPy or CuPy.
    q, k, v : numpy.ndarray
    causal : bool
    """
    rows = sample_rows(q, CHECKED_ROWS)
    exact, exact_lse = reference.attention_rows(q, k, v, rows, causal=causal)
    rough, _ = reference.naive_rows(q, k, v, rows, causal=causal)
    actual = np.stack([reference.host(out[b, i, h]) for b, h, i in rows.tolist()]).astype(np.float64)
    actual_lse = reference.host(lse)[tuple(rows.T)].astype(np.float64)
    allowed = tolerance(exact, rough, out.dtype)
    allowed_lse = lse_tolerance(reference.score_magnitude(q, k, v, rows, causal=causal))
    error, error_lse = np.abs(actual - exact), np.abs(actual_lse - exact_lse)
    passed = (error <= allowed).all() and (error_lse <= allowed_lse).all()  # NaN fails
    return Check(
        bool(passed),
        len(rows),
        float(error.max()),
        float(allowed.min()),
        float(error_lse.max()),
        float(allowed_lse.min()),
    )


def run_on_gpu(sizes: Sizes, dtype: str, causals: Sequence[bool], device: Device, say: Any) -> dict[str, Any]:
    """Compute, check and measure on the current CUDA device.

    Returns
    -------
    dict
        ``ceiling_tflops`` by warps per multiprocessor, and ``runs``, one per entry of `causals`.
    """
    import cupy

    host_qkv = draw(sizes, dtype)
    q, k, v = (cupy.asarray(x) for x in host_qkv)
    rates = mma_ceiling("f16" if dtype == "float16" else "bf16", q.data.device_id)
    ceiling = max(rates.values())
    say(f"mma.sync ceiling {ceiling:.0f} TFLOP/s ({', '.join(f'{w} warps {r:.0f}' for w, r in rates.items())} per SM)")
    say(f"{sizes}, {dtype}")
    runs = []
    for causal in causals:
        run = measure_on_gpu(sizes, host_qkv, (q, k, v), causal, device)
        run["share_of_ceiling"] = run["tflops"] / ceiling
        runs.append(run)
        say(describe(run))
    return {"ceiling_tflops": rates, "runs": runs}


def measure_on_gpu(sizes: Sizes, host_qkv: Any, qkv: Any, causal: bool, device: Device) -> dict[str, Any]:
    """Check and measure one kind of call; `host_qkv` are the NumPy arrays that `qkv` came from."""
    import cupy

    q, k, v = qkv
    problem = Problem.from_arrays(q, k, v, causal=causal, addresses=(q.data.ptr, k.data.ptr, v.data.ptr, 0))
    plan = plan_forward(problem.structure, device)
    spec = plan.kernels[0].spec
    begin = time.perf_counter()
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    cupy.cuda.get_current_stream().synchronize()
    first = time.perf_counter() - begin
    check = check_result(out, lse, *host_qkv, causal=causal)

    def call() -> Any:
        return flash_attention(q, k, v, causal=causal)

    ms = median_ms(call, repeat=REPEAT)
    binary = build(spec, target(spec, device))
    flop = attention_flop(sizes.batch, sizes.heads, sizes.seqlen, sizes.head_dim, causal)
    return {
        "causal": causal,
        "check": check.to_dict(),
        "kernel": spec.name,
        "plan": plan.explain(),
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "first_call_ms": first * 1e3,
        "ms": ms,
        "tflops": flop / ms / 1e9,
        "peak_bytes": peak_bytes(call),
        "by_hand": by_hand(q, k, v, causal),
    }


def describe(run: dict[str, Any]) -> str:
    """One measured call as text."""
    rate = f"{run['tflops']:.0f} TFLOP/s, {run['share_of_ceiling']:.0%} of the ceiling"
    hand = run["by_hand"]
    compared = hand.get("message") or f"{measured(hand)}, {hand['ms'] / run['ms']:.1f} times as long"
    return f"""
{"causal" if run["causal"] else "not causal"}
  check            {Check(**run["check"])}
  flash_attention  {measured(run)}, {rate}
  CuPy by hand     {compared}{hand["note"]}
  first call       {run["first_call_ms"]:8.0f} ms, compiling included unless it was cached
  kernel           {run["plan"]}
                   {run["registers"]} registers per thread, {run["spill_bytes"]} bytes of spills"""


def measured(run: dict[str, Any]) -> str:
    """Time and memory as text."""
    return f"{run['ms']:8.3f} ms, {run['peak_bytes'] / 1e9:6.2f} GB"


def by_hand(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Any]:
    """Time and memory of `attention_by_hand`, or the ``message`` why there is none."""
    import cupy

    note = ""
    if q.dtype != np.float16:
        q, k, v = (x.astype(np.float16) for x in (q, k, v))
        note = " (in float16: CuPy's matmul takes no bfloat16)"
    try:
        peak = peak_bytes(lambda: attention_by_hand(q, k, v, causal))
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            ms = median_ms(lambda: attention_by_hand(q, k, v, causal), repeat=5, warm_up=1)
        pool.free_all_blocks()
    except MemoryError:
        free = cupy.cuda.runtime.memGetInfo()[0]
        return {"message": f"not run: needs more than the {free / 1e9:.1f} GB that are free", "note": note}
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {
            "message": f"not run: cupy.matmul needs cuBLAS ({reason}); install it with: "
            "pip install 'cuda-toolkit[cublas]==12.*' (==13.* beside cupy-cuda13x)",
            "note": note,
        }
    return {"ms": ms, "peak_bytes": peak, "note": note}
