"""What each option does, on one query or a few: runs on a GPU where there is one, in the simulator elsewhere.

python examples/options.py
"""

from typing import Any

import numpy as np

import cupy_fa2

try:
    import cupy

    xp: Any = cupy if cupy.cuda.is_available() else np
except ImportError:
    xp = np

KEYS = 6


def weights(seqlen_q: int = 1, last: float = 0, **options: Any) -> np.ndarray:
    """What each query makes of each key: the values are one-hot, so that out shows it.

    The products q . k are 0 but for the last key's, so that weights are equal unless an option says otherwise.
    """
    q, k, v = (np.zeros((1, n, 1, 16), np.float16) for n in (seqlen_q, KEYS, KEYS))
    q[..., 0], k[:, -1, :, 0] = 1, last
    v[0, :, 0, :KEYS] = np.eye(KEYS)
    options = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = cupy_fa2.flash_attention(*map(xp.asarray, (q, k, v)), **options)
    out = out if xp is np else out.get()
    return out[0, :, 0, :KEYS].astype(np.float32)


def show(title: str, rows: np.ndarray) -> None:
    print(title)
    for row in rows:
        print("   ", " ".join(f"{weight:5.2f}" for weight in row))


def main() -> None:
    show("causal=True: three queries, the last one at the last key", weights(3, causal=True))
    show('causal=True, align="top-left": the first one at the first key', weights(3, causal=True, align="top-left"))
    show("window=(2, 0): two keys to the left and the query's own", weights(3, window=(2, 0)))
    show("softmax_scale=1.0 and a last key whose product is 4", weights(last=4, softmax_scale=1.0))
    show("softcap=1.0 too: it scores 1 tanh(4 / 1), less than 1", weights(last=4, softmax_scale=1.0, softcap=1.0))
    show("alibi_slopes: -0.5 |i + offset - j| on the score", weights(alibi_slopes=np.array([0.5], np.float32)))

    bias = np.array([0, 0, np.log(2), 0, 0, -np.inf], np.float32)
    show("bias: the third key twice, the last one never; its shape broadcasts to the scores'", weights(bias=bias))
    show("mask: True where a query may look", weights(mask=np.array([True, True, False, False, False, True])))
    sink = weights(sinks=np.array([1.0], np.float32))
    show(f"sinks=[1.0]: a logit without a value, which takes {1 - sink.sum():.2f}", sink)
    show("seqlens_q=[2], seqlens_k=[4]: the rest is padding", weights(3, seqlens_q=[2], seqlens_k=[4], causal=True))

    show("dropout_p=0.5: what is kept counts double", weights(4, dropout_p=0.5, dropout_seed=3))
    kept = cupy_fa2.dropout_mask((1, 1, 4, KEYS), 0.5, 3)[0, 0]
    show("dropout_mask says what that is", kept)
    assert np.array_equal(weights(4, dropout_p=0.5, dropout_seed=3) > 0, kept)

    together = weights(3, causal=True, window=(3, None), bias=bias, sinks=np.array([0.0], np.float32))
    show("options combine: causal, window, bias, sinks", together)


if __name__ == "__main__":
    main()
