"""Counts the bytes that live on each tier, by category, while torch runs, and enforces the device's cap.

A ``TorchDispatchMode`` sees every op's results. A storage seen for the first time is an allocation, and ``ledger.py`` keeps what
is live. Views and in-place ops allocate nothing. Sizes are ``nbytes`` of the storage on the CPU device
and the same rounded up to 512 on CUDA.

On CUDA the budget is about the same bytes: those that torch has allocated, without the libraries' workspaces, which like the
CUDA context are the same for every plan and are taken off the card's size by the probe. The cap is enforced twice: after
each op by what is counted here, and by torch's own peak, which is also what is reported, after each step and every other stage
of a job (``check_peak``).
Torch's allocator is limited too (``card.py``). Backward runs on a thread of torch's own, which carries the mode (and the
saved-tensor hooks) of the thread that called it; that one waits, so counts are written by one thread at a time.

Category rules; the estimator simulates the same ones:

weights           parameters and buffers (``assign``).
gradients         a storage becomes a gradient when it is ``param.grad`` after accumulation; before that it counts as what
                  its region says (temporaries in the backbone, logits_and_loss in the head). Of a sparse gradient both the
                  indices and the values, which may be views of what backward had already (token ids, hidden states).
optimizer_state   every tensor the optimizer holds between steps: moments, scales, fp32 master weights, from the update on
                  in which they come to be.
activations       allocated while the backbone runs forward, recomputation included, and what comes back from the host.
logits_and_loss   allocated in the head and the loss, forward; and in backward until the gradient of the backbone's output
                  is complete, that gradient included.
temporaries       everything else: the rest of backward, the optimizer's scratch, inputs. On the CPU device that of an update
                  in 8 bits, too, which bitsandbytes makes of torch's ops inside one of its own.

The host tier holds the copies that ``tiers/tiers.py`` makes, under the category they have on the device; other CPU tensors of a
CUDA run are not counted. *Not counted* on the CPU device, and so no part of what a cap there is about: scratch that an op's
kernel allocates and frees inside itself, the random numbers' state that a block keeps that will run forward again, and storages
resized after birth, unless the meter is notified (``resized``). Predictions report it as ``unmetered_bytes`` and their intervals
reach above it (``estimate/cpu/cpu_scratch.py``); torch's profiler sees it (``benchmarks/accuracy/meter.py``).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from optimizer.base.categories import CATEGORIES, Category, Tier
from optimizer.base.errors import OutOfDeviceMemory, OutOfHostMemory
from optimizer.plan.optimizer_state import update_scratch_bytes
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.meter.block_marks import watch_blocks
from optimizer.runtime.meter.card import Card, requested_in
from optimizer.runtime.meter.ledger import NUM_CATEGORIES, Ledger

CUDA_ROUNDING_BYTES = 512
"""Smallest block of torch's CUDA caching allocator (c10/core/AllocatorConfig.h)."""

_MOMENTS_KEPT = 8
"""Moments before an out-of-memory that its error lists."""
_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_GRADIENTS = _SLOT["gradients"]
_UPDATES = {
    "bitsandbytes.optimizer_update_8bit_blockwise.default": 8,
    "bitsandbytes.optimizer_update_32bit.default": 32,
}
"""Ops of the optimizer that on the CPU are made of others, with the bits of the state they update."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that was live since the last reset."""

    device_bytes: int
    device_bytes_by_category: dict[str, int]
    """At the device's peak; sums to ``device_bytes``."""
    host_bytes: int
    moment: str
    """``backward of block 7 of 12``."""
    slack_bytes: int = 0
    """Most that torch's allocator had reserved beyond the most it had allocated: its fragmentation; 0 on the CPU."""


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does not wrap ``__torch_dispatch__`` against torch.compile, which nothing here uses; that costs per op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Meter(Ledger, PlainDispatchMode):
    """Enter it around what is to be counted; what lives on after leaving stays counted until it goes.

    Over the cap an op's result is dropped and OutOfDeviceMemory raised; counts are right again once that error is let go.
    """

    def __init__(
        self, *, device: torch.device, cap_bytes: int | None = None, host_cap_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.device = device
        self.cap_bytes = cap_bytes
        self.host_cap_bytes = host_cap_bytes
        self._backend = backend_of(device)
        self._has_allocator = self._backend.memory is not None
        self._slot = _SLOT["temporaries"]
        self._phase = "loading"
        self._block = -1
        self._num_blocks = 0
        self._moments: dict[tuple[str, int], int] = {}
        """Most bytes at each moment since the last reset, but for the present one, whose are ``_moment_bytes``."""
        self._moment_bytes = 0
        self._op_allocates: dict[int, bool] = {}
        self._ops: list[Any] = []  # keeps the ids above from being used again
        self._limit_bytes: float = float("inf") if cap_bytes is None else cap_bytes
        self._card = None if self._backend.memory is None else Card(self._backend, self._backend.memory)
        if self._card is not None and cap_bytes is not None:
            self._card.limit_allocator(cap_bytes)
        self.reset_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            # What calling ``func`` itself would do, one Python frame less for each op.
            result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        except torch.OutOfMemoryError as error:
            raise self._translated(error) from error
        # By id: hashing an op runs Python code of torch's.
        allocates = self._op_allocates.get(id(func))
        if allocates is None:
            allocates = self._classify(func)
        if allocates:
            if type(result) is torch.Tensor:
                self._see(result, self._slot)
            elif isinstance(result, tuple | list):
                for item in result:
                    if isinstance(item, torch.Tensor):
                        self._see(item, self._slot)
            elif isinstance(result, torch.Tensor):
                self._see(result, self._slot)
            elif result is None:
                self._held_inside(func, args)
        return result

    def _classify(self, func: Any) -> bool:
        """Report whether an op can return new storage: not when its schema says that all it returns are aliases. Or
        whether it is one of the optimizer's that are made of others, none of which is seen here.
        """
        allocates = any(value.alias_info is None for value in func._schema.returns)
        allocates |= not self._has_allocator and str(func) in _UPDATES
        self._op_allocates[id(func)] = allocates
        self._ops.append(func)
        return allocates

    # What is live.

    def reset_peak(self, *, is_counted: bool = True) -> None:
        """Start a new peak from what is live now. is_counted: False keeps the last one, but for what torch counts on CUDA: what
        follows is not to be entered.
        """
        if self._card is not None:
            self._card.reset_peak()
        if not is_counted:
            return
        self._peak_bytes = self._device_bytes
        self._peak_by_slot = self._bytes[:]
        self._peak_at = (self._phase, self._block)
        self._host_peak_bytes = self._host_bytes
        self._moments.clear()
        self._moment_bytes = self._device_bytes

    @contextmanager
    def peak_of_its_own(self, *, is_counted: bool = True) -> Iterator[None]:
        """Begin a peak for what is done meanwhile; the one that was known until then is back afterwards."""
        known = self._peak_bytes, self._peak_by_slot, self._peak_at, self._host_peak_bytes
        self.reset_peak(is_counted=is_counted)
        yield
        self._peak_bytes, self._peak_by_slot, self._peak_at, self._host_peak_bytes = known

    def peak(self) -> Peak:
        """On CUDA what torch counted and no op returned (scratch, the rest of a block) is added to temporaries."""
        by_category: dict[str, int] = dict(zip(CATEGORIES, self._peak_by_slot[:NUM_CATEGORIES], strict=True))
        total_bytes = self._peak_bytes
        if self._card is not None:
            counted_bytes = self._card.peak_bytes()
            by_category["temporaries"] += max(0, counted_bytes - total_bytes)
            total_bytes = max(counted_bytes, total_bytes)
        return Peak(
            device_bytes=total_bytes,
            device_bytes_by_category=by_category,
            host_bytes=self._host_peak_bytes,
            moment=self._describe(*self._peak_at),
            slack_bytes=self._card.slack_bytes() if self._card is not None else 0,
        )

    def check_peak(self) -> None:
        """Raise OutOfDeviceMemory when the peak went over the cap inside an op, where only torch's counters saw it."""
        if self._has_allocator and self.cap_bytes is not None:
            peak = self.peak()
            over_bytes = peak.device_bytes - self.cap_bytes
            if over_bytes > 0:
                by_category = peak.device_bytes_by_category
                # As everywhere the request is apart from what was in use.
                by_category["temporaries"] = max(0, by_category["temporaries"] - over_bytes)
                raise OutOfDeviceMemory(
                    requested_bytes=over_bytes,
                    in_use_bytes=self.cap_bytes,
                    budget_bytes=self.cap_bytes,
                    bytes_by_category=by_category,
                    moment=f"inside an op in {peak.moment}",
                )

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Torch's out-of-memory error as this program's own, also where the meter is not entered."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._translated(error) from error

    @property
    def workspace_bytes(self) -> int:
        """Workspaces of the matrix libraries; in torch's counters on CUDA, not in this meter's."""
        return self._card.workspace_bytes if self._card is not None else 0

    # What the program reports to the meter.

    def set_region(self, category: Category) -> None:
        """From now on new storages count as ``category``."""
        self._slot = _SLOT[category]

    def region(self, category: Category, *, tier: Tier = "device") -> "Region":
        """``set_region`` for the length of the block; ``tier="host"`` is for the copies that tiers.py makes."""
        return Region(self, _SLOT[category] + (NUM_CATEGORIES if tier == "host" else 0))

    @property
    def category(self) -> Category:
        """The category of the current region."""
        return CATEGORIES[self._slot % NUM_CATEGORIES]

    def mark(self, phase: str, *, block_index: int = -1) -> None:
        """Name the moment for errors and peaks: ``forward``, ``backward``, ``optimizer step``; the block counts from 0."""
        at = self._phase, self._block
        # to the end, so that the latest moments are the last
        self._moments[at] = max(self._moments.pop(at, 0), self._moment_bytes)
        self._moment_bytes = self._device_bytes
        self._phase = phase
        self._block = block_index
        if self._events is not None and self._backend.is_asynchronous:
            # The host runs ahead of the card; a timeline is in the card's time, to within one block.
            self._backend.current_stream().synchronize()

    @property
    def moment(self) -> str:
        return self._describe(self._phase, self._block)

    def assign(self, tensor: torch.Tensor, category: Category, *, tier: Tier = "device") -> None:
        """Count the tensor's storage on its tier as ``category``, whether it was seen before (on that tier) or not."""
        slot = _SLOT[category] + (NUM_CATEGORIES if tier == "host" else 0)
        for part in _parts_of(tensor):
            self._count_as(part, slot)

    def resized(self, tensor: torch.Tensor, category: Category) -> None:
        """Read the size of the tensor's storage again, after ``resize_``, and count it as ``category``."""
        allocation = self._live.get(tensor.untyped_storage()._cdata)
        if allocation is not None:
            # As if it had gone and come again, so that the cap, the peak and the timeline hear of both.
            self._gone(allocation)
        self._see(tensor, _SLOT[category])

    def assign_module(self, module: nn.Module) -> None:
        """Parameters and buffers as weights, and gradients as they come."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.assign(tensor, "weights")

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
        """Move what became ``param.grad`` to gradients, by a hook per parameter."""
        return [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]

    def watch_blocks(self, blocks: Sequence[nn.Module], *, phase: str | None = "forward") -> list[RemovableHandle]:
        """Mark the moment as each block runs forward and as its backward begins; adds nothing to the graph.

        phase: of the blocks' forward; None for the one that was marked last.
        """
        self._num_blocks = len(blocks)

        def at_forward(index: int) -> None:
            self.mark(phase or self._phase, block_index=index)

        def at_backward(index: int) -> None:
            self.mark("backward", block_index=index)

        return watch_blocks(blocks, at_forward=at_forward, at_backward=at_backward)

    # Helpers.

    def _see(self, tensor: torch.Tensor, slot: int) -> None:
        if self._has_allocator and slot < NUM_CATEGORIES and tensor.device.type != self.device.type:
            return
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            for part in _parts_of(tensor):
                self._see(part, slot)
            return
        if storage._cdata in self._live:
            return
        num_bytes = storage.nbytes()
        if self._has_allocator:
            num_bytes = -(-num_bytes // CUDA_ROUNDING_BYTES) * CUDA_ROUNDING_BYTES
        self._come(storage, slot, num_bytes)
        if slot >= NUM_CATEGORIES:
            self._seen_on_host(num_bytes, slot)
            return
        total_bytes = self._device_bytes = self._device_bytes + num_bytes
        if total_bytes > self._limit_bytes:
            raise self._device_full(num_bytes, slot)
        if total_bytes > self._moment_bytes:
            self._moment_bytes = total_bytes
        if total_bytes > self._peak_bytes:
            self._peak_bytes = total_bytes
            self._peak_by_slot = self._bytes[:]
            self._peak_at = (self._phase, self._block)

    def _held_inside(self, func: Any, args: Sequence[Any]) -> None:
        """Count the bytes that an update by bitsandbytes holds while it runs, on the CPU device."""
        bits = _UPDATES.get(str(func))
        if bits is not None:
            num_bytes = update_scratch_bytes(args[1].numel(), bits=bits)
            self._see(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), _SLOT["temporaries"])

    def _seen_on_host(self, num_bytes: int, slot: int) -> None:
        self._host_bytes += num_bytes
        if self.host_cap_bytes is not None and self._host_bytes > self.host_cap_bytes:
            category = CATEGORIES[slot - NUM_CATEGORIES]
            by_category = self.bytes_by_category(tier="host")
            by_category[category] -= num_bytes
            raise OutOfHostMemory(
                requested_bytes=num_bytes,
                in_use_bytes=self._host_bytes - num_bytes,
                budget_bytes=self.host_cap_bytes,
                bytes_by_category=by_category,
                moment=f"in {self.moment}",
                category=category,
                hint="Raise the host budget or choose a plan that offloads less.",
            )
        self._host_peak_bytes = max(self._host_peak_bytes, self._host_bytes)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            for part in _parts_of(gradient):
                self._count_as(part, _GRADIENTS)

    def _count_as(self, tensor: torch.Tensor, slot: int) -> None:
        allocation = self._live.get(tensor.untyped_storage()._cdata)
        if allocation is None:
            self._see(tensor, slot)
        else:
            self._move(allocation, slot)

    def _describe(self, phase: str, block: int) -> str:
        return f"{phase} of block {block + 1} of {self._num_blocks}" if block >= 0 else phase

    def _device_full(self, requested_bytes: int, slot: int) -> OutOfDeviceMemory:
        by_category = self.bytes_by_category()
        by_category[CATEGORIES[slot]] -= requested_bytes
        return OutOfDeviceMemory(
            requested_bytes=requested_bytes,
            in_use_bytes=self._device_bytes - requested_bytes,
            budget_bytes=self.cap_bytes or 0,
            bytes_by_category=by_category,
            moment=f"in {self.moment}",
            category=CATEGORIES[slot],
            moments=self._latest_moments(),
        )

    def _latest_moments(self) -> dict[str, int]:
        latest = list(self._moments.items())[-_MOMENTS_KEPT:]
        return {self._describe(*at): num_bytes for at, num_bytes in latest}

    def _translated(self, error: torch.OutOfMemoryError) -> OutOfDeviceMemory:
        requested_bytes, slack_bytes = requested_in(error), 0
        in_use_bytes, budget_bytes = self._device_bytes, self.cap_bytes or self._device_bytes
        if self._card is not None:
            in_use_bytes, budget_bytes = self._card.in_use_and_limit(requested_bytes, cap_bytes=self.cap_bytes)
            slack_bytes = self._card.unused_bytes()
        by_category = self.bytes_by_category()
        by_category["temporaries"] += max(0, in_use_bytes - self._device_bytes)
        return OutOfDeviceMemory(
            requested_bytes=requested_bytes,
            in_use_bytes=in_use_bytes,
            budget_bytes=budget_bytes,
            bytes_by_category=by_category,
            moment=f"in {self.moment}",
            category=self.category,
            slack_bytes=slack_bytes,
            moments=self._latest_moments(),
        )


@contextmanager
def count_allocations(meter: Meter | None, *, is_counted: bool = True) -> Iterator[None]:
    """Count what is allocated inside, under the cap; does nothing without a meter.

    is_counted: False leaves the counting out, which costs Python for every op, and with it the CPU device's cap; torch's own
    counters and its cap on CUDA stay.
    """
    if meter is None:
        yield
        return
    with meter.translating(), meter if is_counted else nullcontext():
        meter.set_region("temporaries")
        yield
        meter.set_region("temporaries")


def set_region(meter: Meter | None, category: Category) -> None:
    """Count what is allocated from now on as this category; does nothing without a meter."""
    if meter is not None:
        meter.set_region(category)


def mark_phase(meter: Meter | None, phase: str) -> None:
    """Name the part of the step that begins; does nothing without a meter."""
    if meter is not None:
        meter.mark(phase)


def check_peak(meter: Meter | None) -> None:
    """Hold the device's peak against the cap; does nothing without a meter."""
    if meter is not None:
        meter.check_peak()


class Region:
    """A class, since a generator would cost each copy of an offloaded tensor three times as much."""

    __slots__ = ("_meter", "_previous", "_slot")

    def __init__(self, meter: Meter, slot: int) -> None:
        self._meter = meter
        self._slot = slot

    def __enter__(self) -> None:
        self._previous = self._meter._slot
        self._meter._slot = self._slot

    def __exit__(self, *exc: object) -> None:
        self._meter._slot = self._previous


def _parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that have storage: of a sparse one its indices and its values."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
