"""Argument structs: the C++ side, the NumPy dtype and the packer agree."""

from __future__ import annotations

import re

import numpy as np
import pytest
from sampling import sampled

from cupy_fa2.compile import CompileError, compile_source, gather_sources
from cupy_fa2.kernel.param_struct import Field, ParamStruct, Source
from cupy_fa2.kernel.params import ABI_VERSION, ATTENTION_PARAMS, FWD_PARAMS, FWD_TENSOR_PARAMS, STRUCTS

OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--gpu-architecture=compute_80")
UNIT = '#include "params.cuh"\nextern "C" __global__ void unit(fa2::FwdTensorParams) {}\n'


def compile_with(**changed: str) -> None:
    compile_source(UNIT, {**gather_sources(UNIT), **changed}, "unit", OPTIONS)


@pytest.mark.parametrize("params", STRUCTS, ids=lambda params: params.name)
def test_the_packer_follows_the_dtype(params):
    values = {f.name: bytes([i]) * 128 if f.kind == "map" else i + 1 for i, f in enumerate(params.fields)}
    packed = params.pack(dict(reversed(values.items())))
    record = np.frombuffer(packed, params.dtype)[0]
    assert len(packed) == params.size
    for field in params.fields:
        found = record[field.name]
        assert (found.tobytes() if field.kind == "map" else found) == values[field.name]


def test_values_are_packed_by_name():
    values = {field.name: 0 for field in FWD_PARAMS.fields}
    del values["seqlen_k"], values["out"]
    with pytest.raises(ValueError, match=r"missing: seqlen_k \(problem\), out \(address\); unknown: sequlen_k"):
        FWD_PARAMS.pack({**values, "sequlen_k": 7})


def test_a_template_waits_for_what_only_a_launch_knows():
    values = {f.name: 7 for f in FWD_TENSOR_PARAMS.of_source(Source.CONSTANT, Source.PROBLEM, Source.PLAN)}
    record = np.frombuffer(FWD_TENSOR_PARAMS.template(values), FWD_TENSOR_PARAMS.dtype)[0]
    for field in FWD_TENSOR_PARAMS.fields:
        waits = field.source in (Source.ADDRESS, Source.CALL, Source.MAP)
        assert bytes(record[field.name].tobytes()).strip(b"\0") == b"" if waits else record[field.name] == 7


def test_a_struct_begins_with_its_base():
    assert FWD_PARAMS.fields[: len(ATTENTION_PARAMS.fields)] == ATTENTION_PARAMS.fields
    assert all(FWD_TENSOR_PARAMS.offset(f.name) == FWD_PARAMS.offset(f.name) for f in FWD_PARAMS.fields)
    assert ATTENTION_PARAMS.fields[0].name == "abi_version"
    assert ABI_VERSION >= 1


def test_maps_are_aligned_as_the_driver_wants_them():
    assert FWD_TENSOR_PARAMS.alignment == 64
    assert FWD_TENSOR_PARAMS.offset("k_map") % 64 == FWD_TENSOR_PARAMS.offset("v_map") % 64 == 0
    assert FWD_TENSOR_PARAMS.size == FWD_TENSOR_PARAMS.offset("v_map") + 128


def field(name: str, kind: str) -> Field:
    return Field(name, kind, Source.PROBLEM)


def test_layouts_that_compilers_do_not_agree_on_are_refused():
    base = ParamStruct("Base", (field("a", "u8"), field("b", "u4")))
    with pytest.raises(ValueError, match="Derived must begin with a field of Base's alignment"):
        ParamStruct("Derived", (field("c", "u4"),), base)
    with pytest.raises(ValueError, match="Derived has two fields of one name"):
        ParamStruct("Derived", (field("a", "u8"),), base)
    with pytest.raises(ValueError, match="tensor maps to itself"):
        ParamStruct("Mixed", (field("m", "map"), field("c", "u8")))


def test_the_compiler_lays_the_structs_out_as_the_dtypes_do():
    compile_with()


@pytest.mark.parametrize("params", ["AttentionParams", "FwdParams", "FwdTensorParams"])
@pytest.mark.parametrize("name", sampled(["v", "k_stride_seq", "seqlen_k", "scale_log2"], "seqlen_k"))
def test_a_wrong_offset_does_not_compile(params, name):
    header = gather_sources(UNIT)["params.cuh"]
    probe = re.compile(rf"probe_{params}\((\d+)\)\.{name} ==")
    header, count = probe.subn(lambda m: f"probe_{params}({int(m[1]) - 4}).{name} ==", header)
    assert count == 1
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_with(**{"params.cuh": header})
