"""The order in which an observer is told of steps and waits is one that barriers allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import test_ptxsim_hazards as product
import test_ptxsim_pipeline as pipeline
from ptx_tools import run_ptx
from test_ptxsim_observer import Recorder

from cupy_fa2 import ptxsim


class Ordered(ptxsim.Observer):
    """Holds the events of each warp to the barriers of its block."""

    def __init__(self) -> None:
        self.waits: dict[Any, Counter[int]] = defaultdict(Counter)
        self.releases: dict[Any, Counter[int]] = defaultdict(Counter)
        self.at: dict[tuple[int, int], Any] = {}
        self.passed = Counter[str]()

    def step(self, event: ptxsim.StepEvent) -> None:
        for warp in event.warps.tolist():
            assert (id(event.view), warp) not in self.at, "a warp that waits makes a step"

    def wait(self, event: ptxsim.WaitEvent) -> None:
        for block, warp in zip(event.blocks.tolist(), event.warps.tolist(), strict=True):
            self.waits[id(event.view), block, event.barrier][warp] += 1
            self.at[id(event.view), warp] = event.barrier

    def release(self, event: ptxsim.WaitEvent) -> None:
        assert event.active.any(axis=1).all()
        for block, warp in zip(event.blocks.tolist(), event.warps.tolist(), strict=True):
            key = id(event.view), block, event.barrier
            assert self.at.pop((id(event.view), warp)) == event.barrier
            self.releases[key][warp] += 1
            self.passed[event.barrier[0]] += 1
            if event.barrier[0] == "bar":
                come = self.waits[key]
                assert len(come) == event.view.warps_per_block
                assert min(come.values()) >= self.releases[key][warp]


def test_nobody_passes_a_barrier_before_all_have_come() -> None:
    seen = Ordered()
    _, _, report = product.run(observer=seen)
    assert seen.at == {}
    assert seen.passed == {"bar": report.barriers * 4}


def test_mbarriers_are_passed_after_what_completes_them() -> None:
    """Wait FULL after the copies of the tile, wait EMPTY after the arrivals of all warps; tile after tile."""
    source, copies, arrivals, passed = pipeline.SOURCE, Counter[int](), Counter[int](), Counter[str]()
    full, empty, arrive = (pipeline.line_of(source, text) for text in ("// WAIT FULL", "// WAIT EMPTY", "// ARRIVE"))

    class Pipeline(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            blocks = event.blocks[event.active.any(axis=1)].tolist()
            if event.copy is not None:
                assert event.copy == "issue"
                copies.update(blocks)
            if arrive in [frame.line for frame in event.instruction.frames] and event.instruction.base == "mbarrier":
                arrivals.update(blocks)

        def release(self, event: ptxsim.WaitEvent) -> None:
            if event.barrier[0] == "bar":
                return
            lines = [frame.line for frame in event.instruction.frames]
            ((name, per_warp),) = [(n, w) for n, w, line in (("full", 32, full), ("empty", 1, empty)) if line in lines]
            assert (event.active.sum(axis=1) == per_warp).all()
            for block, warp in zip(event.blocks.tolist(), event.warps_in_block.tolist(), strict=True):
                key = f"{name} {block} {warp}"
                passed[key] += 1
                if name == "full":
                    assert copies[block] >= 2 * passed[key]
                else:
                    assert arrivals[block] >= 4 * passed[key]

    _, _, report = pipeline.run(observer=Pipeline())
    tiles = 320 // 64
    for block in range(report.blocks):
        assert copies[block] == 2 * tiles
        assert [passed[f"full {block} {warp}"] for warp in range(4)] == [tiles] * 4
        # The boss waits for the buffers of tiles 2 and later.
        assert [passed[f"empty {block} {warp}"] for warp in range(4)] == [tiles - 2, 0, 0, 0]


def test_who_waits_at_a_barrier_of_part_of_a_block() -> None:
    """Warps that arrive and go on do not wait."""
    seen = Recorder()
    body = """.reg .b32 warp; .reg .pred p; shr.u32 warp, %w, 5; setp.eq.u32 p, warp, 0; mov.u32 r0, 0;
        @p bra FIRST; bar.sync 3, 96; bra DONE; FIRST: bar.arrive 3, 96; DONE: bar.sync 0;"""
    run_ptx(body, [], [np.zeros(96, np.uint32)], observer=seen)
    told = [
        (kind, event.barrier, event.warps_in_block.tolist(), event.instruction.text)
        for kind, event in seen.events
        if kind != "step"
    ]
    assert told == [
        ("wait", ("bar", 3), [1, 2], "bar.sync 3, 96"),
        ("release", ("bar", 3), [1, 2], "bar.sync 3, 96"),
        ("wait", ("bar", 0), [0, 1, 2], "bar.sync 0"),
        ("release", ("bar", 0), [0, 1, 2], "bar.sync 0"),
    ]
    (arrival,) = [event for event in seen.steps() if event.instruction.opcode == "bar.arrive"]
    first_release = next(i for i, (kind, _) in enumerate(seen.events) if kind == "release")
    assert seen.events.index(("step", arrival)) < first_release
