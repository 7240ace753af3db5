"""The simulator's folders import each other in the order that its docstring states, and nothing of attention."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cupy_fa2 import ptxsim

ROOT = Path(ptxsim.__file__).parent
PACKAGE = ptxsim.__name__


def stated_ranks() -> dict[str, int]:
    """Folder or module -> its place in the docstring's order; those in one pair of braces have the same."""
    (line,) = re.findall(r"^    (\w+ -> .*)$", ptxsim.__doc__ or "", re.M)
    return {name: rank for rank, part in enumerate(line.split(" -> ")) for name in re.findall(r"\w+", part)}


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports."""
    package = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def inside() -> Iterator[tuple[Path, str, str]]:
    """For each import of a part of the simulator by another: the file, its own part, the other."""
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in imported(path):
            if name.startswith(f"{PACKAGE}.") and own != "__init__":
                other = name.removeprefix(f"{PACKAGE}.").split(".")[0]
                if other != own:
                    yield path, own, other


def test_every_part_has_its_place() -> None:
    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")} - {"__init__"}
    assert parts == stated_ranks().keys()


def test_each_part_imports_only_those_to_its_right() -> None:
    rank = stated_ranks()
    wrong = [f"{path.relative_to(ROOT)} imports {other}" for path, own, other in inside() if rank[other] <= rank[own]]
    assert wrong == []
    assert len(list(inside())) > 50


def test_the_simulator_imports_nothing_else_of_this_library() -> None:
    """It knows nothing of attention."""
    names = {name for path in ROOT.rglob("*.py") for name in imported(path)}
    assert [name for name in sorted(names) if name.startswith("cupy_fa2") and not name.startswith(PACKAGE)] == []


def test_the_public_names_are_these() -> None:
    assert sorted(ptxsim.__all__) == [
        "AsyncCopyError",
        "BatchView",
        "Card",
        "DeadlockError",
        "DivergenceError",
        "Frame",
        "GlobalMemory",
        "HazardError",
        "Kernel",
        "LaunchError",
        "MbarrierError",
        "MisalignedAddressError",
        "Observer",
        "OutOfBoundsError",
        "ParseError",
        "RaceError",
        "Report",
        "SimulationError",
        "StepEvent",
        "UninitializedReadError",
        "UnsupportedInstruction",
        "WaitEvent",
        "encode_tensor_map",
        "launch",
        "parse_kernel",
    ]
    assert all(hasattr(ptxsim, name) for name in ptxsim.__all__)
