"""Attention on a GPU where there is one, in the simulator elsewhere.

python examples/basic.py
"""

import numpy as np

import cupy_fa2

try:
    import cupy

    on_gpu = cupy.cuda.is_available()
except ImportError:
    on_gpu = False

batch, seqlen, heads, heads_k, head_dim = (2, 4096, 16, 4, 128) if on_gpu else (1, 100, 2, 1, 64)
rng = np.random.default_rng(0)
q = rng.standard_normal((batch, seqlen, heads, head_dim)).astype(np.float16)
k = rng.standard_normal((batch, seqlen, heads_k, head_dim)).astype(np.float16)
v = rng.standard_normal((batch, seqlen, heads_k, head_dim)).astype(np.float16)

if on_gpu:
    out, lse = cupy_fa2.flash_attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
else:
    with cupy_fa2.simulator("A100") as sim:
        out, lse = cupy_fa2.flash_attention(q, k, v, causal=True, return_lse=True)
    print(sim.report)

print(f"{type(out).__module__} array {out.shape} {out.dtype}, lse {lse.shape}")

# The first row of a causal mask sees one key, and so returns that key's value.
first = out[:, 0].get() if on_gpu else out[:, 0]
assert np.array_equal(first, np.repeat(v[:, 0], heads // heads_k, axis=1))
