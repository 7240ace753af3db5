"""Barriers of part of a block: who waits, what is ordered, what reductions give, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_tools import run_ptx

from cupy_fa2 import ptxsim

THREADS = 128
#: Every thread has its number in %w, that of its pair of warps in `pair`, of its warp in `warp`; `at` is its word.
SETUP = """.shared .align 16 .b8 tile[512]; .reg .b32 base, at, there, pair, warp, id, x; .reg .pred p, q, even;
    mov.u32 base, tile; mad.lo.u32 at, %w, 4, base; shr.u32 warp, %w, 5; shr.u32 pair, %w, 6; add.u32 id, pair, 1;
    and.b32 x, warp, 1; setp.eq.u32 even, x, 0;"""


def run(body: str) -> tuple[np.ndarray, ptxsim.Report]:
    """Run a body with four warps; returns `r0` of each thread."""
    out = np.zeros(THREADS, np.uint32)
    report = run_ptx(f"{SETUP} mov.u32 r0, 0; {body}", [], [out])
    return out, report


def exchange(between: str, partner: int) -> np.ndarray:
    """Every thread writes its word, and reads that of thread ``t ^ partner``."""
    read = f"xor.b32 there, %w, {partner}; mad.lo.u32 there, there, 4, base; ld.shared.u32 r0, [there];"
    return run(f"st.shared.u32 [at], %w; {between} {read}")[0]


@pytest.mark.parametrize(
    "barrier",
    [
        "bar.sync id, 64;",
        "barrier.sync.aligned id, 64;",
        "bar.cta.sync id, 64;",
        "mov.u32 x, 64; bar.sync id, x;",
        "setp.eq.u32 p, %w, 3; bar.red.or.pred q, id, 64, p;",
        "setp.eq.u32 p, %w, 3; bar.red.and.pred q, id, 64, !p;",
    ],
)
def test_a_barrier_of_a_pair_orders_the_pair_alone(barrier: str) -> None:
    for partner in (0, 1, 32, 33):
        assert exchange(barrier, partner).tolist() == [t ^ partner for t in range(THREADS)]
    with pytest.raises(ptxsim.RaceError, match="read with no barrier"):
        exchange(barrier, 64)


def test_barriers_of_the_whole_block_by_a_register() -> None:
    for barrier in ("bar.sync x;", "bar.sync x, 128;"):
        assert exchange(f"mov.u32 x, 5; {barrier}", 96).tolist() == [t ^ 96 for t in range(THREADS)]
    assert run("bar.sync id, 64; bar.sync 0; mov.u32 x, 3; bar.sync x;")[1].barriers == 2


def test_those_that_arrive_are_ordered_before_those_that_wait() -> None:
    """Odd warps read what even ones wrote; the other way is a race, and so is reading before."""
    arrive, wait = (
        "@even bar.arrive id, 64; @!even bar.sync id, 64;",
        "@!even bar.arrive id, 64; @even bar.sync id, 64;",
    )
    read = "xor.b32 there, %w, 32; mad.lo.u32 there, there, 4, base; @!even ld.shared.u32 r0, [there];"
    out, report = run(f"@even st.shared.u32 [at], %w; {arrive} {read}")
    assert out.tolist() == [t ^ 32 if t & 32 else 0 for t in range(THREADS)]
    assert report.barriers == 0
    for bad in (wait, ""):
        with pytest.raises(ptxsim.RaceError, match="read with no barrier"):
            run(f"@even st.shared.u32 [at], %w; bar.sync 0; @even st.shared.u32 [at], %w; {bad} {read}")


def test_an_arrival_does_not_order_what_comes_after_it() -> None:
    with pytest.raises(ptxsim.RaceError):
        run(
            """@even bar.arrive id, 64; @even st.shared.u32 [at], %w; @!even bar.sync id, 64;
            xor.b32 there, %w, 32; mad.lo.u32 there, there, 4, base; @!even ld.shared.u32 r0, [there];"""
        )


@pytest.mark.parametrize("operator", ["or", "and"])
@pytest.mark.parametrize("negated", ["", "!"])
@pytest.mark.parametrize("voters", [[], [3], [40], [70, 127], [*range(64)], [*range(128)]], ids=str)
def test_reductions_of_predicates(operator: str, negated: str, voters: list[int]) -> None:
    votes = np.isin(np.arange(THREADS), voters)
    ours = " ".join(f"setp.eq.or.u32 p, %w, {t}, p;" for t in voters)
    out, _ = run(f"setp.ne.u32 p, %w, %w; {ours} bar.red.{operator}.pred q, id, 64, {negated}p; selp.u32 r0, 1, 0, q;")
    pairs = (votes ^ bool(negated)).reshape(2, 64)
    expected = pairs.any(axis=1) if operator == "or" else pairs.all(axis=1)
    assert out.tolist() == np.repeat(expected, 64).tolist()


def test_pairs_meet_again_and_again() -> None:
    """Each pair counts turns of its own: 3 for one, 5 for the other; a warp's partner is always where it is."""
    out, _ = run(
        """.reg .b32 n, total; mad.lo.u32 n, pair, 2, 3; mov.u32 total, 0;
        xor.b32 there, %w, 32; mad.lo.u32 there, there, 4, base;
        LOOP: st.shared.u32 [at], n; bar.sync id, 64; ld.shared.u32 x, [there]; bar.sync id, 64;
        add.u32 total, total, x; sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra LOOP; mov.u32 r0, total;"""
    )
    assert out.tolist() == [6] * 64 + [15] * 64


def test_a_missing_barrier_between_two_turns() -> None:
    with pytest.raises(ptxsim.RaceError, match="written with no barrier since another thread read it"):
        run(
            """.reg .b32 n; mov.u32 n, 2; xor.b32 there, %w, 32; mad.lo.u32 there, there, 4, base;
            LOOP: st.shared.u32 [at], n; bar.sync id, 64; ld.shared.u32 x, [there];
            sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra LOOP;"""
        )


def test_an_arrival_that_may_be_counted_for_the_phase_before() -> None:
    """Arriving twice: nothing says that the partner was there in between."""
    arrive = "@even bar.arrive id, 64; @!even bar.sync id, 64;"
    with pytest.raises(ptxsim.RaceError, match="may still run"):
        run(arrive + arrive)
    run(arrive + "add.u32 x, id, 2; bar.sync x, 64;" + arrive)
    run(arrive + "bar.sync 0;" + arrive)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@even bar.sync id, 64;", "32 of 64 threads wait at a barrier the others never reach"),
        ("@even bar.arrive id, 64;", "32 of 64 threads arrived at a barrier"),
        ("bar.sync 1, 64;", "to which 128 come|the others never reach"),
        ("@even bar.sync id, 64; @!even bar.sync id, 96;", "to others"),
        ("@even bar.sync id, 64; setp.eq.u32 p, %w, 1; @!even bar.red.or.pred q, id, 64, p;", "to others"),
        ("setp.lt.u32 p, %w, 5; @p bar.sync id, 64;", "lanes of a warp"),
        ("bar.arrive id, 64;", "none that waits"),
    ],
)
def test_barriers_that_are_not_kept(body: str, message: str) -> None:
    with pytest.raises(ptxsim.DivergenceError, match=message):
        run(body)


@pytest.mark.parametrize(
    "body",
    [
        "bar.sync id, 48;",
        "bar.sync id, 256;",
        "mov.u32 x, 16; bar.sync x, 64;",
        "bar.arrive id;",
        "bar.red.popc.u32 x, id, 64, even;",
        "bar.red.or.pred.cta.gpu q, id, 64, even;",
    ],
)
def test_what_is_not_supported(body: str) -> None:
    with pytest.raises(ptxsim.UnsupportedInstruction):
        run(body)


def test_a_vote_of_an_unwritten_predicate() -> None:
    with pytest.raises(ptxsim.UninitializedReadError, match="register p"):
        run("bar.red.or.pred q, id, 64, p;")
