"""Setups that people write by hand on devices of one kind; of several kinds: ``uneven/setups.py``."""

import math
from collections.abc import Callable, Sequence

from optimizer.base.errors import InvalidPlan
from optimizer.goal import Goal
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.profile.profile import Profile
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem
from optimizer.search.questions.by_hand.pricing import PricedSetup, SetupQuestion, Team, price_setups
from optimizer.workload import TrainingWorkload


def price_like_setups(
    profile: Profile,
    workload: TrainingWorkload,
    goal: Goal,
    *,
    pose: Callable[[DeviceLayout], SearchProblem],
    problems: Sequence[SearchProblem],
    best: PricedPlan | None,
) -> list[PricedSetup]:
    """Every setup on all devices, or as many as can have equal shares, with the number formats of the best plan, or else the
    smallest that are allowed. pose: the problem of a layout. problems: of the layouts that were searched, whose prices are known.
    """
    if goal.num_devices == 1:
        return []
    known = {problem.layout: problem for problem in problems}
    formats = next((problem.settings()[-1] for problem in problems if problem.settings()), None)
    if best is not None:
        formats = OuterPlan.of(best.plan)
    if formats is None:
        return []

    def pose_traced(layout: DeviceLayout) -> SearchProblem:
        if layout.shares_blocks and layout.tensor not in {each.num_sharing for each in profile.narrower}:
            raise InvalidPlan(
                f"a device's part of each block was not traced; where layout.tensor is pinned to {layout.tensor} it is",
                field="plan.layout.tensor",
                value=layout.tensor,
                allowed="a number of devices whose parts were traced",
            )
        return known.get(layout) or pose(layout)

    total = workload.global_batch_size
    dealing = max((number for number in range(1, goal.num_devices + 1) if total % number == 0), default=1)
    words = "" if dealing == goal.num_devices else f", on {dealing} devices"
    question = SetupQuestion(
        num_blocks=profile.num_blocks,
        whole=Team(num_devices=goal.num_devices),
        dealing=Team(num_devices=dealing, words=words) if dealing > 1 else None,
        formats=formats,
        pose=pose_traced,
        num_sequences=total,
        known={} if best is None else {best.plan: best},
    )
    return price_setups(question, best_ms=math.inf if best is None else best.prediction.step_ms)
