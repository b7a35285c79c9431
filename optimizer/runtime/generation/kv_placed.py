"""One block's keys and values that are packed, or live off the device, or both.

Attention reads them in the workspace (``kv_workspace.py``), which all blocks share. What happens as tokens are given:

prompt          packed: all but its newest 1 to 64 tokens are packed, in whole blocks; then keys and values are written where
                attention reads them, as for a plain cache. Off the device: the records go to the block's home.
a token later   the block's records come from home, begun up to ``prefetch`` blocks before. Packed: where 64 tokens wait, they
                are packed; the new one waits; the records are unpacked, and what waits is copied behind them. Else the new
                token is written behind what came. What is new goes home: a token, or a block once in 64 tokens.

A window drops packed blocks whole, when their newest token is no longer seen; attention is given none that it does not see.
In a window off the device a new token takes the place of the oldest, which is brought nevertheless: one copy instead of two.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from optimizer.formats.kv_packing import KV_BLOCK_TOKENS, KvLayout, KvShape
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.kv_layer import KvLayer
from optimizer.runtime.generation.kv_packing import KvPacker
from optimizer.runtime.generation.kv_workspace import KvHomes, KvWorkspace, Slot
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.homes import OffDeviceBytes


class PlacedKvLayer(KvLayer):  # type: ignore[no-untyped-call]
    """The base of packed and moved caches."""

    def __init__(
        self,
        *,
        capacity: int,
        window: int | None,
        meter: Meter | None,
        plan: KvCachePlan,
        workspace: KvWorkspace,
        homes: KvHomes,
        turn: int,
        block: int,
    ) -> None:
        super().__init__(capacity=capacity, window=window, num_seen=0, meter=meter)
        self._capacity = capacity
        self._plan = plan
        self._workspace = workspace
        self._homes = homes
        self._turn, self._block = turn, block
        self._home: OffDeviceBytes | None = None
        self._brought: Slot | None = None
        self.following: PlacedKvLayer | None = None
        """Whose records come next, after this one's. A cache sets it to the next block's, ``chain`` to another cache's."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, key_dim = key_states.shape
        shape = KvShape(
            batch_size=batch,
            num_heads=heads,
            key_dim=key_dim,
            value_dim=value_states.shape[-1],
            element_bytes=key_states.element_size(),
        )
        self.layout = self._lay_out(shape, prompt_length=key_states.shape[-2])
        self._make_room()
        self.is_initialized = True

    @property
    def records(self) -> torch.Tensor:
        """[records, bytes] as they are kept, in the order in which they are; on the host a view, from a store a copy."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all tokens; memory stays."""
        self._num_seen = self._first = 0
        self._brought = None

    def begin(self) -> None:
        """Start to bring what the next token needs."""
        if self._home is None or self._brought is not None:
            return
        slot = self._brought = self._workspace.take_slot()
        size, offset = self.layout.record_bytes, 0
        for start, end in self._list_runs():
            slot.bring(self._homes.tiers, self._home, start=start * size, end=end * size, offset=offset)
            offset += (end - start) * size

    def _list_runs(self) -> Iterator[tuple[int, int]]:
        """Runs of the records that the next token needs, each from its first to its last place; none is empty."""
        raise NotImplementedError

    def _lay_out(self, shape: KvShape, *, prompt_length: int) -> KvLayout:
        return KvLayout(shape=shape, dtype=self._plan.dtype, capacity=self._capacity, window=self.sliding_window)

    def _make_room(self) -> None:
        """Bytes of its own, and in the workspace."""
        if self._plan.place == "device":
            return
        self._workspace.make_slot(self.layout.store_bytes)
        if self.layout.store_bytes:
            self._home = self._homes.take(
                self.layout.home_bytes, turn=self._turn, block=self._block, place=self._plan.place
            )

    def _count(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[int, int]:
        if self._num_seen:
            # By the tokens that were there before.
            self.begin()
        return super()._count(key_states, value_states)

    def _arrive(self) -> Slot:
        """The slot in which the records are, to be read; those of blocks that follow start to come."""
        slot, self._brought = self._brought, None
        assert slot is not None
        slot.arrive()
        self._begin_following()
        return slot

    def _begin_following(self) -> None:
        following = self.following
        for _ in range(self._plan.num_ahead):
            if following is None:
                break
            following.begin()
            following = following.following

    def _make_bytes(self, num_bytes: int) -> torch.Tensor:
        with nullcontext() if self._meter is None else self._meter.region("kv_cache"):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _tokens_in(self, data: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, sequences, heads, channels] in bytes that hold all keys, then all values."""
        shape = self.layout.shape
        num_keys = num_tokens * shape.num_rows * shape.key_dim
        num_values = num_tokens * shape.num_rows * shape.value_dim
        flat = data.view(self.dtype)
        sizes = (num_tokens, shape.batch_size, shape.num_heads)
        return (
            flat[:num_keys].view(*sizes, shape.key_dim),
            flat[num_keys : num_keys + num_values].view(*sizes, shape.value_dim),
        )


class MovedKvLayer(PlacedKvLayer):  # type: ignore[no-untyped-call]
    """In the weights' dtype, off the device. A record is a token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, position = self._count(key_states, value_states)
        window = self.sliding_window
        num_slots = self.layout.num_records
        slot = self._workspace.first_slot if not position else self._arrive()
        slot.may_change()
        if window is not None and length >= window:
            self._first = length - window
            self._write_records(slot, 0, key_states[:, :, -window:], value_states[:, :, -window:])
            return key_states, value_states
        place = position if window is None else (position - self._first) % num_slots
        if place + length > num_slots:
            raise ValueError(f"{self._num_seen} tokens; the cache was made for {num_slots}")
        self._write_records(slot, place, key_states, value_states)
        keys, values = self._records_in(slot, min(self._num_seen, num_slots))
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    @property
    def records(self) -> torch.Tensor:
        assert self._home is not None
        return self._home.read()[: self.layout.store_bytes].view(-1, self.layout.record_bytes)

    def _list_runs(self) -> Iterator[tuple[int, int]]:
        yield 0, self.layout.num_brought(self._num_seen)

    def _write_records(
        self, slot: Slot, place: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        length, size = key_states.shape[-2], self.layout.record_bytes
        keys, values = self._records_in(slot, place + length)
        keys[place:].copy_(key_states.permute(2, 0, 1, 3))
        values[place:].copy_(value_states.permute(2, 0, 1, 3))
        assert self._home is not None
        start, end = max(place, self.layout.prefix_tokens) * size, (place + length) * size
        if end > start:
            slot.send(self._homes.tiers, self._home, start=start, end=end, offset=start - self.layout.saved_bytes)

    def _records_in(self, slot: Slot, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first tokens in a slot: [tokens, sequences, heads, channels]."""
        shape = self.layout.shape
        flat = slot.data[: num_tokens * self.layout.record_bytes].view(self.dtype).view(num_tokens, -1)
        num_keys = shape.num_rows * shape.key_dim
        sizes = (num_tokens, shape.batch_size, shape.num_heads)
        return flat[:, :num_keys].view(*sizes, shape.key_dim), flat[:, num_keys:].view(*sizes, shape.value_dim)


class PackedKvLayer(PlacedKvLayer):  # type: ignore[no-untyped-call]
    """Packed, on the device or off it. A record is a block of tokens; blocks are numbered from the first token on."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, position = self._count(key_states, value_states)
        if self._num_seen > self._capacity:
            raise ValueError(f"{self._num_seen} tokens; the cache was made for {self._capacity}")
        new = key_states.permute(2, 0, 1, 3), value_states.permute(2, 0, 1, 3)
        if not position:
            self._pack_prompt(*new)
            if self.sliding_window is not None and length >= self.sliding_window:
                return key_states, value_states
            keys, values = self._write_front(new)
        else:
            keys, values = self._add(position, *new)
        return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    @property
    def records(self) -> torch.Tensor:
        data = self._store if self._home is None else self._home.read()
        return data[: self.layout.store_bytes].view(self.layout.num_records, self.layout.record_bytes)

    def _make_room(self) -> None:
        super()._make_room()
        layout = self.layout
        self._store = self._make_bytes(layout.store_bytes if self._plan.place == "device" else 0)
        self._residual = self._tokens_in(self._make_bytes(layout.residual_bytes), layout.num_residual)
        self._workspace.make_front(layout.front_bytes)
        self._packer = KvPacker(layout, self.dtype)

    def _pack_prompt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Into records what is in whole blocks and still seen, but for the newest; those wait."""
        length = len(keys)
        first, end = self.layout.first_block(length), self.layout.num_packed(length)
        done = 0
        for start, stop in self._places(first, end):
            tokens = slice((first + done) * KV_BLOCK_TOKENS, (first + done + stop - start) * KV_BLOCK_TOKENS)
            self._pack(keys[tokens], values[tokens], slot_record=done, place=start, slot=None)
            done += stop - start
        for waiting, given in zip(self._residual, (keys, values), strict=True):
            waiting[: length - end * KV_BLOCK_TOKENS].copy_(given[end * KV_BLOCK_TOKENS :])

    def _add(self, position: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token; all that it sees."""
        layout = self.layout
        slot = self._arrive() if self._home is not None else None
        first, before, end = layout.first_block(position), layout.num_packed(position), layout.num_packed(position + 1)
        if end > before:
            place = before % layout.num_records
            self._pack(*self._residual, slot_record=before - first, place=place, slot=slot)
        num_waiting = position - end * KV_BLOCK_TOKENS
        for waiting, new in zip(self._residual, (key, value), strict=True):
            waiting[num_waiting].copy_(new[0])
        num_waiting += 1
        num_hidden = 0
        if self.sliding_window is not None:
            num_hidden = max(0, position + 1 - self.sliding_window - first * KV_BLOCK_TOKENS)
        if first >= end:
            # No packed block is seen: the newest tokens are read where they wait.
            hidden = max(0, num_waiting - (self.sliding_window or num_waiting))
            return self._residual[0][hidden:num_waiting], self._residual[1][hidden:num_waiting]
        num_packed = (end - first) * KV_BLOCK_TOKENS
        front = self._tokens_in(self._workspace.front, num_packed + num_waiting)
        done = 0
        for records in self._list_records(slot, first, end):
            part = slice(done * KV_BLOCK_TOKENS, (done + len(records)) * KV_BLOCK_TOKENS)
            self._packer.unpack(records, keys=front[0][part], values=front[1][part])
            done += len(records)
        for target, waiting in zip(front, self._residual, strict=True):
            target[num_packed:].copy_(waiting[:num_waiting])
        return front[0][num_hidden:], front[1][num_hidden:]

    def _write_front(self, tokens: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt's keys and values for attention."""
        length = len(tokens[0])
        if not self.layout.num_front:
            return self._residual[0][:length], self._residual[1][:length]
        front = self._tokens_in(self._workspace.front, length)
        for target, given in zip(front, tokens, strict=True):
            target.copy_(given)
        return front

    def _pack(
        self, keys: torch.Tensor, values: torch.Tensor, *, slot_record: int, place: int, slot: Slot | None
    ) -> None:
        """Whole blocks, into the records from ``place`` on; off the device first into a slot's, from ``slot_record`` on."""
        num_blocks, size = len(keys) // KV_BLOCK_TOKENS, self.layout.record_bytes
        if self._home is None:
            self._packer.pack(
                keys, values, records=self.records[place : place + num_blocks], lent=self._workspace.front
            )
            return
        slot = slot or self._workspace.first_slot
        slot.may_change()
        start, end = slot_record * size, (slot_record + num_blocks) * size
        records = slot.data[start:end].view(num_blocks, size)
        self._packer.pack(keys, values, records=records, lent=self._workspace.front)
        slot.send(self._homes.tiers, self._home, start=start, end=end, offset=place * size)

    def _list_records(self, slot: Slot | None, first: int, end: int) -> Iterator[torch.Tensor]:
        """The caches of these blocks, in order."""
        if slot is not None:
            size = self.layout.record_bytes
            yield slot.data[: (end - first) * size].view(end - first, size)
            return
        for start, stop in self._places(first, end):
            yield self.records[start:stop]

    def _list_runs(self) -> Iterator[tuple[int, int]]:
        return self._places(self.layout.first_block(self._num_seen), self.layout.num_packed(self._num_seen))

    def _places(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Places of blocks, in runs: room is used again from the front."""
        room = self.layout.num_records
        while first < end:
            start = first % room
            stop = min(room, start + end - first)
            yield start, stop
            first += stop - start
