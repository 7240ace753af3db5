"""Machine code of a kernel: which instructions its main loop executes for each key tile.

    python bench/sass.py                                  the kernels that an H200 would get, bf16
    python bench/sass.py --card A100 --head-dim 64 --causal
    python bench/sass.py --arch sm_100                    the H200's tiles, assembled for another card
    python bench/sass.py --cubin kernel.cubin --tile '{"block_m": 128, ...}'

Needs no GPU, only a disassembler: ``nvdisasm`` or ``cuobjdump`` of a CUDA toolkit, or
``pip install nvidia-cuda-nvdisasm``. The library function is `main_loop_counts`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

from harness.listing import Instruction, disassemble, find_tool, parse

from cupy_fa2.compile import build
from cupy_fa2.device import named_device
from cupy_fa2.kernel.base import target
from cupy_fa2.kernel.features import Features
from cupy_fa2.kernel.forward import FwdSpec, FwdTile
from cupy_fa2.plan import forward_spec
from cupy_fa2.problem import Structure

__all__ = ["CLASSES", "classify", "disassemble", "find_tool", "main_loop", "main_loop_counts", "mma_per_tile"]

#: Class of instructions -> what its opcodes start with; the first match counts. ``other`` takes the rest, so that the
#: classes of a loop add up to its instructions.
CLASSES: dict[str, tuple[str, ...]] = {
    "mma": ("HMMA", "QMMA", "IMMA"),
    "ldmatrix": ("LDSM",),
    "cp_async": ("LDGSTS", "UBLKCP", "UTMA"),
    "shared": ("LDS", "STS", "ATOMS", "STSM"),
    "local": ("LDL", "STL"),
    "global": ("LDG", "STG", "RED", "ATOM"),
    "mufu": ("MUFU",),
    "move": ("MOV", "IMAD.MOV", "CS2R", "UMOV", "R2UR", "P2R", "R2P"),
    "uniform": ("U",),
    "integer": (
        *("IADD", "IMAD", "LEA", "LOP3", "SHF", "ISETP", "IMNMX", "VIMNMX", "VIADD", "IABS", "PRMT", "SEL", "PLOP3"),
        *("BMSK", "SGXT", "FLO", "POPC", "ISCADD"),
    ),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSETP", "FSEL", "FSET", "FCHK", "HADD", "HFMA", "HMUL"),
    "convert": ("F2F", "F2I", "I2F"),
    "shuffle": ("SHFL", "VOTE", "MATCH", "REDUX"),
    "barrier": ("BAR", "SYNCS"),
    "constant": ("LDC", "S2R", "S2UR"),
    "control": (
        *("BRA", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "EXIT", "WARPSYNC", "NOP", "YIELD"),
        *("LDGDEPBAR", "DEPBAR", "ARRIVES", "NANOSLEEP"),
    ),
}
# LDS* and LDG* are also how other classes begin; these opcodes are looked up before the prefixes.
_EXACT = {"LDSM": "ldmatrix", "LDGSTS": "cp_async", "LDGDEPBAR": "control", "STSM": "shared"}


def classify(opcode: str) -> str:
    """Class of an opcode, one of `CLASSES` or ``other``."""
    if exact := _EXACT.get(opcode.split(".")[0]):
        return exact
    for name, prefixes in CLASSES.items():
        if opcode.startswith(prefixes):
            return name
    return "other"


def main_loop(instructions: list[Instruction]) -> list[Instruction]:
    """Body of the loop that does the work.

    Of the innermost loops (from a backward branch's target to the branch) that contain mma, the one with the fewest
    instructions per mma: where masked and unmasked tiles have loops of their own, the unmasked.

    Raises
    ------
    ValueError
        If no loop contains an mma.
    """
    index = {x.address: i for i, x in enumerate(instructions)}
    loops = [
        (index[x.target], i)
        for i, x in enumerate(instructions)
        if x.target is not None and x.target <= x.address and x.target in index
    ]
    bodies = []
    for begin, end in loops:
        body = instructions[begin : end + 1]
        mma = sum(classify(x.opcode) == "mma" for x in body)
        inner = any(
            (b, e) != (begin, end)
            and begin <= b <= e <= end
            and any(classify(x.opcode) == "mma" for x in instructions[b : e + 1])
            for b, e in loops
        )
        if mma and not inner:
            bodies.append((len(body) / mma, begin, body))
    if not bodies:
        raise ValueError("no loop contains an mma")
    return min(bodies)[2]


def mma_per_tile(tile: FwdTile) -> int:
    """``mma`` that each warp issues for one key tile: S = Q K^T and O += P V, 16 x 8 x 16 at a time."""
    row_tiles = tile.rows_per_warp // 16
    qk = tile.block_n // 8 * tile.head_dim // 16
    pv = tile.head_dim_v // 8 * tile.block_n // 16
    return row_tiles * (qk + pv) // tile.team


def main_loop_counts(
    cubin: bytes, tile: FwdTile | None = None, *, always: bool = False, entry: str | None = None
) -> dict[str, float]:
    """Instructions in the main loop by class, each warp's, for one key tile.

    Static counts: everything between the loop's first instruction and its backward branch, whether a tile takes every
    branch within (copies, masks, the rescaling of O) or not; or only what every tile executes.

    Parameters
    ----------
    cubin : bytes
        A whole ELF file, as `cupy_fa2.compile.build` gives it.
    tile : FwdTile, optional
        Divides by the tiles that one pass of the loop covers (an unrolled loop covers several). By default the
        counts are those of one pass.
    always : bool
        Leave out what some branch inside the loop skips.
    entry : str, optional
        The kernel's name; by default the first function in the file.

    Returns
    -------
    dict
        Class -> count, for every class of `CLASSES` and ``other``; also ``total``, their sum, and ``tiles``, the key
        tiles of one pass.

    Raises
    ------
    FileNotFoundError
        If no disassembler is installed.
    ValueError
        If no loop contains an mma, or not a multiple of a tile's.
    """
    body = main_loop(parse(disassemble(cubin), entry))
    tiles = 1
    if tile is not None:
        mma = sum(classify(x.opcode) == "mma" for x in body)
        tiles, rest = divmod(mma, mma_per_tile(tile))
        if rest or not tiles:
            raise ValueError(f"{mma} mma in the main loop are no multiple of a tile's {mma_per_tile(tile)}")
    if always:
        jumps = [x for x in body if x.target is not None and x.address < x.target <= body[-1].address]
        body = [x for x in body if not any(j.address < x.address < j.target for j in jumps)]
    # `@!PT LDS` never executes: the assembler puts it before LDGSTS as padding.
    counts = Counter("control" if x.predicate == "!PT" else classify(x.opcode) for x in body)
    result = {name: counts[name] / tiles for name in (*CLASSES, "other")}
    return {**result, "total": len(body) / tiles, "tiles": tiles}


def describe(name: str, every: dict[str, float], always: dict[str, float]) -> str:
    """The counts of one kernel in words."""
    parts = [
        f"{key} {value:.0f}" + (f" ({always[key]:.0f})" if always[key] != value else "")
        for key, value in every.items()
        if value and key not in ("total", "tiles")
    ]
    total, sure = every["total"], always["total"]
    return (
        f"{name}\n  {total:.0f} instructions a key tile, {total / every['mma']:.2f} per mma "
        f"(executed always: {sure:.0f}, {sure / every['mma']:.2f})\n  " + ", ".join(parts)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubin", type=Path, help="count in this file instead of building kernels")
    parser.add_argument("--card", default="H200", help="whose tiles (see cupy_fa2.device.NAMED_DEVICES)")
    parser.add_argument("--arch", help="what to assemble for, such as sm_80 (default: the card's)")
    parser.add_argument("--dtype", default="bf16", choices=("f16", "bf16"))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="default: both")
    parser.add_argument("--tile", type=json.loads, help="FwdTile's fields as JSON, not the card's choice")
    parser.add_argument("--dump", action="store_true", help="print the main loop itself too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    rows = {}
    if options.cubin:
        cubins = {options.cubin.name: (options.cubin.read_bytes(), FwdTile(**options.tile) if options.tile else None)}
    else:
        device = named_device(options.card)
        cubins = {}
        masks = (False, True) if options.causal is None else (options.causal,)
        specs = []
        for head_dim, causal in itertools.product(options.head_dim, masks):
            features = Features(band="causal" if causal else "full")
            if options.tile:
                dims = {"head_dim": head_dim, "head_dim_v": head_dim}
                specs.append(FwdSpec(FwdTile(**{**dims, **options.tile}), options.dtype, options.dtype, features))
            else:
                structure = Structure.typical(head_dim, dtype=options.dtype, features=features)
                specs.append(forward_spec(structure, device)[0])
        for spec in dict.fromkeys(specs):
            arch = options.arch or target(spec, device)
            binary = build(spec, arch)
            label = f"{spec.name} {arch} ({binary.registers} registers, {binary.spill_bytes} B spilled)"
            cubins[label] = (binary.cubin, spec.tile)
    try:
        for name, (cubin, tile) in cubins.items():
            rows[name] = {kind: main_loop_counts(cubin, tile, always=kind == "always") for kind in ("every", "always")}
            if options.dump:
                for x in main_loop(parse(disassemble(cubin))):
                    print(f"{x.address:05x} {('@' + x.predicate) if x.predicate else '':5} {x.opcode:28} {x.operands}")
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(rows, indent=1) if options.json else "\n".join(describe(k, **v) for k, v in rows.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
