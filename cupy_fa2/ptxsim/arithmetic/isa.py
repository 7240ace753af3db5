"""The opcode table: what each arithmetic, logic, comparison and selection instruction computes.

An entry of `TABLE` turns an opcode's modifiers into an `Operation`: the types of its operands and a pure
function of NumPy arrays. A modifier that no entry asks for is an UnsupportedInstruction, so nothing is
ignored in silence.

Floating point: every result is rounded to nearest even, once, but for ``fma.rn.f32``, which is computed in
float64 and may round twice (the product is exact, the sum is not: about one case in 2^29 differs in the last
bit). The ``.approx`` functions give the correctly rounded result, closer than a GPU's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..errors import UnsupportedInstruction
from ..types import DTYPES, Array, bits_of, is_float
from . import integer
from .convert import convert_entry
from .operation import Function, Modifiers, Operation, flush


def _arithmetic(plain: Function, floating: Function, arity: int = 2) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        return _floating(floating, t, m, arity) if is_float(t) else Operation((t,), (t,) * arity, plain)

    return build


def _multiply(m: Modifiers, addend: bool = False) -> Operation:
    t = m.type()
    if is_float(t):
        if addend:
            raise UnsupportedInstruction("mad of a float type: use fma")
        return _floating(np.multiply, t, m, 2)
    part = m.choice(("lo", "hi", "wide"))
    result = _double_width(t) if part == "wide" else t
    if not part:
        raise UnsupportedInstruction("an integer product needs .lo, .hi or .wide")
    product: Function = np.multiply if part == "lo" else integer.product_high
    if part == "wide":
        wide = DTYPES[result]

        def product(a: Array, b: Array) -> Array:
            full: Array = a.astype(wide) * b.astype(wide)
            return full

    if not addend:
        return Operation((result,), (t, t), product)
    return Operation((result,), (t, t, result), lambda a, b, c: product(a, b) + c)


def _divide_entry(m: Modifiers) -> Operation:
    t = m.type()
    if is_float(t):
        m.choice(("approx", "full"))
        return _floating(np.divide, t, m, 2)
    return Operation((t,), (t, t), integer.divide)


# Comparison and selection

_ORDERED: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    **dict.fromkeys(("lt", "lo"), np.less),
    **dict.fromkeys(("le", "ls"), np.less_equal),
    **dict.fromkeys(("gt", "hi"), np.greater),
    **dict.fromkeys(("ge", "hs"), np.greater_equal),
}
_COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(name: str, t: str) -> Function:
    """The comparison `name` for type `t`; those of floats that end in ``u`` hold for NaN."""
    if name in ("num", "nan"):
        return _unordered if name == "nan" else _negation(_unordered)
    if name in _ORDERED:
        # NumPy's != holds for NaN; the ordered one of PTX does not.
        return _ordered_unequal if name == "ne" and is_float(t) else _ORDERED[name]
    return _negation(compare(_OPPOSITE[name], t))


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _ordered_unequal(a: Array, b: Array) -> Array:
    return (a < b) | (a > b)


def _negation(function: Function) -> Function:
    return lambda a, b: ~function(a, b)


_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMPARISONS = (*_ORDERED, *_OPPOSITE, "num", "nan")


def _set_predicate(m: Modifiers) -> Operation:
    t = m.type()
    comparison = compare(m.choice(_COMPARISONS), t)
    m.flag("ftz")
    if not (combination := m.choice(_COMBINE)):
        return Operation(("pred", "pred"), (t, t), lambda a, b: _with_complement(comparison(a, b)))
    combine = _COMBINE[combination]

    def both(a: Array, b: Array, p: Array) -> tuple[Array, Array]:
        result = comparison(a, b)
        return combine(result, p), combine(~result, p)

    return Operation(("pred", "pred"), (t, t, "pred"), both)


def _with_complement(result: Array) -> tuple[Array, Array]:
    return result, ~result


def _select(m: Modifiers) -> Operation:
    t = m.type()
    return Operation((t,), (t, t, "pred"), lambda a, b, p: np.where(p, a, b))


def _fused(m: Modifiers) -> Operation:
    t = m.type()
    relu = m.flag("relu")
    towards_zero = m.flag("rz")
    if t == "f64":
        raise UnsupportedInstruction("fma.f64: a product of two float64 is not exact here")

    def fma(a: Array, b: Array, c: Array) -> Array:
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        result = exact.astype(a.dtype)
        if towards_zero:
            # The conversion rounded to nearest; what grew by it goes back one step. So an overflow ends at the largest
            # finite number, and a result is infinite only where an operand was.
            result = np.where(np.abs(result) > np.abs(exact), np.nextafter(result, np.zeros_like(result)), result)
        return _float_max(result, np.zeros_like(result)) if relu else result

    return _floating(fma, t, m, 3)


def _extremum(plain: Function, floating: Function, propagating: Function) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        chosen = propagating if m.flag("NaN") else floating
        return _floating(chosen, t, m, 2) if is_float(t) else Operation((t,), (t, t), plain)

    return build


def _copy_sign(m: Modifiers) -> Operation:
    t = m.type()
    return Operation((t,), (t, t), lambda a, b: np.copysign(b, a))


_PROPERTIES: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "notanumber": np.isnan,
    "number": lambda x: ~np.isnan(x),
}


def _test_property(m: Modifiers) -> Operation:
    t = m.type()
    return Operation(("pred",), (t,), _PROPERTIES[m.choice(_PROPERTIES, "finite")])


def _copy(a: Array) -> Array:
    return a


# Floating-point helpers


def _floating(function: Function, t: str, m: Modifiers, arity: int) -> Operation:
    """Wrap a function of one float type with the modifiers that all float instructions share."""
    if m.choice(("rz", "rm", "rp")):
        raise UnsupportedInstruction("only rounding to nearest even is supported")
    m.flag("rn")
    ftz, saturate = m.flag("ftz"), m.flag("sat")
    wrapped = _pairwise(function, t) if t.endswith("x2") else function
    if (ftz and t == "f32") or saturate:
        inner = wrapped

        def wrapped(*args: Array) -> Array:
            result = flush(inner(*map(flush, args))) if ftz else inner(*args)
            # fmax drops a NaN: .sat turns NaN into +0.
            return np.fmin(np.fmax(result, DTYPES[t].type(0)), DTYPES[t].type(1)) if saturate else result

    return Operation((t,), (t,) * arity, wrapped)


def _pairwise(function: Function, t: str) -> Function:
    half = DTYPES[t.removesuffix("x2")]

    def packed(*args: Array) -> Array:
        result: Array = function(*(a.view(half).reshape(-1, 2) for a in args))
        return np.ascontiguousarray(result.astype(half, copy=False)).view(np.uint32).reshape(-1)

    return packed


def _wide(function: Function) -> Function:
    """Compute in float64 and round to the type of the first operand."""

    def rounded(*args: Array) -> Array:
        result: Array = function(*(a.astype(np.float64) for a in args)).astype(args[0].dtype)
        return result

    return rounded


def _float_min(a: Array, b: Array) -> Array:
    """The lesser number; a NaN operand is dropped."""
    result: Array = np.fmin(a, b)
    # PTX orders -0 below +0; NumPy returns whichever zero comes its way.
    return np.where(a == b, np.where(np.signbit(a), a, b), result) if (result == 0).any() else result


def _float_max(a: Array, b: Array) -> Array:
    result: Array = np.fmax(a, b)
    return np.where(a == b, np.where(np.signbit(a), b, a), result) if (result == 0).any() else result


def _unary_f32(function: Function) -> Callable[[Modifiers], Operation]:
    def build(m: Modifiers) -> Operation:
        t = m.type()
        m.choice(("approx", "full"))
        return _floating(_wide(function), t, m, 1)

    return build


def _double_width(t: str) -> str:
    return f"{t[0]}{2 * bits_of(t)}"


TABLE: dict[str, Callable[[Modifiers], Operation]] = {
    "add": _arithmetic(np.add, np.add),
    "sub": _arithmetic(np.subtract, np.subtract),
    "mul": _multiply,
    "mad": lambda m: _multiply(m, addend=True),
    "fma": _fused,
    "div": _divide_entry,
    "rem": integer.same_type(integer.remainder, 2),
    "min": _extremum(np.minimum, _float_min, np.minimum),
    "max": _extremum(np.maximum, _float_max, np.maximum),
    "neg": _arithmetic(np.negative, np.negative, 1),
    "abs": _arithmetic(np.abs, np.abs, 1),
    "and": integer.same_type(np.bitwise_and, 2),
    "or": integer.same_type(np.bitwise_or, 2),
    "xor": integer.same_type(np.bitwise_xor, 2),
    "not": integer.same_type(integer.invert, 1),
    "shl": integer.shift(left=True),
    "shr": integer.shift(left=False),
    "shf": integer.funnel,
    "bfe": integer.field_extract,
    "bfi": integer.field_insert,
    "lop3": integer.logic3,
    "prmt": integer.permute,
    "popc": integer.counting(integer.count_ones),
    "clz": integer.counting(integer.count_leading_zeros),
    "bfind": integer.counting(integer.find_top),
    "brev": integer.same_type(integer.reverse_bits, 1),
    "cvt": convert_entry,
    "setp": _set_predicate,
    "selp": _select,
    "mov": integer.same_type(_copy, 1),
    "copysign": _copy_sign,
    "testp": _test_property,
    "sqrt": _unary_f32(np.sqrt),
    "rsqrt": _unary_f32(lambda x: 1.0 / np.sqrt(x)),
    "rcp": _unary_f32(lambda x: 1.0 / x),
    "ex2": _unary_f32(np.exp2),
    "lg2": _unary_f32(np.log2),
    "sin": _unary_f32(np.sin),
    "cos": _unary_f32(np.cos),
    "tanh": _unary_f32(np.tanh),
}


@functools.lru_cache(maxsize=1024)
def decode(base: str, modifiers: tuple[str, ...]) -> Operation:
    """Look an opcode up.

    Raises
    ------
    UnsupportedInstruction
        When the opcode, or one of its modifiers, is not in the table.
    """
    if base not in TABLE:
        raise UnsupportedInstruction(f"opcode {base} is not supported")
    remaining = Modifiers(modifiers)
    operation = TABLE[base](remaining)
    remaining.done()
    return operation
