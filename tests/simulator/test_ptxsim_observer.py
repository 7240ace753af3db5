"""What an observer is told: every step once, in an order that barriers allow, with the state as it then is."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_ptxsim_hazards as product
import test_ptxsim_pipeline as pipeline
from ptx_tools import aligned, run_ptx

from cupy_fa2 import ptxsim
from cupy_fa2.compile import compile_source
from cupy_fa2.ptxsim.run import launch as launch_module

KERNELS = [product.run, pipeline.run]


class Recorder(ptxsim.Observer):
    """Keeps everything, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.begun: list[tuple[int, ...]] = []
        self.ended: list[tuple[int, ...]] = []

    def begin(self, view: ptxsim.BatchView) -> None:
        self.begun += map(tuple, view.blocks.tolist())

    def step(self, event: ptxsim.StepEvent) -> None:
        self.events.append(("step", event))

    def wait(self, event: ptxsim.WaitEvent) -> None:
        self.events.append(("wait", event))

    def release(self, event: ptxsim.WaitEvent) -> None:
        self.events.append(("release", event))

    def end(self, view: ptxsim.BatchView, blocks: Any) -> None:
        self.ended += map(tuple, view.blocks[blocks].tolist())

    def steps(self) -> list[ptxsim.StepEvent]:
        return [event for kind, event in self.events if kind == "step"]


def bit_equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


# Counts


@pytest.mark.parametrize("run", KERNELS)
def test_counts_are_the_reports(run: Any) -> None:
    counts, mma = Counter[str](), Counter[tuple[int, int]]()

    class Counts(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            counts[event.instruction.opcode] += event.warps.size
            if event.instruction.base == "mma":
                mma.update(zip(event.blocks.tolist(), event.warps_in_block.tolist(), strict=True))
                assert event.active.all()

    _, _, report = run(observer=Counts())
    assert counts == report.instructions
    assert sum(mma.values()) == report.mma > 0
    # Every warp owns as many rows.
    assert mma.keys() == {(block, warp) for block in range(report.blocks) for warp in range(4)}
    assert set(mma.values()) == {report.mma // report.warps}


@pytest.mark.parametrize("run", KERNELS)
def test_watching_changes_nothing(run: Any) -> None:
    alone, _, report = run()
    watched, _, same = run(observer=Recorder())
    assert bit_equal(alone, watched)
    assert {**report.to_dict(), "seconds": 0} == {**same.to_dict(), "seconds": 0}


def test_nothing_of_it_exists_without_an_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a launch that nobody watches")

    monkeypatch.setattr(launch_module, "Watch", refuse)
    monkeypatch.setattr(launch_module, "BatchView", refuse)
    product.run()
    with pytest.raises(AssertionError, match="nobody watches"):
        product.run(observer=Recorder())


# Lanes


def test_lanes_for_which_the_predicate_holds() -> None:
    """They are those from before the instruction, which may change its own predicate; and nobody is told as well."""
    seen = Recorder()
    body = """.reg .pred p, q; .reg .b32 lane; mov.u32 lane, %laneid; setp.lt.u32 p, lane, 5; setp.gt.u32 q, lane, 99;
        @p setp.gt.u32 p, lane, 2; mov.u32 r0, 0; @p mov.u32 r0, 1; @!p mov.u32 r0, 2; @q mov.u32 r0, 3;
        setp.lt.u32 q, %w, 40; @q bra LOW; add.u32 r0, r0, 10; LOW:"""
    out = np.zeros(64, np.uint32)
    report = run_ptx(body, [], [out], observer=seen)
    lane = np.arange(64) % 32
    chosen = np.where((lane == 3) | (lane == 4), 1, 2)
    assert out.tolist() == (chosen + np.where(np.arange(64) < 40, 0, 10)).tolist()
    by_text = {event.instruction.text: event for event in seen.steps()}
    full, warps = np.ones((2, 32), bool), [0, 1]

    def of(text: str) -> tuple[list[int], np.ndarray]:
        return by_text[text].warps.tolist(), by_text[text].active

    for text, expected in {
        "mov.u32 lane, %laneid": full,
        "@p setp.gt.u32 p, lane, 2": (lane < 5).reshape(2, 32),
        "@p mov.u32 r0, 1": ((lane == 3) | (lane == 4) | (lane >= 99)).reshape(2, 32),
        "@q mov.u32 r0, 3": ~full,
        "@q bra LOW": (np.arange(64) < 40).reshape(2, 32),
    }.items():
        assert of(text)[0] == warps
        assert (of(text)[1] == expected).all(), text
    assert of("add.u32 r0, r0, 10")[0] == [1]
    assert of("add.u32 r0, r0, 10")[1].tolist() == [[x >= 8 for x in range(32)]]
    assert report.instructions["add.u32"] == 1


def test_blocks_begin_and_end_once() -> None:
    """More blocks than run together, whose warps leave at different places."""
    text = """.visible .entry k() { .reg .b32 x, y; .reg .pred p, q; mov.u32 x, %tid.x; mov.u32 y, %ctaid.x;
        setp.lt.u32 p, x, 40; @p exit; setp.eq.u32 q, y, 1; @q ret; mov.u32 x, 0; ret; }"""
    grid = (3, 5, 4)
    seen = Recorder()
    report = ptxsim.launch(
        ptxsim.parse_kernel(text, "k"), grid, (64, 1, 1), 0, [], ptxsim.GlobalMemory(), observer=seen
    )
    everything = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    assert seen.begun == everything
    assert sorted(seen.ended, key=lambda place: place[::-1]) == everything
    assert len({id(event.view) for event in seen.steps()}) > 1
    counts = Counter[str]()
    for event in seen.steps():
        counts[event.instruction.opcode] += event.warps.size
    assert counts == report.instructions


def test_what_an_observer_raises_ends_the_launch() -> None:
    class Enough(Exception):
        pass

    class Stops(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            if event.instruction.base == "mma":
                raise Enough

    with pytest.raises(Enough):
        product.run(observer=Stops())
    c, expected, _ = product.run()
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


# State


def test_copies_and_their_groups() -> None:
    """Each wait leaves the latest group in flight: the next tile."""
    rounds = Counter[str]()

    class Copies(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            if event.copy is None:
                return
            groups = event.view.copy_groups(event.warps)
            assert (groups == groups[0, 0]).all()
            if event.copy == "issue":
                assert groups[0, 0] == rounds["commit"]
            else:
                rounds[event.copy] += 1
                assert groups[0, 0] == rounds["commit"]

    _, _, report = product.run(observer=Copies())
    assert report.warps * (rounds["commit"] + rounds["wait"]) == sum(
        report.instructions[opcode] for opcode in ("cp.async.commit_group", "cp.async.wait_group")
    )
    assert rounds == {"commit": 4, "wait": 3}


ROWS = """
__device__ __forceinline__ float larger(float a, float b) {
  return fmaxf(a, b);  // LARGER
}
extern "C" __global__ void rows(const float* x, float* out, int columns) {
  float best = -1e30f;
#pragma unroll 1
  for (int i = 0; i < columns; i++)
    best = larger(best, x[threadIdx.x * columns + i]);  // BEST
  out[threadIdx.x] = best;
}
"""


@functools.cache
def rows_kernel() -> ptxsim.Kernel:
    options = ("--std=c++20", "--gpu-architecture=compute_80", "-lineinfo")
    return ptxsim.parse_kernel(compile_source(ROWS, {}, "rows", options)[0], "rows", {"rows.cu": ROWS})


def test_a_rows_maximum_after_each_element() -> None:
    """A register read after the steps of a source line."""
    line, recorded, sources = pipeline.line_of(ROWS, "// BEST"), [], set[str | None]()

    class Maxima(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            instruction = event.instruction
            if instruction.base == "max" and line in [frame.line for frame in instruction.frames]:
                recorded.append(event.read(instruction.operands[0], "f32"))
                sources.add(event.source)

    x = aligned(64 * 7 * 4).view(np.float32).reshape(64, 7)
    x[:] = np.random.default_rng(0).standard_normal(x.shape)
    out, memory = aligned(64 * 4).view(np.float32), ptxsim.GlobalMemory()
    pointers = [memory.bind(x, "x"), memory.bind(out, "out", writable=True)]
    params = [*(pointer.to_bytes(8, "little") for pointer in pointers), (7).to_bytes(4, "little")]
    ptxsim.launch(rows_kernel(), (1, 1, 1), (64, 1, 1), 0, params, memory, observer=Maxima())
    assert [r.shape for r in recorded] == [(2, 32)] * 7
    assert (np.stack(recorded, axis=-1).reshape(64, 7) == np.maximum.accumulate(x, axis=1)).all()
    assert [Path(str(source)).name for source in sources] == [f"rows.cu:{pipeline.line_of(ROWS, '// LARGER')}"]


def test_registers_and_shared_memory_as_they_are() -> None:
    checked = Counter[str]()

    class State(ptxsim.Observer):
        def step(self, event: ptxsim.StepEvent) -> None:
            view, text = event.view, event.instruction.text
            checked[text] += 1
            thread = np.arange(64).reshape(2, 32)
            if text == "mov.u32 base, tile":
                self.base = event.read("base")
                assert (self.base == event.read("tile")).all()
                assert not view.defined("x").any()
                assert view.defined("base").all()
                assert view.defined("%tid.x").all()
                assert (view.read("%tid.x") == thread).all()
                assert (event.read("%laneid", "s64") == thread % 32).all()
            elif text == "st.shared.u32 [at+16], %w":
                assert view.shared(0, int(self.base[0, 0]), 16).tolist() == [255] * 16
                assert (event.read(event.instruction.operands[0]) == self.base + 16 + 4 * thread).all()
                words = view.shared(0, int(self.base[0, 0]) + 16, 256)
                assert (words.view(np.uint32) == thread.reshape(-1)).all()
                words[:] = 0
            elif text == "@p mov.f32 x, 0f40200000":
                assert (view.defined("x") == (thread < 40)).all()
                assert (event.read("x", "f32")[thread < 40] == 2.5).all()
                assert (view.read("p", warps=np.array([1])) == (thread[1] < 40)).all()
                assert (event.read("x") == 0x40200000)[thread < 40].all()
                assert (event.read(event.instruction.operands[1], "f32") == 2.5).all()
                guard = event.instruction.predicate
                assert guard is not None
                assert (event.read(guard) == (thread < 40)).all()
            elif text == "ret":
                for block, address, nbytes in ((0, 0, 4), (0, int(self.base[0, 0]) + 400, 128), (0, 1 << 20, 1)):
                    with pytest.raises(ValueError, match="shared memory is at"):
                        view.shared(block, address, nbytes)
                with pytest.raises(ValueError, match="named nothing"):
                    view.read("nothing")

    body = """.shared .align 16 .b8 tile[512]; .reg .b32 base, at; .reg .f32 x; .reg .pred p; mov.u32 r0, 0;
        mov.u32 base, tile; mad.lo.u32 at, %w, 4, base; st.shared.u32 [at+16], %w; ld.shared.u32 r0, [at+16];
        setp.lt.u32 p, %w, 40; @p mov.f32 x, 0f40200000; @!p mov.f32 x, 0f00000000;"""
    out = np.zeros(64, np.uint32)
    run_ptx(body, [], [out], observer=State())
    assert out.tolist() == list(range(64))
    assert min(checked.values()) == 1
    assert {"ret", "mov.u32 base, tile", "@p mov.f32 x, 0f40200000", "st.shared.u32 [at+16], %w"} <= checked.keys()


def test_what_a_step_costs_by_source_line() -> None:
    """The report as it grows says which line has the bank conflicts."""
    by_line = Counter[int]()

    class Conflicts(ptxsim.Observer):
        before = 0

        def step(self, event: ptxsim.StepEvent) -> None:
            now = event.view.report.bank_conflicts
            if now > self.before:
                by_line[event.instruction.frames[-1].line] += now - self.before
            self.before = now

    source = product.edited(("((chunk ^ (row & 7)) << 4)", "(chunk << 4)"))
    _, _, report = product.run(source, observer=Conflicts())
    assert sum(by_line.values()) == report.bank_conflicts > 0
    assert by_line.keys() >= {product.line_of(source, "// LOAD A"), product.line_of(source, "// LOAD B")}


def test_the_documents_example(capsys: pytest.CaptureFixture[str]) -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "debugging.md"
    if not document.is_file():
        pytest.skip("the tests do not stand in a checkout")
    section = document.read_text().split("### Watching a launch")[1].split("\n### ")[0]
    shown = re.search(r"```python\n(.*?)```.*?\n\n((?:    [^\n]*\n)+)", section, re.DOTALL)
    assert shown
    code, output = shown.groups()
    exec(code, {})
    assert capsys.readouterr().out == re.sub(r"^    ", "", output, flags=re.MULTILINE)
