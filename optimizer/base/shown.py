"""Values as an error's fields carry them: plain JSON, cut to what an answer can hold."""

import math
from typing import Any

_MOST_CHARACTERS_SHOWN = 200
_LARGEST_INT_SHOWN = 2**63


def shown(value: Any) -> Any:
    """A refused value as an error may carry it: short, and JSON whatever was sent; of a container only its kind."""
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS_SHOWN]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _LARGEST_INT_SHOWN else f"about {_magnitude(value)}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else type(value).__name__


def _magnitude(value: int) -> str:
    return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}"
