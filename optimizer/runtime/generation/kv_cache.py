"""Keys and values of the tokens so far, in transformers' interface: one preallocated pair of tensors per block, never grown.

transformers' own dynamic cache joins old and new keys at every layer of every step, so that both stand together and all is
copied once a token. Its static cache hands out its whole length, with a mask over what is not filled yet. Here each block's
tensors are made once, at their full length, by the block's first tokens; later tokens are written behind the earlier ones and
the filled part is handed out as a view: masks, and the kernels that attention takes, are those of the dynamic cache.

That is a plain cache (``kv_layer.py``). A plan may have it packed, or off the device, or both (``kv_placed.py``), or have a part
of it made again for each token (``kv_prefix.py``), or have it stay on the host, where attention is then computed
(``kv_host_attention.py``).

A prompt is given whole, then one token at a time.
"""

from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from optimizer.base.errors import InvalidModel
from optimizer.models.anatomy import WholeAnatomy, find_anatomy
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.runtime.generation.kv_host_attention import HostAttendedKvLayer
from optimizer.runtime.generation.kv_layer import KvLayer
from optimizer.runtime.generation.kv_placed import MovedKvLayer, PackedKvLayer, PlacedKvLayer
from optimizer.runtime.generation.kv_prefix import Positions, PrefixKvLayer
from optimizer.runtime.generation.kv_workspace import KvHomes, KvWorkspace
from optimizer.runtime.meter.meter import Meter

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


class KvCache(Cache):
    """The cache of a whole model."""

    def __init__(
        self,
        windows: Windows,
        *,
        capacity: int,
        num_seen: int = 0,
        meter: Meter | None = None,
        plan: KvCachePlan | None = None,
        workspace: KvWorkspace | None = None,
        homes: KvHomes | None = None,
        turn: int = 0,
    ) -> None:
        """capacity: tokens kept at most. num_seen: as if so many had been given, for a trace of what comes after them.

        meter: counts the tensors as ``kv_cache``. plan: a plain cache unless given; what is not plain needs ``workspace`` and
        ``homes``, and is traced with ``num_seen`` only where attention is on the host. turn: of caches that share these, which
        has its homes where.
        """
        if plan is None or plan.is_plain:
            super().__init__(
                layers=[
                    KvLayer(capacity=capacity, window=window, num_seen=num_seen, meter=meter) for window in windows
                ]
            )
            return
        assert workspace is not None
        assert homes is not None
        make: Callable[..., PlacedKvLayer] = MovedKvLayer if plan.dtype == "same" else PackedKvLayer
        if plan.attention == "host":
            make = partial(HostAttendedKvLayer, num_seen=num_seen)
        if plan.prefix_tokens:
            make = partial(PrefixKvLayer, positions=Positions(meter=meter))
        super().__init__(
            layers=[
                make(
                    capacity=capacity,
                    window=window,
                    meter=meter,
                    plan=plan,
                    workspace=workspace,
                    homes=homes,
                    turn=turn,
                    block=block,
                )
                for block, window in enumerate(windows)
            ]
        )
        chain([self])

    @property
    def attends_on_host(self) -> bool:
        """True if the next token's attention is computed there: not the prompt's."""
        return isinstance(self.layers[0], HostAttendedKvLayer) and self.get_seq_length() > 0

    def keep_sequences(self, kept: Sequence[int]) -> None:
        """Keep these sequences of a plain cache alone, numbered from 0 in rising order among those that are left."""
        for layer in self.layers:
            assert isinstance(layer, KvLayer)
            if layer.is_initialized:
                layer.keep_sequences(kept)

    def pass_over(self, length: int, *, but: Container[int]) -> None:
        """Count new tokens of a plain cache for blocks on other devices. but: numbers of the blocks that are here."""
        for block, layer in enumerate(self.layers):
            if block not in but:
                assert isinstance(layer, KvLayer)
                layer.pass_over(length)


def chain(caches: Sequence[KvCache]) -> None:
    """Have records come in the order in which caches that share a workspace take turns: block by block, in each block one cache
    after the other. To be called again when one of them goes.
    """
    in_order = [layer for layers in zip(*(cache.layers for cache in caches), strict=True) for layer in layers]
    for layer, following in zip_longest(in_order, in_order[1:]):
        if isinstance(layer, PlacedKvLayer):
            layer.following = following
