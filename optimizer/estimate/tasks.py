"""What a schedule is made of: tasks, what each waits for, and what it starts beside compute.

A task is made once and is part of many plans' schedules, so what a simulation wants to know of it is kept with it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from optimizer.categories import CATEGORIES, Category, Link
from optimizer.estimate.compiled import NO_COPIES, Bytes, Change, Move, PartBytes, PartTime
from optimizer.estimate.prediction import Lane

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_LOGITS = _SLOT["logits_and_loss"]
NO_TIME = PartTime(compute_ms=0.0)

Legs = tuple[tuple[Lane, float], ...]
"""Lanes one after the other with milliseconds on each; a leg begins when the one before it does, and ends no sooner."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Something under way beside compute, known by its key to who waits for it."""

    key: Hashable
    legs: Legs
    after_block: int | None = None
    """It could begin when this block's backward ended; None when it is begun."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A stretch of the step."""

    phase: str
    """forward, backward or optimizer."""
    block: int
    """-1 outside the blocks."""
    name: str
    """For people, where it is no block: ``head and loss``."""
    bytes: PartBytes
    time: PartTime
    """Busy milliseconds of what is listed below, and of compute."""
    copied: Mapping[Link, int] = field(default_factory=lambda: NO_COPIES)
    waits_for: tuple[Hashable, ...] = ()
    """Keys of transfers that must be done before it, where they were begun at all."""
    arrives: tuple[Transfer, ...] = ()
    """Must be done before it; begun with it unless they were before."""
    begins: tuple[Transfer, ...] = ()
    """Begun with it, for later."""
    leaves: tuple[Legs, ...] = ()
    """Begun with it; nobody waits but a task that ``drains``."""
    drains: bool = False
    """Waits for everything that was begun."""
    moves: Callable[[], Sequence[Move]] | None = field(default=None, compare=False, repr=False)
    """What ``bytes`` sums up, change by change, for a replay; None where all comes and goes at once."""
    on_clocks: dict[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What ``clock.py`` has made of it, by kind of device."""

    def describe(self, num_blocks: int) -> str:
        return f"{self.phase} of block {self.block + 1} of {num_blocks}" if self.block >= 0 else self.name

    @cached_property
    def totals(self) -> "Totals":
        beyond = self.bytes.beyond if any(self.bytes.beyond) else None
        return Totals(int(self.bytes.net.sum()), self.bytes.rise, beyond, self.copied or None)

    @cached_property
    def logits_bytes(self) -> int:
        """Of logits and loss, left behind."""
        return int(self.bytes.net[_LOGITS])


class Totals(NamedTuple):
    """A task's bytes over all categories."""

    net: int
    rise: int
    beyond: tuple[int, ...] | None
    """Net and rise of host, disk and remote store; None where nothing is there of either."""
    copied: Mapping[Link, int] | None


@dataclass(frozen=True)
class Run:
    """Tasks in order, and what they come to together."""

    tasks: tuple[Task, ...]

    @cached_property
    def sums(self) -> "RunSums":
        level = 0
        top, top_index = (self.tasks[0].totals.rise, 0) if self.tasks else (0, 0)
        beyond, highest = [0, 0, 0], [0, 0, 0]
        copied: dict[Link, int] = {}
        for index, task in enumerate(self.tasks):
            net, rise, elsewhere, copies = task.totals
            if level + rise > top:
                top, top_index = level + rise, index
            level += net
            if elsewhere is not None:
                for place in range(3):
                    highest[place] = max(highest[place], beyond[place] + elsewhere[2 * place + 1])
                    beyond[place] += elsewhere[2 * place]
            if copies is not None:
                for link, num_bytes in copies.items():
                    copied[link] = copied.get(link, 0) + num_bytes
        return RunSums(net=level, top=top, top_index=top_index, beyond=tuple(highest), copied=copied)


@dataclass(frozen=True, kw_only=True)
class RunSums:
    """Of a run, above its start. Device bytes over all categories."""

    net: int
    top: int
    """The highest point of the task that has the highest, the first of such."""
    top_index: int
    beyond: tuple[int, ...]
    """The highest on the host, the disk and the remote store; at least 0."""
    copied: Mapping[Link, int]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of a step. ``num_later`` times the ``later`` ones follow the ``first``, then the ``update``."""

    first: Run
    later: Run
    num_later: int
    update: Run
    carried: Bytes
    """What each further micro-batch leaves behind, by category: its inputs, on the CPU device, and rows of sparse gradients."""


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
    """Of one task, in order."""
    return task.moves() if task.moves is not None else tuple(_moves_at_once(task.bytes))


def as_moves(changes: Sequence[Change]) -> tuple[Move, ...]:
    """Of changes that no traced op makes."""
    return tuple(Move(*change, -1) for change in changes)


def _moves_at_once(part: PartBytes) -> Iterator[Move]:
    """Up to the highest point, and from there to the end; what goes goes first."""
    for row in (part.at_rise, part.net - part.at_rise):
        steps = row.tolist()
        for slot in sorted(range(len(steps)), key=lambda slot: steps[slot] > 0):
            if steps[slot]:
                yield Move("device", slot, steps[slot], -1)


def move_task(phase: str, name: str, net: Bytes) -> Task:
    """Bytes that come or go between two parts, in no time."""
    return Task(phase=phase, block=-1, name=name, bytes=moved_bytes(net), time=NO_TIME)


def add_legs(time: PartTime, legs: Legs) -> PartTime:
    """What a part's lanes do, and these transfers."""
    for lane, lane_ms in legs:
        name = f"{lane}_ms"
        time = replace(time, **{name: getattr(time, name) + lane_ms})
    return time
