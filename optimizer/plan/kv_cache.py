"""What can be decided about the cache of keys and values: the representation, and where it lives between uses."""

from dataclasses import dataclass
from typing import Literal

from optimizer.base.errors import InvalidPlan

KvDtype = Literal["same", "int8", "int4"]
KvPlace = Literal["device", "host", "disk", "remote"]
AttentionPlace = Literal["device", "host"]
_MAX_PREFETCH = 8


@dataclass(frozen=True, kw_only=True)
class KvCachePlan:
    """Keys and values of every token so far, by block; blocks with a sliding window hold no more than the window."""

    dtype: KvDtype = "same"
    """Of keys and values as the cache holds them. same: that of the weights. int8: a byte an element and one scale for each
    token and head. int4: half a byte; of keys one scale and one offset for each channel of 64 tokens, of values for each token
    and up to 64 channels of a head. Both in blocks of 64 tokens that are packed once, when all of them are there and another
    comes; the newest 1 to 64 tokens are as the weights are. Lossy."""
    place: KvPlace = "device"
    """Where they are between uses. They are allocated at their full length with the prompt, and never grow. host, disk, remote
    (the memory of another machine, behind a store that speaks the Redis protocol): a block's cache comes to the device for its
    attention, token by token as it grew, and only what is new goes back. Packed blocks travel packed, and the newest tokens,
    which are not, stay on the device. Same bits."""
    prefetch: int = 1
    """Blocks whose cache comes ahead of its use, 0 to 8, each with room of its own on the device; of no meaning where no cache
    comes."""
    attention: AttentionPlace = "device"
    """Where attention of the tokens after the prompt is computed. host: where keys and values lie, by the processor; a token's
    query, key and value go there and what attention makes of them comes back, instead of the block's cache. For a cache on the
    host that is not packed. Same numbers, up to the order of sums."""
    prefix_tokens: int = 0
    """Of each prompt's first tokens, at most so many, 2 or more, or 0 for none: the hidden states that a block was given lie in
    place of their keys and values, come in their place, and the block's own projections make keys and values of them again for
    each token, while the others still come. Only off the device, not packed, in blocks without a window whose hidden states
    weigh less than keys and values. Same numbers, up to the order of sums."""

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
        """Whether blocks' tensors are simply there, as attention reads them."""
        return self.dtype == "same" and self.place == "device"

    @property
    def num_ahead(self) -> int:
        """Blocks whose cache comes ahead of its use."""
        return 0 if self.place == "device" or self.attention == "host" else self.prefetch
