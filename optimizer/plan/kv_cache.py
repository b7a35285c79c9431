"""What can be decided about the cache of keys and values: the representation, and where it lives between uses."""

from dataclasses import dataclass
from typing import Final, Literal

from optimizer.base.errors import InvalidPlan
from optimizer.plan.knob import Condition, Face, Knob, TechniqueDeclaration, Use, differs, equals, exceeds

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


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="offload_kv",
        label="keys and values off the device",
        sentence="Keeps keys and values on the host, the disk or in a remote store; each block's come for its attention.",
        group="Keys and values of generations",
        searches=("generation",),
        lowers=("kv_cache",),
    ),
    TechniqueDeclaration(
        name="host_attention",
        label="attention on the host",
        sentence="Leaves keys and values on the host and computes there the attention of the tokens that follow the prompt.",
        group="Keys and values of generations",
        searches=("generation",),
        lowers=("kv_cache",),
    ),
    TechniqueDeclaration(
        name="quantize_kv",
        label="keys and values in int8 or int4",
        sentence="Packs keys and values into a byte or half a byte an element, in blocks of 64 tokens.",
        group="Keys and values of generations",
        searches=("generation",),
        loss="any",
        lowers=("kv_cache",),
    ),
    TechniqueDeclaration(
        name="rebuild_kv",
        label="keys and values made again from hidden states",
        sentence="Keeps the hidden states of a prompt's first tokens, which weigh less, and makes their keys and values again.",
        group="Keys and values of generations",
        searches=("generation",),
        lowers=("kv_cache",),
    ),
)
_IS_AWAY: Final = Condition(path="kv_cache.place", holds=differs("device"))
KNOBS: Final = (
    Knob(
        path="kv_cache.dtype",
        plain="same",
        words={"same": "as the weights are"},
        uses=(Use(technique="quantize_kv", asks=differs("same")),),
        generation=Face(
            label="Keys and values in",
            change="keys and values in {value}",
            changes={"same": "keys and values as the weights are"},
        ),
    ),
    Knob(
        path="kv_cache.place",
        plain="device",
        words={"remote": "remote store"},
        uses=(
            Use(technique="offload_kv", asks=differs("device")),
            Use(technique="disk", asks=equals("disk")),
            Use(technique="remote", asks=equals("remote")),
        ),
        generation=Face(
            label="They live on",
            change="keys and values on the {value}",
            changes={"remote": "keys and values in the remote store"},
        ),
    ),
    Knob(
        path="kv_cache.prefetch",
        plain=1,
        matters_where=(_IS_AWAY, Condition(path="kv_cache.attention", holds=differs("host"))),
        generation=Face(
            label="Fetched ahead",
            help="blocks, of a cache that is away",
            change="keys and values of {value} blocks ahead instead of {before}",
        ),
    ),
    Knob(
        path="kv_cache.attention",
        plain="device",
        uses=(Use(technique="host_attention", asks=equals("host")),),
        generation=Face(
            label="Attention over them on", help="the host: where a cache of the host is", change="attention on the {value}"
        ),
    ),
    Knob(
        path="kv_cache.prefix_tokens",
        plain=0,
        uses=(Use(technique="rebuild_kv", asks=exceeds(0)),),
        generation=Face(
            label="Made again",
            help="of each prompt's first tokens so many, of a cache that is away; 0 for none",
            change="keys and values of {value:,} tokens of a prompt made again",
            changes={0: "no keys and values made again"},
        ),
    ),
)
