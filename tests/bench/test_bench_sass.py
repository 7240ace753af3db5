"""What the bench reads out of machine code and of a profiler."""

import itertools

import ncu
import pytest
import sass
from sampling import sampled_rows

from cupy_fa2.compile import build
from cupy_fa2.device import named_device
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan import forward_spec
from cupy_fa2.problem import Structure

needs_disassembler = pytest.mark.skipif(
    sass.find_tool() is None, reason="no disassembler: pip install nvidia-cuda-nvdisasm"
)


@needs_disassembler
@pytest.mark.parametrize(
    ("card", "head_dim"),
    sampled_rows(itertools.product(["H200", "A100"], [64, 128, 256]), ("H200", 256)),
)
def test_main_loop_is_what_the_tile_asks_for(head_dim, card):
    device = named_device(card)
    spec, _ = forward_spec(Structure.typical(head_dim), device)
    tile = spec.tile
    cubin = build(spec, target(spec, device)).cubin
    counts = sass.main_loop_counts(cubin, tile)
    always = sass.main_loop_counts(cubin, tile, always=True)
    rows, mma = tile.rows_per_warp, sass.mma_per_tile(tile)
    assert counts["mma"] == always["mma"] == mma
    # A B fragment of 16 x 16 serves the 16-row blocks of a warp, and ldmatrix.x4 brings one; Q is read at most once.
    assert counts["ldmatrix"] <= mma / 2 / (rows // 16) + rows // 16 * tile.head_dim // 16
    assert always["mufu"] >= rows * tile.block_n / tile.team / 32  # the exps
    assert always["local"] == 0
    assert always["integer"] < 0.4 * mma
    assert counts["total"] == sum(counts[name] for name in (*sass.CLASSES, "other"))


@needs_disassembler
def test_main_loop_counts_divide_by_whole_tiles():
    tile = FwdTile(64, 32, 64, 64, 4)
    cubin = build(FwdSpec(tile, "f16", "f16"), "sm_90").cubin
    with pytest.raises(ValueError, match="multiple"):
        sass.main_loop_counts(cubin, FwdTile(64, 48, 64, 64, 4))
    with pytest.raises(RuntimeError, match="failed"):
        sass.disassemble(b"\x7fELF, but not for long")


LISTING = """
	.section	.text.flash_fwd,"ax",@progbits
flash_fwd:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*0020*/                   FSEL R4, R4, -INF, P0 ;
        /*0030*/                   FSEL R5, R5, -INF, P0 ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0080*/             @!PT  LDS RZ, [RZ] ;
.L_x_2:
        /*0090*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00a0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00b0*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
        /*00c0*/                   IMAD.MOV.U32 R2, RZ, RZ, R3 ;
        /*00d0*/               @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*00e0*/                   BRA `(.L_x_3);
	.section	.text.other,"ax",@progbits
        /*0000*/                   HMMA.16816.F32 R4, R8, R2, R4 ;
"""


def test_main_loop_of_a_listing(monkeypatch):
    """The loop with the fewest instructions per mma is the main one."""
    monkeypatch.setattr(sass, "disassemble", lambda cubin: LISTING)

    def nonzero(**options):
        return {name: count for name, count in sass.main_loop_counts(b"", **options).items() if count}

    common = {"mma": 3, "ldmatrix": 1, "move": 1, "tiles": 1}
    assert nonzero() == {**common, "cp_async": 1, "control": 3, "total": 9}
    assert nonzero(always=True) == {**common, "control": 2, "total": 7}
    assert sass.classify("LDGDEPBAR") == "control"
    assert sass.classify("UIADD3") == "uniform"
    assert sass.classify("STSM.16.M88.4") == "shared"


def test_profiler_counters_are_read_and_sorted():
    names = ("Kernel Name", "gpu__time_duration.sum", *(f"stalled_{x}" for x in ("barrier", "wait", "wait_not_issued")))
    names = [
        name.replace("stalled", "smsp__average_warps_issue_stalled") + "_per_issue_active.ratio" * ("stalled" in name)
        for name in names
    ]
    text = "==PROF== Connected\nkernel of ours\n"
    for row in (names, ["", "ns", "inst", "inst", "inst"], ["flash_fwd", "2,712,345", "0.5", "1.5", "1.2"]):
        text += ",".join(f'"{cell}"' for cell in row) + "\n"
    (launch,) = ncu.parse(text)
    assert launch["gpu__time_duration.sum"] == (2_712_345.0, "ns")
    lines = ncu.describe(launch).splitlines()
    assert [line.split() for line in lines[-2:]] == [["wait", "1.50", "75.0%"], ["barrier", "0.50", "25.0%"]]
    assert ncu.parse("==ERROR== nothing") == []
