"""The clocks against their definition: who has been told of what."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupy_fa2 import ptxsim
from cupy_fa2.ptxsim.ordering.clocks import Clocks
from cupy_fa2.ptxsim.ordering.hazards import WARP_STEP, SharedHazards, after_block_barrier, first_moments, whole_warp

THREADS = [0, 1, 32, 33]
Step = tuple[str, int, int]


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Steps of 64 threads: accesses to a few words, barriers, and threads that tell another all they know."""
    thread, word, warp = st.sampled_from(THREADS), st.integers(0, 1), st.sampled_from([0, 32])
    step = st.one_of(
        st.tuples(st.sampled_from(["read", "write"]), thread, word),
        st.tuples(st.just("warp read"), warp, word),
        st.tuples(st.sampled_from(["tell", "tell"]), thread, thread),
        st.tuples(st.sampled_from(["warp tells", "warp barrier"]), warp, thread),
        st.sampled_from([("block barrier", 0, 0), ("tell", 0, 32), ("tell", 1, 33), ("read", 0, 0), ("read", 1, 0)]),
    )
    return draw(st.lists(step, min_size=3, max_size=14))


@settings(max_examples=15 * settings().max_examples // 2)
@example([("warp read", 0, 0), ("tell", 0, 32), ("write", 32, 0)])
@example([("warp read", 0, 0), ("warp barrier", 0, 0), ("tell", 0, 32), ("write", 32, 0)])
@example([("read", 0, 0), ("read", 1, 0), ("tell", 1, 33), ("write", 33, 0)])
@given(programs())
def test_races_against_what_threads_were_told(program: list[Step]) -> None:
    """A thread may touch a word if it has been told, by whatever way, of all conflicting accesses of others."""
    found: list[ptxsim.HazardError] = []
    moments = first_moments(64, 1)
    clocks = Clocks(moments, 64)
    hazards = SharedHazards(3, 64, found.append, clocks)
    hazards.valid[:] = True
    lanes = np.arange(64)
    # By thread, the accesses that it knows of; all accesses, as (write, thread, word).
    told: list[set[int]] = [set() for _ in range(64)]
    accesses: list[tuple[bool, int, int]] = []
    readers: dict[tuple[int, int], set[int]] = {}
    for kind, a, b in program:
        warp = lanes[a // 32 * 32 : a // 32 * 32 + 32]
        expected = False
        if kind in ("read", "write", "warp read"):
            mine = warp if kind == "warp read" else lanes[a : a + 1]
            act = hazards.on_write if kind == "write" else hazards.on_read
            act(np.full(mine.size, b), whole_warp(moments[mine]) if kind == "warp read" else moments[mine], mine)
            known = set.intersection(*(told[t] for t in mine))
            for i, (write, thread, word) in enumerate(accesses):
                conflict = word == b and (write or kind == "write") and (thread != a or kind == "warp read")
                expected |= conflict and i not in known
            for t in mine.tolist():
                told[t].add(len(accesses))
                accesses.append((kind == "write", t, b))
            if kind == "read":
                readers.setdefault((a // 32, b), set()).add(a)
        elif kind == "tell":
            clocks.acquire(lanes[b : b + 1], clocks.release(lanes[a : a + 1]))
            told[b] |= told[a]
        elif kind == "warp tells":
            clocks.acquire(lanes[b : b + 1], clocks.release(warp).max(axis=0, keepdims=True))
            told[b] = told[b].union(*(told[t] for t in warp))
        elif kind == "warp barrier":
            clocks.pass_warp_barrier(warp)
            moments[warp] += WARP_STEP
            everything = set[int]().union(*(told[t] for t in warp))
            for t in warp.tolist():
                told[t] = set(everything)
        else:
            moments[:] = after_block_barrier(moments)
            clocks.pass_block_barrier(slice(None))
            everything = set[int]().union(*told)
            told = [set(everything) for _ in told]
        assert not (expected and not found)
        if found:
            # Several lanes that read one word are remembered as their whole warp, of which more has to be known.
            assert expected or any(len(group) > 1 for group in readers.values())
            return
