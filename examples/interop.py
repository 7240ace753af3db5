"""Arrays of torch, JAX and Numba, without a copy. Each part runs where its library and a GPU are there.

python examples/interop.py
"""

from collections.abc import Callable

import cupy as cp
import numpy as np

import cupy_fa2

SHAPE = (1, 1000, 8, 64)  # batch, seqlen, heads, head_dim


def with_torch() -> str:
    import torch

    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    # Run on torch's stream, behind the work that torch has queued. (Before CuPy 14: cp.cuda.ExternalStream.)
    with cp.cuda.Stream.from_external(torch.cuda.current_stream()):
        out = torch.from_dlpack(cupy_fa2.flash_attention(q, k, v, causal=True))
    return f"{type(out).__name__} {tuple(out.shape)} {out.dtype} on {out.device}"


def with_jax() -> str:
    import jax

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, SHAPE, jax.numpy.bfloat16) for key in keys)
    jax.block_until_ready((q, k, v))  # outside of jit there is no stream to share
    out = cupy_fa2.flash_attention(q, k, v, causal=True)
    cp.cuda.get_current_stream().synchronize()
    result = jax.dlpack.from_dlpack(out)
    return f"{type(result).__name__} {result.shape} {result.dtype}"


def with_numba() -> str:
    from numba import cuda

    rng = np.random.default_rng(0)
    q, k, v = (cuda.to_device(rng.standard_normal(SHAPE).astype(np.float16)) for _ in range(3))
    cuda.synchronize()
    out = cuda.as_cuda_array(cupy_fa2.flash_attention(q, k, v, causal=True))  # __cuda_array_interface__ both ways
    return f"{type(out).__name__} {out.shape} {out.dtype}"


def main() -> None:
    if not cp.cuda.is_available():
        print("no GPU: nothing to share")
        return
    parts: list[Callable[[], str]] = [with_torch, with_jax, with_numba]
    for part in parts:
        try:
            print(f"{part.__name__}: {part()}")
        except ImportError as error:
            print(f"{part.__name__}: skipped ({error})")


if __name__ == "__main__":
    main()
