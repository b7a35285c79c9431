"""Setups that people write by hand on devices of several kinds: all of them with equal shares, or where a step cannot be dealt
out so, the like devices that it can be dealt out to.
"""

from collections.abc import Sequence
from dataclasses import replace

from optimizer.hardware.machine import DeviceKind
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem
from optimizer.search.questions.by_hand.pricing import PricedSetup, SetupQuestion, Team, price_setups
from optimizer.search.questions.uneven.bounds import LeastTime
from optimizer.search.questions.uneven.options import Found, Option
from optimizer.search.questions.uneven.question import UnevenQuestion, speed_of
from optimizer.search.questions.uneven.replicas import count_replicas
from optimizer.search.questions.uneven.spared import raise_ranks


def price_uneven_setups(question: UnevenQuestion, *, best: PricedPlan | None) -> list[PricedSetup]:
    """Every setup, with the number formats of the best plan that is known, or else the smallest that are allowed. None where only
    one device may be used.
    """
    kinds = _kinds_of(question)
    whole = _team_of(kinds)
    if whole.num_devices < 2:
        return []
    question.budgets.clear()
    asked = SetupQuestion(
        num_blocks=question.profile.num_blocks,
        whole=whole,
        dealing=_dealing(question, kinds, whole),
        formats=_formats_of(question, kinds, best),
        pose=lambda layout: _pose(question, layout),
        num_sequences=question.workload.global_batch_size,
        known={} if best is None else {best.plan: best},
    )
    return price_setups(asked, best_ms=float("inf") if best is None else best.prediction.step_ms)


def option_of(found: PricedSetup) -> Option:
    """A setup as one of the options, once it has a price. It is one plan, so nothing of it is faster."""
    assert found.priced is not None
    layout = found.priced.plan.layout
    return Option(
        label=found.label,
        words=found.words,
        num_devices=layout.num_devices,
        layout=layout,
        least=LeastTime(found.priced.prediction.step_ms),
        search=lambda _: Found(found.priced),
        team=(),
        likeness=("setup", found.label),
        best=found.priced,
    )


def _kinds_of(question: UnevenQuestion) -> list[DeviceKind]:
    """All kinds, or as many of the fastest as the goal has devices for, in the order of the machine."""
    left, found = question.goal.num_devices, []
    for kind in sorted(question.machine.kinds, key=lambda kind: -speed_of(kind)):
        number = min(left, kind.num_devices)
        found += [replace(kind, num_devices=number)] * (number > 0)
        left -= number
    names = [kind.device.name for kind in question.machine.kinds]
    return sorted(found, key=lambda kind: names.index(kind.device.name))


def _team_of(kinds: Sequence[DeviceKind], *, words: str = "") -> Team:
    ranks = tuple(RankShare(device=kind.device.name) for kind in kinds for _ in range(kind.num_devices))
    return Team(num_devices=len(ranks), ranks=ranks, words=words, replicas=count_replicas(kinds, are_alike=False))


def _dealing(question: UnevenQuestion, kinds: Sequence[DeviceKind], whole: Team) -> Team | None:
    total = question.workload.global_batch_size
    if total % whole.num_devices == 0:
        return whole
    alike = [kind for kind in kinds if kind.num_devices > 1 and total % kind.num_devices == 0]
    if not alike:
        return None
    most = max(alike, key=lambda kind: kind.num_devices * speed_of(kind))
    return _team_of([most], words=f", on {most.num_devices}x {most.device.name}")


def _formats_of(question: UnevenQuestion, kinds: Sequence[DeviceKind], best: PricedPlan | None) -> OuterPlan:
    if best is not None:
        return OuterPlan.of(best.plan)
    problem = question.pose(kinds[0], DeviceLayout(), num_sequences=question.workload.global_batch_size)
    return next(reversed(problem.settings()), OuterPlan(micro_batch_size=1, accumulation_steps=1))


def _pose(question: UnevenQuestion, layout: DeviceLayout) -> SearchProblem:
    """The problem of a layout whose ranks all have the same share. What it allows is that of the kind with the least memory."""
    if layout.is_cut:
        return question.pose_cut(layout)
    names = {share.device for share in layout.ranks}
    kinds = [kind for kind in question.machine.kinds if kind.device.name in names]
    smallest = min(kinds, key=lambda kind: kind.device.memory_bytes)
    each = question.workload.global_batch_size // layout.num_devices
    posed = question.pose(smallest, layout.without_ranks, num_sequences=each, team=kinds)
    return replace(
        posed,
        goal=question.goal,
        layout=layout,
        price=lambda plan: raise_ranks(question.price(plan), question.spared_bytes),
        detail=lambda plan, _: raise_ranks(question.estimate(plan), question.spared_bytes),
    )
