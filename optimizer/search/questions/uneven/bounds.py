"""Least times of steps that ranks on unequal devices share, without a search: each works on its own sequences, and all wait for
what they exchange. Most teams are passed over by them, as over a slow link, where gradients alone take longer than other plans.
"""

from collections.abc import Sequence
from typing import NamedTuple

from optimizer.hardware.machine import DeviceKind
from optimizer.plan.layout import DeviceLayout
from optimizer.search.problem import Relax, SearchProblem
from optimizer.search.questions.uneven.question import UnevenQuestion


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

    With t the time of one sequence on a device, shares that end together take the number of sequences over the sum of all 1 / t.
    """
    waits_ms, lane_ms = _exchange_ms(question, team, layout)
    total = question.workload.global_batch_size
    sequence_ms = [_sequence_ms(question, kind) for kind in team]
    if not all(sequence_ms):
        return LeastTime(max(waits_ms, lane_ms), lane_ms)
    slowest_ms = max(sequence_ms)
    if is_equal:
        return LeastTime(max(lane_ms, waits_ms + total / layout.num_devices * slowest_ms), lane_ms)
    speed = sum(kind.num_devices / each_ms for kind, each_ms in zip(team, sequence_ms, strict=True))
    # each has one sequence or more
    return LeastTime(max(lane_ms, waits_ms + max(total / speed, slowest_ms)), lane_ms)


def _sequence_ms(question: UnevenQuestion, kind: DeviceKind) -> float:
    """Least milliseconds of compute for one sequence of a step; 0 if nothing is known."""
    name = kind.device.name
    if name not in question.sequence_ms:
        total = question.workload.global_batch_size
        problem = question.pose(kind, DeviceLayout(), num_sequences=total)
        relax = problem.relax
        times = [] if relax is None else [relax.compute_ms(base) for base in problem.settings()]
        question.sequence_ms[name] = min(times, default=0.0) / total
    return question.sequence_ms[name]


def _exchange_ms(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> tuple[float, float]:
    """``Relax.exchange_ms`` of the settings that exchange least."""
    found: list[tuple[float, float]] = []
    for kind in team:
        problem = question.pose(kind, layout, num_sequences=1, team=team)
        relax: Relax | None = problem.relax
        found += [] if relax is None else [relax.exchange_ms(base) for base in problem.settings()]
    return min((waits for waits, _ in found), default=0.0), min((lane for _, lane in found), default=0.0)
