"""Range checks of the numbers in a workload and a goal; each refusal names the field and what is allowed."""

import math
import reprlib

from optimizer.base.errors import InvalidWorkload
from optimizer.base.shown import shown_value


def require_int(name: str, value: object, *, low: int, high: int, section: str = "workload") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidWorkload(
            f"{section}.{name} is {reprlib.repr(value)}; allowed: an integer from {low:,} to {high:,}",
            field=f"{section}.{name}",
            value=shown_value(value),
            allowed={"minimum": low, "maximum": high},
        )


def require_float(name: str, value: object, *, low: float, high: float, low_allowed: bool = True) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low <= value <= high) or (value == low and not low_allowed):  # type: ignore[operator]
        opening = "from" if low_allowed else "above"
        raise InvalidWorkload(
            f"workload.{name} is {reprlib.repr(value)}; allowed: a number {opening} {low:g} to {high:g}",
            field=f"workload.{name}",
            value=shown_value(value),
            allowed={"minimum": low, "maximum": high},
        )
