"""Attention with every option by scalars, and calls to try it on: shares nothing with the definition."""

import itertools
import math

import ml_dtypes
import numpy as np

from cupy_fa2.dropout import dropout_mask, threshold

B, M, N, HEADS, HEADS_K, D, DV = 2, 6, 9, 4, 2, 3, 5


def draw(batch=B, seqlen_q=M, seqlen_k=N, heads=HEADS, heads_k=HEADS_K, head_dim=D, head_dim_v=DV, seed=0, mean=0.3):
    rng = np.random.default_rng(seed)
    shapes = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim), (batch, seqlen_k, heads_k)
    return [rng.normal(mean, 1.5, s) for s in (shapes[0], shapes[1], (*shapes[2], head_dim_v))]


def at(x, b, h, i, j):
    """An entry of something broadcast, by counting axes from the right."""
    index = (b, h, i, j)[4 - x.ndim :]
    return x[tuple(0 if n == 1 else place for n, place in zip(x.shape, index, strict=True))]


def direct(q, k, v, **options):
    """Everything by scalars: a key's weight is 1 / (exp(sink - s_j) + sum_l exp(s_l - s_j))."""
    get = options.get
    batch, seqlen_q, num_heads, head_dim = q.shape
    num_heads_k = k.shape[2]
    out = np.zeros((batch, seqlen_q, num_heads, v.shape[3]))
    lse = np.full((batch, num_heads, seqlen_q), -np.inf)
    left, right = get("window") or (None, None)
    for b, h in itertools.product(range(batch), range(num_heads)):
        len_q = seqlen_q if get("seqlens_q") is None else int(get("seqlens_q")[b])
        len_k = k.shape[1] if get("seqlens_k") is None else int(get("seqlens_k")[b])
        align = get("align", "bottom-right")
        if isinstance(align, str):
            offset = len_k - len_q if align == "bottom-right" else 0
        else:
            offset = int(align[b]) if np.ndim(align) else align
        hk = h * num_heads_k // num_heads
        for i in range(len_q):
            scores = {}
            for j in range(len_k):
                if get("causal") and j > i + offset:
                    continue
                if (left is not None and j < i + offset - left) or (right is not None and j > i + offset + right):
                    continue
                if get("mask") is not None and not at(get("mask"), b, h, i, j):
                    continue
                dot = math.fsum(q[b, i, h, c] * k[b, j, hk, c] for c in range(head_dim))
                s = dot * (get("softmax_scale") or head_dim**-0.5)
                if get("softcap"):
                    s = get("softcap") * math.tanh(s / get("softcap"))
                if get("alibi_slopes") is not None:
                    slopes = get("alibi_slopes")
                    s -= (slopes[b][h] if np.ndim(slopes) == 2 else slopes[h]) * abs(i + offset - j)
                if get("bias") is not None:
                    s += float(at(get("bias"), b, h, i, j))
                if s > -math.inf:
                    scores[j] = s
            sink = -math.inf if get("sinks") is None else get("sinks")[h]
            lse[b, h, i] = sink
            for j, s in scores.items():
                weight = 1 / (math.exp(sink - s) + math.fsum(math.exp(t - s) for t in scores.values()))
                lse[b, h, i] = s - math.log(weight)
                if get("dropout_p"):
                    kept = threshold(get("dropout_p"))
                    mask = dropout_mask((b + 1, h + 1, i + 1, j + 1), get("dropout_p"), get("dropout_seed"))
                    weight *= 65536 / kept if mask[b, h, i, j] else 0
                out[b, i, h] += [weight * x for x in v[b, j, hk]]
    return out, lse


def assert_same(actual, expected, tolerance=1e-12):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


rng = np.random.default_rng(1)
SPARSE = rng.random((B, HEADS, M, N)) < 0.6
SPARSE[0, :, 2], SPARSE[1, 1, 4:] = False, False  # rows that see nothing
HOLES = np.where(SPARSE, rng.normal(size=SPARSE.shape), -np.inf)
SOME = rng.normal(size=(B, HEADS))


OPTIONS = {
    "window": {"window": (2, 1)},
    "window, left only": {"window": (0, None)},
    "window, right only": {"window": (None, 3), "align": "top-left"},
    "window and causal": {"window": (3, 2), "causal": True},
    "window away from everything": {"window": (1, 1), "align": 30},
    "window around each batch's diagonal": {"window": (2, 0), "align": np.array([-3, 4])},
    "softcap": {"softcap": 1.3},
    "softcap and a negative scale": {"softcap": 2.0, "softmax_scale": -0.9},
    "alibi": {"alibi_slopes": SOME[0], "align": -2},
    "alibi of each batch": {"alibi_slopes": SOME},
    "bias": {"bias": rng.normal(size=(B, HEADS, M, N))},
    "bias with holes": {"bias": HOLES},
    "bias of a key": {"bias": rng.normal(size=N)},
    "bias of a query": {"bias": rng.normal(size=(M, 1))},
    "bias of a head": {"bias": rng.normal(size=(HEADS, 1, 1))},
    "bias of a batch": {"bias": rng.normal(size=(B, 1, 1, N)).astype(ml_dtypes.bfloat16)},
    "bias, one number": {"bias": np.array(0.7)},
    "mask": {"mask": SPARSE},
    "mask of a key": {"mask": SPARSE[:, :1, :1]},
    "mask of a query": {"mask": SPARSE[0, 0, :, :1]},
    "mask, nothing": {"mask": np.array([False])},
    "sinks": {"sinks": SOME[0] * 3},
    "sinks and holes": {"sinks": SOME[0], "mask": SPARSE, "bias": HOLES},
    "lengths": {"seqlens_q": [4, 6], "seqlens_k": np.array([9, 5], np.int32)},
    "no lengths": {"seqlens_q": [0, 6], "seqlens_k": [3, 0]},
    "lengths and causal": {"seqlens_q": [3, 6], "seqlens_k": [8, 5], "causal": True},
    "lengths and causal, top-left": {"seqlens_q": [3, 6], "seqlens_k": [8, 5], "causal": True, "align": "top-left"},
    "lengths, bias and mask": {"seqlens_k": [7, 2], "bias": HOLES, "mask": SPARSE, "sinks": SOME[0]},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 12345678901234567890},
    "dropout and sinks": {"dropout_p": 0.4, "dropout_seed": np.array(5, np.uint64), "sinks": SOME[1]},
    "all": {
        "causal": True,
        "window": (4, 4),
        "align": np.array([2, 5]),
        "softmax_scale": -0.8,
        "softcap": 2.5,
        "alibi_slopes": SOME / 3,
        "bias": HOLES.astype(np.float16),
        "mask": SPARSE[:1, :1],
        "sinks": SOME[1],
        "seqlens_q": [5, 6],
        "seqlens_k": [9, 8],
        "dropout_p": 0.3,
        "dropout_seed": 3,
    },
}
