"""Names under which a machine's curves are stored: what measures them and what reads them take each name from here. Torch-free.

The names are part of stored machines. Where a machine lacks a curve, whoever prices falls back to another or to a flat rate.
"""

from typing import Final, Literal

Curve = tuple[tuple[float, float], ...]
"""Rates attained by size, as (size, rate per second), sizes rising."""
MatmulSort = Literal["mm", "bmm", "small", "rows", "small rows"]
"""``rows`` are a generation's products of few rows; ``small`` ones are those that a quicker library is not asked for."""
AttentionWay = Literal["forward", "backward", "token"]
"""``token`` is attention of a generation's single tokens."""
PackingWay = Literal["pack", "unpack"]
PackedForm = Literal["bf16", "int8"]
"""The form in which a compressed trip stores numbers."""
DRAW: Final = "draw"
"""Op curve of one sequence that draws its token, by scores."""
_COLD: Final = " cold"


def matmul_curve_name(sort: MatmulSort, *, dtype: str, form: str = "", is_cold: bool = False) -> str:
    """``mm nt fp32``. form: empty for all forms together. is_cold: of weights that come from memory each time."""
    return _joined(sort, form, dtype) + _COLD * is_cold


def with_cold_in_place(curves: dict[str, Curve]) -> dict[str, Curve]:
    """The same curves, where each that has a cold one is replaced by it."""
    cold = {name.removesuffix(_COLD): curve for name, curve in curves.items() if name.endswith(_COLD)}
    return {**curves, **cold}


def attention_curve_name(way: AttentionWay, *, dtype: str, form: str = "") -> str:
    """``forward fp32``, ``forward whole fp32``. form: as a profile's op has it."""
    return _joined(way, form, dtype)


def op_curve_name(op: str, *, dtype: str = "fp32") -> str:
    """``tanh``, ``tanh bf16``. op: an op's name without its namespace, a kind of time, or ``DRAW``."""
    return _joined(op, "" if dtype == "fp32" else dtype)


def packing_curve_name(way: PackingWay, form: PackedForm) -> str:
    """``pack int8``."""
    return _joined(way, form)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
