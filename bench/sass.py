"""Machine code of a kernel: which instructions its main loop executes for each key tile.

    python bench/sass.py                                  the kernels that an H200 would get, bf16
    python bench/sass.py --arch sm_80 --head-dim 64 --causal
    python bench/sass.py --cubin kernel.cubin --tile '{"block_m": 128, ...}'

Needs no GPU, only a disassembler: ``nvdisasm`` or ``cuobjdump`` of a CUDA toolkit, or
``pip install nvidia-cuda-nvdisasm``. The library function is `main_loop_counts`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cupy_fa2.compile import build
from cupy_fa2.device import named_device
from cupy_fa2.kernel.forward import ENTRY, FwdTile, KernelSpec
from cupy_fa2.plan import forward_spec

__all__ = [
    "CLASSES",
    "Instruction",
    "classify",
    "disassemble",
    "find_tool",
    "main_loop",
    "main_loop_counts",
    "mma_per_tile",
    "parse",
]

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

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L[\w.]+|[A-Za-z_$][\w$.]*):")
_TARGET = re.compile(r"`\(([^)]+)\)|\b(0x[0-9a-f]+)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    address : int
    predicate : str
        Such as ``"!P0"``; empty where it always executes.
    opcode : str
        With its modifiers: ``"HMMA.16816.F32.BF16"``.
    operands : str
    target : int or None
        Where a branch goes.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    target: int | None = None


def find_tool() -> str | None:
    """Path of ``nvdisasm`` or ``cuobjdump``: on PATH, in a CUDA toolkit, or where pip puts it."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep)]
    folders += [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += ["/usr/local/cuda/bin"]
    site = Path(sysconfig.get_path("purelib"))
    folders += [str(path) for path in sorted(site.glob("nvidia/*/bin"), reverse=True)]
    for name in ("nvdisasm", "cuobjdump"):
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            return found
    return None


def disassemble(cubin: bytes, tool: str | None = None) -> str:
    """The text of a cubin.

    Raises
    ------
    FileNotFoundError
        If no disassembler is installed.
    RuntimeError
        If it fails.
    """
    tool = tool or find_tool()
    if tool is None:
        raise FileNotFoundError("neither nvdisasm nor cuobjdump was found: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        options = ["-c"] if Path(tool).stem == "nvdisasm" else ["-sass"]
        done = subprocess.run([tool, *options, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout


def parse(text: str, entry: str = ENTRY) -> list[Instruction]:
    """The instructions of one function, in order, as either disassembler prints them."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels seen since the last instruction
    jumps: dict[int, str] = {}
    inside = False
    for line in text.splitlines():
        if "Function :" in line:  # cuobjdump
            inside = line.split(":")[1].strip() == entry
        elif line.lstrip().startswith(".section") and ".text." in line:  # nvdisasm
            inside = f".text.{entry}," in line
        if not inside:
            continue
        if (match := _LINE.search(line)) is None:
            if match := _LABEL.match(line):
                waiting.append(match[1])
            continue
        address, predicate, opcode, operands = int(match[1], 16), match[2] or "", match[3], match[4].strip()
        labels.update(dict.fromkeys(waiting, address))
        waiting.clear()
        if opcode.startswith("BRA") and (target := _TARGET.search(operands)):
            jumps[len(found)] = target[1] or target[2]
        found.append(Instruction(address, predicate, opcode, operands))
    for index, name in jumps.items():
        at = int(name, 16) if name.startswith("0x") else labels.get(name)
        old = found[index]
        found[index] = Instruction(old.address, old.predicate, old.opcode, old.operands, at)
    return found


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
    cubin: bytes, tile: FwdTile | None = None, *, always: bool = False, entry: str = ENTRY
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
    entry : str
        The kernel's name.

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
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--card", default="H200", help="whose tiles (see cupy_fa2.device.NAMED_DEVICES)")
    parser.add_argument("--dtype", default="bf16", choices=("f16", "bf16"))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="default: both")
    parser.add_argument("--tile", type=json.loads, help="FwdTile's fields as JSON, instead of the card's choice")
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
        if options.tile:
            specs = [KernelSpec(FwdTile(**options.tile), options.dtype, options.dtype, causal) for causal in masks]
        else:
            chosen = itertools.product(options.head_dim, masks)
            specs = [forward_spec(d, d, device, options.dtype, causal=causal)[0] for d, causal in chosen]
        for spec in specs:
            binary = build(spec, options.arch)
            label = f"{spec.name} {options.arch} ({binary.registers} registers, {binary.spill_bytes} B spilled)"
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
