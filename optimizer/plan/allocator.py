"""What can be decided about the CUDA caching allocator; without effect on the CPU device."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocatorPlan:
    """Settings of the process."""

    expandable_segments: bool = False
    """Segments that grow instead of new ones beside them: less fragmentation where sizes vary."""
