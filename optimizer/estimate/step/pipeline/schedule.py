"""Runs the schedule of a step through the ranks of a cut model: who works when, and who waits for whom. Pure and torch-free.

The runtime's own rules (``runtime/ranks/pipeline``): what is sent crosses when both sides are ready; who sends goes on meanwhile,
but waits until it is taken at the moments that ``link.py`` names.

*Not modelled*: crossings of several pairs of ranks that share one link.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

from optimizer.plan.devices.stages import PipelineSchedule, RankStages, Turn, count_sent_at_once, list_turns

_Sent = Literal["hidden", "gradient"]


class _Event(NamedTuple):
    """That a stage begins to send, or that it was taken."""

    what: _Sent
    stage: int
    """The stage that sends."""
    micro_batch: int
    is_taken: bool


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Milliseconds that a stage computes for one micro-batch, or all stages of a rank together."""

    forward_ms: float
    backward_ms: float
    """Time of the first micro-batch's backward."""
    accumulate_ms: float
    """Time of each other, whose gradients add to those that are there."""

    def of(self, turn: Turn) -> float:
        if turn.kind == "forward":
            return self.forward_ms
        return self.accumulate_ms if turn.micro_batch else self.backward_ms

    @property
    def of_one_ms(self) -> float:
        """Time of a micro-batch that is not the first."""
        return self.forward_ms + self.accumulate_ms

    def of_all_ms(self, num_micro_batches: int) -> float:
        """Time of all micro-batches of a step."""
        return num_micro_batches * self.of_one_ms + self.backward_ms - self.accumulate_ms

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``."""
        return start_ms + self.of(turn)


class Turns(Protocol):
    """The clock of a rank within a schedule."""

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``; turns are asked for in their order."""


class Clocked(Turns, Protocol):
    """The clock of a rank, from step to step."""

    @property
    def has_work_left(self) -> bool:
        """True where the host is still busy with the step that has ended."""

    def end_step(self, at_ms: float) -> float:
        """Time at which clipping and the update end, where all ranks have done their turns at ``at_ms``."""

    def begin_again(self) -> None:
        """A new step, with what is under way."""


@dataclass(frozen=True, kw_only=True)
class RankPrice:
    """One rank of a cut model under one plan."""

    peak_bytes: int
    """Most bytes on its device in a steady step."""
    host_bytes: int
    """Most bytes on the host, likewise."""
    times: StageTimes
    """Times of micro-batches that wait for no other rank, but for their own copies."""
    first_stage: StageTimes
    """Times of compute alone in the rank's first stage."""
    compute_ms: float
    """Time of compute alone in a step, up to the update."""
    make_clock: Callable[[], Clocked]
    """Makes the clock of a step."""


def least_step_ms(prices: Sequence[RankPrice]) -> float:
    """No step of these ranks, in their order, is shorter: before a rank's first turn a micro-batch goes forward through the ranks
    before it, and after its last one backward.
    """
    least_ms = before_ms = 0.0
    for price in prices:
        least_ms = max(least_ms, before_ms + price.compute_ms)
        before_ms += price.first_stage.forward_ms + min(price.first_stage.backward_ms, price.first_stage.accumulate_ms)
    return least_ms


@dataclass(frozen=True, kw_only=True)
class RanStep:
    """A step that was run, up to what follows the last micro-batch."""

    total_ms: float
    waited_ms: tuple[tuple[float, ...], ...]
    """By rank, the wait in each of its turns, and one more until all ranks are done."""
    turns: tuple[tuple[Turn, ...], ...]


def run_steady(
    clocks: Sequence[Clocked],
    *,
    ranks: Sequence[RankStages],
    num_micro_batches: int,
    schedule: PipelineSchedule,
    crossing_ms: float,
    notice_ms: float = 0.0,
) -> tuple[RanStep, float]:
    """Run a step that follows others like it; returns it, and the time at which the last rank has updated its weights. The
    rest as ``run_schedule`` has it.
    """

    def run() -> tuple[RanStep, float]:
        ran = run_schedule(
            clocks,
            ranks=ranks,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            crossing_ms=crossing_ms,
            notice_ms=notice_ms,
        )
        return ran, max([clock.end_step(ran.total_ms) for clock in clocks])

    ran = run()
    if any(clock.has_work_left for clock in clocks):
        for clock in clocks:
            clock.begin_again()
        ran = run()
    return ran


def run_schedule(
    times: Sequence[Turns],
    *,
    ranks: Sequence[RankStages],
    num_micro_batches: int,
    schedule: PipelineSchedule,
    crossing_ms: float,
    notice_ms: float = 0.0,
) -> RanStep:
    """Run it. crossing_ms: of one micro-batch's hidden states from a stage to the next, and of their gradients back. notice_ms:
    from when a stage is ready to receive until the other knows.
    """
    happened: dict[_Event, float] = {}
    runs = [
        _RankRun(
            own=own,
            times=each,
            turns=tuple(list_turns(own, num_micro_batches=num_micro_batches, schedule=schedule)),
            at_once=dict(zip(get_args(_Sent), count_sent_at_once(own, num_micro_batches=num_micro_batches), strict=True)),
            crossing_ms=crossing_ms,
            notice_ms=notice_ms,
            happened=happened,
        )
        for own, each in zip(ranks, times, strict=True)
    ]
    under_way = [(walk := run.walk(), next(walk)) for run in runs]
    while under_way:
        num_before = len(happened)
        under_way = [pair for walk, event in under_way if (pair := _go_on(walk, event, happened)) is not None]
        if under_way and len(happened) == num_before and not any(event in happened for _, event in under_way):
            raise RuntimeError("the ranks of a schedule wait for each other")
    total_ms = max(run.now_ms for run in runs)
    return RanStep(
        total_ms=total_ms,
        waited_ms=tuple((*run.waited_ms, total_ms - run.last_turn_ms) for run in runs),
        turns=tuple(run.turns for run in runs),
    )


_Walk = Generator[_Event, float, None]


def _go_on(walk: _Walk, event: _Event, happened: Mapping[_Event, float]) -> tuple[_Walk, _Event] | None:
    """Let a rank go on as far as it can; what it asks for then, or None where it has ended."""
    try:
        while event in happened:
            event = walk.send(happened[event])
    except StopIteration:
        return None
    return walk, event


@dataclass(kw_only=True)
class _RankRun:
    """One rank on its way through a step."""

    own: RankStages
    times: Turns
    turns: tuple[Turn, ...]
    at_once: Mapping[_Sent, int]
    """Most tensors of each kind that are sent and held."""
    crossing_ms: float
    notice_ms: float
    happened: dict[_Event, float]
    now_ms: float = 0.0
    last_turn_ms: float = 0.0
    """Time at which the last turn has ended."""
    waited_ms: list[float] = field(default_factory=list)
    _held: dict[_Sent, deque[_Event]] = field(default_factory=lambda: {kind: deque() for kind in get_args(_Sent)})
    """That hidden states, or gradients, which were sent and are still held are taken, the oldest first."""

    def walk(self) -> _Walk:
        """The turns in order. Asks for events and is given their times."""
        last_stage = self.own.num_ranks * len(self.own.stages) - 1
        for turn in self.turns:
            start_ms = self.now_ms
            kind, micro_batch, stage = turn
            if kind == "forward":
                yield from self._receive("hidden", stage - 1, micro_batch, is_there=stage > 0)
            else:
                yield from self._receive("gradient", stage + 1, micro_batch, is_there=stage < last_stage)
            begun_ms = self.now_ms
            self.now_ms = self.times.end_ms(turn, begun_ms)
            work_ms = self.now_ms - begun_ms
            if kind == "forward":
                yield from self._send("hidden", stage, micro_batch, is_there=stage < last_stage)
            else:
                yield from self._send("gradient", stage, micro_batch, is_there=stage > 0)
            self.waited_ms.append(self.now_ms - start_ms - work_ms)
        self.last_turn_ms = self.now_ms
        yield from self._settle("hidden")
        yield from self._settle("gradient")

    def _receive(self, what: _Sent, source: int, micro_batch: int, *, is_there: bool) -> _Walk:
        """is_there: whether there is a stage that sends."""
        if not is_there:
            return
        ready_ms = yield _Event(what, source, micro_batch, is_taken=False)
        self.now_ms = max(self.now_ms + self.notice_ms, ready_ms) + self.crossing_ms
        self.happened[_Event(what, source, micro_batch, is_taken=True)] = self.now_ms
        if what == "gradient":
            yield from self._settle("hidden")
        elif self.at_once["gradient"] == 1:
            yield from self._settle("gradient")

    def _send(self, what: _Sent, stage: int, micro_batch: int, *, is_there: bool) -> _Walk:
        if is_there:
            yield from self._settle(what, leaving=self.at_once[what] - 1)
            self.happened[_Event(what, stage, micro_batch, is_taken=False)] = self.now_ms
            self._held[what].append(_Event(what, stage, micro_batch, is_taken=True))

    def _settle(self, what: _Sent, *, leaving: int = 0) -> _Walk:
        """Wait until what was sent first is taken, and ``leaving`` are held."""
        while len(self._held[what]) > leaving:
            taken_ms = yield self._held[what].popleft()
            self.now_ms = max(self.now_ms, taken_ms)
