"""The words of the seam: one call of an op with its sizes, and what its kernel holds beside them. Torch-free."""

from typing import Literal, NamedTuple

from optimizer.base.intervals import ByteInterval, exact_interval

Certainty = Literal["exact", "bound", "unknown"]
"""Degree to which a number is known. exact: a formula that a source states. bound: an interval with its reason.
unknown: no source gives a number."""


class OpCall(NamedTuple):
    """One op at one shape, as far as a profile carries it."""

    name: str
    """Name of the overload, like ``aten.mm.default``."""
    dtype: str = ""
    """Dtype of the numbers it reads, as ``profile.Op.dtype``."""
    form: str = ""
    sides: tuple[int, ...] = ()
    """Sides of attention: the query's length, the keys' length, the width of a head."""
    read_bytes: int = 0
    written_bytes: int = 0


class Held(NamedTuple):
    """Bytes on the device that no tensor of the trace accounts for."""

    scratch: ByteInterval
    """Bytes held between the op's start and its end."""
    kept: ByteInterval
    """Bytes held from the op until its backward; of a backward op nothing."""
    certainty: Certainty = "exact"
    source: str = ""


NO_BYTES = exact_interval(0)
NOTHING = Held(NO_BYTES, NO_BYTES)


def interval_of(*candidates: int, likely: int) -> ByteInterval:
    """The interval from the least to the most of some candidates, the likely one among them."""
    return ByteInterval(low=min(*candidates, likely), value=likely, high=max(*candidates, likely))


def hold_while_running(scratch: ByteInterval, source: str) -> Held:
    """Scratch that goes with its op: exact where both ends meet."""
    return Held(scratch, NO_BYTES, "exact" if scratch.low == scratch.high else "bound", source)
