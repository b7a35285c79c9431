"""Attention of a batch whose rows have keys and values of their own, each of its own length.

A row's newest key and value go into that row's cache, and its query attends to that cache alone, by the attention that the model
would have called (transformers' ``AttentionInterface``): nothing is padded, so that what a row comes to depends on no other row.
Models whose code attends by itself, or hands attention a mask, are found by ``Forward`` as it begins, and run row by row.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from optimizer.runtime.generation.kv_cache import KvCache

IMPLEMENTATION: Final = "headroom_by_row"
_NAME: Final = "headroom_rows"


class RowsNotSupportedError(Exception):
    """This model cannot be given several rows at once."""


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One block of all rows' caches. Rows beyond them are there to fill the batch; nothing is kept of those."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._seen = [
            layer.update(key_states[index : index + 1], value_states[index : index + 1])
            for index, layer in enumerate(self._layers)
        ]
        setattr(key_states, _NAME, self)
        return key_states, value_states

    def take_seen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values that each row sees; once for each token."""
        seen, self._seen = self._seen, []
        return seen

    @property
    def is_waiting(self) -> bool:
        """True if a token was given and nobody attended."""
        return bool(self._seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class RowsCache(Cache):
    """The caches of several rows as one, for one token of each."""

    def __init__(self, caches: Sequence[KvCache]) -> None:
        self._by_block = [RowsLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
        super().__init__(layers=[*self._by_block])

    def check_attended(self) -> None:
        """Raises RowsNotSupportedError where a block attended by code of its own."""
        if any(layer.is_waiting for layer in self._by_block):
            raise RowsNotSupportedError("a block attends in code of its own")


@contextmanager
def attending_by_row(config: Any) -> Iterator[None]:
    """Have a model's blocks ask ``attend`` for attention; afterwards the implementation that was there."""
    otherwise = config._attn_implementation
    AttentionInterface.register(IMPLEMENTATION, _attend_with(otherwise))
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = otherwise


def _attend_with(implementation: str) -> Any:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        layer: RowsLayer | None = getattr(key, _NAME, None)
        if layer is None or attention_mask is not None:
            raise RowsNotSupportedError(f"{type(module).__name__} gives attention keys or a mask of its own")
        own = _own_attention(module, implementation)
        outputs = [
            own(module, query[index : index + 1], keys, values, None, **others)[0]
            for index, (keys, values) in enumerate(layer.take_seen())
        ]
        filling = [torch.zeros_like(outputs[0])] * (len(query) - len(outputs))
        return torch.cat([*outputs, *filling]), None

    return attend


def _own_attention(module: torch.nn.Module, implementation: str) -> Any:
    """The attention that the model would call. Raises RowsNotSupportedError where there is none by a name."""
    if implementation in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[implementation]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise RowsNotSupportedError(f"{type(module).__name__} attends in code of its own")
    return eager
