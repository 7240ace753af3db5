"""Plans of several launches: fills, scratch that one kernel writes and the next one reads, what each is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import cupy_fa2
from cupy_fa2 import ptxsim
from cupy_fa2.call import bind, run
from cupy_fa2.call.simulated import Simulator
from cupy_fa2.device import named_device
from cupy_fa2.kernel import params
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.param_struct import Field, ParamStruct, Source
from cupy_fa2.plan import MAX_GRID, Buffer, Fill, Launch, Plan

A100 = named_device("A100")
THREADS = 32
HEADER = params.render_header()

COPY_PARAMS = ParamStruct(
    "CopyParams",
    (
        Field("source", "u8", Source.ADDRESS, "one float per thread", argument="x"),
        Field("partial", "u8", Source.ADDRESS, "likewise"),
        Field("y", "u8", Source.ADDRESS, "likewise"),
        Field("factor", "f4", Source.PLAN),
        Field("bias", "i4", Source.CALL),
    ),
)


@dataclass(frozen=True)
class CopySpec:
    """One thread, one float: ``to += from * factor + bias``."""

    to: str
    source: str

    params = COPY_PARAMS
    threads = THREADS
    shared_bytes = 0
    only_arch = None
    entry = "copy"

    @property
    def name(self) -> str:
        return f"copy_{self.source}_{self.to}"

    def render(self) -> str:
        return f"""#include "params.cuh"
using namespace fa2;
{COPY_PARAMS.render()}
extern "C" __global__ void copy(const __grid_constant__ CopyParams params) {{
  const float* from = reinterpret_cast<const float*>(params.{self.source});
  float* to = reinterpret_cast<float*>(params.{self.to});
  to[threadIdx.x] += from[threadIdx.x] * params.factor + static_cast<float>(params.bias);
}}
"""


@dataclass(frozen=True)
class CopyLaunch(Launch):
    factor: float = 1.0

    def values(self, problem, device):
        return {"factor": self.factor}


def copy(source: str, to: str, factor: float, reads: str) -> CopyLaunch:
    return CopyLaunch(CopySpec(to, source), (1, 1, 1), (reads, to), (to,), factor)


SCRATCH = Buffer("partial", 4 * THREADS, zeroed=True)
FIRST, SECOND = copy("source", "partial", 2.0, "x"), copy("partial", "y", 10.0, "partial")


def simulated(plan: Plan, **arrays: np.ndarray) -> Simulator:
    with Simulator(A100).current() as simulator:
        run(plan, None, arrays, {"bias": 1})
    return simulator


def test_kernels_hand_on_through_scratch():
    x, y = np.arange(THREADS, dtype=np.float32), np.ones(THREADS, np.float32)
    plan = Plan((FIRST, Fill("other", 7), SECOND), (SCRATCH, Buffer("other", 8)), A100, "A test")
    simulator = simulated(plan, x=x, y=y)
    np.testing.assert_array_equal(y, 1 + (2 * x + 1) * 10 + 1)  # what it held was read
    assert len(simulator.reports) == len(plan.kernels) == 2
    assert plan.read_first == {"x", "y", "partial"}
    text = plan.explain()
    assert "copy_source_partial on A100" in text
    assert "then every byte of other set to 7; then copy_partial_y" in text


@pytest.mark.parametrize("own", [False, True])
def test_a_bound_plan_runs_again_with_its_scratch(own):
    x, y = np.ones(THREADS, np.float32), np.zeros(THREADS, np.float32)
    plan = Plan((FIRST, SECOND), (Buffer("other", 100), SCRATCH), A100, "")
    workspace = np.full(plan.workspace_bytes, 0xAA, np.uint8) if own else None
    with Simulator(A100).current():
        call = bind(plan, None, {"x": x, "y": y}, {"bias": 0}, workspace)
        for times in (1, 2):
            call()
            assert (y == 20 * times).all()
    if own:
        assert (workspace[256:].view(np.float32) == 2).all()
        assert (workspace[:100] == 0xAA).all()


def test_scratch_that_nothing_has_written_may_not_be_read():
    x, y = np.ones(THREADS, np.float32), np.zeros(THREADS, np.float32)
    dirty = replace(SCRATCH, zeroed=False)
    with pytest.raises(ValueError, match="partial is read before anything has written it"):
        Plan((FIRST, SECOND), (dirty,), A100, "")
    careless = replace(FIRST, reads=("x",))  # but its kernel does read
    with pytest.raises(ptxsim.UninitializedReadError, match="partial"):
        simulated(Plan((careless, SECOND), (dirty,), A100, ""), x=x, y=y)
    simulated(Plan((Fill("partial"), careless, SECOND), (dirty,), A100, ""), x=x, y=y)
    assert (y == 31).all()


def test_results_that_nothing_has_written_may_not_be_read():
    x, y = np.ones(THREADS, np.float32), np.zeros(THREADS, np.float32)
    only_writes = replace(FIRST, spec=CopySpec("y", "source"), reads=("x",), writes=("y",))
    with pytest.raises(ptxsim.UninitializedReadError, match="y"):
        simulated(Plan((only_writes,), (), A100, ""), x=x, y=y)


def test_names_must_be_known():
    with pytest.raises(ValueError, match="copy_source_partial has no field for z"):
        replace(FIRST, reads=("x", "z"))
    with pytest.raises(ValueError, match="y is no buffer of the plan"):
        Plan((Fill("y"),), (), A100, "")
    x = np.ones(THREADS, np.float32)
    with pytest.raises(ValueError, match="arrays must be among partial, x; got xx"):
        simulated(Plan((FIRST,), (SCRATCH,), A100, ""), xx=x)
    with pytest.raises(ValueError, match="got none"):
        simulated(Plan((FIRST,), (SCRATCH,), A100, ""))


def test_buffers_lie_apart_at_their_alignment():
    plan = Plan((), (Buffer("a", 100), Buffer("b", 8, alignment=16), Buffer("c", 4)), A100, "")
    assert plan.workspace_offsets == {"a": 0, "b": 112, "c": 256}
    assert plan.workspace_bytes == 260
    assert Plan((), (), A100, "").workspace_bytes == 0
    with pytest.raises(ValueError, match="two buffers of one name"):
        Plan((), (SCRATCH, SCRATCH), A100, "")
    for alignment in (0, 48, 512):
        with pytest.raises(ValueError, match=f"a power of two up to 256, got {alignment}"):
            Buffer("a", 1, alignment)


def test_a_grid_has_an_end():
    with pytest.raises(ValueError, match=f"at most {MAX_GRID} blocks"):
        replace(FIRST, grid=(MAX_GRID + 1, 1, 1))


def test_a_plan_runs_on_its_own_device_only():
    plan = Plan((FIRST,), (SCRATCH,), named_device("H200"), "")
    with pytest.raises(ValueError, match="the plan is for H200, the arrays are on A100"):
        simulated(plan, x=np.ones(THREADS, np.float32))


def test_what_is_specific_to_an_architecture_says_so_in_its_target():
    h200 = named_device("H200")
    assert target(FIRST.spec, h200) == "sm_90"

    class WgmmaSpec(CopySpec):
        only_arch = 90

    spec = WgmmaSpec("y", "source")
    assert target(spec, h200) == "sm_90a"
    assert target(spec, h200, virtual=True) == "compute_90a"
    for other in ("A100", "B200"):
        with pytest.raises(ValueError, match=f"copy_source_y runs on sm_90 alone, {other} is sm_"):
            target(spec, named_device(other))


def test_every_field_says_where_its_value_comes_from():
    for one in params.STRUCTS:
        for field in one.fields:
            assert isinstance(field.source, Source)
            assert (field.source is Source.MAP) == (field.kind == "map")
            assert field.source is not Source.ADDRESS or field.kind == "u8"


def test_kernels_of_another_version_are_not_run(monkeypatch):
    monkeypatch.setattr(params, "ABI_VERSION", params.ABI_VERSION + 1)
    other = replace(SECOND, spec=CopySpec("y", "y"), reads=("y",))  # that no other test has loaded
    monkeypatch.setattr(params, "render_header", lambda: HEADER)
    y = np.zeros(THREADS, np.float32)
    message = f"copy_y_y takes argument structs of version {params.ABI_VERSION - 1}, .* {params.ABI_VERSION};"
    with pytest.raises(RuntimeError, match=message):
        simulated(Plan((other,), (), A100, ""), y=y)


def test_calls_are_watched():
    class Blocks(ptxsim.Observer):
        steps = 0

        def step(self, event):
            self.steps += 1

    q = np.ones((1, 16, 1, 16), np.float16)
    with cupy_fa2.simulator(observer=Blocks()) as simulator:
        cupy_fa2.flash_attention(q, q, q)
    assert simulator.observer.steps > 100
