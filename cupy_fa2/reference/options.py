"""Options of the definition: those of a call that say what is computed, by the names and defaults that calls have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cupy_fa2.problem import Options

__all__ = ["NAMES", "filled", "takes_options"]

#: Without those that say where results go, which there are, and in which dtype.
NAMES = tuple(name for name in Options._fields if name not in ("out", "out_dtype", "return_lse"))

F = TypeVar("F", bound=Callable[..., Any])


def filled(given: Mapping[str, Any]) -> Options:
    """The options given, with defaults for the others.

    Raises
    ------
    TypeError
        One is not among `NAMES`.
    """
    unknown = sorted(given.keys() - set(NAMES))
    if unknown:
        raise TypeError(f"the definition has no option {', '.join(unknown)}; it has {', '.join(NAMES)}")
    return Options(**given)


def takes_options(function: F) -> F:
    """Show the options by name in the signature of a function that hands its ``**options`` to `filled`."""
    own = inspect.signature(function)
    kinds = inspect.Parameter
    named = [kinds(name, kinds.KEYWORD_ONLY, default=Options._field_defaults[name]) for name in NAMES]
    kept = [parameter for parameter in own.parameters.values() if parameter.kind is not kinds.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*kept, *named])  # type: ignore[attr-defined]
    return function
