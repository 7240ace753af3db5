"""The house: who may import whom, without circles, and the names that users import."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupy_fa2

PACKAGE = "cupy_fa2"
ROOT = Path(cupy_fa2.__file__).parent

#: Packages and modules from the top to the bottom: each imports only from those after it, and not from those beside it
#: in one pair of braces. `__init__` is what `import cupy_fa2` gives.
ORDER = (
    "__main__ -> cli -> __init__ -> api -> call -> {compile, ptxsim, plan} -> problem -> kernel -> {device, dropout}"
)

#: These stand aside: no kernel's way leads through them, and they know only what they are checked against.
ASIDE = {"testing": {"reference"}, "reference": {"problem", "dropout"}}
MAY_USE_THEM = {"__main__", "cli"}

RANK = {name: rank for rank, part in enumerate(ORDER.split(" -> ")) for name in re.findall(r"\w+", part)}


def module_name(path: Path) -> str:
    """``cupy_fa2.plan.pick``; of a package's ``__init__.py`` the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(name: str) -> Iterator[tuple[str, bool]]:
    """Modules of the package that a module imports, and whether it does so as soon as it is imported itself."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found = [full if (full := f"{module}.{alias.name}") in MODULES else module for alias in node.names]
        else:
            continue
        for each in found:
            if each in MODULES and each != name:
                yield each, id(node) not in later


def part(name: str) -> str:
    """The package or module of `ORDER` that a module belongs to."""
    return [*name.split("."), "__init__"][1]


def test_every_part_has_its_place():
    assert {part(name) for name in MODULES} == RANK.keys() | ASIDE.keys()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_below(name):
    own = part(name)
    for other in {part(each) for each, _ in imported(name)} - {own}:
        if own in ASIDE:
            assert other in ASIDE[own], f"{name} imports {other}"
        elif other in ASIDE:
            assert own in MAY_USE_THEM, f"{name} imports {other}"
        else:
            assert RANK[other] > RANK[own], f"{name} imports {other}"


def test_no_circles():
    """Of modules that import each other as they are imported."""
    needs = {name: {each for each, at_once in imported(name) if at_once} for name in MODULES}
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"circles among {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


# --- what users import --------------------------------------------------------------------------------------

#: Paths that README, documents, examples and bench name; they stay where they are.
PATHS = [
    "cupy_fa2.flash_attention", "cupy_fa2.simulator", "cupy_fa2.dropout_mask", "cupy_fa2.CompileError",
    "cupy_fa2.compile.build", "cupy_fa2.compile.compile_source",
    "cupy_fa2.device.NAMED_DEVICES", "cupy_fa2.device.named_device", "cupy_fa2.device.cuda_device",
    "cupy_fa2.dropout.dropout_mask", "cupy_fa2.dropout.dropout_values", "cupy_fa2.dropout.threshold",
    "cupy_fa2.plan.plan_forward", "cupy_fa2.problem.Problem", "cupy_fa2.call.run",
    "cupy_fa2.ptxsim.parse_kernel", "cupy_fa2.ptxsim.launch", "cupy_fa2.ptxsim.GlobalMemory.bind",
    "cupy_fa2.cli.main.main",
]  # fmt: skip

#: The public packages, and all that is in them.
PUBLIC = {
    "cupy_fa2": {"CompileError", "__version__", "dropout_mask", "flash_attention", "simulator"},
    "cupy_fa2.reference": {
        "Array", "Layout", "attention", "attention_rows", "host", "naive", "naive_rows", "score_magnitude",
        "softcap_error",
    },
    "cupy_fa2.testing": {
        "DTYPES", "EVERYTHING", "Example", "OPTION_EXAMPLES", "OPTION_SIZES", "OPTION_VARIANTS", "SCORE_ARRAY_AXES",
        "SCORE_ARRAY_STORAGES", "STORAGES", "Storage", "assert_attention_close", "assert_poison_intact",
        "attention_examples", "host", "lse_tolerance", "poisoned", "random_bias", "random_mask", "random_qkv",
        "sample_rows", "tolerance", "ulp", "with_options",
    },
}  # fmt: skip


def found(path: str) -> object:
    """What a dotted path leads to: a module, then attributes."""
    words = path.split(".")
    for length in range(len(words), 0, -1):
        if ".".join(words[:length]) in MODULES:
            there = importlib.import_module(".".join(words[:length]))
            for word in words[length:]:
                there = getattr(there, word)
            return there
    raise ImportError(path)


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_leads_somewhere(path):
    assert found(path) is not None


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_package_has_these_names(package):
    names = importlib.import_module(package).__all__
    assert sorted(names) == sorted(PUBLIC[package])
    assert all(found(f"{package}.{name}") is not None for name in names)


def test_what_the_documents_name_is_there():
    """Every ``cupy_fa2.…`` in text and code, and every name that they import from it."""
    checkout = ROOT.parent
    documents = [checkout / "README.md", *(checkout / "docs").glob("*.md"), *(checkout / "examples").glob("*.py")]
    if not documents[0].is_file():
        pytest.skip("the tests do not stand in a checkout")
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)
    named = set(re.findall(r"(?<![\w/-])cupy_fa2(?:\.(?!py\b)[A-Za-z_]\w*)+", text))
    for module, names in re.findall(r"from (cupy_fa2[\w.]*) import (\w+(?:, \w+)*)", text):
        named |= {f"{module}.{name}" for name in names.split(", ")}
    assert len(named) > 5
    for path in sorted(named):
        assert found(path) is not None
