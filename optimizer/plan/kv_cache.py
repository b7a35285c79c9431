"""Decisions about the cache of keys and values: its representation, and where it lives between uses."""

from dataclasses import dataclass
from typing import Literal

from optimizer.base.errors import InvalidPlan

KvDtype = Literal["same", "int8", "int4"]
KvPlace = Literal["device", "host", "disk", "remote"]
AttentionPlace = Literal["device", "host"]
_MAX_PREFETCH = 8


@dataclass(frozen=True, kw_only=True)
class KvCachePlan:
    """Representation, place and use of the keys and values of every token so far; blocks with a sliding window hold no more than
    the window.
    """

    dtype: KvDtype = "same"
    """Format of keys and values in the cache. same: the weights' dtype. int8: a byte an element and one scale for each token and
    head. int4: half a byte; keys have one scale and one offset for each channel of 64 tokens, values for each token and up to
    64 channels of a head. Both pack blocks of 64 tokens once, when all of them are there and another comes; the newest 1 to 64
    tokens keep the weights' dtype. Lossy."""
    place: KvPlace = "device"
    """Home of keys and values between uses. They are allocated at their full length with the prompt, and never grow. host, disk,
    remote (the memory of another machine, behind a store that speaks the Redis protocol): a block's cache comes to the device
    for its attention, token by token as it grew, and only new tokens go back. Packed blocks travel packed, and the newest
    tokens, which are not, stay on the device. Same bits."""
    prefetch: int = 1
    """Blocks whose cache is fetched ahead of its use, 0 to 8, each with room of its own on the device; without effect if no cache
    is fetched."""
    attention: AttentionPlace = "device"
    """Processor that computes the attention of tokens after the prompt. host: the one beside keys and values; a token's query,
    key and value go there and attention's output comes back, instead of the block's cache. Needs a cache on the host that is
    not packed. Same numbers, up to the order of sums."""
    prefix_tokens: int = 0
    """Most of each prompt's first tokens whose keys and values are rebuilt, 2 or more, or 0 for none. A block keeps and fetches
    their hidden states in place of keys and values, and its own projections make keys and values of them again for each token,
    while the other tokens' still come. Only off the device, not packed, in blocks without a window whose hidden states weigh
    less than keys and values. Same numbers, up to the order of sums."""

    def __post_init__(self) -> None:
        if self.prefix_tokens < 0 or self.prefix_tokens == 1:
            raise InvalidPlan(
                f"plan.kv_cache.prefix_tokens is {self.prefix_tokens}; allowed: 0, or 2 or more",
                field="plan.kv_cache.prefix_tokens",
                value=self.prefix_tokens,
                allowed="0, or 2 or more",
            )
        if not 0 <= self.prefetch <= _MAX_PREFETCH:
            raise InvalidPlan(
                f"plan.kv_cache.prefetch is {self.prefetch}; allowed: 0 to {_MAX_PREFETCH}",
                field="plan.kv_cache.prefetch",
                value=self.prefetch,
                allowed={"minimum": 0, "maximum": _MAX_PREFETCH},
            )

    @property
    def is_plain(self) -> bool:
        """True if blocks' tensors are on the device in the form that attention reads."""
        return self.dtype == "same" and self.place == "device"

    @property
    def num_ahead(self) -> int:
        """Blocks whose cache is fetched ahead of its use; 0 if no cache is fetched."""
        return 0 if self.place == "device" or self.attention == "host" else self.prefetch
