"""mbarriers: the protocol, whom a phase orders before whom, and misuse; 64 threads and no compiler."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_tools import aligned

from cupy_fa2 import ptxsim

PRELUDE = """
    .shared .align 128 .b8 tile[4096]; .shared .align 8 .b8 bars[64];
    .reg .b32 t, lane, warp, base, at, bar, other, x, y; .reg .b64 state, s, g;
    .reg .pred p, q, first, leader, low;
    mov.u32 t, %tid.x; mov.u32 lane, %laneid; mov.u32 warp, %warpid; mov.u32 base, tile; mov.u32 bar, bars;
    mad.lo.u32 at, t, 4, base; xor.b32 other, t, 32; mad.lo.u32 other, other, 4, base; ld.param.u64 s, [source];
    setp.eq.u32 first, t, 0; setp.eq.u32 leader, lane, 0; setp.eq.u32 low, warp, 0; mov.u32 x, 0;
"""


def run(body: str, count: int = 64, wait_for_init: bool = True) -> np.ndarray:
    """Run a body of 64 threads with a barrier of some count at `bar`; returns register x of each."""
    init = f"@first mbarrier.init.shared.b64 [bar], {count};" + ("bar.sync 0;" if wait_for_init else "")
    text = f""".visible .entry k(.param .u64 source, .param .u64 out) {{ {PRELUDE} {init}
{body}
        ld.param.u64 g, [out]; mad.wide.u32 g, t, 4, g; st.global.u32 [g], x; ret; }}"""
    source, out = aligned(4096).view(np.uint32), np.zeros(64, np.uint32)
    source[:] = np.arange(1024)
    memory = ptxsim.GlobalMemory()
    params = [memory.bind(source, "source"), memory.bind(out, "out", writable=True)]
    kernel = ptxsim.parse_kernel(text, "k")
    ptxsim.launch(kernel, (1, 1, 1), (64, 1, 1), 0, [p.to_bytes(8, "little") for p in params], memory)
    return out


def wait(parity: int | str, name: str = "W", bar: str = "bar", op: str = "try_wait") -> str:
    return f"{name}: mbarrier.{op}.parity.shared.b64 p, [{bar}], {parity}; @!p bra {name};"


ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
WRITE = "st.shared.u32 [at], t;"
READ = "ld.shared.u32 x, [other];"
SWAPPED = [t ^ 32 for t in range(64)]


# The protocol


@pytest.mark.parametrize(
    "meet",
    [
        ARRIVE + wait(0),
        ARRIVE + wait(0, op="test_wait"),
        "mbarrier.arrive.release.cta.shared::cta.b64 state, [bar], 1;"
        "W: mbarrier.try_wait.acquire.cta.shared::cta.b64 p, [bar], state, 1000; @p bra D; bra W; D:",
        "mbarrier.arrive.shared.b64 state, [bar]; W: mbarrier.test_wait.shared.b64 p, [bar], state; @!p bra W;",
        "mbarrier.arrive.expect_tx.release.cta.shared.b64 _, [bar], 0;" + wait(0),
    ],
)
def test_a_phase_orders_who_arrived_before_who_waited(meet: str) -> None:
    assert run(WRITE + meet + READ).tolist() == SWAPPED


def test_phases_alternate() -> None:
    body = f"""mov.u32 y, 0;
    LOOP: add.u32 x, t, y; st.shared.u32 [at], x; {ARRIVE} {wait("y", "W0")}
        ld.shared.u32 x, [other]; {ARRIVE} xor.b32 y, y, 1; {wait("y", "W1")}
        xor.b32 y, y, 1; add.u32 y, y, 2; setp.lt.u32 q, y, 10; @q bra LOOP;"""
    assert run(body).tolist() == [t + 8 for t in SWAPPED]


def test_one_arrival_per_warp() -> None:
    meet = "bar.warp.sync -1; @leader mbarrier.arrive.shared.b64 _, [bar];" + wait(0)
    assert run(WRITE + meet + READ, count=2).tolist() == SWAPPED


def test_an_arrival_of_many() -> None:
    meet = "bar.warp.sync -1; @leader mbarrier.arrive.shared.b64 _, [bar], 32;" + wait(0)
    assert run(WRITE + meet + READ).tolist() == SWAPPED


def test_a_fresh_barrier_is_in_the_phase_after_parity_one() -> None:
    assert run(wait(1) + "mov.u32 x, 7;").tolist() == [7] * 64


def test_a_test_may_fail_and_the_thread_go_on() -> None:
    body = f"mbarrier.test_wait.parity.shared.b64 p, [bar], 0; selp.u32 x, 1, 2, p; {ARRIVE} {wait(0)}"
    assert run(body).tolist() == [2] * 64


def test_a_barrier_can_be_made_anew() -> None:
    again = """bar.sync 0; @first mbarrier.inval.shared.b64 [bar]; @first mbarrier.init.shared.b64 [bar], 2; bar.sync 0;
        bar.warp.sync -1; @leader mbarrier.arrive.shared.b64 _, [bar];"""
    assert run(WRITE + ARRIVE + wait(0, "W0") + again + wait(0, "W1") + READ).tolist() == SWAPPED


def test_arrivals_at_different_places() -> None:
    body = f"{WRITE} @low bra LOW; {ARRIVE} bra WAIT; LOW: {ARRIVE} WAIT: mov.u32 y, 0; {wait('y')} {READ}"
    assert run(body.replace("LOW: mb", "LOW: mov.u32 y, 0; mb")).tolist() == SWAPPED


def test_a_lane_may_wait_for_another_of_its_warp() -> None:
    """Which runs only then: where nothing of the kind is needed, a warp stays together."""
    first = f"""@!first bra OTHERS; {wait(0, "W0")} mov.u32 x, 5; bra END;
        OTHERS: setp.eq.u32 q, t, 1; @q mbarrier.arrive.shared.b64 _, [bar]; END: bar.warp.sync -1;"""
    # Lane 0 of warp 0 waits for warp 1, whose arrival comes last in the text, and the others for lane 0.
    then = f"""@!low bra HIGH; @!first bra TOGETHER; {wait(1, "W1")} TOGETHER: bar.warp.sync -1; add.u32 x, x, 1;
        bra DONE; HIGH: setp.eq.u32 q, t, 32; @q bra GIVE; bra DONE;
        GIVE: {wait(0, "W2")} {ARRIVE} DONE: mov.u32 y, 0;"""
    assert run(first, count=1).tolist()[:3] == [5, 0, 0]
    assert run(first + "bar.sync 0;" + then, count=1).tolist()[:3] == [6, 1, 1]


# What is not ordered


@pytest.mark.parametrize(
    "meet",
    [
        "",
        ARRIVE,
        "mbarrier.arrive.relaxed.cta.shared.b64 _, [bar];" + wait(0),
        # Who arrives for the warp knows only what it did itself.
        "@leader mbarrier.arrive.shared.b64 _, [bar], 32;" + wait(0),
        # Only one lane of each warp waits.
        f"{ARRIVE} @!leader bra END; {wait(0)} END:",
    ],
)
def test_nothing_less_orders_two_warps(meet: str) -> None:
    with pytest.raises(ptxsim.RaceError, match="shared memory is read"):
        run(WRITE + meet + READ)


def test_what_follows_an_arrival_is_not_ordered() -> None:
    with pytest.raises(ptxsim.RaceError, match="shared memory is read"):
        run(ARRIVE + WRITE + wait(0) + READ)


@pytest.mark.parametrize("low_first", [True, False])
def test_a_handover_goes_one_way(low_first: bool) -> None:
    """Whichever warp runs first: what the giver does after its arrival races with what the taker does."""
    give, take = f"{WRITE} {ARRIVE}", f"{wait(0)} ld.shared.u32 x, [other];"
    sides = (give, take) if low_first else (take, give)
    body = "{} bra LOW; {} bra END; LOW: mov.u32 y, 0; {} END:"
    run(body.format("@low", *sides), count=32)
    late = body.format("@low", *(side.replace(ARRIVE, ARRIVE + WRITE) for side in sides))
    with pytest.raises(ptxsim.RaceError):
        run(late, count=32)


def test_a_phase_may_not_be_missed() -> None:
    """Warp 1 waits for the first phase, which the second follows with nothing to hold it back."""
    both = f"{ARRIVE} {wait(0, 'W0')} {ARRIVE} {wait(1, 'W1')}"
    body = f"@low bra LOW; {wait(0, 'W2')} bra END; LOW: mov.u32 y, 0; {both} END:"
    with pytest.raises((ptxsim.RaceError, ptxsim.DeadlockError)):
        run(body, count=32)
    with pytest.raises((ptxsim.RaceError, ptxsim.DeadlockError)):
        run(body.replace("@low", "@!low"), count=32)


def test_an_arrival_needs_its_phase() -> None:
    """Warp 0 arrives for two phases and waits for neither: both arrivals may count in one of them."""
    body = f"{ARRIVE} @!low bra END; {ARRIVE} END: {wait(0)}"
    with pytest.raises((ptxsim.RaceError, ptxsim.MbarrierError)):
        run(body)


# Misuse


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mbarrier.arrive.shared.b64 _, [bar+8];", "no mbarrier"),
        (wait(0, bar="bar+8"), "no mbarrier"),
        ("@first mbarrier.init.shared.b64 [bar], 64;", "again"),
        ("@first mbarrier.init.shared.b64 [bar+8], 0;", "0 arrivals"),
        ("ld.shared.u32 x, [bar+4];", "read as ordinary"),
        ("st.shared.u32 [bar], x;", "written as ordinary"),
        ("mbarrier.arrive.shared.b64 _, [bar], 2;", "more arrivals"),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [bar], 1048576;", "bytes expected"),
        ("@first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16; @first mbarrier.inval.shared.b64 [bar];",
         "16 of 16 bytes"),
        ("bar.sync 0; @first mbarrier.inval.shared.b64 [bar]; bar.sync 0;" + ARRIVE, "no mbarrier"),
    ],
)  # fmt: skip
def test_misuse(body: str, message: str) -> None:
    with pytest.raises(ptxsim.MbarrierError, match=message):
        run(body)


def test_addresses_of_barriers() -> None:
    with pytest.raises(ptxsim.MisalignedAddressError):
        run("mbarrier.arrive.shared.b64 _, [bar+4];")
    with pytest.raises(ptxsim.OutOfBoundsError):
        run("mbarrier.arrive.shared.b64 _, [bar+8192];")
    assert run("cvt.u64.u32 g, bar; cvta.shared.u64 g, g; mbarrier.arrive.b64 _, [g];" + wait(0)).tolist() == [0] * 64


def test_an_invalidated_barrier_is_memory_that_nothing_has_written() -> None:
    body = "bar.sync 0; @first mbarrier.inval.shared.b64 [bar]; bar.sync 0; {} ld.shared.u32 x, [bar];"
    with pytest.raises(ptxsim.UninitializedReadError):
        run(body.format(""))
    assert run(body.format("@first st.shared.u32 [bar], 3; bar.sync 0;")).tolist() == [3] * 64


def test_a_barrier_that_may_not_be_there_yet() -> None:
    with pytest.raises(ptxsim.RaceError, match="initialised"):
        run(ARRIVE, wait_for_init=False)


@pytest.mark.parametrize(
    "opcode",
    [
        "mbarrier.arrive.noComplete.shared.b64 state, [bar], 1",
        "mbarrier.arrive_drop.shared.b64 state, [bar]",
        "mbarrier.arrive.shared::cluster.b64 _, [bar]",
        "mbarrier.pending_count.b64 x, state",
        "mbarrier.try_wait.parity.relaxed.cta.shared.b64 p, [bar], 1",
        "cp.async.bulk.commit_group",
        "cp.async.mbarrier.arrive.shared.b64 [bar]",
    ],
)
def test_what_is_not_supported(opcode: str) -> None:
    with pytest.raises(ptxsim.UnsupportedInstruction):
        run(opcode + ";")


@pytest.mark.parametrize("op", ["try_wait", "test_wait"])
def test_deadlocks(op: str) -> None:
    with pytest.raises(ptxsim.DeadlockError, match=r"initialised at PTX line \d+, with 64 of 64 arrivals"):
        run(wait(0, op=op))
    with pytest.raises(ptxsim.DeadlockError, match="1 of 64 arrivals") as caught:
        run(f"@!first {ARRIVE} {wait(0, op=op)}")
    assert op in caught.value.text
    # Others wait at the barrier of the block, or have left.
    with pytest.raises(ptxsim.DeadlockError, match="32 of 64 arrivals"):
        run(f"@low bra END; {ARRIVE} {wait(0, op=op)} END: bar.sync 0;")
    # The rest of the warp goes on until it needs the whole of it.
    with pytest.raises(ptxsim.DeadlockError):
        run(f"@!first bra END; {wait(0, op=op)} END: bar.warp.sync -1;")


# Copies


EXPECT = "@first mbarrier.arrive.expect_tx.shared.b64 _, [bar], {};"
COPY = "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [base], [s], {}, [bar];"
LOAD = "ld.shared.u32 x, [at];"
FILL = EXPECT.format(256) + COPY.format(256)


@pytest.mark.parametrize(
    "body",
    [
        FILL + wait(0) + LOAD,
        COPY.format(256) + EXPECT.format(256) + wait(0) + LOAD,
        EXPECT.format(256) + COPY.format(128) + COPY.format(128).replace("[base], [s]", "[base+128], [s+128]") + wait(0)
        + LOAD,
        "@first mbarrier.expect_tx.shared.b64 [bar], 256;" + COPY.format(256)
        + "@first mbarrier.arrive.shared.b64 _, [bar];" + wait(0) + LOAD,
        # One thread waits and the barrier of the block tells the others.
        FILL + f"@!first bra END; {wait(0)} END: bar.sync 0;" + LOAD,
        # One lane of each warp waits, and its warp learns of it.
        FILL + f"@!leader bra END; {wait(0)} END: bar.warp.sync -1;" + LOAD,
    ],
)  # fmt: skip
def test_a_copy_that_was_waited_for(body: str) -> None:
    assert run(body, count=1).tolist() == list(range(64))


@pytest.mark.parametrize(
    "between",
    ["", "bar.sync 0;", "bar.sync 0; bar.sync 0;", f"@!low bra END; {wait(0)} END:", wait(1)],
)
def test_a_copy_that_was_not_waited_for(between: str) -> None:
    for access in (LOAD, WRITE):
        with pytest.raises((ptxsim.AsyncCopyError, ptxsim.DeadlockError)) as caught:
            run(FILL + between + access, count=1)
        assert isinstance(caught.value, ptxsim.DeadlockError) == (between == wait(1))


def test_a_copy_over_what_is_still_read_or_written() -> None:
    for access in (WRITE, WRITE + "bar.sync 0;" + LOAD):
        with pytest.raises(ptxsim.RaceError, match="written with no barrier"):
            run(access + FILL + wait(0), count=1)
        run(access + "bar.sync 0;" + FILL + wait(0), count=1)


def test_copies_and_exits() -> None:
    with pytest.raises(ptxsim.AsyncCopyError, match="nobody waited"):
        run(FILL, count=1)
    with pytest.raises(ptxsim.AsyncCopyError, match="16 of 16 bytes missing"):
        run(EXPECT.format(16), count=1)


def test_bytes_beyond_what_is_expected() -> None:
    for size in (240, 0):
        with pytest.raises(ptxsim.AsyncCopyError):
            run(EXPECT.format(size) + COPY.format(256) + wait(0), count=1)
    with pytest.raises(ptxsim.AsyncCopyError, match="256 bytes"):
        run(COPY.format(256) + EXPECT.format(240) + wait(0), count=1)
