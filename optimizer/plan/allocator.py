"""Decisions about the CUDA caching allocator; they have no effect on the CPU device."""

from dataclasses import dataclass
from typing import Final

from optimizer.plan.knob import Face, Knob


@dataclass(frozen=True, kw_only=True)
class AllocatorPlan:
    """The caching allocator's settings for the whole process."""

    expandable_segments: bool = False
    """Segments that grow instead of new ones beside them: less fragmentation where sizes vary."""


@dataclass(frozen=True, kw_only=True)
class AllocatorPins:
    """Decisions of ``AllocatorPlan`` that are made beforehand; None leaves one free."""

    expandable_segments: bool | None = None


_FACE: Final = Face(label="Segments that grow", help="of torch's allocator on a card")
KNOBS: Final = (
    Knob(
        path="allocator.expandable_segments",
        plain=False,
        words={True: "yes", False: "no"},
        training=_FACE,
        generation=_FACE,
    ),
)
