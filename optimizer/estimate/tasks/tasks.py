"""The elements of a schedule: tasks, what each waits for, and what it starts beside compute. Torch-free.

A task is made once and is part of many plans' schedules (``step/runs.py``), so what a simulation wants to know of it is kept with
it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optimizer.base.categories import CATEGORIES, Category, Lane, Link
from optimizer.estimate.tasks.change import NO_COPIES, Change, Move
from optimizer.estimate.tasks.parts import Bytes, PartBytes, PartTime
from optimizer.estimate.tasks.transfers import Event, Legs, Transfer, make_event
from optimizer.hardware.machine import Processor

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_LOGITS = _SLOT["logits_and_loss"]
NO_TIME = PartTime(compute_ms=0.0)

@dataclass(frozen=True, kw_only=True)
class Task:
    """A stretch of the step."""

    phase: str
    """forward, backward or optimizer."""
    block: int
    """Number of the block; -1 outside the blocks."""
    name: str
    """Name of the task, for people, where it is no block: ``head and loss``."""
    bytes: PartBytes
    time: PartTime
    """Busy milliseconds of what is listed below, and of compute."""
    copied: Mapping[Link, int] = field(default_factory=lambda: NO_COPIES)
    waits_for: tuple[Hashable, ...] = ()
    """Keys of transfers that must be done before it, where they were begun at all."""
    arrives: tuple[Transfer, ...] = ()
    """Transfers that must be done before it; begun with it unless they were before."""
    begins: tuple[Transfer, ...] = ()
    """Transfers that are begun with it, for later."""
    leaves: tuple[Legs, ...] = ()
    """Transfers that are begun with it; nobody waits but a task that ``drains``."""
    drains: bool = False
    """True where it waits for everything that was begun."""
    moves: Callable[[], Sequence[Move]] | None = field(default=None, compare=False, repr=False)
    """The changes that ``bytes`` sums up, one by one, for a replay; None where all comes and goes at once."""
    allocated_rise: Callable[[Processor], int] | None = field(default=None, compare=False, repr=False)
    """Bytes by which ``bytes`` goes above its start with what the CPU's kernels hold; None where no kernel holds
    anything."""
    num_random_states: int = 0
    """Random states that this begins to keep, of a block that runs forward again, or, below 0, lets go of when it ends."""

    def describe(self, num_blocks: int) -> str:
        return f"{self.phase} of block {self.block + 1} of {num_blocks}" if self.block >= 0 else self.name

    def in_block(
        self,
        block: int,
        *,
        waits_for: tuple[Hashable, ...] = (),
        arrives: tuple[Transfer, ...] = (),
        begins: tuple[Transfer, ...] = (),
    ) -> "Task":
        """This task of another block that is alike; what all of them come to is worked out once."""
        other = object.__new__(Task)
        other.__dict__.update(self.__dict__, totals=self.totals, block=block, waits_for=waits_for, arrives=arrives, begins=begins)
        return other

    @cached_property
    def on_cpu(self) -> "Step":
        """The task's step on the CPU device's clock."""
        return self._step("cpu")

    @cached_property
    def on_cuda(self) -> "Step":
        """The task's step on a card's clock."""
        return self._step("cuda")

    def _step(self, device_kind: str) -> "Step":
        event = make_event(
            waits_for=self.waits_for,
            arrives=self.arrives,
            begins=self.begins,
            leaves=self.leaves,
            drains=self.drains,
            device_kind=device_kind,
        )
        return self.time.compute_ms, event

    @cached_property
    def totals(self) -> "Totals":
        beyond = self.bytes.beyond
        places = tuple(
            (place, beyond[2 * place], beyond[2 * place + 1]) for place in range(NUM_BEYOND) if any(beyond[2 * place :][:2])
        )
        elsewhere = Elsewhere(places, tuple(self.copied.items())) if places or self.copied else None
        return Totals(self.bytes.net_bytes, self.bytes.rise, int(self.bytes.net[_LOGITS]), elsewhere)


Step = tuple[float, Event | None]
"""Milliseconds on the compute lane, and what is done before them."""
NUM_BEYOND = 3
"""Tiers beyond the device: host, disk and remote store, in this order."""


class Elsewhere(NamedTuple):
    """The work of a task beyond the device."""

    places: tuple[tuple[int, int, int], ...]
    """(Which tier, net, rise) of those that it changes."""
    copied: tuple[tuple[Link, int], ...]


class Totals(NamedTuple):
    """A task's bytes on the device over all categories, and what few tasks have."""

    net: int
    rise: int
    logits: int
    """The part of the net that is logits and loss."""
    elsewhere: Elsewhere | None


def single(category: Category, num_bytes: int) -> Bytes:
    """A row of CATEGORIES with one entry."""
    row = np.zeros(len(CATEGORIES), dtype=np.int64)
    row[_SLOT[category]] = num_bytes
    return row


def moved_bytes(net: Bytes) -> PartBytes:
    """Bytes that come or go at once."""
    rise = max(0, int(net.sum()))
    return PartBytes(net=net, rise=rise, at_rise=net if rise else np.zeros_like(net))


def risen_bytes(device: Bytes, *, host: int = 0) -> PartBytes:
    """Bytes that come and go again."""
    return PartBytes(net=np.zeros_like(device), rise=int(device.sum()), at_rise=device, host_rise=host)


def list_moves(task: Task) -> Sequence[Move]:
    """Moves of one task, in order."""
    return task.moves() if task.moves is not None else tuple(_moves_at_once(task.bytes))


def as_moves(changes: Sequence[Change]) -> tuple[Move, ...]:
    """Moves for changes that no traced op makes."""
    return tuple(Move(*change, -1) for change in changes)


def _moves_at_once(part: PartBytes) -> Iterator[Move]:
    """Moves up to the highest point, and from there to the end; what goes goes first."""
    for row in (part.at_rise, part.net - part.at_rise):
        steps = row.tolist()
        for slot in sorted(range(len(steps)), key=lambda slot: steps[slot] > 0):
            if steps[slot]:
                yield Move("device", slot, steps[slot], -1)


def move_task(phase: str, name: str, net: Bytes) -> Task:
    """Bytes that come or go between two parts, in no time."""
    return Task(phase=phase, block=-1, name=name, bytes=moved_bytes(net), time=NO_TIME)


def add_legs(time: PartTime, legs: Sequence[tuple[Lane, float]]) -> PartTime:
    """Time of a part's lanes and of these transfers."""
    if not legs:
        return time
    lanes_ms: dict[str, float] = {}
    for lane, lane_ms in legs:
        name = f"{lane}_ms"
        lanes_ms[name] = (lanes_ms[name] if name in lanes_ms else getattr(time, name)) + lane_ms
    return replace(time, **lanes_ms)  # type: ignore[arg-type]
