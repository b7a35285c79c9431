"""AdamW, SGD and Lion for tensors whose state left the device: kept on the host or in a store, updated on the host.

The numbers are those of the device's update: the same fused kernel (``update_rule.py``) on the same fp32 values, cut at the
borders at which that kernel cuts its own work. The update of a tensor runs in pieces of at most ``PIECE_ELEMENTS``; while one
is worked on, the next is read from its store and the one before is written back. Jobs run on the worker of
``optimizer_state.py``: on CUDA a thread beside backward or the next forward, on the CPU device at once. Who needs a tensor's
new weights waits for that tensor alone.

What is allocated, all of it at construction and until the end; P is the most elements of a piece: ``PIECE_ELEMENTS`` or the
largest leaving tensor, and each leaving tensor, in the model's order, has n elements:

host or store  by the plan's place: fp32 master (4n) and each moment (4n), as optimizer state. No master where the weight
               streams and is fp32: its home (``weights.py``) is the master, where the plan's weights have their place.
               Without masters a copy in the weight's own dtype stands for one, and a home of any dtype.
host           4 bytes per tensor: its count of steps (optimizer state), with AdamW.
host           gradient scratch, where gradients are below fp32: 4P (gradients).
host           with Lion, 4P for what its update holds (temporaries).
host           without masters, 4P for the fp32 numbers of a piece and the random bits of its rounding (temporaries).
host           two slots, each: 4P for the master and each moment that any tensor has in a store (optimizer state),
               and, where weights are below fp32 and not at home on the host, P weights in their dtype (weights).

Nothing is allocated by an update. Its copies per step and tensor: store to host and back 4n for each part in a store; the new
weights, n in their dtype, from the host to the device, or, for a home in a store below fp32, from the host to that store.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from optimizer.base.categories import Lane
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.plan.optimizer_state import OptimizerStatePlan, StatePlace
from optimizer.runtime.tiers.copies import Copy
from optimizer.runtime.tiers.homes import HomeTensor, OffDeviceBytes, pieces
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.runtime.tiers.transfers import Transfer
from optimizer.runtime.updates.stochastic_rounding import StochasticRounding, num_noise_words
from optimizer.runtime.updates.update_rule import Piece, rule_of
from optimizer.workload import TrainingWorkload

MASTER = "master"

GradientOf = Callable[[str], torch.Tensor]
"""The complete gradient of a tensor, on the host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateFacts:
    """Numbers that one optimizer step applies to every tensor."""

    learning_rate: float
    grad_factor: torch.Tensor | None
    """Factor that gradients are still to be multiplied by; an fp32 scalar on the host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Leaving:
    """One tensor whose state is not on the device."""

    name: str
    parameter: nn.Parameter
    weight_decay: float
    parts: Mapping[str, OffDeviceBytes]
    num_steps: torch.Tensor | None
    """None where the optimizer does not count."""
    home: OffDeviceBytes | None
    """Home of the weight, where it streams; the master itself when both have one dtype."""
    master_dtype: torch.dtype
    """fp32, or without masters the weight's own."""

    @property
    def is_below_fp32(self) -> bool:
        return self.parameter.dtype != torch.float32

    @property
    def needs_conversion(self) -> bool:
        """True if new weights pass through a buffer of their own dtype."""
        return self.has_master and (self.home is None or self.home.data is None)

    @property
    def has_master(self) -> bool:
        """True if the master has other numbers than the weight."""
        return self.parameter.dtype != self.master_dtype

    @property
    def lane(self) -> Lane:
        """The lane that its parts are waited for on."""
        stored = [home.stored.lane for home in self.parts.values() if home.stored is not None]
        return "network" if "network" in stored else "disk"

    def dtype_of(self, key: str) -> torch.dtype:
        """Bytes of one of the parts."""
        return self.master_dtype if key == MASTER else torch.float32


class HostState:
    """The state that left, and its updates under way."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        plan: OptimizerStatePlan,
        workload: TrainingWorkload,
        tiers: Tiers,
        home_of: Callable[[str], OffDeviceBytes | None],
        rounding: StochasticRounding | None = None,
    ) -> None:
        """rounding: of weights below fp32 that are to have no masters."""
        self._rounding = rounding
        self._weight_decay = workload.weight_decay
        self._rule = rule_of(workload)
        self._parts = (MASTER, *self._rule.moments)
        self._tiers = tiers
        self._tensors: dict[str, _Leaving] = {}
        for name, parameter in named.items():
            self._tensors[name] = self._make(name, parameter, plan.place, home_of(name))
        self._num_piece_elements = min(PIECE_ELEMENTS, max((p.numel() for p in named.values()), default=0))
        self._gradient_scratch = self._make_gradient_scratch()
        self._wide, self._noise = self._make_rounding_scratch()
        self._rule_scratch: torch.Tensor | None = None
        if self._rule.holds_copy:
            size = self._num_piece_elements
            self._rule_scratch = tiers.host_buffer(size, dtype=torch.float32, category="temporaries", pinned=False)
        self._slots = (self._make_slot(), self._make_slot())
        self._under_way: dict[str, Future[None]] = {}
        self._copies: dict[str, list[Copy]] = {}

    @property
    def names(self) -> Collection[str]:
        """In the model's order."""
        return self._tensors.keys()

    # Updating.

    def begin(self, names: Sequence[str]) -> None:
        """From now on who asks for these tensors waits for the ``run`` that follows."""
        for name in names:
            self._under_way[name] = Future()
            self._copies[name] = []

    def run(self, names: Sequence[str], gradient_of: GradientOf, facts: UpdateFacts) -> None:
        """Update these tensors, in this order. Raises what ``gradient_of`` raises, and what the disk met; who waits for a tensor
        then raises it too.
        """
        try:
            # Before anything is read: tensors whose gradient is refused stay as they were.
            gradients = {name: gradient_of(name) for name in names}
            self._run([self._tensors[name] for name in names], gradients, facts)
        except BaseException as error:
            for name in names:
                if not self._under_way[name].done():
                    self._under_way[name].set_exception(error)
            raise

    def is_updated(self, name: str) -> bool:
        future = self._under_way.get(name)
        return future is None or future.done()

    def wait(self, name: str) -> None:
        """Until the tensor's update is done on the host: its home is new, its gradient no longer needed."""
        future = self._under_way.get(name)
        if future is not None and not future.done():
            with self._tiers.lanes.waiting("host"):
                future.result()
        elif future is not None:
            future.result()

    def require(self, name: str) -> None:
        """Until compute that is queued from here on finds the tensor's new weights on the device."""
        self.wait(name)
        for copy in self._copies.pop(name, ()):
            copy.wait()

    def settle(self) -> None:
        """Wait for everything under way."""
        for name in self._tensors:
            self.require(name)
        for slot in self._slots:
            slot.settle()

    # Checkpoints.

    def export(self, name: str) -> dict[str, torch.Tensor | HomeTensor]:
        """The state in the form of the device's: the master only where it is not the weight's equal."""
        tensor = self._tensors[name]
        size = tensor.parameter.shape
        keys = self._parts if tensor.has_master else self._rule.moments
        exported: dict[str, torch.Tensor | HomeTensor] = {
            key: HomeTensor(tensor.parts[key], dtype=torch.float32, shape=size) for key in keys
        }
        return exported if tensor.num_steps is None else {**exported, "step": tensor.num_steps}

    def set(self, name: str, key: str, value: torch.Tensor) -> None:
        """Undo ``export`` for one entry; ``master`` also for fp32 weights, where it is not the weight's home."""
        tensor = self._tensors[name]
        if key == "step" and tensor.num_steps is not None:
            tensor.num_steps.copy_(value)
        elif tensor.parts[key] is not tensor.home:
            tensor.parts[key].write(value.contiguous(), dtype=tensor.dtype_of(key))

    # Helpers.

    def _make(self, name: str, parameter: nn.Parameter, place: StatePlace, home: OffDeviceBytes | None) -> _Leaving:
        parts: dict[str, OffDeviceBytes] = {}
        num_bytes = 4 * parameter.numel()
        master_dtype = torch.float32 if self._rounding is None else parameter.dtype
        if home is not None and parameter.dtype == master_dtype:
            parts[MASTER] = home
        else:
            master = parts[MASTER] = OffDeviceBytes(
                self._tiers,
                master_dtype.itemsize * parameter.numel(),
                place=place,
                category="optimizer_state",
                meets_device=parameter.dtype == master_dtype,
            )
            weight = parameter.detach() if home is None else home.read().view(parameter.dtype)
            master.write(weight.contiguous(), dtype=master_dtype)
        for key in self._rule.moments:
            moment = parts[key] = OffDeviceBytes(
                self._tiers, num_bytes, place=place, category="optimizer_state", meets_device=False
            )
            if moment.data is not None:
                moment.data.zero_()
        num_steps = None
        if self._rule.counts_steps:
            num_steps = self._tiers.host_buffer((), dtype=torch.float32, category="optimizer_state", pinned=False).zero_()
        return _Leaving(
            name=name,
            parameter=parameter,
            weight_decay=self._weight_decay if parameter.dim() >= 2 else 0.0,
            parts=parts,
            num_steps=num_steps,
            home=home,
            master_dtype=master_dtype,
        )

    def _make_rounding_scratch(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """fp32 numbers and random bits of a piece."""
        if self._rounding is None:
            return None, None
        size = self._num_piece_elements
        make = partial(self._tiers.host_buffer, category="temporaries", pinned=False)
        return make(size, dtype=torch.float32), make(num_noise_words(size), dtype=torch.int64)

    def _make_gradient_scratch(self) -> torch.Tensor | None:
        if not any(tensor.is_below_fp32 for tensor in self._tensors.values()):
            return None
        return self._tiers.host_buffer(
            self._num_piece_elements, dtype=torch.float32, category="gradients", pinned=False
        )

    def _make_slot(self) -> "_Slot":
        tensors = self._tensors.values()
        size = self._num_piece_elements
        stored = [key for key in self._parts if any(tensor.parts[key].stored is not None for tensor in tensors)]
        converted = next((tensor.parameter.dtype for tensor in tensors if tensor.needs_conversion), None)
        return _Slot(
            parts={
                key: self._tiers.host_buffer(size, dtype=self._widest(key), category="optimizer_state") for key in stored
            },
            weights=None if converted is None else self._tiers.host_buffer(size, dtype=converted, category="weights"),
        )

    def _widest(self, key: str) -> torch.dtype:
        """The dtype of a part, of whichever tensor has the wider one."""
        return max((tensor.dtype_of(key) for tensor in self._tensors.values()), key=lambda dtype: dtype.itemsize)

    def _run(self, tensors: Sequence[_Leaving], gradients: Mapping[str, torch.Tensor], facts: UpdateFacts) -> None:
        work = list(_cut(tensors))
        reading: list[Transfer] = self._begin_reading(work[0], self._slots[0]) if work else []
        for index, piece in enumerate(work):
            slot, next_slot = self._slots[index % 2], self._slots[(index + 1) % 2]
            arriving = reading
            if index + 1 < len(work):
                reading = self._begin_reading(work[index + 1], next_slot)
            if arriving:
                with self._tiers.lanes.waiting(piece.tensor.lane):
                    for transfer in arriving:
                        transfer.wait()
            self._update_piece(piece, slot, gradients[piece.tensor.name], facts)
            if piece.is_last:
                self._under_way[piece.tensor.name].set_result(None)

    def _begin_reading(self, piece: "_Piece", slot: "_Slot") -> list[Transfer]:
        slot.settle()
        transfers = []
        for key, home in piece.tensor.parts.items():
            if home.stored is not None:
                target = self._part(piece, key, slot)
                transfers.append(home.stored.read(target, offset_bytes=target.itemsize * piece.start))
        return transfers

    def _update_piece(self, piece: "_Piece", slot: "_Slot", gradient: torch.Tensor, facts: UpdateFacts) -> None:
        tensor = piece.tensor
        master, *moments = (self._part(piece, key, slot) for key in self._parts)
        if piece.start == 0 and tensor.num_steps is not None:
            tensor.num_steps.add_(1)
        weight = master
        if self._wide is not None and master.dtype != torch.float32:
            weight = self._wide[: piece.num_elements].copy_(master)
        self._rule.update(
            Piece(
                weight,
                self._scaled(gradient.view(-1)[piece.start : piece.end], facts.grad_factor),
                moments,
                facts.learning_rate,
                tensor.weight_decay,
                num_steps=tensor.num_steps,
                scratch=self._rule_scratch,
            )
        )
        if weight is not master and self._rounding is not None:
            if piece.start == 0:
                self._rounding.begin(tensor.name)
            self._rounding.round_(weight, name=tensor.name, start=piece.start, noise=self._noise)
            master.copy_(weight)
        self._bring_weights(piece, slot, master)
        for key, home in tensor.parts.items():
            if home.stored is not None:
                part = self._part(piece, key, slot)
                slot.leaving.append(home.stored.write(part, offset_bytes=part.itemsize * piece.start))

    def _part(self, piece: "_Piece", key: str, slot: "_Slot") -> torch.Tensor:
        home, dtype = piece.tensor.parts[key], piece.tensor.dtype_of(key)
        if home.data is None:
            return slot.parts[key].view(dtype)[: piece.num_elements]
        return home.data.view(dtype)[piece.start : piece.end]

    def _scaled(self, gradient: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        """In fp32; scaled where clipping on the device scales: bf16 as it is, fp16 once it is fp32."""
        if factor is not None and gradient.dtype != torch.float16:
            gradient.mul_(factor)
        if self._gradient_scratch is None:
            return gradient
        widened = self._gradient_scratch[: gradient.numel()].copy_(gradient)
        if factor is not None and gradient.dtype == torch.float16:
            widened.mul_(factor)
        return widened

    def _bring_weights(self, piece: "_Piece", slot: "_Slot", master: torch.Tensor) -> None:
        """The new numbers to where the weight lives."""
        tensor = piece.tensor
        dtype = tensor.parameter.dtype
        home = tensor.home
        if home is not None and home.data is not None:
            if tensor.has_master:
                home.data.view(dtype)[piece.start : piece.end].copy_(master)
            return
        new = master
        if slot.weights is not None and tensor.has_master:
            new = slot.weights[: piece.num_elements].copy_(master)
        if home is None:
            target = tensor.parameter.data.view(-1)[piece.start : piece.end]
            # Its gradient is on the host, so backward no longer needs the weight, and the next forward waits for it.
            copy = self._tiers.copy_to_device(new, target, behind_compute=False)
            self._copies[tensor.name].append(copy)
            if new is not master or tensor.parts[MASTER].stored is not None:
                slot.leaving.append(copy)
        elif home.stored is not None and tensor.has_master:
            slot.leaving.append(home.stored.write(new, offset_bytes=dtype.itemsize * piece.start))


class _Slot:
    """Staging of one piece. Not to be filled again before what leaves it has left."""

    def __init__(self, *, parts: Mapping[str, torch.Tensor], weights: torch.Tensor | None) -> None:
        self.parts = parts
        self.weights = weights
        self.leaving: list[Transfer | Copy] = []

    def settle(self) -> None:
        leaving, self.leaving = self.leaving, []
        for one in leaving:
            if isinstance(one, Transfer):
                one.wait()
            else:
                one.finish()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Piece:
    tensor: _Leaving
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        return self.end == self.tensor.parameter.numel()


def _cut(tensors: Sequence[_Leaving]) -> Iterator[_Piece]:
    for tensor in tensors:
        for start, end in pieces(tensor.parameter.numel()):
            yield _Piece(tensor=tensor, start=start, end=end)
