"""What the bench compares with, by name. Each peer is optional: where it cannot be had, its place holds the reason."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = [
    "TITLES",
    "Unavailable",
    "Wrong",
    "largest_difference",
    "module",
    "relative_difference",
    "tensor",
    "torch_module",
    "versions",
]

#: Name in results and on the command line -> title in tables. ``flash2``, ``cudnn`` and ``efficient`` are back ends of
#: torch's `scaled_dot_product_attention`.
TITLES = {
    "flash2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "flash3": "FlashAttention-3",
    "triton": "Triton",
    "efficient": "efficient",
    "flex": "flex_attention",
    "cupy": "CuPy by hand",
}

# Name in a result's versions -> module that has one.
_MODULES = (("torch", "torch"), ("triton", "triton"), ("flash3", "fa3_fwd_interface"))


class Unavailable(Exception):
    """A peer that cannot run here, or not this row; the message says why."""


class Wrong(Exception):
    """A peer that is trusted differs from us, so it is our own result that is wrong: the row has no time."""


@functools.cache
def module(name: str) -> Any:
    """A module that may be missing.

    Raises
    ------
    Unavailable
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises whatever it likes
        raise Unavailable(f"no {name} ({' '.join(str(error).split())[:80]})") from error


def torch_module() -> Any:
    """The module `torch`, with a CUDA device.

    Raises
    ------
    Unavailable
    """
    torch = module("torch")
    if not torch.cuda.is_available():
        raise Unavailable("this torch has no CUDA device")
    return torch


def versions() -> dict[str, str | None]:
    """Versions of the peers, None where one is missing."""
    found: dict[str, str | None] = {}
    for name, imported in _MODULES:
        try:
            found[name] = str(getattr(module(imported), "__version__", "unknown"))
        except Unavailable:
            found[name] = None
    try:
        found["cudnn"] = str(torch_module().backends.cudnn.version())
    except Unavailable:
        found["cudnn"] = None
    return found


def tensor(x: Any) -> Any:
    """An array as a torch tensor, without a copy."""
    torch = module("torch")
    if x.dtype == bool:  # travels as bytes: not every DLPack has a bool
        return torch.from_dlpack(x.view("u1")).view(torch.bool)
    return torch.from_dlpack(x)


def largest_difference(theirs: Any, ours: Any) -> float:
    """Largest difference of a torch tensor and a CuPy array; NaN if either has one."""
    return float((theirs.float() - tensor(ours).float()).abs().max())


def relative_difference(theirs: Any, ours: Any) -> float:
    """Norm of the difference of a torch tensor and a CuPy array over the norm of the second; NaN if either has one."""
    expected = tensor(ours).float()
    return float((theirs.float() - expected).norm() / expected.norm())
