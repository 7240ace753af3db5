"""Each option of the forward against the definition, alone and together, in both simulated cards' kernels and on GPUs.

Most kernels work on 128 query rows; on the A100 they take 64 keys at a time (head_dim up to 80) or 48 (128), on the
H200 128, 48, or at head_dim 256 twice 32. The sizes here make windows and lengths begin and end inside such tiles.
"""

import itertools

import numpy as np
import pytest
from conftest import example, some
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import by_turns, sampled, sampled_rows

from cupy_fa2.call import option_arrays
from cupy_fa2.testing import (
    DTYPES,
    EVERYTHING,
    OPTION_EXAMPLES,
    OPTION_VARIANTS,
    Storage,
    assert_poison_intact,
    attention_examples,
    host,
    poisoned,
    with_options,
)

SIMULATED = attention_examples(max_seqlen=200, max_heads=4, max_work=1 << 19, options=True)
ON_GPU = attention_examples(max_seqlen=1100, max_batch=5, max_heads=40, max_work=1 << 30, options=True)

#: head_dim, head_dim_v.
DIMS = [(64, 64), (128, 40), (40, 40), (256, 256), (128, 128), (80, 80), (64, 128)]

OPTIONS = OPTION_EXAMPLES | OPTION_VARIANTS


@settings(max_examples=max(2, settings().max_examples // 5))
@given(data=st.data())
def test_any_options_agree_with_the_definition(cards, data):
    out_dtype = data.draw(st.sampled_from([None, None, np.float32]))
    cards.hold(data.draw(ON_GPU if cards.on_gpu else SIMULATED), out_dtype=out_dtype)


@pytest.mark.parametrize(("cards", "name"), by_turns(OPTIONS, *OPTION_VARIANTS), indirect=["cards"])
def test_each_option(cards, name):
    """Two tiles of rows and several of keys; head dims take turns in the simulator."""
    for head_dim, head_dim_v in some(cards, list(OPTIONS).index(name), DIMS):
        for dtype in some(cards, head_dim // 8, list(DTYPES)):
            batch = 2 if name.startswith("padded") else cards.size(1, 2)
            e = example(dtype, batch, 140, 150, 1, head_dim, head_dim_v=head_dim_v, mean=0.3)
            cards.hold(with_options(e, OPTIONS[name]))


@pytest.mark.parametrize(("cards", "turn"), by_turns(range(3), 1), indirect=["cards"])
def test_everything_at_once(cards, turn):
    for head_dim, head_dim_v in DIMS[turn::3] if cards.on_gpu else some(cards, turn, DIMS):
        for dtype, out_dtype in some(cards, turn, [*itertools.product(DTYPES, (None, np.float32))]):
            e = example(dtype, 2, 140, 150, 1, head_dim, head_dim_v=head_dim_v)
            cards.hold(with_options(e, EVERYTHING), out_dtype=out_dtype)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_everything_of_nothing(fa, empty):
    """Arrays without an element are still arrays; without keys there is the sink."""
    fields = {**EVERYTHING, "align": 3, "seqlens_q": None, "seqlens_k": None}
    out, lse = fa.hold(example(**{"seqlen_q": 3, "head_dim": 16, **fields, empty: 0}))
    if empty == "seqlen_k":
        assert not out.any()
        assert np.isfinite(host(lse)).all()


# --- windows ------------------------------------------------------------------------------------------------

#: Of 150 queries over 200 keys.
WINDOWS = {
    "within a tile": ((40, 3), {}),
    "over an edge": ((70, 20), {}),
    "one key": ((0, 0), {}),
    "narrow": ((5, 5), {}),
    "one tile": ((63, 0), {}),
    "one tile and a key": ((64, 0), {}),
    "two tiles": ((64, 64), {}),
    "left only": ((33, None), {}),
    "right only": ((None, 17), {}),
    "neither": ((None, None), {}),
    "as wide as the keys": ((199, 149), {}),
    "wider": ((1000, 1000), {}),
    "the widest": ((2**40, 10**9), {}),
    "and causal": ((10, 50), {"causal": True}),
    "left only and causal": ((100, None), {"causal": True}),
    "top-left": ((30, 10), {"align": "top-left"}),
    "no key for the last rows": ((10, 5), {"align": 100}),
    "no key for the first rows": ((5, 10), {"align": -100}),
    "no key before": ((10, 10), {"align": -300}),
    "no key beyond": ((10, 10), {"align": 300}),
    "one key for the last row": ((149, 0), {"align": -149}),
    "one key for the first row": ((0, 7), {"align": 199}),
    "far before": ((10, None), {"align": -(5 * 10**8)}),
    "far beyond": ((None, 10), {"align": 2**31}),
    "an align of each batch element": ((40, 3), {"align": (-70, 130), "batch": 2}),
}
MORE_WINDOWS = (
    "narrow", "one tile and a key", "two tiles", "neither", "as wide as the keys", "wider", "left only and causal",
    "no key before", "no key beyond", "one key for the last row", "one key for the first row", "far before",
)  # fmt: skip


@pytest.mark.parametrize(("cards", "name"), by_turns(WINDOWS, *MORE_WINDOWS), indirect=["cards"])
def test_windows(cards, name):
    window, fields = WINDOWS[name]
    head_dim = 16 if cards.card == "A100" else 64
    cards.hold(example(seqlen_q=150, seqlen_k=200, num_heads=1, head_dim=head_dim, window=window, **fields))
    if cards.on_gpu:
        for head_dim in (128, 256):
            sizes = {"seqlen_q": 1000, "seqlen_k": 900, "head_dim": head_dim}
            cards.hold(example("bfloat16", **{**sizes, **fields, "batch": 2}, window=window))


@pytest.mark.parametrize("window", sampled([(0, 0), (3, 1), (100, 0), (0, 100)], (0, 0), (3, 1)))
@pytest.mark.parametrize(
    "seqlens", sampled([(1, 1), (1, 65), (65, 1), (2, 300), (129, 128), (17, 16)], (1, 65), (129, 128)), ids=str
)
def test_windows_over_few_queries_or_keys(fa, seqlens, window):
    for align in fa.size([("bottom-right", "top-left")[sum(window) % 2]], ["bottom-right", "top-left"]):
        fa.hold(example("float16", 2, *seqlens, 2, 16, head_dim_v=32, window=window, align=align))


@pytest.mark.parametrize(
    ("window", "align"),
    [((10, None), -(2**30)), ((2**31 - 1, None), 2**30), ((None, 2**31 - 1), -(2**30))],
    ids=["unbounded", "left", "right"],
)
def test_windows_that_reach_back_from_far_away(fa, window, align):
    fa.hold(example(num_heads=1, head_dim=16, seqlen_q=40, seqlen_k=40, window=window, align=align))


# --- sinks --------------------------------------------------------------------------------------------------

SINKS = np.array([-np.inf, -1e30, -80, 0, 3, 80, 1e4, 1e30], np.float32)


def test_sinks_of_any_size(cards):
    for dtype, out_dtype in some(cards, 1, [*itertools.product(DTYPES, (None, np.float32))]):
        for k in cards.size([70], [70, 1000]):
            cards.hold(example(dtype, seqlen_k=k, num_heads=8, num_heads_k=2), sinks=SINKS, out_dtype=out_dtype)


@pytest.mark.parametrize(
    "blind", [{"align": -1000, "causal": True}, {"seqlen_k": 0}, {"seqlens_k": (0,)}, {"mask": np.zeros((), bool)}],
    ids=["causal", "no keys", "length 0", "mask"],
)  # fmt: skip
def test_sinks_of_rows_that_see_no_key(fa, blind):
    """`lse` is the sink; nothing to give, so out is 0."""
    fields = {name: x for name, x in blind.items() if name != "mask"}
    out, lse = fa.hold(example(num_heads=8, head_dim=16, **fields), sinks=SINKS, **{"mask": blind.get("mask")})
    assert not host(out).any()
    np.testing.assert_allclose(host(lse), np.broadcast_to(SINKS[:, None], lse.shape), rtol=1e-6)


def test_padding_has_no_sink(fa):
    out, lse = fa.hold(example(batch=2, seqlens_q=(40, 3), seqlens_k=(0, 9), sinks=True, num_heads=2, head_dim=16))
    assert np.isfinite(host(lse)[0]).all()
    assert (host(lse)[1, :, 3:] == -np.inf).all()
    assert not host(out)[1, 3:].any()


@pytest.mark.xfail(strict=True, reason="in base 2 they are the largest float32")
@pytest.mark.parametrize("sink", [3e38, -3e38])
def test_sinks_at_the_end_of_float32(fa, sink):
    """Finite: the first leaves nothing to the keys, the second all; a row that sees none has it for `lse`."""
    fa.hold(example(num_heads=1, head_dim=16, causal=True, align=-20), sinks=np.array([sink], np.float32))


@pytest.mark.parametrize("step", [2, -1, 0])
def test_sinks_and_slopes_of_any_stride(fa, step):
    def strided(shape):
        values = fa.xp.asarray(np.random.default_rng(1).exponential(0.2, (4, 12)).astype(np.float32))
        if step == 0:
            return fa.xp.broadcast_to(values[0, 0], shape)
        return values[: 2 * abs(step), : 3 * abs(step)][::step, ::step]

    e = example(batch=2, num_heads=3, head_dim=16)
    fa.hold(e, alibi_slopes=strided((2, 3)), sinks=strided((2, 3))[1])
    if step:
        fa.hold(e, alibi_slopes=strided((2, 3))[1], sinks=strided((2, 3))[0])


# --- softcap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", sampled([1e-3, 0.5, 30.0, 1e6, np.float32(20), 7], 1e-3, 1e6, np.float32(20)))
def test_softcaps(fa, softcap):
    for scale in (None, -0.5, 0.0, 4.0):
        fa.hold(example(softcap=softcap, softmax_scale=scale, num_heads=1, head_dim=16, mean=0.5))


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_softcaps_that_flatten_everything_or_nothing(fa, softcap):
    e = example(num_heads=1, head_dim=16)
    _, lse = fa.hold(e, softcap=softcap)
    if softcap < 1:
        np.testing.assert_allclose(host(lse), np.log(70), rtol=1e-6)
    else:
        np.testing.assert_allclose(host(lse), host(fa.call(*e.arrays(fa.xp))[1]), atol=2.0**-9)


# --- ALiBi --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "align"), by_turns(["bottom-right", "top-left", 7, -60, 300, (-100, 90)]), ids=str, indirect=["cards"]
)
def test_alibi(cards, align):
    """Slopes of either sign, from any diagonal, over two tiles of rows and several of keys."""
    slopes = np.array([[0.5, -0.05], [0.0, 0.01]], np.float32)
    e = example("bfloat16", 2, 140, 150, 2, 16, align=align)
    cards.hold(e, alibi_slopes=slopes)


@pytest.mark.parametrize(
    "align", sampled(["top-left", "bottom-right", 7, -3, (20, -11)], "bottom-right", -3, (20, -11)), ids=str
)
def test_one_diagonal_for_causal_window_and_alibi(fa, align):
    """Where a steep slope, a window of one key, or a causal mask with a slope that favours what is far leave one key:
    its value, bit for bit."""
    e = example(batch=2, seqlen_q=90, seqlen_k=150, num_heads=1, head_dim=16, head_dim_v=32, align=align)
    q, k, v = e.arrays(fa.xp)
    offset = np.broadcast_to(
        {"top-left": 0, "bottom-right": 60}.get(align, align) if isinstance(align, str) else align, 2
    )
    diagonal = np.arange(90) + offset[:, None]
    steep = fa.xp.asarray(np.array([60], np.float32))
    there = (diagonal >= 0) & (diagonal < 150)
    nearest = host(v)[np.arange(2)[:, None], np.clip(diagonal, 0, 149)]
    by_slope = host(fa.call(q, k, v, alibi_slopes=steep, align=e.options["align"])[0])
    fa.same_bits(by_slope, nearest)
    by_causal = host(fa.call(q, k, v, alibi_slopes=steep, causal=True, align=e.options["align"])[0])
    fa.same_bits(by_causal, np.where((diagonal >= 0)[..., None, None], nearest, nearest.dtype.type(0)))
    by_window = host(fa.call(q, k, v, window=(0, 0), align=e.options["align"])[0])
    fa.same_bits(by_window, np.where(there[..., None, None], nearest, nearest.dtype.type(0)))


# --- padded batches -----------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (0, 1, 70, 37), (65, 131, 150, 0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 4)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    "align", sampled(["bottom-right", "top-left", -5, 40, (3, -60, 100, 0)], "bottom-right", (3, -60, 100, 0)), ids=str
)
def test_lengths(fa, align, options):
    """NaN lies beyond them; heads are grouped."""
    one = ("seqlens_k", "seqlens_q")[fa.size(isinstance(align, str), 0)]
    both = {"seqlens_q": LENGTHS_Q, "seqlens_k": LENGTHS_K}
    for lengths in fa.size([both, {one: both[one]}], [both, *({n: x} for n, x in both.items())]):
        fa.hold(example("float16", 4, 70, 150, 2, 16, num_heads_k=1, align=align, **lengths, **options))


@pytest.mark.parametrize(
    ("cards", "seqlens"), by_turns([(1, 1), (127, 63), (128, 64), (129, 65), (3, 129)]), ids=str, indirect=["cards"]
)
def test_lengths_at_edges_of_tiles(cards, seqlens):
    """One batch element has these lengths, the other all."""
    for head_dim in some(cards, 0, [64, 128, 256]):
        e = example(
            "bfloat16", 2, 140, 150, 1, head_dim, seqlens_q=(seqlens[0], 140), seqlens_k=(seqlens[1], 150), causal=True
        )
        cards.hold(e)


@pytest.mark.parametrize(
    "kind", sampled(["int32", "int64", "uint8", "int16", "list", "strided"], "int64", "list", "strided")
)
def test_kinds_of_lengths(fa, kind):
    e = example("float16", 4, 70, 150, 1, 16, seqlens_q=LENGTHS_Q, seqlens_k=LENGTHS_K)
    expected = fa.hold(e)
    for name, lengths in (("seqlens_q", LENGTHS_Q), ("seqlens_k", LENGTHS_K)):
        if kind == "list":
            given = list(lengths)
        elif kind == "strided":
            given = fa.xp.asarray(np.repeat(np.array(lengths, np.int32), 2))[::2]
        else:
            given = fa.xp.asarray(np.array(lengths, kind))
        options = {**e.options, **e.option_arrays(fa.xp), name: given}
        fa.same_bits(fa.call(*e.arrays(fa.xp), **options), expected)


def test_lengths_that_no_array_could_have(fa, monkeypatch):
    """Nobody has looked at those on a device; on the host, where they are refused, this test looks away."""
    monkeypatch.setattr(option_arrays, "_check_lengths", lambda *_: None)
    q, k, v = example("float16", 4, 70, 150, 1, 16).arrays(fa.xp)
    for kind in (np.int32, np.int64):
        wild = np.array([-5, np.iinfo(kind).max, 71, np.iinfo(kind).min], kind)
        for options in ({}, {"causal": True}):
            fa.same_bits(
                fa.call(q, k, v, seqlens_q=fa.xp.asarray(wild), seqlens_k=fa.xp.asarray(wild[::-1].copy()), **options),
                fa.call(q, k, v, seqlens_q=[0, 70, 70, 0], seqlens_k=[0, 71, 150, 0], **options),
            )


# --- where it goes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out_dtype", "layout"),
    sampled_rows(itertools.product([None, np.float32], ["bshd", "bhsd"]), (None, "bhsd"), (np.float32, "bshd")),
)
def test_out_is_written_in_place_and_nothing_beside_it(fa, layout, out_dtype):
    """With every option, rows and batch elements that do not exist among them."""
    e = with_options(example("bfloat16", 2, 140, 150, 1, 24, layout=layout), EVERYTHING)
    q, _, v = e.arrays(fa.xp)
    expected = fa.hold(e, out_dtype=out_dtype)
    both = [Storage(pad=(1, 2, 3, 8)), Storage(step=(1, 1, 1, 2), offset=3)]
    for storage in fa.size([both[layout == "bhsd"]], both):
        out = poisoned((*q.shape[:3], v.shape[3]), out_dtype or q.dtype, storage, xp=fa.xp)
        options = {**e.options, **e.option_arrays(fa.xp)}
        result = fa.call(*e.arrays(fa.xp), **options, out=out, out_dtype=out_dtype)
        assert result[0] is out
        fa.same_bits(result, expected)
        assert_poison_intact(out)


def test_small_option_arrays_may_be_lists(fa):
    """They are copied to where q is."""
    e = example(batch=2, num_heads=2, head_dim=16, seqlens_q=(40, 9), seqlens_k=(3, 70), sinks=True, alibi="bh")
    options = {**e.options, **e.option_arrays(fa.xp)}
    as_lists = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in e.options.items()}
    arrays = e.arrays(fa.xp)
    fa.same_bits(fa.call(*arrays, **as_lists), fa.call(*arrays, **options))
    fa.same_bits(fa.call(*arrays, **e.options), fa.call(*arrays, **options))


def test_inputs_are_left_alone(fa):
    e = with_options(example("bfloat16", 2, 140, 150, 1, 24), EVERYTHING)
    arrays, options = e.arrays(fa.xp), e.option_arrays(fa.xp)
    before = fa.bits(*arrays, *options.values())
    fa.call(*arrays, **{**e.options, **options})
    assert fa.bits(*arrays, *options.values()) == before
