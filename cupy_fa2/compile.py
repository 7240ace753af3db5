"""From a spec to machine code: NVRTC behind a content-addressed cache.

CuPy's RawModule could compile too, but its cache does not look into included files, it cannot build for a card that is
not there, and it compiles with flags of its own. Here the key of a cache entry covers everything that the result
depends on: the rendered unit, every included text, the options, the NVRTC version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_fa2.kernel import params
from cupy_fa2.kernel.base import KernelSpec

__all__ = ["Binary", "CompileError", "build", "cache_dir", "compile_source", "nvrtc_version", "source_root"]

_OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_USAGE = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_MAGIC = b"cupy_fa2 binary 1\n"


class CompileError(RuntimeError):
    """NVRTC is missing, or refused a source; the message carries its log."""


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes
    ----------
    name : str
        The spec's name.
    arch : str
        Target, such as ``"sm_90"``.
    cubin : bytes
        Machine code, a whole ELF file. Empty where only PTX was asked for.
    ptx : str
        The PTX it was assembled from.
    registers, spill_bytes : int
        Per thread, as the assembler reports them (-1 where it did not run).
    path : pathlib.Path or None
        The cached cubin, or None where the cache could not be written.
    """

    name: str
    arch: str
    cubin: bytes
    ptx: str
    registers: int
    spill_bytes: int
    path: Path | None = None


def source_root() -> Path:
    """The folder of the CUDA sources: inside an installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for root in (package / "cuda_src", package.parent / "cuda_src"):
        if (root / "sm80" / "fwd.cuh").is_file():
            return root
    raise FileNotFoundError(f"the CUDA sources are neither in {package} nor beside it; reinstall cupy_fa2")


def cache_dir() -> Path:
    """``$CUPY_FA2_CACHE_DIR``, else ``cupy_fa2`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("CUPY_FA2_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cupy_fa2"


def gather_sources(unit: str) -> dict[str, str]:
    """Every text that `unit` includes, directly or not, by the name it is included under."""
    root = source_root()
    found: dict[str, str] = {}
    pending = [unit]
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            if name not in found:
                found[name] = params.render_header() if name == "params.cuh" else (root / name).read_text()
                pending.append(found[name])
    return found


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CompileError(
            "CuPy is needed to compile kernels: pip install cupy-cuda12x 'cuda-toolkit[nvrtc,cudart]==12.*' "
            "(or cupy-cuda13x with ==13.*)"
        ) from error
    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC library that CuPy has found, such as ``(12, 9)``."""
    try:
        major, minor = _nvrtc().getVersion()
    except CompileError:
        raise
    except Exception as error:  # CuPy raises whatever its loader raised, at length
        raise CompileError(
            f"NVRTC, the run-time compiler of CUDA, was not found ({str(error).strip().partition(chr(10))[0]}). "
            "Install it with: pip install 'cuda-toolkit[nvrtc]==12.*' (==13.* beside cupy-cuda13x)"
        ) from error
    return int(major), int(minor)


def known_target(arch: str) -> str:
    """`arch`, or the newest one of its generation that NVRTC knows: machine code runs on later members of it.

    What is specific to one architecture (``"sm_90a"``) has no such relatives.

    Raises
    ------
    CompileError
        If NVRTC knows none.
    """
    kind, _, number = arch.partition("_")
    nvrtc_version()
    known = _nvrtc().getSupportedArchs()
    specific = number.endswith("a")
    wanted = int(number.rstrip("a"))
    relatives = [one for one in known if one <= wanted and one // 10 == wanted // 10]
    fitting = [one for one in relatives if one == wanted or not specific]
    if not fitting:
        version = ".".join(map(str, nvrtc_version()))
        raise CompileError(
            f"NVRTC {version} does not know {arch}, it knows {', '.join(f'{kind}_{one}' for one in known)}; "
            "install a newer one, such as: pip install cupy-cuda13x 'cuda-toolkit[nvrtc,cudart]==13.*'"
        )
    return f"{kind}_{max(fitting)}{'a' if specific else ''}"


def compile_source(unit: str, headers: dict[str, str], name: str, options: tuple[str, ...]) -> tuple[str, bytes, str]:
    """Run NVRTC once, without any cache.

    Returns
    -------
    ptx : str
    cubin : bytes
        Empty for a virtual architecture (``compute_NN``).
    log : str
    """
    nvrtc_version()
    nvrtc = _nvrtc()
    texts, names = [text.encode() for text in headers.values()], [header.encode() for header in headers]
    program = nvrtc.createProgram(unit, f"{name}.cu", texts, names)
    try:
        try:
            nvrtc.compileProgram(program, list(options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(f"NVRTC {nvrtc_version()} could not compile {name} ({error}):\n{log}") from error
        ptx = nvrtc.getPTX(program)
        cubin = b"" if any("=compute_" in option for option in options) else bytes(nvrtc.getCUBIN(program))
        text = (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0")
        # Line information names the unit and its includes as if they lay in the working directory.
        with contextlib.suppress(OSError):  # it may be gone
            text = text.replace(f'"{os.getcwd()}/', '"')
        return text, cubin, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _whole_elf(cubin: bytes) -> bytes:
    """The cubin as a whole ELF file: CuPy 14.2 drops the last byte, which tools other than the driver miss."""
    if cubin[:4] != b"\x7fELF":
        raise CompileError("NVRTC gave no ELF file")
    table, entry_size, entries = (
        int.from_bytes(cubin[a:b], "little") for a, b in ((0x28, 0x30), (0x3A, 0x3C), (0x3C, 0x3E))
    )
    programs, program_size, program_count = (
        int.from_bytes(cubin[a:b], "little") for a, b in ((0x20, 0x28), (0x36, 0x38), (0x38, 0x3A))
    )
    size = max(table + entry_size * entries, programs + program_size * program_count)
    if len(cubin) < size - 1:
        raise CompileError(f"the cubin is cut short: {len(cubin)} bytes of at least {size}")
    return cubin.ljust(size, b"\0")


def _encode(binary: Binary) -> bytes:
    header = f"{binary.registers} {binary.spill_bytes} {len(binary.ptx.encode())} {len(binary.cubin)}\n".encode()
    body = header + binary.ptx.encode() + binary.cubin
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _decode(blob: bytes, name: str, arch: str, path: Path) -> Binary | None:
    """The entry's content, or None where it is damaged in any way."""
    head = len(_MAGIC) + 65
    if not blob.startswith(_MAGIC) or hashlib.sha256(blob[head:]).hexdigest().encode() != blob[len(_MAGIC) : head - 1]:
        return None
    line, _, rest = blob[head:].partition(b"\n")
    registers, spills, ptx_size, cubin_size = (int(word) for word in line.split())
    cubin = rest[ptx_size : ptx_size + cubin_size]
    return Binary(name, arch, cubin, rest[:ptx_size].decode(), registers, spills, path)


def _write(path: Path, blob: bytes) -> bool:
    """Write-then-rename, so that no reader ever sees half an entry. False where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: its files are for one user alone, and a cache may be shared.
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_bytes(blob)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError:
        return False
    return True


_built: dict[str, Binary] = {}
_lock = threading.Lock()


def build(spec: KernelSpec, arch: str, *, line_info: bool = False) -> Binary:
    """Compile `spec` for `arch`, or fetch it from the cache.

    Parameters
    ----------
    spec : KernelSpec
    arch : str
        A real architecture (``"sm_90"``, ``"sm_90a"``) for machine code, a virtual one (``"compute_80"``) for PTX
        alone: `cupy_fa2.kernel.base.target`.
    line_info : bool
        Keep source lines in the PTX. For the simulator; the compiler writes its working directory into the text, so
        machine code is built without.

    Raises
    ------
    CompileError
        If NVRTC is missing or refuses the source.
    """
    arch = known_target(arch)
    unit = spec.render()
    headers = gather_sources(unit)
    options = (*_OPTIONS, f"--gpu-architecture={arch}", *(("--generate-line-info",) if line_info else ()))
    if nvrtc_version() >= (12, 9):
        options += ("--no-cache",)  # NVRTC's own cache skips the assembler, and with it the report of registers
    digest = hashlib.sha256(repr((unit, sorted(headers.items()), options, nvrtc_version())).encode()).hexdigest()
    with _lock:
        if digest in _built:
            return _built[digest]
    path: Path | None = None
    binary: Binary | None = None
    with contextlib.suppress(RuntimeError):  # no home folder: nothing is kept
        path = cache_dir() / f"{spec.name}_{arch}_{digest[:32]}.bin"
    if path is not None:
        with contextlib.suppress(OSError):  # not there yet, or not readable: build
            binary = _decode(path.read_bytes(), spec.name, arch, path)
    if binary is None:
        ptx, cubin, log = compile_source(unit, headers, spec.name, options)
        usage, spills = _USAGE.search(log), _SPILLS.search(log)
        binary = Binary(
            spec.name,
            arch,
            _whole_elf(cubin) if cubin else b"",
            ptx,
            int(usage[1]) if usage else -1,
            int(spills[2]) + int(spills[3]) if spills else -1,
        )
        if path is not None:
            _write(path, _encode(binary))
    with _lock:
        return _built.setdefault(digest, binary)
