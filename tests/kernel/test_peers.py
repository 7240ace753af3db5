"""Agreement with other libraries' attention, where they are installed: torch's and JAX's.

In the simulator with their CPU back ends; on a GPU with their CUDA arrays, which are passed to the call as they are.
Both align `is_causal` top-left.
"""

import os

import numpy as np
import pytest
from conftest import example

import cupy_fa2
from cupy_fa2.testing import DTYPES, host

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries' imports

CASES = [
    {"head_dim": 64, "seqlen_q": 70, "seqlen_k": 70, "causal": True},
    {"head_dim": 128, "seqlen_q": 33, "seqlen_k": 90, "causal": False},
    {"head_dim": 40, "seqlen_q": 50, "seqlen_k": 80, "causal": True, "align": "top-left"},
    {"head_dim": 96, "seqlen_q": 20, "seqlen_k": 65, "num_heads": 4, "num_heads_k": 2, "causal": False},
]
# Both round out to the dtype, and P before its product; values of N(0, 1) average to below 4.
ATOL = {"float16": 4e-3, "bfloat16": 3e-2}


def import_or_skip(name):
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"d{case['head_dim']}")
def test_torch(fa, case, dtype):
    torch = import_or_skip("torch")
    if fa.on_gpu and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA device")
    sample = example(dtype, batch=2, **case)
    arrays = [host(x) for x in sample.arrays(np)]
    # torch's tensors in the dtype itself, through float32, which NumPy and torch share.
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in arrays]
    if fa.on_gpu:
        tensors = [x.cuda() for x in tensors]
    q, k, v = (x.double().transpose(1, 2) for x in tensors)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(sample.options.get("causal")))
    out = cupy_fa2.flash_attention(*(tensors if fa.on_gpu else arrays), **sample.options)
    np.testing.assert_allclose(
        host(out).astype(np.float64), theirs.transpose(1, 2).cpu().numpy(), atol=ATOL[dtype], rtol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"d{case['head_dim']}")
def test_jax(fa, case, dtype):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave room for the other tests
    jax = import_or_skip("jax")
    platforms = {device.platform for device in jax.devices()}
    if fa.on_gpu and not platforms & {"gpu", "cuda"}:
        pytest.skip("this JAX has no CUDA device")
    sample = example(dtype, batch=2, **case)
    arrays = [np.ascontiguousarray(host(x)) for x in sample.arrays(np)]
    device = jax.devices("gpu" if fa.on_gpu else "cpu")[0]
    theirs_in = [jax.device_put(x, device) for x in arrays]
    with jax.default_matmul_precision("highest"):
        theirs = jax.nn.dot_product_attention(
            *(x.astype("float32") for x in theirs_in), is_causal=bool(sample.options.get("causal"))
        )
    theirs_in[0].block_until_ready()
    out = cupy_fa2.flash_attention(*(theirs_in if fa.on_gpu else arrays), **sample.options)
    np.testing.assert_allclose(host(out).astype(np.float64), np.asarray(theirs, np.float64), atol=ATOL[dtype], rtol=0)
