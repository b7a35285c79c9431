"""Decisions about the CUDA caching allocator; they have no effect on the CPU device."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocatorPlan:
    """The caching allocator's settings for the whole process."""

    expandable_segments: bool = False
    """Segments that grow instead of new ones beside them: less fragmentation where sizes vary."""
