"""Answers to a goal's objective: the plan, the work that it is for, the limit that binds, the layouts of devices beside it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from optimizer.base.categories import Tier
from optimizer.base.serialize import WithJson, to_json
from optimizer.goal import Objective
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.result import SearchResult
from optimizer.workload import TrainingWorkload

Pose = Callable[[Profile, TrainingWorkload], SearchProblem]
"""The question for another model or other work; goal and machine stay."""
Unit = Literal["sequences", "tokens", "blocks"]


@dataclass(frozen=True, kw_only=True)
class Limit(WithJson):
    """The end of the range, and its reason."""

    unit: Unit
    largest: int
    """The largest size that fits."""
    peak_bytes: int
    """Upper end of the chosen plan's peak there."""
    budget_bytes: int
    next: int | None
    """The next size up; None where it is not memory that ends it."""
    next_peak_bytes: int | None
    """The smallest peak that was found there."""
    reason: str
    """The whole in a sentence."""


@dataclass(frozen=True, kw_only=True)
class LayoutOption(WithJson):
    """The best plan of one layout of devices."""

    layout: DeviceLayout
    best: PricedPlan | None
    """None where nothing fits, or where it was not searched."""
    least_step_ms: float
    """No plan of the layout is faster."""
    sentence: str
    """A comparison with the layout that was chosen."""


@dataclass(frozen=True, kw_only=True)
class SetupOption(WithJson):
    """A setup of several devices that people write by hand."""

    setup: str
    """The setup, whatever its blocks do: ``fsdp``."""
    label: str
    """Key of its plan in ``result.baselines``, which has none where it cannot be carried out."""
    words: str
    """The setup in a few words."""
    finding: str
    """Compares it with the chosen plan, or says why it does not fit or cannot be carried out."""

    @property
    def sentence(self) -> str:
        """Both in one, without its end."""
        return f"{self.words}: {self.finding}"


@dataclass(frozen=True, kw_only=True)
class ObjectiveAnswer:
    """The answer to a goal's objective."""

    objective: Objective
    workload: TrainingWorkload
    """With the batch or the sequence that was found."""
    num_blocks: int
    num_parameters: int
    budget_bytes: dict[Tier, int]
    """Budget of each tier; 0 for a tier that may not be used or is not there."""
    result: SearchResult
    limit: Limit | None
    """None where the work is as it was asked for."""
    layouts: tuple[LayoutOption, ...] = ()
    """The best of each layout of devices, one device first; empty where the goal is one device."""
    setups: tuple[SetupOption, ...] = ()
    """Setups of several devices that people write by hand, for the fastest step and the cheapest run; empty where the goal is one
    device."""

    def for_run(self, workload: TrainingWorkload) -> "ObjectiveAnswer":
        """The same for a workload that is priced alike (``detailed_part``): its plans are the same, a run may be longer."""

        def over(priced: PricedPlan) -> PricedPlan:
            return replace(priced, prediction=priced.prediction.over(workload.num_steps))

        result = replace(
            self.result,
            chosen=over(self.result.chosen),
            baselines={label: over(priced) for label, priced in self.result.baselines.items()},
            frontier=tuple(over(priced) for priced in self.result.frontier),
        )
        length, size = self.workload.sequence_length, self.workload.global_batch_size
        found = replace(workload, sequence_length=length, global_batch_size=size)
        return replace(self, result=result, workload=found)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return {**document, "result": self.result.to_json()}


def answer_with(
    problem: SearchProblem, profile: Profile, result: SearchResult, *, limit: Limit | None = None
) -> ObjectiveAnswer:
    """The answer that a result gives.

    problem: the one that ``result`` answers. limit: None where the work is as it was asked for.
    """
    return ObjectiveAnswer(
        objective=problem.goal.objective,
        workload=problem.whole_workload,
        budget_bytes={
            "device": problem.goal.device_budget_bytes,
            "host": problem.host_budget_bytes,
            "disk": problem.disk_budget_bytes if problem.allows("disk") else 0,
            "remote": problem.remote_budget_bytes if problem.allows("remote") else 0,
        },
        num_blocks=profile.num_blocks,
        num_parameters=profile.num_parameters,
        result=result,
        limit=limit,
    )
