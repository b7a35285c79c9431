"""Keys and values of a prompt's first tokens, made again for each token from the hidden states that their block was given.

Off the device those hidden states lie in place of keys and values, and come in their place, first, into the same room. As the
block begins, keys and values are made of them and written over them, while the records of the other tokens still come; then the
block runs as ever. Sources: KVPR (arXiv 2411.17089) for the split, HCache (EuroSys 2025) for hidden states.

The block's own forward makes them: it is run on the hidden states up to where it hands keys and values to its cache, which here
takes them and leaves by an exception. So norms, biases, packed weights and rotary positions are those of the block, and no model
needs code of its own. Nobody asks for the queries of those tokens, so a ``q_proj`` is passed over; where one product makes
queries, keys and values together, all three are made.

*Assumed*: keys and values of a token depend on its hidden state and position alone, as they do wherever a cache is of any use.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from optimizer.base.errors import InvalidModel, InvalidPlan
from optimizer.formats.kv_packing import KvLayout, KvShape
from optimizer.formats.kv_prefix import can_rebuild, count_rebuilt, prefix_refusal
from optimizer.runtime.generation.kv_placed import MovedKvLayer
from optimizer.runtime.meter.meter import Meter

_QUERIES = "q_proj"
"""Names in transformers of a projection that makes queries alone."""


class Positions:
    """Inputs that blocks get for the first tokens beside hidden states: rotary tables and position ids, copied once for all."""

    def __init__(self, *, meter: Meter | None) -> None:
        self._meter = meter
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cut(self, given: torch.Tensor, *, length: int, num_tokens: int) -> torch.Tensor | None:
        """length: of the prompt. None for masks and whatever else is not by position: keys and values do not depend on it."""
        axis = -2 if given.is_floating_point() else -1
        if given.dim() > 3 or given.dim() < -axis or given.shape[axis] != length:
            return None
        reference, copy = self._copies.get(id(given), (None, given))
        if reference is None or reference() is not given:
            with nullcontext() if self._meter is None else self._meter.region("kv_cache"):
                copy = given.narrow(axis, 0, num_tokens).clone(memory_format=torch.contiguous_format)
            self._copies[id(given)] = weakref.ref(given), copy
        return copy


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """Arguments of a block for a prompt's first tokens; hidden states and cache are filled in for each call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of_prompt(
        cls, args: Sequence[Any], kwargs: dict[str, Any], *, positions: Positions, num_tokens: int
    ) -> "BlockInputs":
        """args, kwargs: what the block was given with the whole prompt."""
        found = partial(_find_input, hidden=hidden_in(args, kwargs), positions=positions, num_tokens=num_tokens)
        return cls(args=tuple(map(found, args)), kwargs={name: found(value) for name, value in kwargs.items()})

    def call(self, function: Callable[..., Any], *, hidden: torch.Tensor, cache: Any) -> None:
        known = {id(_HIDDEN): hidden, id(_CACHE): cache}
        args = [known.get(id(value), value) for value in self.args]
        function(*args, **{name: known.get(id(value), value) for name, value in self.kwargs.items()})


_HIDDEN, _CACHE = object(), object()


def _find_input(value: Any, *, hidden: torch.Tensor, positions: Positions, num_tokens: int) -> Any:
    """No function inside another that calls itself: it would hold the hidden states until the next collection of cycles."""
    if value is hidden:
        return _HIDDEN
    if isinstance(value, Cache):
        return _CACHE
    if isinstance(value, torch.Tensor):
        return positions.cut(value, length=hidden.shape[1], num_tokens=num_tokens)
    if isinstance(value, tuple | list):
        return tuple(_find_input(each, hidden=hidden, positions=positions, num_tokens=num_tokens) for each in value)
    return value


def hidden_in(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a block is given, [batch, length, hidden_size]."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def make_again(
    block: nn.Module, hidden: torch.Tensor, inputs: BlockInputs, *, into: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Keys and values of hidden states [batch, tokens, hidden_size] into tensors [tokens, batch, heads, channels].

    These may lie over the hidden states. Raises InvalidModel for a block that gives its cache nothing.
    """
    with _without_queries(block, hidden):
        try:
            inputs.call(block.forward, hidden=hidden, cache=_Taker(into))
        except _TakenError:
            return
    raise InvalidModel(
        f"a {type(block).__name__} makes no keys and values of its hidden states; plan.kv_cache.prefix_tokens must be 0",
        field="model_type",
        value=type(block).__name__,
        allowed="blocks that hand their keys and values to a cache",
    )


class _TakenError(Exception):
    """Ends a block's forward; no fault."""


class _Taker:
    """In place of a cache."""

    def __init__(self, into: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._into = into

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for target, states in zip(self._into, (key_states, value_states), strict=True):
            target.copy_(states.permute(2, 0, 1, 3))
        raise _TakenError


@contextmanager
def _without_queries(block: nn.Module, hidden: torch.Tensor) -> Iterator[None]:
    """Inside, projections that make queries alone give a tensor of their shape that takes no memory, with any numbers."""
    found = [module for name, module in block.named_modules() if name.rpartition(".")[2] == _QUERIES]
    wrapped = [(module, module.forward) for module in found if "forward" in vars(module)]
    try:
        for module in found:
            width = int(module.out_features)
            module.forward = lambda given, width=width: hidden.new_empty(1).expand(*given.shape[:-1], width)
        yield
    finally:
        for module in found:
            module.__dict__.pop("forward", None)
        for module, forward in wrapped:
            module.forward = forward


class PrefixKvLayer(MovedKvLayer):  # type: ignore[no-untyped-call]
    """The cache of one block; where it cannot make a prefix again, or the prompt is too short, it keeps all keys and values."""

    def __init__(self, *, positions: Positions, **choices: Any) -> None:
        super().__init__(**choices)
        self._positions = positions
        self.refused: InvalidPlan | None = None
        """Why its block cannot make keys and values again; None where it can, or has not run."""
        self._given: tuple[Sequence[Any], dict[str, Any]] | None = None
        self._inputs: BlockInputs | None = None

    def enter(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Its block begins. Raises InvalidModel as ``make_again``."""
        if not self.get_seq_length():
            self._given = args, kwargs
        elif self._inputs is not None:
            self._make_again(block, self._inputs)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = super().update(key_states, value_states, *args, **kwargs)
        if self._given is not None:
            (block_args, block_kwargs), self._given = self._given, None
            if self.layout.prefix_tokens:
                self._inputs = BlockInputs.of_prompt(
                    block_args, block_kwargs, positions=self._positions, num_tokens=self.layout.prefix_tokens
                )
                self._send_states(hidden_in(block_args, block_kwargs))
        return seen

    def begin(self) -> None:
        """Hidden states first, which are worked on while the rest comes."""
        if self._home is None or self._brought is not None:
            return
        layout = self.layout
        if not layout.prefix_tokens:
            super().begin()
            return
        slot = self._brought = self._workspace.take_slot()
        tiers, end = self._homes.tiers, layout.num_brought(self._num_seen) * layout.record_bytes
        slot.bring(tiers, self._home, start=0, end=layout.prefix_bytes, offset=0)
        first = layout.prefix_tokens * layout.record_bytes
        if end > first:
            slot.bring(tiers, self._home, start=layout.prefix_bytes, end=end - layout.saved_bytes, offset=first)

    def reset(self) -> None:
        super().reset()
        self._given = self._inputs = None

    def _lay_out(self, shape: KvShape, *, prompt_length: int) -> KvLayout:
        assert self._given is not None
        hidden_size = hidden_in(*self._given).shape[-1]
        elements = shape.num_heads * (shape.key_dim + shape.value_dim)
        can = can_rebuild(window=self.sliding_window, hidden_size=hidden_size, elements_per_token=elements)
        if not can:
            self.refused = prefix_refusal(
                self._plan.prefix_tokens,
                has_windows=self.sliding_window is not None,
                state_bytes=hidden_size * shape.element_bytes,
                token_bytes=elements * shape.element_bytes,
            )
        return KvLayout(
            shape=shape,
            dtype=self._plan.dtype,
            capacity=self._capacity,
            window=self.sliding_window,
            prefix_tokens=count_rebuilt(self._plan.prefix_tokens, prompt_length=prompt_length) if can else 0,
            state_bytes=shape.batch_size * hidden_size * shape.element_bytes,
        )

    def _send_states(self, hidden: torch.Tensor) -> None:
        """Take the first tokens' states home: [sequences, tokens, hidden_size]. Straight from what the block was given,
        in runs."""
        num_tokens = self.layout.prefix_tokens
        runs = [hidden] if num_tokens == hidden.shape[1] else [hidden[row, :num_tokens] for row in range(len(hidden))]
        start, home, tiers = 0, self._home, self._homes.tiers
        assert home is not None
        for run in runs:
            states = run.contiguous()
            if home.data is not None:
                tiers.copy_to_host(states, home.data[start : start + states.nbytes])
            else:
                assert home.stored is not None
                tiers.save(states, home.stored, offset_bytes=start)
            start += states.nbytes

    def _make_again(self, block: nn.Module, inputs: BlockInputs) -> None:
        self.begin()
        slot, layout = self._brought, self.layout
        assert slot is not None
        # What left the slot has left, too: it was queued on the same stream, before what comes.
        slot.arrive_first()
        self._begin_following()
        states = slot.data[: layout.prefix_bytes].view(self.dtype)
        hidden = states.view(layout.shape.batch_size, layout.prefix_tokens, -1)
        make_again(block, hidden, inputs, into=self._records_in(slot, layout.prefix_tokens))


def check_prefixes(layers: Sequence[object]) -> None:
    """After a prompt: raise InvalidPlan where no block can make its keys and values again, though the plan says so."""
    refused = [layer.refused for layer in layers if isinstance(layer, PrefixKvLayer)]
    for why in refused if None not in refused else ():
        assert why is not None
        raise why


def watch_prefixes(blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Have blocks notify their cache as they begin; after hooks that bring their weights."""

    def at(index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            layer = None if cache is None else cache.layers[index]
            if isinstance(layer, PrefixKvLayer):
                layer.enter(module, args, kwargs)

        return enter

    return [block.register_forward_pre_hook(at(index), with_kwargs=True) for index, block in enumerate(blocks)]
