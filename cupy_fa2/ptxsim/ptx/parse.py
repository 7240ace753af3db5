"""PTX text -> Kernel: parameters, variables and decoded operands, each instruction with its source line.

Written for what NVRTC emits, inline assembly included. What it does not know is a ParseError, never skipped.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping

from ..errors import Frame, ParseError, UnsupportedInstruction
from .kernel import (
    REGISTER_BITS,
    TYPE_BYTES,
    Address,
    Ignored,
    Imm,
    Instruction,
    Kernel,
    Operand,
    Param,
    Reg,
    SharedVariable,
    Special,
    Symbol,
    Vector,
    used_registers,
)
from .literals import literal
from .variables import module_variables


def parse_kernel(ptx: str | bytes, entry: str, sources: Mapping[str, str] | None = None) -> Kernel:
    """Parse the kernel `entry` out of a PTX module.

    Parameters
    ----------
    ptx : str or bytes
        The module's text, as NVRTC returns it.
    entry : str
        Name of the kernel.
    sources : mapping of str to str, optional
        Source text by file name, to quote in errors. A name matches by its end, so base names will do.

    Returns
    -------
    Kernel
        The parsed kernel.
    """
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    # Comments become spaces, so that positions and line numbers stay those of the text given.
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text.rstrip("\0"))
    header = re.search(rf"\.entry\s+{re.escape(entry)}\s*\(([^)]*)\)", text)
    if header is None:
        known = ", ".join(re.findall(r"\.entry\s+([\w$]+)", text)) or "none"
        raise ParseError(f"no kernel named {entry!r} in this module; it has: {known}")
    start = text.index("{", header.end())
    return _Body(text, entry, start, _files(text, sources)).kernel(_params(header.group(1)))


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_STATEMENT = re.compile(
    r"""\s*(?:(?P<loc>\.loc\s[^\n]*)
          |(?P<label>[\w$]+)\s*:(?!:)
          |(?P<open>\{)|(?P<close>\})
          |(?P<statement>[^;]+);
          |;)""",
    re.X,
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")
_RANGE = re.compile(r"(%?[A-Za-z_$][\w$]*?)<(\d+)>$")
_SPECIAL = re.compile(r"%(?:(?:n?tid|n?ctaid)\.[xyz]|laneid|warpid|nwarpid|lanemask_\w\w|dynamic_smem_size|clock\w*)$")


def _params(text: str) -> tuple[Param, ...]:
    params, offset = [], 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        match = _PARAM.match(declaration)
        if match is None or match[2] not in TYPE_BYTES:
            raise ParseError(f"unknown kernel parameter: {declaration}")
        unit = TYPE_BYTES[match[2]]
        align, size = int(match[1] or unit), unit * int(match[4] or 1)
        offset = -(-offset // align) * align
        params.append(Param(match[3], offset, size))
        offset += size
    return tuple(params)


def _files(text: str, sources: Mapping[str, str] | None) -> dict[int, tuple[str, list[str]]]:
    """Names and, where known, lines of the files that ``.loc`` refers to by number."""
    files = {}
    for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M):
        matching = [body for key, body in (sources or {}).items() if name.endswith(key) or key.endswith(name)]
        files[int(number)] = (name, matching[0].splitlines() if matching else [])
    return files


class _Body:
    """The parser's state inside one kernel body."""

    def __init__(self, text: str, entry: str, start: int, files: dict[int, tuple[str, list[str]]]) -> None:
        self.text, self.entry, self.start, self.files = text, entry, start, files
        self.newlines = [m.start() for m in re.finditer("\n", text)]
        self.registers: list[tuple[str, int]] = []
        #: Innermost scope last: inline assembly may declare registers inside braces.
        self.scopes: list[dict[str, Operand]] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        #: Where the function that a position belongs to was inlined, to rebuild the chain of callers.
        self.callers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.shared = {m[4]: m for m in _SHARED.finditer(text)}
        self.variables = module_variables(text)
        self.params: tuple[Param, ...] = ()
        self.symbols = set[str]()

    def kernel(self, params: tuple[Param, ...]) -> Kernel:
        self.params = params
        pending: list[tuple[Instruction, str]] = []
        frames: tuple[Frame, ...] = ()
        position = self.start
        while match := _STATEMENT.match(self.text, position):
            position = match.end()
            if (statement := match["statement"]) is not None:
                if statement[0] == ".":
                    self.directive(statement, match.start("statement"))
                else:
                    line = bisect_right(self.newlines, match.start("statement")) + 1
                    pending.append(self.instruction(" ".join(statement.split()), line, frames))
            elif match["loc"]:
                frames = self.location(match["loc"])
            elif match["label"]:
                self.labels[match["label"]] = len(pending)
            elif match["open"]:
                self.scopes.append({})
            elif match["close"]:
                self.scopes.pop()
                if not self.scopes:
                    break
        else:
            raise ParseError(f"the body of {self.entry} does not end")
        shared = tuple(
            SharedVariable(
                name,
                TYPE_BYTES[m[3]] * int(m[5] or (0 if m[1] else 1)),
                int(m[2] or TYPE_BYTES[m[3]]),
                bool(m[1]),
            )
            for name, m in self.shared.items()
            if name in self.symbols
        )
        instructions = tuple(self.resolve(instruction, label) for instruction, label in pending)
        known = {name: value for name, value in self.variables.items() if value is not None}
        return Kernel(self.entry, params, shared, tuple(self.registers), instructions, known)

    def directive(self, text: str, position: int) -> None:
        words = text.split(None, 2)
        if words[0] == ".reg":
            bits = REGISTER_BITS.get(words[1].lstrip("."))
            if bits is None:
                raise self.unsupported(f"registers of type {words[1]}", text, position)
            for name in (n.strip() for n in words[2].split(",")):
                if ranged := _RANGE.match(name):
                    self.ranges[ranged[1]] = (bits, int(ranged[2]))
                else:
                    self.scopes[-1][name] = self.new_register(name, bits)
        elif words[0] == ".local":
            raise self.unsupported("local memory: an array of this kernel does not stay in registers", text, position)
        elif words[0] not in (".shared", ".pragma"):
            raise self.unsupported(f"directive {words[0]}", text, position)

    def unsupported(self, what: str, text: str, position: int) -> UnsupportedInstruction:
        line = bisect_right(self.newlines, position) + 1
        return UnsupportedInstruction(f"{what} is not supported", line=line, text=" ".join(text.split()))

    def new_register(self, name: str, bits: int) -> Reg:
        self.registers.append((name, bits))
        return Reg(len(self.registers) - 1, bits)

    def location(self, text: str) -> tuple[Frame, ...]:
        match = _LOC.match(text)
        if match is None:
            raise ParseError(f"unknown line information: {text}")
        here = tuple(map(int, match.group(1, 2, 3)))
        if match[4]:
            self.callers[here] = tuple(map(int, match.group(4, 5, 6)))
        frames, seen = [], set[tuple[int, ...]]()
        at: tuple[int, ...] | None = here
        while at is not None and at not in seen:
            seen.add(at)
            name, lines = self.files.get(at[0], (f"file {at[0]}", []))
            frames.append(Frame(name, at[1], lines[at[1] - 1].strip() if 0 < at[1] <= len(lines) else ""))
            # The same source position may be inlined in one place and stand in the kernel itself in another: it has
            # callers only if this very .loc says so.
            at = self.callers.get(at) if at != here or match[4] else None
        # Line 0 is code the compiler made up between two statements.
        return tuple(frame for frame in frames if frame.line)

    def instruction(self, text: str, line: int, frames: tuple[Frame, ...]) -> tuple[Instruction, str]:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise ParseError("not an instruction", line=line, text=text)
        negated, guard, opcode, rest = match.groups()
        base, *modifiers = opcode.replace("::", "_").split(".")
        try:
            predicate = None
            if guard is not None:
                register = self.operand(guard)
                if not isinstance(register, Reg) or register.bits != 1:
                    raise ParseError(f"{guard} is not a predicate")
                predicate = Reg(register.index, 1, bool(negated))
            if base == "bra":
                return Instruction(opcode, base, tuple(modifiers), (), predicate, line, text, frames), rest.strip()
            operands = tuple(self.operand(part.strip()) for part in _OPERAND.findall(rest) if not part.isspace())
        except (ParseError, UnsupportedInstruction) as error:
            error.line, error.text, error.frames = line, text, frames
            raise
        used = used_registers(base, modifiers, operands)
        return Instruction(opcode, base, tuple(modifiers), operands, predicate, line, text, frames, -1, *used), ""

    def resolve(self, instruction: Instruction, label: str) -> Instruction:
        if not label:
            return instruction
        if label not in self.labels:
            raise ParseError(f"branch to unknown label {label}", line=instruction.line, text=instruction.text)
        return instruction._replace(target=self.labels[label])

    def operand(self, text: str) -> Operand:
        # Operands are kept by their text. One that is made of others (a vector, an address) may name a register that an
        # inner scope declares anew, so it is looked up in, and kept for, the innermost scope alone.
        compound = text[0] in "{[!" or "|" in text
        for scope in self.scopes[-1:] if compound else reversed(self.scopes):
            if (known := scope.get(text)) is not None:
                return known
        operand = self.new_operand(text)
        self.scopes[-1 if compound else 0][text] = operand
        return operand

    def new_operand(self, text: str) -> Operand:
        first = text[0]
        if first == "{":
            return Vector(tuple(self.operand(part.strip()) for part in text[1:-1].split(",")))
        if first == "[":
            base, comma, coordinates = text[1:-1].partition(",")
            if comma:
                # A place in a tensor: its map, and one coordinate per dimension.
                return Vector((self.address(base), self.operand(coordinates.strip())))
            return self.address(base)
        if first == "!":
            inner = self.operand(text[1:])
            if isinstance(inner, Reg):
                return Reg(inner.index, inner.bits, True)
        if "|" in text:
            return Vector(tuple(self.operand(part.strip()) for part in text.split("|")))
        if text == "_":
            return Ignored()
        if first == "%":
            if _SPECIAL.match(text):
                return Special(text)
            stem = text.rstrip("0123456789")
            bits, count = self.ranges.get(stem, (0, 0))
            if bits and len(stem) < len(text) and int(text[len(stem) :]) < count:
                return self.new_register(text, bits)
            raise ParseError(f"undeclared register {text}")
        if first in "+-0123456789":
            return literal(text)
        if re.fullmatch(r"[\w$]+", text):
            return self.symbol(text)
        raise ParseError(f"unknown operand {text}")

    def symbol(self, name: str) -> Symbol:
        if name in self.variables:
            raise UnsupportedInstruction(f"the module's variable {name} is read, written or has its address taken")
        if name not in self.shared and all(name != param.name for param in self.params):
            raise ParseError(f"neither a register, a parameter nor a shared variable: {name}")
        self.symbols.add(name)
        return Symbol(name)

    def address(self, text: str) -> Address:
        base, _, offset = text.partition("+")
        operand = self.operand(base.strip())
        if not isinstance(operand, (Reg, Imm, Symbol)):
            raise ParseError(f"unknown address [{text}]")
        return Address(operand, int(offset or "0", 0))
