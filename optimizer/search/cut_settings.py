"""Lists what plans of a cut model may decide outside the blocks: all on the devices, or some of it on the host.

*Not searched*: other shares of the state than those of ``SHARES``; other numbers of blocks that are fetched ahead than those of
``PREFETCHES``.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.weights import WeightsPlace
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.grid import PREFETCHES, all_homes, has_free_fraction, with_chunks

SHARES: Final = (0.25, 0.5, 0.75)
"""Shares of the state that leave the devices, beside all of it."""


@dataclass(frozen=True, kw_only=True)
class CutSettings:
    """The settings of one problem."""

    near: tuple[OuterPlan, ...]
    """Everything is on the devices, but for what blocks offload."""
    away: tuple[OuterPlan, ...]
    """Gradients, optimizer state or weights are on the host; of the counts of chunks the fewest and the most."""

    def without(self, others: Collection[OuterPlan]) -> "CutSettings":
        """The settings but for some."""
        near, away = (tuple(each for each in listed if each not in others) for listed in (self.near, self.away))
        return CutSettings(near=near, away=away)

    @property
    def all(self) -> tuple[OuterPlan, ...]:
        return (*self.near, *self.away)


def list_cut_settings(problem: SearchProblem) -> CutSettings:
    """The settings that the goal and its pins allow."""
    near, away = list[OuterPlan](), list[OuterPlan]()
    for base in problem.settings():
        for home in all_homes(problem, base):
            chunked = with_chunks(problem, home)
            if is_near(home):
                near += chunked
            else:
                for each in dict.fromkeys((chunked[0], chunked[-1])):
                    away += _fetched(problem, each)
    return CutSettings(near=tuple(near), away=tuple(away))


def home_of(setting: OuterPlan) -> tuple[GradientsChoice, StatePlace, WeightsPlace]:
    """The places of gradients, optimizer state and weights."""
    return setting.gradients, setting.state_place, setting.weights_place


def is_near(setting: OuterPlan) -> bool:
    """Report whether everything is on the devices."""
    return home_of(setting) == ("keep", "device", "device")


def list_finer(problem: SearchProblem, setting: OuterPlan) -> Iterator[OuterPlan]:
    """Settings that move less of the state than this one, or that fetch other numbers of blocks ahead."""
    if has_free_fraction(problem, setting):
        yield from (replace(setting, state_fraction=share) for share in SHARES if share < setting.state_fraction)
    if setting.weights_place != "device" and "prefetch" not in problem.pinned_levers:
        yield from (replace(setting, prefetch=prefetch) for prefetch in PREFETCHES if prefetch != setting.prefetch)


def _fetched(problem: SearchProblem, setting: OuterPlan) -> list[OuterPlan]:
    """The setting as it is, and with as few blocks on the device at once as can be where weights stream."""
    if setting.weights_place == "device" or "prefetch" in problem.pinned_levers:
        return [setting]
    return [setting, replace(setting, prefetch=0)]
