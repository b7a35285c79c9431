"""One block's keys and values on the device, in the weights' dtype: one preallocated pair of tensors, never grown.

A block with a sliding window holds the window alone, as a ring: a new token takes the place of the oldest. All that is held
is seen then, so its order does not matter to attention, whose sum over keys is merely made in another order.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from optimizer.runtime.meter.meter import Meter


class KvLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one block, each [batch, heads, slots, head_dim]."""

    is_croppable = False

    def __init__(self, *, capacity: int, window: int | None, num_seen: int, meter: Meter | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None
        self.sliding_window = window
        self.num_slots = capacity if window is None else min(capacity, window)
        self._num_seen = num_seen
        self._first = 0
        """Position whose place is the first slot; those that follow take the next ones, round and round."""
        self._num_sequences: int | None = None
        """That are left; None for all."""
        self._meter = meter

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        region = nullcontext() if self._meter is None else self._meter.region("kv_cache")
        with region:
            self.keys, self.values = self._make(key_states), self._make(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new tokens' and return all that these tokens see."""
        length, position = self._count(key_states, value_states)
        window = self.sliding_window
        if window is not None and length >= window:
            # Attention over the prompt sees more than is kept: what is kept is a copy, what is handed on was given.
            self._first = length - window
            self._write(0, key_states[:, :, -window:], value_states[:, :, -window:])
            return key_states, value_states
        slot = position if window is None else (position - self._first) % self.num_slots
        if slot + length > self.num_slots:
            raise ValueError(f"{self._num_seen} tokens; the cache was made for {self.num_slots}")
        self._write(slot, key_states, value_states)
        num_held = min(self._num_seen, self.num_slots)
        assert self.keys is not None
        assert self.values is not None
        number = self._num_sequences
        return self.keys[:number, :, :num_held], self.values[:number, :, :num_held]

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """These alone of those that are left, in rising order: moved to the front, where the tensors stay as they are."""
        num_held = min(self._num_seen, self.num_slots)
        assert self.keys is not None
        assert self.values is not None
        for tensor in (self.keys, self.values):
            move_to_front(tensor[:, :, :num_held], kept)
        self._num_sequences = len(kept)

    def pass_over(self, length: int) -> None:
        """Count tokens that the block runs for on another device, where their keys and values are."""
        self._num_seen += length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that ``update`` will return, and the position of the first."""
        window, num_seen = self.sliding_window, self._num_seen
        if window is None or num_seen < window:
            return num_seen + query_length, 0
        return window - 1 + query_length, num_seen - window + 1

    def get_seq_length(self) -> int:
        return self._num_seen

    def reset(self) -> None:
        """Forget all tokens; the tensors stay."""
        self._num_seen = self._first = 0

    def _count(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[int, int]:
        """Count new tokens and those before them. The first make the tensors."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, position = key_states.shape[-2], self._num_seen
        if position and length > 1:
            raise ValueError(f"{length} tokens after {position}; behind a prompt they come one at a time")
        self._num_seen += length
        return length, position

    def _make(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        return torch.empty((batch, heads, self.num_slots, dim), dtype=states.dtype, device=states.device)

    def _write(self, slot: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        end = slot + key_states.shape[-2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[: self._num_sequences, :, slot:end].copy_(key_states)
        self.values[: self._num_sequences, :, slot:end].copy_(value_states)


def move_to_front(rows: torch.Tensor, kept: Sequence[int]) -> None:
    """These rows of a tensor, in rising order, over its first; in place, and with no memory besides."""
    for row, source in enumerate(kept):
        if row != source:
            rows[row].copy_(rows[source])
