"""The variables of a module, outside of its kernels."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ptx_tools import aligned

from cupy_fa2 import ptxsim
from cupy_fa2.compile import compile_source

KERNEL = "\n.visible .entry k(.param .u64 p)\n{{\n.reg .b32 x; .reg .b64 a;\n{}\nret;\n}}\n"


def variables(text: str) -> dict[str, bytes]:
    return dict(ptxsim.parse_kernel(text + KERNEL.format(""), "k").variables)


@pytest.mark.parametrize(
    ("declaration", "value"),
    [
        (".visible .global .align 4 .u32 v = 3;", b"\3\0\0\0"),
        (".global .align 4 .u32 v = 3;", b"\3\0\0\0"),
        (".visible .const .align 4 .b32 v = 0x10U;", b"\x10\0\0\0"),
        (".global .s16 v = -2;", b"\xfe\xff"),
        (".global .align 8 .u64 v = -81985529216486896;", struct.pack("<Q", 0xFEDCBA9876543210)),
        (".global .align 1 .b8 v[6] = {1, 2, 255};", b"\1\2\xff\0\0\0"),
        (".global .align 4 .b8 v[3];", b"\0\0\0"),
        (".global .u32 v[2][2] = {1, 2, 3};", struct.pack("<4I", 1, 2, 3, 0)),
        (".weak .global .align 4 .u32 v[2] = {4,\n  5};", struct.pack("<2I", 4, 5)),
        (".global .f32 v = 0f3FC00000;", struct.pack("<f", 1.5)),
        (".global .f32 v[3] = {1.5, -2, 0d4004000000000000};", struct.pack("<3f", 1.5, -2, 2.5)),
        (".global .f64 v = 0d4004000000000000;", struct.pack("<d", 2.5)),
        (".global .attribute(.managed) .align 4 .u32 v = 7;", b"\7\0\0\0"),
    ],
)
def test_initial_bytes(declaration: str, value: bytes) -> None:
    assert variables(declaration) == {"v": value}
    between = f".extern .shared .align 16 .b8 shared[];\n// .global .u32 w = 1;\n{declaration}\n.global .u8 u = 9;"
    assert variables(between) == {"v": value, "u": b"\t"}
    assert variables(KERNEL.replace("k(", "other(").format("") + declaration) == {"v": value}


def test_an_address_and_what_another_module_defines_have_no_bytes() -> None:
    text = ".global .u32 v = 1; .global .u64 p[2] = {0, generic(v)};\n.global .u64 q = v+4; .extern .global .u32 w;"
    assert variables(text) == {"v": b"\1\0\0\0"}


@pytest.mark.parametrize(
    "declaration",
    [
        ".global .v4 .f32 v;",
        ".global .u128 v;",
        ".global .u32 v = {{1}};",
        ".global .u32 v = 1x;",
        ".const .surface v;",
    ],
)
def test_unknown_declarations_are_refused(declaration: str) -> None:
    with pytest.raises(ptxsim.ParseError, match=r"v|1x"):
        variables(declaration)


def test_more_values_than_bytes_are_refused() -> None:
    with pytest.raises(ptxsim.ParseError, match="v has 8 bytes and 12 of initial values"):
        variables(".global .u32 v[2] = {1, 2, 3};")


@pytest.mark.parametrize(
    "instruction", ["ld.global.u32 x, [v];", "ld.const.u32 x, [v+4];", "st.global.u32 [v], 1;", "mov.u64 a, v;"]
)
@pytest.mark.parametrize("initial", ["= 3", "", "= generic(k)"])
def test_a_kernel_that_touches_one_is_refused_by_name(instruction: str, initial: str) -> None:
    text = f".global .u32 v {initial};\n" + KERNEL.format(instruction)
    with pytest.raises(ptxsim.UnsupportedInstruction, match="the module's variable v ") as caught:
        ptxsim.parse_kernel(text, "k")
    assert (caught.value.line, caught.value.text) == (6, instruction.removesuffix(";"))


def test_a_register_may_have_the_name_of_a_variable() -> None:
    kernel = ptxsim.parse_kernel(".global .u32 x = 3;" + KERNEL.format("mov.u32 x, 1;"), "k")
    assert kernel.variables == {"x": b"\3\0\0\0"}


def test_a_version_that_nvrtc_compiled_in() -> None:
    """A loader may check the version of an argument struct; the kernel itself runs as ever."""
    source = """
    extern "C" __device__ const unsigned abi_version = 3;
    extern "C" __device__ const char abi_name[] = "a;b{}";
    extern "C" __device__ const unsigned sizes[3] = {1, 70000};
    extern "C" __global__ void k(unsigned* out) { out[threadIdx.x] = abi_version + threadIdx.x; }
    """
    ptx, _, _ = compile_source(source, {}, "versions", ("--gpu-architecture=compute_80",))
    kernel = ptxsim.parse_kernel(ptx, "k")
    assert int.from_bytes(kernel.variables["abi_version"], "little") == 3
    assert kernel.variables["abi_name"] == b"a;b{}\0"
    assert kernel.variables["sizes"] == struct.pack("<3I", 1, 70000, 0)
    out, memory = aligned(32 * 4).view(np.uint32), ptxsim.GlobalMemory()
    params = memory.bind(out, "out", writable=True).to_bytes(8, "little")
    ptxsim.launch(kernel, (1, 1, 1), (32, 1, 1), 0, params, memory)
    assert (out == np.arange(32) + 3).all()
