"""Outer steps, which bring ranks together that train alone for some steps: what crosses between them, and what each keeps.

Every rank keeps on its host, for each trained element, the weight that all had in common last and, of an outer step with
momentum, that, both in fp32. Trained elements are counted through in the model's order and cross in buckets, one all-reduce for
each:

fp32   the differences, each times the rank's share of the samples.
bf16   the same, rounded; they are added up in bf16.
int8   whole numbers of at most ``largest_int8``, so that the sum of all ranks fits 8 bits, with an fp32 scale for every
       ``SCALE_BLOCK_ELEMENTS`` differences: the largest on any rank, which an all-reduce of its own finds first.

Torch-free; ``runtime/ranks/outer_step.py`` does it and ``estimate/categories/outer_step.py`` prices it.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from optimizer.formats.transfer_sizes import SCALE_BLOCK_ELEMENTS, SCALE_BYTES
from optimizer.plan.devices.layout import SyncFormat, SyncRule

OUTER_LEARNING_RATE: Final = 0.7
"""The authors' best, as OUTER_MOMENTUM is: Douillard et al., DiLoCo (arXiv 2311.08105), section 3.1."""
OUTER_MOMENTUM: Final = 0.9
"""Momentum of Nesterov's kind."""
BUCKET_ELEMENTS: Final = 1 << 24
"""Differences that cross at once: so many that a round trip of a slow link is short beside them, and few beside a model."""
STATE_BYTES: Final[dict[SyncRule, int]] = {"average": 4, "nesterov": 8}
"""For each trained element: its last common weight, and its outer momentum if there is any."""
_INT8_LIMIT: Final = 127
SENT_BYTES: Final[dict[SyncFormat, int]] = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of a difference on its way."""


def list_buckets(num_elements: int) -> Iterator[range]:
    """The elements of each bucket, counted through all trained tensors in order."""
    for start in range(0, num_elements, BUCKET_ELEMENTS):
        yield range(start, min(start + BUCKET_ELEMENTS, num_elements))


def count_scales(num_elements: int) -> int:
    """The scales of so many differences of one bucket."""
    return -(-num_elements // SCALE_BLOCK_ELEMENTS)


def largest_int8(num_ranks: int) -> int:
    """The largest whole number that each of so many ranks may send."""
    return _INT8_LIMIT // num_ranks


class HostBuffers(NamedTuple):
    """Buffers that a rank keeps on its host beside what it keeps for each element."""

    num_values: int
    """Differences in fp32: of the largest bucket, to whole blocks of scales."""
    num_sent: int
    """The same in the format in which they cross; 0 in fp32."""
    num_scales: int
    num_rounded: int
    """Weights of the largest bucket in their own dtype, where that is below fp32 and there are no masters."""


def size_buffers(num_elements: int, *, sync_format: SyncFormat, are_rounded: bool) -> HostBuffers:
    """are_rounded: true where trained weights are below fp32 and have no masters."""
    largest = min(num_elements, BUCKET_ELEMENTS)
    blocks = count_scales(largest)
    return HostBuffers(
        num_values=blocks * SCALE_BLOCK_ELEMENTS,
        num_sent=0 if sync_format == "fp32" else blocks * SCALE_BLOCK_ELEMENTS,
        num_scales=blocks if sync_format == "int8" else 0,
        num_rounded=largest if are_rounded else 0,
    )


def count_host_bytes(
    num_elements: int, *, sync_format: SyncFormat, sync_rule: SyncRule, weight_bytes: int, are_rounded: bool
) -> int:
    """Bytes that a rank keeps on its host for the outer step. weight_bytes: of a trained weight in its own dtype."""
    buffers = size_buffers(num_elements, sync_format=sync_format, are_rounded=are_rounded)
    return (
        STATE_BYTES[sync_rule] * num_elements
        + 4 * buffers.num_values
        + SENT_BYTES[sync_format] * buffers.num_sent
        + SCALE_BYTES * buffers.num_scales
        + weight_bytes * buffers.num_rounded
    )
