"""Layout of keys and values that are packed or live off the device; runtime makes it and estimate predicts its sizes.
Torch-free; ``runtime/generation/kv_packing.py`` does the packing.

A block's cache is a row of records, each contiguous, so that new records are one copy and existing ones another. In the weights'
dtype a record is a token: its keys, then its values. Packed it is ``KV_BLOCK_TOKENS`` tokens: codes and numbers of the keys, then
of the values. Within both, tokens come first, then sequences, heads, channels.

int8  a signed byte for each element, a multiple of its token's and head's scale, the largest by 127.
int4  two elements in a byte: of the block's tokens the first half low, the second half high. ``low + step * code``, code 0 to 15;
      keys with a step and a low for each channel over the block's tokens, values for each token and group of channels. Keys have
      channels that are large in every token, which by token would cost all others their bits (KIVI, arXiv 2402.02750).

Scales, steps and lows are in the weights' dtype, rounded before they are used, so that packing and unpacking use the same.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Final

from optimizer.plan.kv_cache import KvDtype

KV_BLOCK_TOKENS: Final = 64
"""Tokens that are packed together, once; at most as many of the newest tokens are not packed."""
KV_GROUP_ELEMENTS: Final = 64
"""Largest number of a value's channels that share a step; the number used divides a head's channels evenly."""
PACKED_AT_ONCE: Final = 8
"""Blocks of a prompt that are packed at once, so that packing's own memory stays small."""
WIDE_BYTES: Final = 4
"""Bytes of the fp32 numbers in which packing computes."""


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """Keys and values of one block, of all sequences that run together."""

    batch_size: int
    num_heads: int
    key_dim: int
    value_dim: int
    element_bytes: int
    """Bytes of one number in the weights' dtype."""

    @property
    def num_rows(self) -> int:
        """Heads of all sequences together."""
        return self.batch_size * self.num_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token of each sequence, not packed."""
        return self.num_rows * (self.key_dim + self.value_dim) * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class PackedHalf:
    """The keys or the values in a record."""

    start: int
    """Byte at which it begins in the record."""
    dim: int
    codes_bytes: int
    numbers: tuple[int, ...]
    """Shape of the scales, or of the steps and of the lows: tokens or 1, then sequences, heads, channels or groups or 1."""
    has_lows: bool
    element_bytes: int

    @property
    def numbers_bytes(self) -> int:
        return prod(self.numbers) * self.element_bytes

    @property
    def steps_start(self) -> int:
        return self.start + self.codes_bytes

    @property
    def lows_start(self) -> int:
        return self.steps_start + self.numbers_bytes

    @property
    def end(self) -> int:
        return self.lows_start + (self.numbers_bytes if self.has_lows else 0)


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Number and size of the records in one block's cache, and the memory that is needed beside them."""

    shape: KvShape
    dtype: KvDtype
    capacity: int
    """Largest number of tokens that the cache is given."""
    window: int | None
    prefix_tokens: int = 0
    """First tokens that are kept off the device as hidden states (``kv_prefix.py``); on the device they are records like all."""
    state_bytes: int = 0
    """Bytes of the hidden state of one token of each sequence."""

    @property
    def is_packed(self) -> bool:
        return self.dtype != "same"

    @cached_property
    def num_records(self) -> int:
        """Records that the cache has room for."""
        if not self.is_packed:
            return self.capacity if self.window is None else min(self.capacity, self.window)
        every = max(0, (self.capacity - 1) // KV_BLOCK_TOKENS)
        return every if self.window is None else min(every, max(1, -(-(self.window - 1) // KV_BLOCK_TOKENS)))

    @cached_property
    def record_bytes(self) -> int:
        return self.values.end if self.is_packed else self.shape.token_bytes

    @property
    def store_bytes(self) -> int:
        return self.num_records * self.record_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the hidden states that are kept in place of records."""
        return self.prefix_tokens * self.state_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that records of those tokens would need more than their hidden states."""
        return self.prefix_tokens * self.record_bytes - self.prefix_bytes

    @property
    def home_bytes(self) -> int:
        """Bytes off the device: hidden states, then the records of the other tokens."""
        return self.store_bytes - self.saved_bytes

    @property
    def num_residual(self) -> int:
        """Newest tokens that have room, unpacked, beside packed ones."""
        return min(KV_BLOCK_TOKENS, self.capacity) if self.is_packed else 0

    @property
    def residual_bytes(self) -> int:
        return self.num_residual * self.shape.token_bytes

    @property
    def num_front(self) -> int:
        """Largest number of tokens that are unpacked for attention; 0 if all are among the newest."""
        if not self.is_packed or not self.num_records:
            return 0
        return min(self.capacity, (self.num_records + 1) * KV_BLOCK_TOKENS)

    @cached_property
    def front_bytes(self) -> int:
        """Bytes of the room that blocks use one after the other: for the keys and values that attention reads unpacked, and
        before that for packing.
        """
        if not self.num_front:
            return 0
        return max(
            self.num_front * self.shape.token_bytes, min(PACKED_AT_ONCE, self.num_records) * self.wide_block_bytes
        )

    @cached_property
    def wide_block_bytes(self) -> int:
        """Bytes that packing one record works in: its keys or values in fp32, and their scales."""
        num_each = max(prod(half.numbers) * (1 + half.has_lows) for half in (self.keys, self.values))
        num_elements = KV_BLOCK_TOKENS * self.shape.num_rows * max(self.shape.key_dim, self.shape.value_dim)
        return WIDE_BYTES * (num_elements + num_each)

    @cached_property
    def keys(self) -> PackedHalf:
        shape = self.shape
        numbers = (KV_BLOCK_TOKENS, 1) if self.dtype == "int8" else (1, shape.key_dim)
        return self._packed_half(0, shape.key_dim, (numbers[0], shape.batch_size, shape.num_heads, numbers[1]))

    @cached_property
    def values(self) -> PackedHalf:
        shape = self.shape
        num_groups = 1 if self.dtype == "int8" else shape.value_dim // gcd(shape.value_dim, KV_GROUP_ELEMENTS)
        numbers = (KV_BLOCK_TOKENS, shape.batch_size, shape.num_heads, num_groups)
        return self._packed_half(self.keys.end, shape.value_dim, numbers)

    def _packed_half(self, start: int, dim: int, numbers: tuple[int, ...]) -> PackedHalf:
        num_elements = KV_BLOCK_TOKENS * self.shape.num_rows * dim
        return PackedHalf(
            start=start,
            dim=dim,
            codes_bytes=num_elements if self.dtype == "int8" else num_elements // 2,
            numbers=numbers,
            has_lows=self.dtype == "int4",
            element_bytes=self.shape.element_bytes,
        )

    # Records that are there, and records that move, by the number of tokens that were given before.

    def first_block(self, num_seen: int) -> int:
        """Index of the oldest packed block of tokens that the next token still sees."""
        return 0 if self.window is None else max(0, (num_seen - self.window + 1) // KV_BLOCK_TOKENS)

    def num_packed(self, num_seen: int) -> int:
        """Blocks of tokens that were packed so far, dropped ones included."""
        return max(0, (num_seen - 1) // KV_BLOCK_TOKENS)

    def num_brought(self, num_seen: int) -> int:
        """Records that come to the device for the next token."""
        if self.is_packed:
            return max(0, self.num_packed(num_seen) - self.first_block(num_seen))
        return min(num_seen, self.num_records)

    def num_sent(self, num_seen: int) -> int:
        """Records that leave the device with the next token."""
        if self.is_packed:
            return self.num_packed(num_seen + 1) - self.num_packed(num_seen)
        return 1

    def num_sent_with_prompt(self, length: int) -> int:
        """Records that leave the device with a prompt."""
        return self.num_brought(length)

    def total_brought(self, low: int, high: int) -> int:
        """The sum of ``num_brought`` for every number of tokens from ``low`` to ``high``."""
        if self.is_packed:
            shift = 0 if self.window is None else self.window - 1
            dropped = 0 if self.window is None else _sum_floors(low - shift, high - shift)
            return _sum_floors(low - 1, high - 1) - dropped
        below = min(high, self.num_records)
        return (low + below) * max(0, below - low + 1) // 2 + self.num_records * (high - max(low - 1, below))

    def total_sent(self, low: int, high: int) -> int:
        """The sum of ``num_sent`` over the same numbers of tokens."""
        return self.num_packed(high + 1) - self.num_packed(low) if self.is_packed else high - low + 1


def _sum_floors(low: int, high: int) -> int:
    """The sum of ``max(0, x // KV_BLOCK_TOKENS)`` for every x from ``low`` to ``high``."""

    def up_to(last: int) -> int:
        quotient, rest = divmod(max(-1, last), KV_BLOCK_TOKENS)
        return KV_BLOCK_TOKENS * quotient * (quotient - 1) // 2 + quotient * (rest + 1) if quotient > 0 else 0

    return up_to(high) - up_to(low - 1)
