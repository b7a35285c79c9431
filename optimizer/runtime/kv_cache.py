"""Keys and values of the tokens so far, in transformers' interface: one preallocated pair of tensors per block, never grown.

transformers' own dynamic cache joins old and new keys at every layer of every step, so that both stand together and all is
copied once a token. Its static cache hands out its whole length, with a mask over what is not filled yet. Here each block's
tensors are made once, at their full length, by the block's first tokens; later tokens are written behind the earlier ones and
the filled part is handed out as a view: masks, and the kernels that attention takes, are those of the dynamic cache.

A block with a sliding window holds the window alone, as a ring: a new token takes the place of the oldest. All that is held
is seen then, so its order does not matter to attention, whose sum over keys is merely made in another order.

A prompt is given whole, then one token at a time.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from optimizer.errors import InvalidModel
from optimizer.models.anatomy import WholeAnatomy, find_anatomy
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.runtime.meter import Meter

Windows = Sequence[int | None]
"""For each block its sliding window, the own token included; None where it sees every earlier token."""
_DECODER_KINDS = ("full", "local")
_KINDS = (DynamicLayer, DynamicSlidingWindowLayer)


def find_windows(model: nn.Module) -> list[int | None]:
    """Raises InvalidModel where the model is no decoder that runs in two halves, or some block keeps anything but keys and values
    by token.
    """
    config: Any = model.config
    if isinstance(find_anatomy(model), WholeAnatomy):
        raise InvalidModel(
            f"{config.model_type} does not run as backbone and head; generation needs a causal decoder that does",
            field="model_type",
            value=config.model_type,
            allowed="a causal decoder",
        )
    if config.model_type == DECODER_TYPE:
        return [_window_of_kind(kind, config) for kind in config.layer_types]
    layers = DynamicCache(config=config).layers
    wrong = next((layer for layer in layers if type(layer) not in _KINDS), None)
    if wrong is not None:
        raise InvalidModel(
            f"{config.model_type} keeps a {type(wrong).__name__} between tokens; generation keeps keys and values of every "
            "token or of a sliding window",
            field="layer_types",
            value=type(wrong).__name__,
            allowed=[kind.__name__ for kind in _KINDS],
        )
    return [getattr(layer, "sliding_window", None) for layer in layers]


def _window_of_kind(kind: str, config: Any) -> int | None:
    if kind not in _DECODER_KINDS:
        raise InvalidModel(
            f"layer_types holds {kind}, which keeps no keys and values by token; generation with a cache needs full or local "
            "attention",
            field="layer_types",
            value=kind,
            allowed=list(_DECODER_KINDS),
        )
    return int(config.local_window) if kind == "local" else None


class KvLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Of one block: keys and values, each [batch, heads, slots, head_dim]."""

    is_croppable = False

    def __init__(self, *, capacity: int, window: int | None, num_seen: int, meter: Meter | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None
        self.sliding_window = window
        self.num_slots = capacity if window is None else min(capacity, window)
        self._num_seen = num_seen
        self._first = 0
        """Position whose place is the first slot; those that follow take the next ones, round and round."""
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
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, position = key_states.shape[-2], self._num_seen
        if position and length > 1:
            raise ValueError(f"{length} tokens after {position}; behind a prompt they come one at a time")
        self._num_seen += length
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
        return self.keys[:, :, :num_held], self.values[:, :, :num_held]

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

    def _make(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        return torch.empty((batch, heads, self.num_slots, dim), dtype=states.dtype, device=states.device)

    def _write(self, slot: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        end = slot + key_states.shape[-2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, slot:end].copy_(key_states)
        self.values[:, :, slot:end].copy_(value_states)


class KvCache(Cache):
    """Of a whole model."""

    def __init__(self, windows: Windows, *, capacity: int, num_seen: int = 0, meter: Meter | None = None) -> None:
        """capacity: tokens kept at most. num_seen: as if so many had been given, for a trace of what comes after them.

        meter: counts the tensors as ``kv_cache``.
        """
        super().__init__(
            layers=[KvLayer(capacity=capacity, window=window, num_seen=num_seen, meter=meter) for window in windows]
        )
