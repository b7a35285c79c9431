"""Bytes and durations: the only place where they are converted or written for people.

Inside the program bytes are integers, durations are floats with their unit in the name. GiB and MiB are binary.
"""

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MOST_CHARACTERS = 30
_LEAST_BARE = MIB
"""A smaller number without a unit is taken for a slip: nobody budgets 8 bytes."""
_MOST_BYTES = 2**60
"""An exbibyte: the most that a goal allows, and far below the largest integer of a database."""
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size as people write it: ``12 GiB``, ``480MiB``; ``6e9`` is refused. A bare number is bytes, but for a text with a
    small one, which is refused with a question.

    Raises ValueError that names the accepted units.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"size {str(text)[:20]} is negative; give 0 or more bytes")
        return _within_reason(text)
    match = _QUANTITY.fullmatch(str(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNIT_BYTES:
        raise ValueError(
            f"size {text!r:.80} is not understood; write a number and one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        )
    number = match.group(1)
    if not unit and 0 < float(number) < _LEAST_BARE:
        raise ValueError(f"size {number!r:.40} has no unit; {number:.40} GiB? Write that, or {number:.40} B for bytes")
    if len(number) > _MOST_CHARACTERS:
        raise ValueError(f"size {number[:12]}… has {len(number)} digits; allowed: at most {_MOST_CHARACTERS}")
    # a whole number is kept exact; a float would round one above 2^53
    return _within_reason(int(number) * _UNIT_BYTES[unit] if number.isdigit() else round(float(number) * _UNIT_BYTES[unit]))


def _within_reason(num_bytes: int) -> int:
    if num_bytes > _MOST_BYTES:
        raise ValueError("the size is over 2^60 bytes; give at most 1,048,576 TiB")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Three significant figures in the largest binary unit that keeps the number at 1 or more: ``7.30 GiB``."""
    magnitude = abs(num_bytes)
    for unit, unit_bytes in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= unit_bytes:
            value = num_bytes / unit_bytes
            decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{num_bytes} B"


def format_duration(seconds: float) -> str:
    """Write a duration for people: ``40 ms``, ``12 s``, ``6 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def format_slowdown(times: float) -> str:
    """Words for a time beside another, which it is so many times: ``as fast``, ``32 % slower``, ``14 times as long``."""
    if times >= 2:
        return f"{times:.1f} times as long" if times < 10 else f"{times:.0f} times as long"
    percent = 100 * (times - 1)
    return f"{percent:.0f} % slower" if percent >= 1 else "as fast"
