"""Attention where keys and values lie: of the tokens after a prompt, on the host (FlexGen, Sheng et al. 2023, section 4.2).

A block's cache is a home of records, as any that is moved (``kv_placed.py``), and a prompt runs as with those. A token later its
key, its value and its query go to the host in one piece, the processor attends to the records, and the output comes back. So
what crosses the link does not grow with the cache, and the device holds none of it but a prompt's, as its records leave.

A model's own code asks for attention, through the interface that transformers has for that (``AttentionInterface``): while a
token is decoded the model is set to use one by the name of ``IMPLEMENTATION``, for which transformers also makes no masks. None
is needed: all that a block's cache holds is seen (``kv_layer.py``). Our decoder asks its keys
(``models/decoder/attention_hook.py``). Who attends in code of its own, or wants more than a scale and a soft cap on
scores, is refused with what it does.

The copies run in order with compute, not on the stream of other copies: compute waits for them, and they would wait for weights
that are on their way.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from optimizer.base.errors import InvalidModel
from optimizer.formats.host_attention import HostAttention
from optimizer.models.decoder.attention_hook import attend_of, set_attend
from optimizer.models.decoder.blocks import Block
from optimizer.runtime.generation.kv_placed import MovedKvLayer

IMPLEMENTATION: Final = "headroom_on_host"
_WIDE = torch.float32
_UNUSED = frozenset({"position_ids", "cache_position"})
"""Tensors that models hand on and attention to a whole cache has no use for."""


class HostAttendedKvLayer(MovedKvLayer):  # type: ignore[no-untyped-call]
    """Keys and values on the host, in the weights' dtype, that stay there."""

    query_shape: torch.Size | None = None
    """Attention for the newest token's query, as the model gave it: [batch, heads, 1, channels]."""
    caps_scores = False

    def __init__(self, *, num_seen: int = 0, **options: Any) -> None:
        """num_seen: as ``KvCache`` has it. Such a layer has no home, and what runs on the device is all that runs."""
        super().__init__(**options)
        self._num_seen = num_seen
        self._num_first = 0
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._host: HostAttention | None = None

    @property
    def is_waiting(self) -> bool:
        """True if a token was given and nobody attended."""
        return self._new is not None

    def begin(self) -> None:
        """Nothing comes."""

    def reset(self) -> None:
        super().reset()
        self._new = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The key and value of a token after the prompt, with ``attend`` to be asked for."""
        if not self._num_seen:
            return super().update(key_states, value_states)
        self._count(key_states, value_states)
        if self._num_seen > self._capacity:
            raise ValueError(f"{self._num_seen} tokens; the cache was made for {self._capacity}")
        self._new = key_states, value_states
        set_attend(key_states, self.attend)
        return key_states, value_states

    def attend(self, query: torch.Tensor, *, scaling: float | None, softcap: float | None) -> torch.Tensor:
        """[batch, 1, heads, channels of values] of the newest token's queries [batch, heads, 1, channels of keys]."""
        assert self._new is not None
        (keys, values), self._new = self._new, None
        batch, num_heads, _, key_dim = query.shape
        _check_query(query, keys)
        self.query_shape, self.caps_scores = query.shape, softcap is not None
        sent = torch.cat((keys.reshape(-1), values.reshape(-1), query.reshape(-1)))
        output = torch.empty((batch, 1, num_heads, values.shape[-1]), dtype=query.dtype, device=query.device)
        if self._home is not None:
            scale = key_dim**-0.5 if scaling is None else scaling
            self._attend_on_host(sent, output, scaling=scale, softcap=softcap)
        return output

    def _make_room(self) -> None:
        if self._num_seen:
            return
        # For the prompt's records, which leave from it; none come.
        self._workspace.make_slot(self.layout.num_brought(self._num_first) * self.layout.record_bytes)
        self._home = self._homes.take(self.layout.store_bytes, turn=self._turn, block=self._block, place="host")

    def _count(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[int, int]:
        """The room on the device is by the tokens that are given first."""
        if not self.is_initialized:
            self._num_first = key_states.shape[-2]
        return super()._count(key_states, value_states)

    def _attend_on_host(self, sent: torch.Tensor, output: torch.Tensor, *, scaling: float, softcap: float | None) -> None:
        tiers, home = self._homes.tiers, self._home
        assert home is not None
        assert home.data is not None
        if self._host is None or self._host.num_query_heads != output.shape[2]:
            self._host = HostAttention(kept=self.layout, num_query_heads=output.shape[2])
        room = self._homes.take_room(self._host.num_bytes)
        sums = room.views.get(self)
        if sums is None:
            sums = room.views[self] = HostSums(self._host, room.data, home.data, dtype=self.dtype)
        tiers.copy_to_host(sent, sums.arriving, beside=False).finish()
        with tiers.lanes.busy("host"):
            place = (self._num_seen - 1 - self._first) % self.layout.num_records
            size = self.layout.record_bytes
            home.data[place * size : (place + 1) * size].copy_(sums.record)
            sums.attend(min(self._num_seen, self.layout.num_records), scaling=scaling, softcap=softcap)
        tiers.copy_to_device(sums.leaving, output, beside=False)


class HostSums:
    """Attention of one block's newest token, in the room that all blocks share. Nothing is allocated."""

    def __init__(self, host: HostAttention, room: torch.Tensor, home: torch.Tensor, *, dtype: torch.dtype) -> None:
        """home: the block's records."""
        shape, offsets = host.kept.shape, host.offsets
        self._host, self._home = host, home.view(dtype)
        self._num_rows, self._dims = shape.num_rows, (shape.key_dim, shape.value_dim)
        self.arriving = room[: host.arriving_bytes]
        """From the device: a record and the queries."""
        self.record = self.arriving[: host.kept.record_bytes]
        self.leaving = room[offsets.leaving : offsets.leaving + host.leaving_bytes]
        """To the device: what attention makes."""
        query_size, output_size = ((self._num_rows, host.group_size, dim) for dim in self._dims)
        self._given = self.arriving[host.kept.record_bytes :].view(dtype).view(query_size)
        self._made = self.leaving.view(dtype).view(output_size)
        wide = room.view(_WIDE)
        self._scores, self._tokens = (wide[place // _WIDE.itemsize :] for place in (offsets.scores, offsets.tokens))
        self._query, self._output = self._given, self._made
        if host.is_widened:
            self._query = wide[offsets.query // _WIDE.itemsize :][: self._given.numel()].view(query_size)
            self._output = wide[offsets.output // _WIDE.itemsize :][: self._made.numel()].view(output_size)

    def attend(self, num_tokens: int, *, scaling: float, softcap: float | None) -> None:
        """To the first so many records."""
        if self._host.is_widened:
            self._query.copy_(self._given)
        query, output, num_queries = self._query.mul_(scaling), self._output, self._host.group_size
        size = (self._num_rows, num_queries, num_tokens)
        scores = self._scores.as_strided(size, (num_queries * num_tokens, num_tokens, 1))
        for part, keys in self._slices(scores, half=0):
            torch.bmm(query, keys.transpose(1, 2), out=part)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        torch.softmax(scores, dim=-1, out=scores)
        for index, (part, values) in enumerate(self._slices(scores, half=1)):
            if index:
                output.baddbmm_(part, values)
            else:
                torch.bmm(part, values, out=output)
        if self._host.is_widened:
            self._made.copy_(output)

    def _slices(self, scores: torch.Tensor, *, half: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Scores of some tokens with their keys (half 0) or values (half 1), [rows, tokens, channels] in fp32."""
        dim, num_rows, num_tokens = self._dims[half], self._num_rows, scores.shape[2]
        width = num_rows * sum(self._dims)
        start = half * num_rows * self._dims[0] + self._home.storage_offset()
        if not self._host.is_widened:
            yield scores, self._home.as_strided((num_rows, num_tokens, dim), (dim, width, 1), start)
            return
        for first in range(0, num_tokens, self._host.slice_tokens):
            count = min(self._host.slice_tokens, num_tokens - first)
            kept = self._home.as_strided((count, num_rows * dim), (width, 1), start + first * width)
            self._tokens.as_strided((count, num_rows * dim), (num_rows * dim, 1)).copy_(kept)
            wide = self._tokens.as_strided((num_rows, count, dim), (dim, num_rows * dim, 1))
            yield scores[:, :, first : first + count], wide


# What a model calls.


def check_asks_for_attention(blocks: Sequence[torch.nn.Module]) -> None:
    """Raise InvalidModel where blocks' code attends by itself: it is neither our decoder's nor does it know of the interface.
    What does and yet attends by itself is found as it runs.
    """
    place = type(blocks[0]).__module__
    if type(blocks[0]) is not Block and not hasattr(sys.modules[place], "ALL_ATTENTION_FUNCTIONS"):
        raise refuse(f"{type(blocks[0]).__name__} attends in code of its own")


@contextmanager
def attending_on_host(config: Any, *, otherwise: str | None) -> Iterator[None]:
    """Have a model's blocks ask ``attend_on_host`` for attention; afterwards the implementation ``otherwise``, None where the
    model has none to choose. Several forward passes of one model may be inside at once, if all end before any leaves.
    """
    if otherwise is None:
        yield
        return
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend_on_host)
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = otherwise


def attend_on_host(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the arguments that transformers passes. Raises InvalidModel where it would have to do what this cannot."""
    attend = attend_of(key)
    wanted = [name for name, given in others.items() if isinstance(given, torch.Tensor) and name not in _UNUSED]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if attend is None:
        wanted.append("keys that are not those of the cache")
    if attend is None or wanted:
        raise refuse(f"{type(module).__name__} gives attention {', '.join(wanted)}")
    return attend(query, scaling=scaling, softcap=softcap), None


def refuse(why: str) -> InvalidModel:
    """The error for a model whose attention cannot be computed elsewhere."""
    return InvalidModel(
        f"{why}; attention on the host takes queries, keys, values, a scale and a soft cap: "
        "choose plan.kv_cache.attention device",
        field="plan.kv_cache.attention",
        value="host",
        allowed=["device"],
    )


def _check_query(query: torch.Tensor, keys: torch.Tensor) -> None:
    if query.shape[1] % keys.shape[1] or query.shape[-1] != keys.shape[-1] or query.dtype != keys.dtype:
        raise refuse(
            f"queries are {query.shape[1]} heads of {query.shape[-1]} {query.dtype}, keys {keys.shape[1]} of "
            f"{keys.shape[-1]} {keys.dtype}"
        )


def check_attended(layers: Any, model_type: str) -> None:
    """Raise InvalidModel where a block was given a token and did not ask for attention where its keys and values are."""
    if any(isinstance(layer, HostAttendedKvLayer) and layer.is_waiting for layer in layers):
        raise refuse(f"{model_type} attends in code of its own")
