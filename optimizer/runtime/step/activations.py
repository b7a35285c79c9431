"""Carries out the activations row of a plan: each block keeps, recomputes or offloads what autograd saves in it.

keep       nothing is wrapped.
recompute  ``torch.utils.checkpoint`` around the block's forward; its inputs stay, dropout draws again the same numbers.
selective  the same with contexts that keep the results of products and attention (``selective.py``).
offload    saved-tensor hooks around the block's forward. Each storage that autograd saves goes to the host tier once, however
           many views of it are saved, the block's input included; it comes back at its first use in backward and stays
           until its last. Not moved: parameters, buffers, and the block's other inputs (position embeddings, masks), which
           all blocks share and which therefore stay on the device anyway, and what kernels save on the host (random seeds).
           offload_disk and offload_remote do the same to a scratch file and to a remote store (``tiers/tiers.py``).

All give the same bits, but for trips that are compressed. When a block's backward begins, all it moved is fetched (if it was
not yet), then the offloaded block before it of the same micro-batch, in the order in which the backward before used it, in the
first one what was saved last first. On CUDA that is to the device, beside compute: at most two blocks are back at once, and at
most two are on their way out. On the CPU device it is from the stores into host staging only, and the device gets each storage
at its first use.

Compressed, each value of a block's saved tensors is off by at most 2^-9 of itself (bf16) or 1/254 of the largest of its 256
neighbours (int8); outputs and loss of the step are exact, gradients are off in proportion (tests hold 1 % and 10 % of their
norm). *Not modelled*: tensors that a custom autograd function hides in its context
instead of ``save_for_backward`` are not seen by hooks and stay on the device.
"""

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimizer.base.categories import Category
from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan, BlockChoice, Compression
from optimizer.runtime.layers.matmul_dispatch import interrupting
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.selective import make_selective_contexts
from optimizer.runtime.tiers.copies import CopyLayout, DeviceCopy, OffloadedCopy, typed, view_of
from optimizer.runtime.tiers.plain_copies import PlainCopies
from optimizer.runtime.tiers.tiers import OffloadPlace, Tiers

_CATEGORY: Category = "activations"
_PLACES: dict[BlockChoice, OffloadPlace] = {"offload": "host", "offload_disk": "disk", "offload_remote": "remote"}


def apply_activations(
    blocks: Sequence[nn.Module], plan: ActivationsPlan, tiers: Tiers, *, firsts: Sequence[int] = (0,)
) -> Callable[[], None]:
    """Wrap each block's forward by its choice; returns a function that takes the wrapping off again.

    firsts: numbers of the blocks at which a forward pass begins: of each stage's first where the model is cut. Opens the stores
    that the plan needs: raises what they do where one is missing.
    """
    if len(plan.per_block) != len(blocks):
        raise InvalidPlan(
            f"plan.activations.per_block names {len(plan.per_block)} blocks; the model has {len(blocks)}",
            field="plan.activations.per_block",
            value=len(plan.per_block),
            allowed=len(blocks),
        )
    schedule = _Offloads(tiers, plan.compress, firsts=firsts)
    if plan.num_offloaded:
        tiers.prepare_compression(plan.compress)
    wrapped: list[nn.Module] = []
    for index, (block, choice) in enumerate(zip(blocks, plan.per_block, strict=True)):
        if choice == "recompute":
            block.forward = _recomputing(block.forward, tiers.meter, contexts=noop_context_fn)
        elif choice == "selective":
            block.forward = _recomputing(block.forward, tiers.meter, contexts=make_selective_contexts)
        elif choice in _PLACES:
            tiers.open_store(_PLACES[choice])
            block.forward = _offloading(block, schedule, index, _PLACES[choice])
        else:
            continue
        wrapped.append(block)

    def undo() -> None:
        for block in wrapped:
            # The wrapper is an attribute of the instance; without it the class's own method shows again.
            del block.forward

    return undo


def _recomputing(
    forward: Callable[..., Any], meter: Meter | None, *, contexts: Callable[[], tuple[Any, Any]]
) -> Callable[..., Any]:
    """contexts: makes what is entered around the first and around the second run."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True, "context_fn": contexts}

    @interrupting
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if meter is None:
            return forward(*args, **kwargs)
        # Entered again when backward recomputes: those tensors are activations too.
        with meter.region(_CATEGORY):
            return forward(*args, **kwargs)

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if args:
            return checkpoint(run, *args, **options, **kwargs)
        # Only positional tensors show it which card's random state to restore.
        hidden = kwargs.pop("hidden_states")
        named = functools.partial(_with_hidden, run)
        return checkpoint(named, hidden, **options, **kwargs)

    return recomputing


def _with_hidden(run: Callable[..., Any], hidden: torch.Tensor, **kwargs: Any) -> Any:
    return run(hidden_states=hidden, **kwargs)


def _offloading(block: nn.Module, schedule: "_Offloads", index: int, place: OffloadPlace) -> Callable[..., Any]:
    forward = block.forward
    own = (*block.parameters(), *block.buffers())

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        staying = [*own, *_tensors_in((args[1:], kwargs))]
        if not args:
            hidden = kwargs.get("hidden_states")
            staying = [tensor for tensor in staying if tensor is not hidden]
        group = schedule.begin(index, place, {tensor.untyped_storage()._cdata for tensor in staying})
        with saved_tensors_hooks(group.pack, group.unpack):
            return forward(*args, **kwargs)

    return offloading


class _Moved:
    """One storage that left the device, and how many saved tensors still wait for it."""

    __slots__ = ("__weakref__", "copy", "device_copy", "dtype", "is_used", "num_waiting", "position", "source", "version")

    def __init__(
        self, copy: OffloadedCopy, tensor: torch.Tensor, storage: torch.UntypedStorage, *, position: int
    ) -> None:
        self.copy = copy
        self.source = weakref.ref(storage)
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.position = position
        """Among what its block moved, in the order of leaving."""
        self.device_copy: DeviceCopy | None = None
        self.num_waiting = 1
        self.is_used = False

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Report whether it is this tensor's storage as it is now: an address can be used again, a storage be written to
        after it was saved. What was packed as one dtype cannot be shown as another."""
        is_same = self.source() is storage and self.version == tensor._version
        return is_same and (self.copy.packing.compress == "none" or self.dtype == tensor.dtype)


class _Offloads:
    """The offloaded blocks of the forward passes in flight, so that one block's backward can fetch the next one's.

    Of a model that is cut several micro-batches are under way: each has groups of its own, linked from the last block's of a
    stage to the first one's. Backward passes do not overlap.
    """

    def __init__(self, tiers: Tiers, compress: Compression, *, firsts: Sequence[int]) -> None:
        """firsts: as of ``apply_activations``."""
        self.tiers = tiers
        self.compress = compress
        self._firsts = sorted(firsts)
        is_plain = compress == "none" and not tiers.is_asynchronous
        self._plain = tiers.plain_copies(_CATEGORY) if is_plain else None
        self._newest: _Group | _PlainGroup | None = None
        self._orders: dict[int, list[int]] = {}
        """By block, positions in the order of their first use in its newest backward."""

    def begin(self, index: int, place: OffloadPlace, staying: set[int]) -> "_Group | _PlainGroup":
        self.tiers.begin_group()
        newest, first = self._newest, self._firsts[bisect_right(self._firsts, index) - 1]
        # A forward pass takes blocks in their order, so one that comes no later than the newest belongs to another pass.
        earlier = newest if newest is not None and first <= newest.index < index else None
        group: _Group | _PlainGroup
        if place == "host" and self._plain is not None:
            group = _PlainGroup(self, index, self._plain, staying, earlier=earlier)
        else:
            group = _Group(self, index, place, staying, earlier=earlier)
        self._newest = group
        return group

    def expected(self, index: int) -> list[int]:
        """Positions of what a block moved, in the order in which its backward is expected to use them; none before the first."""
        return self._orders.get(index, [])

    def fetch(self, moved: _Moved) -> DeviceCopy:
        if moved.device_copy is None:
            moved.device_copy = self.tiers.fetch(moved.copy, category=_CATEGORY)
        return moved.device_copy

    def enter_backward(self, group: "_Group | _PlainGroup") -> None:
        """Start fetching this block and the offloaded one whose backward comes next."""
        coming = [*group.coming(), *(group.earlier.coming() if group.earlier is not None else ())]
        if isinstance(group, _Group):
            self._orders[group.index] = group.used
        if self.tiers.is_asynchronous:
            for moved in coming:
                self.fetch(moved)
        else:
            self.tiers.prefetch([moved.copy for moved in coming])


class _Group:
    """The storages that one block's forward moved. Autograd's handles own the copies; this holds them weakly."""

    def __init__(
        self,
        schedule: _Offloads,
        index: int,
        place: OffloadPlace,
        staying: set[int],
        *,
        earlier: "_Group | _PlainGroup | None",
    ) -> None:
        """earlier: the offloaded block before this one in the same forward pass."""
        self._schedule = schedule
        self.index = index
        self.used: list[int] = []
        self._place = place
        self._staying = staying
        self.earlier = earlier
        self._by_storage: dict[int, weakref.ref[_Moved]] = {}
        self.order: list[weakref.ref[_Moved]] = []
        self._in_backward = False

    def pack(self, tensor: torch.Tensor) -> Any:
        tiers = self._schedule.tiers
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._staying or not tiers.is_on_device(tensor):
            return tensor
        known = self._by_storage.get(key)
        moved = known() if known is not None else None
        if moved is not None and moved.holds(tensor, storage):
            moved.num_waiting += 1
            return moved, CopyLayout(tensor)
        copy = tiers.offload(
            storage, category=_CATEGORY, dtype=tensor.dtype, place=self._place, compress=self._schedule.compress
        )
        moved = _Moved(copy, tensor, storage, position=len(self.order))
        self._by_storage[key] = known = weakref.ref(moved)
        self.order.append(known)
        return moved, CopyLayout(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        moved, layout = packed
        if not self._in_backward:
            self._in_backward = True
            self._schedule.enter_backward(self)
        if not moved.is_used:
            moved.is_used = True
            self.used.append(moved.position)
        data = self._schedule.fetch(moved).wait()
        moved.num_waiting -= 1
        if moved.num_waiting <= 0:
            moved.device_copy = None
        return view_of(data, like=layout)

    def coming(self) -> Iterator[_Moved]:
        """Copies still waited for, in the order in which backward is expected to need them."""
        expected = self._schedule.expected(self.index)
        is_known = len(expected) == len(self.order)
        for position in expected if is_known else reversed(range(len(self.order))):
            moved = self.order[position]()
            if moved is not None and moved.num_waiting:
                yield moved


class _PlainMoved:
    """``_Moved`` of a ``_PlainGroup``."""

    __slots__ = ("__weakref__", "back", "home", "num_waiting", "source", "version")

    def __init__(self, home: torch.Tensor, storage: torch.UntypedStorage, version: int) -> None:
        self.home = home
        self.source = weakref.ref(storage)
        self.version = version
        self.back: torch.Tensor | None = None
        self.num_waiting = 1


class _PlainGroup:
    """A ``_Group`` on the CPU device whose copies go to the host as they are: none is under way, so none is expected."""

    def __init__(
        self,
        schedule: _Offloads,
        index: int,
        copies: PlainCopies,
        staying: set[int],
        *,
        earlier: "_Group | _PlainGroup | None",
    ) -> None:
        self._schedule = schedule
        self.index = index
        self._copies = copies
        self._staying = staying
        self.earlier = earlier
        self._by_storage: dict[int, weakref.ref[_PlainMoved]] = {}
        self._in_backward = False

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._staying:
            return tensor
        known = self._by_storage.get(key)
        moved = known() if known is not None else None
        version = tensor._version
        if moved is not None and moved.source() is storage and moved.version == version:
            moved.num_waiting += 1
            return moved, CopyLayout(tensor)
        is_whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
        source = tensor if is_whole else typed(storage, dtype=tensor.dtype, device=tensor.device)
        moved = _PlainMoved(self._copies.out.copy(source), storage, version)
        self._by_storage[key] = weakref.ref(moved)
        return moved, None if is_whole else CopyLayout(tensor)

    def unpack(self, packed: torch.Tensor | tuple[_PlainMoved, CopyLayout | None]) -> torch.Tensor:
        if not isinstance(packed, tuple):
            return packed
        moved, layout = packed
        if not self._in_backward:
            self._in_backward = True
            self._schedule.enter_backward(self)
        data = moved.back
        if data is None:
            data = self._copies.back.copy(moved.home)
        moved.num_waiting -= 1
        moved.back = data if moved.num_waiting > 0 else None
        return data if layout is None else view_of(data, like=layout)

    def coming(self) -> Iterator[_Moved]:
        return iter(())


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
