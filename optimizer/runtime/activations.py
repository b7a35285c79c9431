"""Carries out the activations row of a plan: each block keeps, recomputes or offloads what autograd saves in it.

keep       nothing is wrapped.
recompute  ``torch.utils.checkpoint`` around the block's forward; its inputs stay, dropout draws again the same numbers.
selective  the same with contexts that keep the results of products and attention (``selective.py``).
offload    saved-tensor hooks around the block's forward. Each storage that autograd saves goes to the host tier once, however
           many views of it are saved, the block's input included; it comes back at its first use in backward and stays
           until its last. Not moved: parameters, buffers, and the block's other inputs (position embeddings, masks), which
           all blocks share and which therefore stay on the device anyway, and what kernels save on the host (random seeds).

All give the same bits. On CUDA, copies run beside compute: when a block's backward begins, all it moved is fetched (if
it was not yet), then the offloaded block before it, what was saved last first; so at most two blocks are back at once, and
at most two are on their way out (``tiers.py``). *Not modelled*: tensors that a custom autograd function hides in its context
instead of ``save_for_backward`` are not seen by hooks and stay on the device.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from optimizer.categories import Category
from optimizer.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.runtime.meter import Meter
from optimizer.runtime.selective import make_selective_contexts
from optimizer.runtime.tiers import DeviceCopy, HostCopy, Layout, Tiers, view_of

_CATEGORY: Category = "activations"


def apply_activations(blocks: Sequence[nn.Module], plan: ActivationsPlan, tiers: Tiers) -> Callable[[], None]:
    """Wrap each block's forward by its choice; returns a function that takes the wrapping off again."""
    if len(plan.per_block) != len(blocks):
        raise InvalidPlan(
            f"plan.activations.per_block names {len(plan.per_block)} blocks; the model has {len(blocks)}",
            field="plan.activations.per_block",
            value=len(plan.per_block),
            allowed=len(blocks),
        )
    schedule = _Offloads(tiers)
    wrapped: list[nn.Module] = []
    for index, (block, choice) in enumerate(zip(blocks, plan.per_block, strict=True)):
        if choice == "recompute":
            block.forward = _recomputing(block.forward, tiers.meter, contexts=noop_context_fn)
        elif choice == "selective":
            block.forward = _recomputing(block.forward, tiers.meter, contexts=make_selective_contexts)
        elif choice == "offload":
            block.forward = _offloading(block, schedule, index)
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
        # Only positional tensors tell it which card's random state to restore.
        hidden = kwargs.pop("hidden_states")
        named = functools.partial(_with_hidden, run)
        return checkpoint(named, hidden, **options, **kwargs)

    return recomputing


def _with_hidden(run: Callable[..., Any], hidden: torch.Tensor, **kwargs: Any) -> Any:
    return run(hidden_states=hidden, **kwargs)


def _offloading(block: nn.Module, schedule: "_Offloads", index: int) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        staying = [*block.parameters(), *block.buffers(), *_tensors_in((args[1:], kwargs))]
        if not args:
            hidden = kwargs.get("hidden_states")
            staying = [tensor for tensor in staying if tensor is not hidden]
        group = schedule.begin(index, {tensor.untyped_storage()._cdata for tensor in staying})
        with saved_tensors_hooks(group.pack, group.unpack):
            return forward(*args, **kwargs)

    return offloading


class _Moved:
    """One storage that left the device, and how many saved tensors still wait for it."""

    __slots__ = ("__weakref__", "device_copy", "host_copy", "num_waiting", "source", "version")

    def __init__(self, host_copy: HostCopy, source: torch.UntypedStorage, version: int) -> None:
        self.host_copy = host_copy
        self.source = weakref.ref(source)
        self.version = version
        self.device_copy: DeviceCopy | None = None
        self.num_waiting = 0


class _Offloads:
    """The offloaded blocks of the forward pass in flight, so that one block's backward can fetch the next one's."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self._groups: dict[int, _Group] = {}

    def begin(self, index: int, staying: set[int]) -> "_Group":
        self.tiers.begin_group()
        group = _Group(self, index, staying)
        self._groups[index] = group
        return group

    def fetch(self, moved: _Moved) -> DeviceCopy:
        if moved.device_copy is None:
            moved.device_copy = self.tiers.fetch(moved.host_copy, category=_CATEGORY)
        return moved.device_copy

    def enter_backward(self, group: "_Group") -> None:
        """Start fetching this block and the offloaded one whose backward comes next."""
        if not self.tiers.is_asynchronous:
            return
        group.fetch_all()
        earlier = [other for other in self._groups if other < group.index]
        if earlier:
            self._groups[max(earlier)].fetch_all()


class _Group:
    """What one block's forward moved. Autograd's handles own the copies; this holds them weakly."""

    def __init__(self, schedule: _Offloads, index: int, staying: set[int]) -> None:
        self._schedule = schedule
        self.index = index
        self._staying = staying
        self._by_storage: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()
        self.order: list[weakref.ref[_Moved]] = []
        self._in_backward = False

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._staying or not self._schedule.tiers.is_on_device(tensor):
            return tensor
        moved = self._by_storage.get(key)
        # An address can be used again, and a storage written to after it was saved: both make a new copy.
        if moved is None or moved.source() is not storage or moved.version != tensor._version:
            moved = _Moved(self._schedule.tiers.offload(storage, category=_CATEGORY), storage, tensor._version)
            self._by_storage[key] = moved
            self.order.append(weakref.ref(moved))
        moved.num_waiting += 1
        return moved, Layout(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        moved, layout = packed
        if not self._in_backward:
            self._in_backward = True
            self._schedule.enter_backward(self)
        data = self._schedule.fetch(moved).wait()
        moved.num_waiting -= 1
        if moved.num_waiting <= 0:
            moved.device_copy = None
        return view_of(data, like=layout)

    def fetch_all(self) -> None:
        """Fetch what is still waited for, in the order in which backward comes to it."""
        for reference in reversed(self.order):
            moved = reference()
            if moved is not None and moved.num_waiting:
                self._schedule.fetch(moved)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
