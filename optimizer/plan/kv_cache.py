"""Decisions about the cache of keys and values: its representation, and where it lives between uses."""

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
