"""Tasks in order: the runs that a step is made of, and what each comes to in bytes and on the clock. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, attrgetter
from typing import Final, NamedTuple

from optimizer.base.categories import Link
from optimizer.estimate.tasks.change import NO_COPIES
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.tasks.tasks import NUM_BEYOND, Task
from optimizer.estimate.tasks.transfers import Event


class TaskRun:
    """Tasks in order, and what they come to together.

    A search prices hundreds of runs, mostly of tasks that were in others before, so the work for each task is left to what Python
    has built in.
    """

    def __init__(self, tasks: Sequence[Task], *, parts: "tuple[TaskRun, TaskRun] | None" = None) -> None:
        """Make a run. parts: two runs whose tasks these are, from which the rest is put together."""
        self.tasks = tuple(tasks)
        self._parts = parts
        self._steps: dict[str, Steps] = {}

    def __add__(self, after: "TaskRun") -> "TaskRun":
        """Put this run and then the other together."""
        return TaskRun(self.tasks + after.tasks, parts=(self, after))

    @cached_property
    def follows_blocks(self) -> bool:
        """True where it has transfers that could begin when a block's backward ended."""
        transfers = (transfer for task in self.tasks for transfer in (*task.arrives, *task.begins))
        return any(transfer.after_block is not None for transfer in transfers)

    def steps(self, device_kind: str) -> "Steps":
        """Steps of its tasks on this clock."""
        if device_kind not in self._steps:
            self._steps[device_kind] = self._list_steps(device_kind)
        return self._steps[device_kind]

    def _list_steps(self, device_kind: str) -> "Steps":
        if self._parts is not None:
            before, after = (part.steps(device_kind) for part in self._parts)
            return Steps(
                compute_ms=before.compute_ms + after.compute_ms,
                events=before.events + after.events,
                acts=before.acts or after.acts,
            )
        if not self.tasks:
            return Steps(compute_ms=(), events=(), acts=False)
        compute_ms, events = zip(*map(_STEP_OF[device_kind], self.tasks), strict=True)
        return Steps(compute_ms=compute_ms, events=events, acts=any(map(_acts_of, filter(None, events))))

    @cached_property
    def sums(self) -> "RunSums":
        if self._parts is not None:
            before, after = self._parts
            return _join_sums(before.sums, after.sums)
        if not self.tasks:
            return NO_SUMS
        nets, rises, logits, elsewhere = zip(*map(_totals_of, self.tasks), strict=True)
        levels = list(accumulate(nets, initial=0))
        tops = list(map(add, levels, rises))
        top = max(tops)
        beyond, highest = [0] * NUM_BEYOND, [0] * NUM_BEYOND
        copied: dict[Link, int] = {}
        for places, links in filter(None, elsewhere):
            for place, net, rise in places:
                if beyond[place] + rise > highest[place]:
                    highest[place] = beyond[place] + rise
                beyond[place] += net
            for link, num_bytes in links:
                copied[link] = copied.get(link, 0) + num_bytes
        return RunSums(
            net=levels[-1],
            top=top,
            top_index=tops.index(top),
            num_tasks=len(tops),
            logits=sum(logits),
            beyond=tuple(beyond),
            beyond_top=tuple(highest),
            copied=copied,
        )


class Steps(NamedTuple):
    """Clock steps of a run's tasks, in order."""

    compute_ms: tuple[float, ...]
    """Milliseconds on the compute lane, after the event."""
    events: tuple[Event | None, ...]
    acts: bool
    """True where any event does more than wait."""


class RunSums(NamedTuple):
    """Totals of a run, above its start. Device bytes over all categories."""

    net: int
    top: int
    """The highest point of the task that has the highest, the first of such."""
    top_index: int
    num_tasks: int
    logits: int
    """The part of the net that is logits and loss."""
    beyond: tuple[int, ...]
    """Bytes that are left on each tier beyond the device, and those that were there at the most, at least 0."""
    beyond_top: tuple[int, ...]
    copied: Mapping[Link, int]


def _join_sums(before: RunSums, after: RunSums) -> RunSums:
    if not before.num_tasks or not after.num_tasks:
        return before if before.num_tasks else after
    is_later = before.net + after.top > before.top
    copied = dict(before.copied)
    for link, num_bytes in after.copied.items():
        copied[link] = copied.get(link, 0) + num_bytes
    return RunSums(
        net=before.net + after.net,
        top=before.net + after.top if is_later else before.top,
        top_index=before.num_tasks + after.top_index if is_later else before.top_index,
        num_tasks=before.num_tasks + after.num_tasks,
        logits=before.logits + after.logits,
        beyond=tuple(map(add, before.beyond, after.beyond)),
        beyond_top=tuple(map(max, before.beyond_top, map(add, before.beyond, after.beyond_top))),
        copied=copied,
    )


NO_SUMS: Final = RunSums(0, 0, 0, 0, 0, (0,) * NUM_BEYOND, (0,) * NUM_BEYOND, NO_COPIES)
_totals_of: Final = attrgetter("totals")
_acts_of: Final = attrgetter("acts")
_STEP_OF: Final = {"cpu": attrgetter("on_cpu"), "cuda": attrgetter("on_cuda")}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tasks of a step. ``num_later`` times the ``later`` ones follow the ``first``, then the ``update``.

    Where ranks exchange gradients after the last micro-batch alone, that one differs from the others: it is not among the later
    ones, and ``update`` begins with it.
    """

    first: TaskRun
    later: TaskRun
    num_later: int
    update: TaskRun
    carried: Bytes
    """Bytes that each further micro-batch leaves behind, by category: its inputs, on the CPU device, and rows of sparse
    gradients."""
    last: TaskRun | None = None
    """The last micro-batch where it differs."""

    @cached_property
    def tasks_after_last(self) -> tuple[Task, ...]:
        """Tasks that follow the last micro-batch."""
        return self.update.tasks if self.last is None else self.update.tasks[len(self.last.tasks) :]

    @cached_property
    def carried_bytes(self) -> int:
        """Bytes over all categories."""
        return int(self.carried.sum())
