"""Small calls with ragged sizes, of every option and view: what bench/sanitize.py reruns under compute-sanitizer.

Arrays are as small as what they hold, so that a tool sees what is read beyond their ends; `CUPY_FA2_NO_POOL=1` makes
each an allocation of its own.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import example

from cupy_fa2.testing import (
    DTYPES,
    EVERYTHING,
    OPTION_EXAMPLES,
    OPTION_VARIANTS,
    assert_attention_close,
    random_qkv,
    with_options,
)

pytestmark = [pytest.mark.sanitize, pytest.mark.full]

HEAD_DIMS = (40, 64, 80, 7, 128, 256)
OPTIONS = {**OPTION_EXAMPLES, "everything": EVERYTHING}


def called(fa, arrays, **options):
    """A call of these arrays, against the definition."""
    result = fa.call(*arrays, **options)
    assert_attention_close(*result, *arrays, **{name: x for name, x in options.items() if name != "out_dtype"})


def view(x, how, xp):
    """`x` on the device, lying in memory in some way and ending where its allocation does, or nearly."""
    if how == "reversed":  # rows last to first
        return xp.asarray(np.ascontiguousarray(x[:, ::-1]))[:, ::-1]
    if how == "fused":  # between two others of its size
        return xp.asarray(np.concatenate([x, x, x], axis=2))[:, :, x.shape[2] : 2 * x.shape[2]]
    if how == "odd":  # from the second element on
        return xp.asarray(np.concatenate([x.reshape(-1)[:1], x.reshape(-1)]))[1:].reshape(x.shape)
    return xp.asarray(x)


@pytest.mark.racecheck
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_ragged_sizes(fa, head_dim, causal):
    dtype = list(DTYPES)[(HEAD_DIMS.index(head_dim) + causal) % 2]
    seqlens = (130, 77) if causal else (65, 130)
    called(fa, random_qkv(1, *seqlens, 2, head_dim, dtype=dtype, xp=fa.xp), causal=causal)


#: dtype, seqlens, head dims, how arrays lie, heads, options.
VIEWS = {
    "fused": ("float16", (33, 70), (64, 128), "fused", (2, 2), {"causal": True}),
    "reversed": ("bfloat16", (100, 129), (192, 128), "reversed", (2, 2), {"causal": True}),
    "heads first": ("float16", (70, 33), (128, 40), "packed", (2, 2), {"layout": "bhsd"}),
    "odd start": ("bfloat16", (64, 64), (64, 64), "odd", (2, 2), {}),
    "one query": ("float16", (1, 65), (64, 64), "packed", (4, 1), {"causal": True}),
    "float32 out": ("bfloat16", (40, 50), (64, 64), "packed", (2, 2),
                    {"causal": True, "out_dtype": "float32", "align": "top-left"}),
    "odd head dims": ("float16", (17, 19), (33, 65), "packed", (2, 2), {"causal": True, "softmax_scale": -0.2}),
}  # fmt: skip


@pytest.mark.racecheck
@pytest.mark.parametrize("name", VIEWS)
def test_views(fa, name):
    dtype, seqlens, (head_dim, head_dim_v), how, (heads, heads_k), options = VIEWS[name]
    layout = options.get("layout", "bshd")
    drawn = random_qkv(
        *(1, *seqlens, heads, head_dim),
        **{"num_heads_k": heads_k, "head_dim_v": head_dim_v, "dtype": dtype, "layout": layout},
    )
    called(fa, [view(x, how, fa.xp) for x in drawn], **options)


@pytest.mark.parametrize(("dtype", "causal"), [*itertools.product(DTYPES, [False, True])])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
def test_several_tiles_of_a_fused_array(fa, head_dim, dtype, causal):
    drawn = random_qkv(2, 200, 333, 4, head_dim, num_heads_k=2, dtype=dtype)
    called(fa, [view(x, "fused", fa.xp) for x in drawn], causal=causal)


def with_fields(fa, fields, head_dim, turn):
    """A call with options; biases and masks that lie contiguously end with their allocation."""
    dtype = list(DTYPES)[turn % 2]
    e = with_options(example(dtype, 2, 70, 99, 2, head_dim, num_heads_k=1, seed=turn), fields)
    options = {**e.options, **e.option_arrays(fa.xp)}
    for name in ("bias", "mask"):
        if name in options and getattr(e, f"{name}_storage") == "contiguous":
            options[name] = options[name].copy()
    out, lse = fa.call(*(x.copy() for x in e.arrays(fa.xp)), **options)
    assert_attention_close(out, lse, *e.arrays(fa.xp), **e.options)


def turns(names):
    """Options, each at three head dims, of which one by turns is for racecheck."""
    for (turn, name), head_dim in itertools.product(enumerate(names), (64, 128, 256)):
        mine = (64, 128, 256)[turn % 3] == head_dim
        yield pytest.param(name, head_dim, turn, marks=[pytest.mark.racecheck] if mine else [])


@pytest.mark.parametrize(("name", "head_dim", "turn"), [*turns(OPTIONS)])
def test_options(fa, name, head_dim, turn):
    with_fields(fa, OPTIONS[name], head_dim, turn)


@pytest.mark.racecheck
@pytest.mark.parametrize("name", OPTION_VARIANTS)
def test_variants(fa, name):
    turn = list(OPTION_VARIANTS).index(name)
    with_fields(fa, OPTION_VARIANTS[name], (64, 128, 256)[turn % 3], turn)
