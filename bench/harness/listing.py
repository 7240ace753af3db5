"""What a disassembler prints of a kernel, as instructions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Instruction", "disassemble", "find_tool", "parse"]

# cuobjdump announces a function, nvdisasm its section.
_FUNCTION = re.compile(r"(?:Function : |^\s*\.section\s+\.text\.)([\w$.]+)")
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


def parse(text: str, entry: str | None = None) -> list[Instruction]:
    """The instructions of one function, by default the first, in order, as either disassembler prints them."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []  # labels seen since the last instruction
    jumps: dict[int, str] = {}
    inside = False
    for line in text.splitlines():
        if name := _FUNCTION.search(line):
            entry = entry or name[1]
            inside = name[1] == entry
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
