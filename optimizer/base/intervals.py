"""A number of bytes that is not known exactly: the most likely one and its bounds. Torch-free, JSON-able."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ByteInterval:
    """``low <= value <= high``."""

    low: int
    value: int
    high: int

    def __add__(self, other: "ByteInterval") -> "ByteInterval":
        """Add the bounds, as if both parts were at their bounds at once."""
        return ByteInterval(low=self.low + other.low, value=self.value + other.value, high=self.high + other.high)


def exact_interval(num_bytes: int) -> ByteInterval:
    return ByteInterval(low=num_bytes, value=num_bytes, high=num_bytes)


def sum_intervals(intervals: Iterable[ByteInterval]) -> ByteInterval:
    return sum(intervals, start=exact_interval(0))
