"""Runs the schedule of a step through the stages of a cut model: who works when, and who waits for whom. Pure and torch-free.

The runtime's own rules (``runtime/ranks/pipeline``): what is sent crosses when both sides are ready; who sends goes on meanwhile,
but waits until it is taken at the moments that ``link.py`` names.

*Not modelled*: crossings of several pairs of stages that share one link.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from optimizer.plan.stages import PipelineSchedule, StageOfModel, Turn, list_turns

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
    """Milliseconds that a stage computes for one micro-batch."""

    forward_ms: float
    backward_ms: float
    """Time of the first micro-batch's backward."""
    accumulate_ms: float
    """Time of each other, whose gradients add to those that are there."""

    def of(self, turn: Turn) -> float:
        kind, index = turn
        if kind == "forward":
            return self.forward_ms
        return self.accumulate_ms if index else self.backward_ms

    @property
    def of_one_ms(self) -> float:
        """Time of a micro-batch that is not the first."""
        return self.forward_ms + self.accumulate_ms

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``."""
        return start_ms + self.of(turn)


class Turns(Protocol):
    """The clock of a stage within a schedule."""

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``; turns are asked for in their order."""


class Clocked(Turns, Protocol):
    """The clock of a stage, from step to step."""

    @property
    def has_work_left(self) -> bool:
        """True where the host is still busy with the step that has ended."""

    def end_step(self, at_ms: float) -> float:
        """Time at which clipping and the update end, where all stages have done their turns at ``at_ms``."""

    def begin_again(self) -> None:
        """A new step, with what is under way."""


@dataclass(frozen=True, kw_only=True)
class StagePrice:
    """One stage under one plan."""

    peak_bytes: int
    """Most bytes on its device in a steady step."""
    host_bytes: int
    """Most bytes on the host, likewise."""
    times: StageTimes
    """Times of micro-batches that wait for no other stage, but for their own copies."""
    make_clock: Callable[[], Clocked]
    """Makes the clock of a step."""


@dataclass(frozen=True, kw_only=True)
class RanStep:
    """A step that was run, up to what follows the last micro-batch."""

    total_ms: float
    waited_ms: tuple[tuple[float, ...], ...]
    """By stage, the wait in each of its turns, and one more until all stages are done."""
    turns: tuple[tuple[Turn, ...], ...]


def run_steady(
    clocks: Sequence[Clocked],
    *,
    stages: Sequence[StageOfModel],
    num_micro_batches: int,
    schedule: PipelineSchedule,
    crossing_ms: float,
    notice_ms: float = 0.0,
) -> tuple[RanStep, float]:
    """Run a step that follows others like it; returns it, and the time at which the last stage has updated its weights. The
    rest as ``run_schedule`` has it.
    """

    def run() -> tuple[RanStep, float]:
        ran = run_schedule(
            clocks,
            stages=stages,
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
    stages: Sequence[StageOfModel],
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
        _StageRun(
            stage=stage,
            times=each,
            turns=tuple(list_turns(stage, num_micro_batches=num_micro_batches, schedule=schedule)),
            crossing_ms=crossing_ms,
            notice_ms=notice_ms,
            happened=happened,
        )
        for stage, each in zip(stages, times, strict=True)
    ]
    under_way = [(walk := run.walk(), next(walk)) for run in runs]
    while under_way:
        num_before = len(happened)
        under_way = [pair for walk, event in under_way if (pair := _go_on(walk, event, happened)) is not None]
        if under_way and len(happened) == num_before and not any(event in happened for _, event in under_way):
            raise RuntimeError("the stages of a schedule wait for each other")
    total_ms = max(run.now_ms for run in runs)
    return RanStep(
        total_ms=total_ms,
        waited_ms=tuple((*run.waited_ms, total_ms - run.last_turn_ms) for run in runs),
        turns=tuple(run.turns for run in runs),
    )


_Walk = Generator[_Event, float, None]


def _go_on(walk: _Walk, event: _Event, happened: Mapping[_Event, float]) -> tuple[_Walk, _Event] | None:
    """Let a stage go on as far as it can; what it asks for then, or None where it has ended."""
    try:
        while event in happened:
            event = walk.send(happened[event])
    except StopIteration:
        return None
    return walk, event


@dataclass(kw_only=True)
class _StageRun:
    """One stage on its way through a step."""

    stage: StageOfModel
    times: Turns
    turns: tuple[Turn, ...]
    crossing_ms: float
    notice_ms: float
    happened: dict[_Event, float]
    now_ms: float = 0.0
    last_turn_ms: float = 0.0
    """Time at which the last turn has ended."""
    waited_ms: list[float] = field(default_factory=list)
    _pending: dict[_Sent, int] = field(default_factory=dict)
    """The micro-batch whose hidden states, or whose gradient, were sent last and are still held."""

    def walk(self) -> _Walk:
        """The turns in order. Asks for events and is given their times."""
        for turn in self.turns:
            start_ms = self.now_ms
            kind, micro_batch = turn
            if kind == "forward":
                yield from self._receive("hidden", self.stage.index - 1, micro_batch, is_there=not self.stage.is_first)
            else:
                yield from self._receive("gradient", self.stage.index + 1, micro_batch, is_there=not self.stage.is_last)
            begun_ms = self.now_ms
            self.now_ms = self.times.end_ms(turn, begun_ms)
            work_ms = self.now_ms - begun_ms
            if kind == "forward":
                yield from self._send("hidden", micro_batch, is_there=not self.stage.is_last)
            else:
                yield from self._send("gradient", micro_batch, is_there=not self.stage.is_first)
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
        yield from self._settle("gradient" if what == "hidden" else "hidden")

    def _send(self, what: _Sent, micro_batch: int, *, is_there: bool) -> _Walk:
        if is_there:
            yield from self._settle(what)
            self.happened[_Event(what, self.stage.index, micro_batch, is_taken=False)] = self.now_ms
            self._pending[what] = micro_batch

    def _settle(self, what: _Sent) -> _Walk:
        """Wait until what was sent last is taken."""
        if what in self._pending:
            taken_ms = yield _Event(what, self.stage.index, self._pending.pop(what), is_taken=True)
            self.now_ms = max(self.now_ms, taken_ms)
