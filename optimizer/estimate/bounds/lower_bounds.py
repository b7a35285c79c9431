"""The lower bounds that a search reads, as types: what plans come to at least, without a price of any of them.

``relaxation.py`` works them out for training, ``generation_floor.py`` for a generation. A search needs only their form, so it
depends on no estimator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.plan.activations import BlockChoice, Compression

Numbers = NDArray[np.float64]
Form = tuple[BlockChoice, Compression]
"""A block's choice, with the packing of an offloaded block's copies."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Lower bounds on a setting's plans, at several counts of chunks. Bytes over all categories, milliseconds of a
    whole step.
    """

    num_of_kind: Numbers
    """Number of blocks but the last, by kind."""
    kind_bytes: Numbers
    """Bytes that such a block holds when forward ends, as [kind, form]."""
    kind_ms: Numbers
    """Milliseconds of such a block, as [sum, kind, form]."""
    last_bytes: Numbers
    """Bytes of the last block, with the highest of what comes on top of all blocks until its backward ends, as [chunks,
    form]."""
    last_ms: Numbers
    """Milliseconds of the last block, as [sum, form]."""
    fixed_bytes: float
    """Bytes that are always there, with all of the state on the device."""
    end_bytes: Numbers
    """Bytes at the end of backward, whatever the blocks do, above ``fixed_bytes``; by number of chunks."""
    fixed_ms: Numbers
    """Milliseconds of all but the blocks, as [sum, chunks]."""
    state_bytes: float
    """Bytes that go from the device where all of the state leaves that may."""
    state_ms: Numbers
    """Milliseconds more, or less, where all of the state leaves; by sum."""
    host_bytes: int
    """Bytes on the host between steps, where all of the state leaves."""
    state_host_bytes: int
    """The part of them that is state which may stay."""
    kind_host_bytes: Numbers
    """Bytes that such a block has on the host when forward ends, as [kind, form]."""
    last_host_bytes: Numbers
    """The same of the last block, by form."""
    disk_bytes: int
    remote_bytes: int
    margin: float
    """Share of a peak that the budget must have room for beside it."""


class Floors(NamedTuple):
    """Lower bounds of one arrangement, each by number of micro-batches and by batch size."""

    total_s: Numbers
    between_s: Numbers
    """Least time of batches between this and the next that make as many micro-batches, where a micro-batch's time is
    convex in its size."""
    prefill_ms: Numbers
    device_bytes: Numbers
    """Lower bound of the upper end of a prediction's interval."""
    host_bytes: Numbers
    disk_bytes: Numbers
    remote_bytes: Numbers
    prefix_tokens: Numbers | float = 0.0
    """Prefix length of a plan that makes keys and values again: of all lengths up to the plan's own the one that takes
    the least time, 0 where that is none. All times are no more than any of these lengths takes."""

    def of_rows(self, rows: Sequence[int]) -> "Floors":
        """The bounds of some of the numbers of micro-batches."""
        return self._replace(**{name: each[rows] for name, each in self._asdict().items() if not isinstance(each, float)})
