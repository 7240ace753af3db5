"""What the bench compares with. Each peer is optional: where it cannot be had, its column holds the reason."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from cases import Case

__all__ = [
    "PEERS",
    "SDPA",
    "TITLES",
    "Unavailable",
    "by_hand",
    "largest_difference",
    "prepare",
    "relative_difference",
    "sdpa",
    "tensor",
    "torch_module",
    "versions",
]

#: Column of a result -> its title.
TITLES = {
    "flash2": "torch flash (FA2)",
    "cudnn": "torch cuDNN",
    "flash3": "FlashAttention-3",
    "triton": "Triton",
    "cupy": "CuPy by hand",
}
#: Peers that are timed in turn with ours; ``cupy`` takes too long and is timed by itself.
PEERS = ("flash2", "cudnn", "flash3", "triton")

#: Peers that are back ends of torch's `scaled_dot_product_attention` -> torch's names of them.
SDPA = {"flash2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}

_BYTES_BY_HAND = 11  # per score: what the pool grows to, 22 GB for 2 x 16 x 8192 x 8192


class Unavailable(Exception):
    """A peer that cannot run here, or not this row; the message says why."""


@functools.cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever it likes
        raise Unavailable(f"no {name} ({' '.join(str(error).split())[:80]})") from error


def torch_module() -> Any:
    """The module `torch`, with a CUDA device.

    Raises
    ------
    Unavailable
    """
    torch = _module("torch")
    if not torch.cuda.is_available():
        raise Unavailable("this torch has no CUDA device")
    return torch


def versions() -> dict[str, str | None]:
    """Versions of the peers, None where one is missing."""
    found: dict[str, str | None] = {}
    for column, name in (("torch", "torch"), ("triton", "triton"), ("flash3", "fa3_fwd_interface")):
        try:
            found[column] = str(getattr(_module(name), "__version__", "unknown"))
        except Unavailable:
            found[column] = None
    try:
        found["cudnn"] = str(torch_module().backends.cudnn.version())
    except Unavailable:
        found["cudnn"] = None
    return found


def prepare(peer: str, case: Case, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A call of `peer` on CuPy arrays (batch, seqlen, heads, head_dim) that returns a torch tensor of that shape.

    Raises
    ------
    Unavailable
    """
    torch = torch_module()
    tensors = [torch.from_dlpack(x) for x in (q, k, v)]
    if peer in SDPA:
        call = sdpa(peer, *tensors, is_causal=case.causal)

    elif peer == "flash3":
        if case.dtype != "bf16":
            raise Unavailable("the wheel is bf16 only")
        flash3 = _module("fa3_fwd_interface")

        def call() -> Any:
            out = flash3.flash_attn_func(*tensors, causal=case.causal)
            return out[0] if isinstance(out, tuple) else out

    elif peer == "triton":
        _module("triton")
        triton_forward = _module("peer_triton").forward

        def call() -> Any:
            return triton_forward(*tensors, case.causal)

    else:
        raise ValueError(f"no peer {peer}")
    return call


def sdpa(peer: str, q: Any, k: Any, v: Any, **options: Any) -> Callable[[], Any]:
    """A call of one back end of torch's `scaled_dot_product_attention`, with its `options`, on torch tensors.

    Tensors and result are (batch, seqlen, heads, head_dim).
    """
    torch, attention = _module("torch"), _module("torch.nn.attention")
    backend = getattr(attention.SDPBackend, SDPA[peer])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Any:
        with attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def largest_difference(theirs: Any, ours: Any) -> float:
    """Largest difference of a torch tensor and a CuPy array; NaN if either has one."""
    return float((theirs.float() - torch_module().from_dlpack(ours).float()).abs().max())


def relative_difference(theirs: Any, ours: Any) -> float:
    """Norm of the difference of a torch tensor and a CuPy array over the norm of the second; NaN if either has one."""
    expected = torch_module().from_dlpack(ours).float()
    return float((theirs.float() - expected).norm() / expected.norm())


def tensor(x: Any) -> Any:
    """An array as a torch tensor, without a copy."""
    torch = _module("torch")
    if x.dtype == bool:  # travels as bytes: not every DLPack has a bool
        return torch.from_dlpack(x.view("u1")).view(torch.bool)
    return torch.from_dlpack(x)


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
