"""The variables of a module, outside of its kernels: what a host may look up in it by name, such as a version."""

from __future__ import annotations

import re

from ..errors import ParseError
from .kernel import TYPE_BYTES
from .literals import literal, literal_bytes

# In an opcode such as ld.global these words follow another character; a declaration begins with them.
_DECLARATION = re.compile(r"(?<!\S)(\.extern\s+)?\.(?:global|const)\s[^;]*;")
# Compiled when first needed: most modules have none.
_VARIABLE = r"""
    \.(?:global|const)\s+
    (?:\.attribute\s*\([^)]*\)\s*)?
    (?:\.align\s+\d+\s+)?
    \.(?P<type>\w+)\s+
    (?P<name>[\w$]+)\s*
    (?P<sizes>(?:\[\d+\])*)\s*
    (?:=\s*(?P<open>\{)?(?P<values>[^{}]*)(?(open)\})\s*)?;"""


def module_variables(text: str) -> dict[str, bytes | None]:
    """The initial bytes of each variable; None for one that holds an address, which only a loader knows.

    Parameters
    ----------
    text : str
        The module, without comments.

    Returns
    -------
    dict of str to bytes or None
        Variables in global or constant memory. Those that another module defines are not among them.
    """
    found = {}
    for declaration in _DECLARATION.finditer(text):
        if not declaration[1]:
            name, value = _variable(declaration[0])
            found[name] = value
    return found


def _variable(declaration: str) -> tuple[str, bytes | None]:
    match = re.fullmatch(_VARIABLE, declaration, re.X)
    if match is None or match["type"] not in TYPE_BYTES:
        raise ParseError(f"unknown variable of a module: {' '.join(declaration.split())}")
    t, size = match["type"], TYPE_BYTES[match["type"]]
    for count in re.findall(r"\d+", match["sizes"]):
        size *= int(count)
    values = [value.strip() for value in (match["values"] or "").split(",")]
    if any(value[:1].isalpha() or value[:1] in "_$%" for value in values if value):
        return match["name"], None
    data = b"".join(literal_bytes(literal(value), t) for value in values if value)
    if len(data) > size:
        raise ParseError(f"{match['name']} has {size} bytes and {len(data)} of initial values")
    return match["name"], data.ljust(size, b"\0")
