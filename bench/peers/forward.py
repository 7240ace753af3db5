"""Calls of the peers for the plain forward: no mask, or a causal one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.case import Case

from peers import Unavailable, module, tensor, torch_module
from peers.torch_sdpa import BACK_ENDS, sdpa

__all__ = ["by_hand", "prepare"]

_BYTES_BY_HAND = 11  # per score: what the pool grows to, 22 GB for 2 x 16 x 8192 x 8192


def prepare(peer: str, case: Case, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A call of `peer` on CuPy arrays (batch, seqlen, heads, head_dim) that returns a torch tensor of that shape.

    Raises
    ------
    Unavailable
    """
    torch_module()
    tensors = [tensor(x) for x in (q, k, v)]
    if peer in BACK_ENDS:
        return sdpa(peer, *tensors, is_causal=case.causal)
    if peer == "flash3":
        if case.dtype != "bf16":
            raise Unavailable("the wheel is bf16 only")
        flash3 = module("fa3_fwd_interface")

        def call() -> Any:
            out = flash3.flash_attn_func(*tensors, causal=case.causal)
            return out[0] if isinstance(out, tuple) else out

        return call
    if peer == "triton":
        module("triton")
        forward = module("peers.triton_forward").forward
        return lambda: forward(*tensors, case.causal)
    raise ValueError(f"no peer {peer}")


def by_hand(case: Case, q: Any, k: Any, v: Any) -> float:
    """Milliseconds of matmul, softmax, matmul written in CuPy; the second of two calls.

    Raises
    ------
    Unavailable
    """
    import cupy

    from cupy_fa2.cli.measure import attention_by_hand

    if case.dtype != "f16":
        raise Unavailable("float16 only: CuPy's matmul does not take bfloat16")
    needed = _BYTES_BY_HAND * case.batch * case.num_heads * case.seqlen**2
    free = cupy.cuda.runtime.memGetInfo()[0]
    if needed > 0.9 * free:
        raise Unavailable(f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    pool = cupy.cuda.MemoryPool()
    try:
        with cupy.cuda.using_allocator(pool.malloc):
            attention_by_hand(q, k, v, case.causal)
            begin.record()
            attention_by_hand(q, k, v, case.causal)
            end.record()
            end.synchronize()
    except ImportError as error:
        raise Unavailable(f"no cuBLAS ({' '.join(str(error).split())[:80]})") from error
    finally:
        pool.free_all_blocks()
    return float(cupy.cuda.get_elapsed_time(begin, end))
