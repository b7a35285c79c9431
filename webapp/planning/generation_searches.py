"""Searches for a generate job's plan, remembered like those of training (``searches.py``).

Looked for as if every prompt were the longest and asked for the most new tokens, since a search prices hundreds of plans and each
price grows with the number of lengths; what is then shown is priced with the lengths as they are, and never needs more.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.errors import NoFeasiblePlan
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.profile.inference import InferenceProfile
from optimizer.recent import Recent
from optimizer.workload import InferenceGoal, InferenceWorkload
from webapp.planning.searches import NothingFits

if TYPE_CHECKING:
    from optimizer.search.inference.problem import InferenceProblem, PricedInferencePlan

MAX_ANSWERS = 4


@dataclass(frozen=True, kw_only=True)
class GenerationQuestion:
    """What work, on what, for what."""

    profile: InferenceProfile
    profile_sha256: str
    workload: InferenceWorkload
    goal: InferenceGoal
    machine: MachineSpec
    calibration: dict[str, Any] | None

    @property
    def key(self) -> tuple[object, ...]:
        place = (self.profile_sha256, repr(self.machine.to_json()), repr(self.calibration))
        return *place, self.workload, self.goal

    def pose(self, workload: InferenceWorkload) -> "InferenceProblem":
        # here and below, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
        from optimizer.search.inference.search import inference_problem

        return inference_problem(
            self.profile, workload=workload, goal=self.goal, machine=self.machine, calibration=self.calibration
        )


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """Every plan priced with the prompts' own lengths."""

    chosen: "PricedInferencePlan | None"
    """None where nothing fits; then the error says what the smallest is."""
    baselines: "dict[str, PricedInferencePlan]"
    frontier: "tuple[PricedInferencePlan, ...]"
    explanation: tuple[str, ...]
    """Of the chosen plan."""
    nothing_fits: NothingFits | None = None


_answers: Recent[tuple[object, ...], GenerationAnswer] = Recent(MAX_ANSWERS)


def find_generation(question: GenerationQuestion) -> GenerationAnswer:
    """The best plan, or baselines and the error where nothing fits."""
    return _answers.obtain(question.key, lambda: _search(question))


def explain_generation(question: GenerationQuestion, priced: "PricedInferencePlan") -> list[str]:
    from optimizer.plan.explain_inference import explain_inference_plan

    return list(explain_inference_plan(priced.plan, workload=question.workload, prediction=priced.prediction))


def _search(question: GenerationQuestion) -> GenerationAnswer:
    from optimizer.search.inference.baselines import price_inference_baselines
    from optimizer.search.inference.search import search_inference
    from optimizer.search.inference.solve import Book

    workload = question.workload
    bound_workload = workload.as_if_equal(max_sequence_length=question.profile.max_sequence_length)
    exact, bound = question.pose(workload), question.pose(bound_workload)

    def shown(found: "PricedInferencePlan", *, in_detail: bool = True) -> "PricedInferencePlan":
        return exact.priced(found.label, found.plan, in_detail=in_detail) if bound_workload is not workload else found

    try:
        result = search_inference(bound, profile=question.profile, machine=question.machine)
    except NoFeasiblePlan as error:
        baselines = price_inference_baselines(Book(problem=bound))
        return GenerationAnswer(
            chosen=None,
            baselines={label: shown(priced) for label, priced in baselines.items()},
            frontier=(),
            explanation=(),
            nothing_fits=NothingFits.of(error),
        )
    chosen = shown(result.chosen)
    sentences = result.explanation if chosen is result.chosen else explain_generation(question, chosen)
    return GenerationAnswer(
        chosen=chosen,
        baselines={label: shown(priced) for label, priced in result.baselines.items()},
        frontier=tuple(shown(priced, in_detail=False) for priced in result.frontier),
        explanation=tuple(sentences),
    )
