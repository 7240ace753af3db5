"""Barriers of a block and a warp, and what they order: races, found whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_tools import TILE, run_block, run_ptx

from cupy_fa2 import ptxsim
from cupy_fa2.ptxsim.ordering.hazards import WARP_STEP, SharedHazards, after_block_barrier, first_moments


def exchange(between: str, partner: int) -> np.ndarray:
    """Every thread writes a word, then reads the word of thread ``t ^ partner``."""
    out = np.zeros(64, np.uint32)
    body = f"""{TILE} st.shared.u32 [at], %w; {between}
        xor.b32 at, %w, {partner}; mad.lo.u32 at, at, 4, base; ld.shared.u32 r0, [at];"""
    run_ptx(body, [], [out])
    return out


@pytest.mark.parametrize("between", ["bar.sync 0;", "barrier.sync 0;", "barrier.sync.aligned 0, 64;", "bar.sync 3;"])
def test_a_block_barrier_orders_the_block(between: str) -> None:
    assert exchange(between, 32).tolist() == [t ^ 32 for t in range(64)]


@pytest.mark.parametrize(
    "between", ["", "bar.warp.sync -1;", "membar.cta;", "fence.acq_rel.gpu;", "vote.sync.any.pred q, q, -1;"]
)
def test_nothing_else_orders_two_warps(between: str) -> None:
    declare = ".reg .pred q; setp.eq.u32 q, %w, 0;" if "vote" in between else ""
    with pytest.raises(ptxsim.RaceError, match="read with no barrier"):
        exchange(declare + between, 32)


def test_a_warp_barrier_orders_the_warp() -> None:
    assert exchange("bar.warp.sync -1;", 1).tolist() == [t ^ 1 for t in range(64)]


@pytest.mark.parametrize("between", ["", "shfl.sync.idx.b32 %t, %w, 0, 31, -1;"])
def test_nothing_less_orders_a_warp(between: str) -> None:
    with pytest.raises(ptxsim.RaceError):
        exchange(between, 1)


def test_a_thread_orders_itself() -> None:
    assert exchange("", 0).tolist() == list(range(64))


@pytest.mark.parametrize("first", [0, 32], ids=["low warp first", "high warp first"])
@pytest.mark.parametrize("accesses", [("ld", "st"), ("st", "ld"), ("st", "st")], ids="-".join)
def test_races_do_not_depend_on_the_schedule(first: int, accesses: tuple[str, str]) -> None:
    code = {"ld": "ld.shared.u32 %t, [base];", "st": "st.shared.u32 [base], %t;"}
    one, other = (code[name] for name in accesses)
    body = f"""{TILE} .reg .pred p, q; mov.u32 %t, 1; setp.eq.u32 p, %w, 0; @p st.shared.u32 [base], %w;
        bar.sync 0; setp.eq.u32 p, %w, {first}; setp.eq.u32 q, %w, {32 - first};
        @p {one} @q {other} bar.sync 0;"""
    with pytest.raises(ptxsim.RaceError):
        run_block(body)


Access = tuple[str, int, int]


@st.composite
def programs(draw: st.DrawFn) -> list[Access]:
    """Steps of 64 threads: an access to a few words by a thread or by many at once; or a barrier."""
    thread, word = st.sampled_from([0, 1, 31, 32, 33, 63]), st.integers(0, 2)
    step = st.one_of(
        st.tuples(st.sampled_from(["read", "read", "write"]), thread, word),
        st.tuples(st.sampled_from(["warp read", "block read"]), st.sampled_from([0, 32]), word),
        st.tuples(st.just("block barrier"), st.just(0), st.just(0)),
        st.tuples(st.just("warp barrier"), st.sampled_from([0, 32]), st.just(0)),
    )
    return draw(st.lists(step, max_size=16))


@given(programs())
def test_races_against_all_pairs(program: list[Access]) -> None:
    """The tables against the definition: two threads, one word, a write, and no barrier between."""
    found: list[ptxsim.HazardError] = []
    hazards = SharedHazards(3, 64, found.append)
    hazards.valid[:] = True
    moments = first_moments(64, 1)
    lanes = np.arange(64)
    block, warps = 0, [0, 0]
    seen: list[tuple[bool, int, int, int, int]] = []
    expected = False
    for kind, thread, word in program:
        if kind == "block barrier":
            moments = after_block_barrier(moments)
            block += 1
        elif kind == "warp barrier":
            moments[thread : thread + 32] += WARP_STEP
            warps[thread // 32] += 1
        else:
            many = {"warp read": lanes[thread : thread + 32], "block read": lanes}
            mine = many.get(kind, lanes[thread : thread + 1])
            act = hazards.on_write if kind == "write" else hazards.on_read
            act(np.full(mine.size, word), moments[mine], mine)
            now = [(kind == "write", t, word, block, warps[t // 32]) for t in mine.tolist()]
            for write, t, same_word, in_block, in_warp in now:
                for other_write, other, other_word, other_block, other_warp in seen:
                    ordered = other_block != in_block or (other // 32 == t // 32 and other_warp != in_warp)
                    conflict = (write or other_write) and other_word == same_word and other != t
                    expected |= conflict and not ordered
            seen += now
        assert bool(found) == expected
        if expected:
            return


def test_many_readers_are_all_remembered() -> None:
    """A write races with any of several readers, not only with the last."""
    for reader in (0, 5, 31, 40):
        body = f"""{TILE} .reg .pred p, q; setp.eq.u32 p, %w, 0; @p st.shared.u32 [base], %w; bar.sync 0;
            ld.shared.u32 %t, [base]; setp.eq.u32 q, %w, {reader}; @q st.shared.u32 [base], %w;"""
        with pytest.raises(ptxsim.RaceError, match="read it"):
            run_block(body)


def test_one_instruction_that_writes_a_word_twice() -> None:
    with pytest.raises(ptxsim.RaceError, match="in one instruction"):
        run_block(f"{TILE} st.shared.u32 [base], %w;")


def test_neighbouring_halves_do_not_race() -> None:
    run_block(f"{TILE} .reg .b16 h; cvt.u16.u32 h, %w; mad.lo.u32 at, %w, 2, base; st.shared.u16 [at], h;")


@pytest.mark.parametrize("left", ["exit;", "bra END;"])
def test_a_barrier_that_some_never_reach(left: str) -> None:
    with pytest.raises(ptxsim.DivergenceError, match="32 of 64"):
        run_block(f".reg .pred p; setp.lt.u32 p, %w, 32; @p {left} bar.sync 0; END:")
    with pytest.raises(ptxsim.DivergenceError, match="lanes of a warp"):
        run_block(f".reg .pred p; setp.lt.u32 p, %w, 7; @p {left} bar.sync 0; END:")


def test_warps_may_wait_at_different_places() -> None:
    report = run_block(
        ".reg .pred p; setp.lt.u32 p, %w, 32; @p bra L; bar.sync 0; bra END; L: bar.sync 0; END: mov.u32 %t, 0;"
    )
    assert report.barriers == 1


def test_different_barriers_do_not_meet() -> None:
    with pytest.raises(ptxsim.DivergenceError):
        run_block(".reg .pred p; setp.lt.u32 p, %w, 32; @p bra L; bar.sync 0; bra END; L: bar.sync 1; END:")
