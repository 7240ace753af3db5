"""Warp-wide instructions against the tables of the PTX ISA, written here element by element."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from ptx_tools import run_ptx

from cupy_fa2 import ptxsim

HALF = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


# "Matrix Fragments for mma.m16n8k16 with floating point type": element i of a lane's fragment.


def a_place(lane: int, i: int) -> tuple[int, int]:
    group, member = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = member * 2 + (i & 1) + (8 if i >= 4 else 0)
    return row, column


def a_place_k8(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def b_place(lane: int, i: int) -> tuple[int, int]:
    return (lane % 4) * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), (lane % 4) * 2 + (i & 1)


def fragments(matrices: np.ndarray, place: Callable[[int, int], tuple[int, int]], per_lane: int) -> list[np.ndarray]:
    """Per element of the fragment, its value in every thread."""
    threads = 32 * len(matrices)
    return [
        np.array([matrices[t // 32][place(t % 32, i)] for t in range(threads)], matrices.dtype) for i in range(per_lane)
    ]


def registers(elements: list[np.ndarray]) -> list[np.ndarray]:
    """Pairs of 16-bit elements as 32-bit registers, the first one low."""
    words = [x.view(np.uint16).astype(np.uint32) for x in elements]
    return [low | high << 16 for low, high in zip(words[::2], words[1::2], strict=True)]


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("k", [16, 8])
def test_mma_fragments(t: str, k: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (3, *shape)).astype(HALF[t]) for shape in ((16, k), (k, 8)))
    c = rng.integers(-100, 100, (3, 16, 8)).astype(np.float32)
    a_words = registers(fragments(a, a_place if k == 16 else a_place_k8, k // 2))
    b_words = registers(fragments(b, b_place, k // 4))
    sources = [*a_words, *b_words, *fragments(c, c_place, 4)]
    out = [np.zeros(96, np.float32) for _ in range(4)]
    names = iter(f"a{i}" for i in range(len(sources)))
    parts = ["{" + ", ".join(next(names) for _ in range(n)) + "}" for n in (len(a_words), len(b_words), 4)]
    report = run_ptx(
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{t}.{t}.f32 {{r0, r1, r2, r3}}, {', '.join(parts)};", sources, out
    )
    # Small integers: every sum is exact, in any order.
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    for value, wanted in zip(out, fragments(expected, c_place, 4), strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert report.mma == 3


def test_mma_with_half_accumulators() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(-4, 4, (2, *shape)).astype(np.float16) for shape in ((16, 16), (16, 8), (16, 8)))
    sources = [
        *registers(fragments(a, a_place, 8)), *registers(fragments(b, b_place, 4)), *registers(fragments(c, c_place, 4))
    ]  # fmt: skip
    out = [np.zeros(64, np.uint32) for _ in range(2)]
    run_ptx("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {r0,r1}, {a0,a1,a2,a3}, {a4,a5}, {a6,a7};", sources, out)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float16)
    for value, wanted in zip(out, registers(fragments(expected, c_place, 4)), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_mma_products_are_exact_and_sums_are_float32() -> None:
    # 255/256 squared needs 16 bits of product; in bfloat16 it would round to 1.
    x = np.full((1, 16, 16), 255 / 256).astype(ml_dtypes.bfloat16)
    sources = [*registers(fragments(x, a_place, 8)), *registers(fragments(x, b_place, 4))]
    out = [np.zeros(32, np.float32) for _ in range(4)]
    zeros = "{0f00000000, 0f00000000, 0f00000000, 0f00000000}"
    run_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{r0,r1,r2,r3}}, {{a0,a1,a2,a3}}, {{a4,a5}}, {zeros};",
        sources,
        out,
    )
    assert (out[0] == 16 * (255 / 256) ** 2).all()


SHARED_COPY = """
.reg .b32 base, at; .reg .b64 from;
mov.u32 base, tile;
"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(count: int, trans: bool) -> None:
    rng = np.random.default_rng(2)
    # 8 rows per matrix, each row 16 bytes, written by thread and row in some order that is not the identity.
    order = rng.permutation(32)
    rows = rng.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    words = rows.view(np.uint32)
    sources = [np.ascontiguousarray(words[:, i]) for i in range(4)] + [order.astype(np.uint32)]
    out = [np.zeros(32, np.uint32) for _ in range(count)]
    names = ", ".join(f"r{i}" for i in range(count))
    body = f"""
        .shared .align 16 .b8 tile[512];
        {SHARED_COPY}
        mad.lo.u32 at, %w, 16, base;
        st.shared.v4.b32 [at], {{a0, a1, a2, a3}};
        bar.sync 0;
        mad.lo.u32 at, a4, 16, base;
        ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{names}}}, [at];
    """
    report = run_ptx(body, sources, out)
    for matrix in range(count):
        # Lane i of the 8 that belong to a matrix names its row i.
        tile = np.stack([rows[order[8 * matrix + i]] for i in range(8)])
        if trans:
            tile = tile.T
        for lane in range(32):
            low, high = (int(tile[lane // 4][2 * (lane % 4) + e]) for e in (0, 1))
            assert int(out[matrix][lane]) == low | high << 16
    assert report.ldmatrix == 1
    assert report.wavefronts_ideal["ldmatrix"] == count


@pytest.mark.parametrize(("stride", "wavefronts"), [(16, 4), (32, 8), (128, 32), (144, 4)])
def test_bank_conflicts_of_ldmatrix(stride: int, wavefronts: int) -> None:
    out = [np.zeros(32, np.uint32) for _ in range(4)]
    zero = "{%w, %w, %w, %w}"
    body = f"""
        .shared .align 16 .b8 tile[{stride * 32}];
        {SHARED_COPY}
        mad.lo.u32 at, %w, {stride}, base;
        st.shared.v4.b32 [at], {zero};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{r0, r1, r2, r3}}, [at];
    """
    report = run_ptx(body, [], out)
    assert report.wavefronts["ldmatrix"] == wavefronts
    assert report.wavefronts["st"] == wavefronts
    assert report.wavefronts_ideal["ldmatrix"] == 4
    assert report.bank_conflicts == 2 * (wavefronts - 4)


@pytest.mark.parametrize(("stride", "wavefronts"), [(4, 1), (8, 2), (128, 32), (132, 1), (0, 1)])
def test_bank_conflicts_of_loads(stride: int, wavefronts: int) -> None:
    out = [np.zeros(32, np.uint32)]
    body = f"""
        .shared .align 16 .b8 tile[{132 * 32}];
        {SHARED_COPY}
        mad.lo.u32 at, %w, {max(stride, 4)}, base;
        st.shared.b32 [at], %w;
        bar.sync 0;
        mad.lo.u32 at, %w, {stride}, base;
        ld.shared.b32 r0, [at];
    """
    report = run_ptx(body, [], out)
    assert report.wavefronts["ld"] == wavefronts
    assert report.wavefronts_ideal["ld"] == 1
    np.testing.assert_array_equal(out[0], np.arange(32) if stride else np.zeros(32))


def shuffle_by_hand(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudocode of the PTX ISA."""
    b, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    last = (lane & segment) | (clamp & ~segment)
    first = lane & segment
    if mode == "up":
        j = lane - b
        inside = j >= last
    elif mode == "down":
        j = lane + b
        inside = j <= last
    elif mode == "bfly":
        j = lane ^ b
        inside = j <= last
    else:
        j = first | (b & ~segment)
        inside = j <= last
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8, 4])
@pytest.mark.parametrize("b", [0, 1, 3, 9])
def test_shfl(mode: str, width: int, b: int) -> None:
    values = np.random.default_rng(3).integers(0, 1 << 32, 64).astype(np.uint32)
    c = ((32 - width) << 8) | (0 if mode == "up" else 31)
    out, inside = np.zeros(64, np.uint32), np.zeros(64, np.bool_)
    run_ptx(f"shfl.sync.{mode}.b32 r0|r1, a0, {b}, {c}, -1;", [values], [out, inside])
    for t in range(64):
        source, ok = shuffle_by_hand(mode, t % 32, b, c)
        assert out[t] == values[t - t % 32 + source]
        assert inside[t] == ok


def test_votes() -> None:
    p = np.random.default_rng(4).integers(0, 2, 128).astype(np.bool_)
    p[32:64], p[64:96] = True, False
    word = np.zeros(128, np.uint32)
    flags = [np.zeros(128, np.bool_) for _ in range(3)]
    here = np.zeros(128, np.uint32)
    body = """
        vote.sync.ballot.b32 r0, a0, -1; vote.sync.any.pred r1, a0, -1; vote.sync.all.pred r2, a0, -1;
        vote.sync.uni.pred r3, a0, -1; activemask.b32 r4;
    """
    run_ptx(body, [p], [word, *flags, here])
    warps = p.reshape(4, 32)
    expected = [sum(int(bit) << i for i, bit in enumerate(warp)) for warp in warps]
    assert word.reshape(4, 32)[:, 0].tolist() == expected
    assert (word.reshape(4, 32) == word.reshape(4, 32)[:, :1]).all()
    for flag, function in zip(flags, (np.any, np.all, lambda x: x.all() or not x.any()), strict=True):
        assert flag.reshape(4, 32)[:, 5].tolist() == [bool(function(warp)) for warp in warps]
    assert (here == 0xFFFFFFFF).all()


@pytest.mark.parametrize("operation", ["add", "min", "max", "and", "or", "xor"])
def test_redux(operation: str) -> None:
    values = np.random.default_rng(5).integers(-1000, 1000, 64).astype(np.int32)
    t = "s32" if operation in ("add", "min", "max") else "b32"
    out = np.zeros(64, np.int32)
    run_ptx(f"redux.sync.{operation}.{t} r0, a0, -1;", [values], [out])
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    function = functions.get(operation) or getattr(np, f"bitwise_{operation}")
    for warp in range(2):
        assert (out[32 * warp : 32 * warp + 32] == function.reduce(values[32 * warp : 32 * warp + 32])).all()


def test_a_collective_needs_its_whole_warp() -> None:
    out = [np.zeros(64, np.uint32)]
    body = """.reg .pred p; setp.ge.u32 p, %w, 40; mov.u32 r0, 0;
        @p bra L;
        shfl.sync.idx.b32 r0, %w, 0, 31, -1;
        L:"""
    with pytest.raises(ptxsim.DivergenceError) as caught:
        run_ptx(body, [], out)
    assert caught.value.threads == tuple(range(32, 40))
    # The member mask may say so: then it is only the lanes that it names.
    run_ptx(body.replace("-1;", "%m;").replace(".reg .pred p;", ".reg .pred p; .reg .b32 %m; activemask.b32 %m;")
            .replace("L;", "L; activemask.b32 %m;"), [], out)  # fmt: skip


def test_an_aligned_instruction_needs_its_whole_warp() -> None:
    body = """.reg .pred p; .reg .b32 x; .shared .align 16 .b8 tile[512]; mov.u32 x, tile; setp.eq.u32 p, %w, 7;
        @p bra L;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%t}, [x];
        L:"""
    with pytest.raises(ptxsim.DivergenceError, match="31 lanes"):
        run_ptx(body, [], [])
