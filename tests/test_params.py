"""The argument struct: the C++ side, the NumPy dtype and the packer agree."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_fa2.compile import CompileError, compile_source
from cupy_fa2.params import ABI_VERSION, FWD_PARAMS, ParamStruct, render_header

OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--gpu-architecture=compute_80")
UNIT = '#include "params.cuh"\nextern "C" __global__ void unit(fa2::FwdParams) {}\n'


def test_the_packer_follows_the_dtype():
    values = [index + 1 for index in range(len(FWD_PARAMS.fields))]
    record = np.frombuffer(FWD_PARAMS.packer.pack(*values), FWD_PARAMS.dtype)[0]
    assert [record[name] for name, _, _ in FWD_PARAMS.fields] == values


def test_the_struct_begins_with_its_version():
    assert FWD_PARAMS.fields[0][0] == "abi_version"
    assert ABI_VERSION >= 1


def test_padding_is_refused():
    padded = ParamStruct("Padded", (("a", "u4", ""), ("b", "u8", "")))
    with pytest.raises(ValueError, match="Padded has padding"):
        _ = padded.dtype


def test_the_compiler_lays_the_struct_out_as_the_dtype_does():
    compile_source(UNIT, {"params.cuh": render_header()}, "unit", OPTIONS)


@pytest.mark.parametrize("kind", ["pointer", "stride", "size", "scale"])
def test_a_wrong_offset_does_not_compile(kind):
    field = {"pointer": "v", "stride": "k_stride_seq", "size": "seqlen_k", "scale": "scale_log2"}[kind]
    probe = re.compile(rf"probe_FwdParams\((\d+)\)\.{field} ==")
    header, count = probe.subn(lambda m: f"probe_FwdParams({int(m[1]) - 4}).{field} ==", render_header())
    assert count == 1
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_source(UNIT, {"params.cuh": header}, "unit", OPTIONS)
