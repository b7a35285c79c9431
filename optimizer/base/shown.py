"""Shortens values for the fields of an error: plain JSON, cut to a length that an answer can hold."""

import math
from typing import Any

_MOST_CHARACTERS_SHOWN = 200
_LARGEST_INT_SHOWN = 2**63


def shown_value(value: Any) -> Any:
    """A refused value in the form that an error carries: short, always JSON, and for a container only its kind."""
    if isinstance(value, str):
        return value[:_MOST_CHARACTERS_SHOWN]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _LARGEST_INT_SHOWN else f"about {_power_of_two(value)}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else type(value).__name__


def shown_field(path: str) -> str:
    """Write a dotted path of a field in words: ``kv_cache.place`` becomes ``KV cache place``."""
    return path.replace("num_", "number of ").replace("kv_", "KV ").replace(".", " ").replace("_", " ")


def _power_of_two(value: int) -> str:
    return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}"
