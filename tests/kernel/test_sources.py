"""What the CUDA sources may know of each other: core <- policy <- kernels."""

from __future__ import annotations

import re

import pytest

from cupy_fa2.compile import source_root
from cupy_fa2.kernel.params import STRUCTS

#: Folder -> the folders that its files may include; `params.cuh` is the rendered header of argument structs.
MAY_INCLUDE = {
    "core": {"core"},
    "policy": {"core", "policy", "params.cuh"},
    "sm80": {"core", "policy", "sm80", "params.cuh"},
    "bench": {"core", "bench"},
}
SOURCES = sorted(source_root().rglob("*.cuh"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_includes_point_down(source):
    text = source.read_text()
    for name in re.findall(r'#include "([^"]+)"', text):
        assert name.split("/")[0] in MAY_INCLUDE[source.parent.name], f"{source} includes {name}"
    # core knows no argument struct; policies know the one that all kernels have, and no kernel's own.
    known = {"core": (), "policy": ("AttentionParams",)}.get(source.parent.name)
    if known is not None:
        named = {one.name for one in STRUCTS if re.search(rf"\b{one.name}\b", text)}
        assert named <= set(known), f"{source} knows {named}"


def test_every_folder_is_named():
    assert {path.parent.name for path in SOURCES} == set(MAY_INCLUDE)
