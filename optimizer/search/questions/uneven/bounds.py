"""Least times of steps that ranks on unequal devices share, without a search: each works on its own sequences, and all wait for
what they exchange. Most teams are passed over by them, as over a slow link, where gradients alone take longer than other plans.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Final, NamedTuple

from optimizer.hardware.machine import DeviceKind
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.search.problem import Relax, SearchProblem
from optimizer.search.questions.uneven.question import UnevenQuestion

_ROUNDING: Final = 1e-9


class LeastTime(NamedTuple):
    """Milliseconds of a step that no plan goes below; 0 if nothing is known."""

    step_ms: float
    network_ms: float = 0.0
    """Those in which the network is busy."""


def least_alone_ms(problem: SearchProblem) -> float:
    """No plan of the problem takes less; 0 if nothing is known."""
    return min((problem.relax.base_ms(base) for base in problem.settings()), default=0.0) if problem.relax else 0.0


def least_shared(
    question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout, *, is_equal: bool
) -> LeastTime:
    """The least time of shares among all devices of these kinds, given that larger micro-batches take no longer for a sequence.
    is_equal: all have as many sequences.
    """
    waits_ms, lane_ms = _exchange_ms(question, team, layout)
    total = question.workload.global_batch_size
    sequence_ms = [question.least_sequence_ms(kind) for kind in team]
    if not all(sequence_ms):
        return LeastTime(max(waits_ms, lane_ms), lane_ms)
    counts = [kind.num_devices for kind in team]
    shared_ms = total / layout.num_devices * max(sequence_ms) if is_equal else whole_sequences_ms(total, counts, sequence_ms)
    return LeastTime(max(lane_ms, waits_ms + shared_ms), lane_ms)


def whole_sequences_ms(total: int, counts: Sequence[int], sequence_ms: Sequence[float]) -> float:
    """The least time in which so many whole sequences are done, each device having one or more. counts, sequence_ms: devices of
    each kind, and their time for one sequence.
    """
    # With parts of sequences all devices would end together; no sooner than that, and then when one has done another.
    begin_ms = max(total / sum(count / each_ms for count, each_ms in zip(counts, sequence_ms, strict=True)), *sequence_ms)
    done = [int(begin_ms / each_ms + _ROUNDING) for each_ms in sequence_ms]
    waiting = [((number + 1) * each_ms, kind) for kind, (number, each_ms) in enumerate(zip(done, sequence_ms, strict=True))]
    heapify(waiting)
    num_done = sum(count * number for count, number in zip(counts, done, strict=True))
    end_ms = begin_ms
    while num_done < total:
        end_ms, kind = waiting[0]
        num_done += counts[kind]
        heapreplace(waiting, (end_ms + sequence_ms[kind], kind))
    return end_ms


def _exchange_ms(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> tuple[float, float]:
    """``Relax.exchange_ms`` of the settings that exchange least, which does not depend on bits of state."""
    key = (question.likeness_of(team), layout)
    if key not in question.exchange_ms:
        found: list[tuple[float, float]] = []
        for kind in {question.likeness(kind, team): kind for kind in team}.values():
            problem = question.pose(kind, layout, num_sequences=1, team=team)
            relax: Relax | None = problem.relax
            bases = dict.fromkeys(replace(base, bits=32) for base in problem.settings())
            found += [] if relax is None else [relax.exchange_ms(base) for base in bases]
        question.exchange_ms[key] = (
            min((waits for waits, _ in found), default=0.0),
            min((lane for _, lane in found), default=0.0),
        )
    return question.exchange_ms[key]
