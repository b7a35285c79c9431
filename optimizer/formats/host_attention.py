"""Layout of the host memory in which attention runs beside keys and values on the host; runtime makes it and estimate predicts
it. Torch-free; ``runtime/generation/kv_host_attention.py`` does the computing.

For one token of each sequence, its key, its value and its query come to the host in one piece, attention reads the block's
records (``kv_packing.py``) there, and its output goes back. Scores and sums are fp32. Records in 16 bits are widened in slices of
tokens, because the processor multiplies 16-bit numbers several times slower than fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from optimizer.formats.kv_packing import WIDE_BYTES, KvLayout

SLICE_BYTES: Final = 4 << 20
"""Bytes of keys or values that are widened at once: they fit a processor's cache, and are enough that calls cost little."""
_ALIGNMENT: Final = 64
"""Bytes of a cache line, at which each part begins."""


class BufferOffsets(NamedTuple):
    """Byte at which each part of the host buffer begins, and the buffer's end."""

    arriving: int
    leaving: int
    scores: int
    query: int
    output: int
    tokens: int
    end: int


@dataclass(frozen=True, kw_only=True)
class HostAttention:
    """Sizes and offsets of one block's attention on the host."""

    kept: KvLayout
    """Layout of the block's keys and values, which are not packed."""
    num_query_heads: int

    @property
    def group_size(self) -> int:
        """Neighbouring query heads that share one head of keys and values."""
        return self.num_query_heads // self.kept.shape.num_heads

    @cached_property
    def query_bytes(self) -> int:
        shape = self.kept.shape
        return shape.batch_size * self.num_query_heads * shape.key_dim * shape.element_bytes

    @cached_property
    def arriving_bytes(self) -> int:
        """Bytes that come from the device for each token: a record and the queries."""
        return self.kept.record_bytes + self.query_bytes

    @cached_property
    def leaving_bytes(self) -> int:
        """Bytes that go back to the device for each token: the attention's output."""
        shape = self.kept.shape
        return shape.batch_size * self.num_query_heads * shape.value_dim * shape.element_bytes

    @property
    def is_widened(self) -> bool:
        return self.kept.shape.element_bytes != WIDE_BYTES

    @cached_property
    def slice_tokens(self) -> int:
        """Tokens that are widened at once."""
        each_bytes = WIDE_BYTES * self.kept.shape.num_rows * max(self.kept.shape.key_dim, self.kept.shape.value_dim)
        return min(self.kept.num_records, max(1, SLICE_BYTES // each_bytes))

    def num_slices(self, num_tokens: int) -> int:
        return -(-num_tokens // self.slice_tokens) if self.is_widened else 1

    @cached_property
    def offsets(self) -> BufferOffsets:
        shape = self.kept.shape
        widened = WIDE_BYTES * self.is_widened
        sizes = (
            self.arriving_bytes,
            self.leaving_bytes,
            WIDE_BYTES * shape.num_rows * self.group_size * self.kept.num_records,
            widened * shape.num_rows * self.group_size * shape.key_dim,
            widened * shape.num_rows * self.group_size * shape.value_dim,
            widened * self.slice_tokens * shape.num_rows * max(shape.key_dim, shape.value_dim),
        )
        return BufferOffsets(*_list_offsets(sizes))

    @property
    def num_bytes(self) -> int:
        """Host bytes of the buffer, which blocks use one after the other."""
        return self.offsets.end

    def num_flops(self, num_tokens: int) -> int:
        """FLOPs of both of attention's products."""
        shape = self.kept.shape
        return 2 * shape.num_rows * self.group_size * num_tokens * (shape.key_dim + shape.value_dim)

    def num_ops(self, num_tokens: int, *, caps_scores: bool) -> int:
        """Ops that the host runs, views among them: copies in both directions, keeping the record, and the sums."""
        sums = 2 + 13 * self.num_slices(num_tokens) if self.is_widened else 5
        return 15 + 3 * caps_scores + sums


def _list_offsets(sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield the offset of each part behind the one before, and then the end of the last."""
    place = 0
    for num_bytes in sizes:
        yield place
        place += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    yield place
