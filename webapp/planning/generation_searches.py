"""Searches for a generate job's plan, remembered like those of training (``searches.py``).

Looked for as if every prompt were the longest and asked for the most new tokens, since a search prices hundreds of plans and each
price grows with the number of lengths; what is then shown is priced with the lengths as they are, and never needs more.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.recent import Recent
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.workload import GenerationWorkload
from webapp.planning.searches import NothingFits

if TYPE_CHECKING:
    from optimizer.search.generation.knobs import GenerationKnob
    from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan

MAX_ANSWERS = 4


@dataclass(frozen=True, kw_only=True)
class GenerationQuestion:
    """What work, on what, for what."""

    profile: GenerationProfile
    profile_sha256: str
    workload: GenerationWorkload
    goal: GenerationGoal
    machine: MachineSpec
    calibration: dict[str, Any] | None

    @property
    def key(self) -> tuple[object, ...]:
        place = (self.profile_sha256, repr(self.machine.to_json()), repr(self.calibration))
        return *place, self.workload, self.goal

    @property
    def here(self) -> dict[str, Any]:
        """What the library is asked with, beside the profile."""
        return {
            "workload": self.workload,
            "goal": self.goal,
            "machine": self.machine,
            "calibration": self.calibration,
        }

    def pose(self, workload: GenerationWorkload) -> "GenerationProblem":
        # here and below, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
        from optimizer.search.generation.search import generation_problem

        return generation_problem(
            self.profile, workload=workload, goal=self.goal, machine=self.machine, calibration=self.calibration
        )


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """Every plan priced with the prompts' own lengths."""

    chosen: "PricedGenerationPlan | None"
    """None where nothing fits; then the error says what the smallest is."""
    baselines: "dict[str, PricedGenerationPlan]"
    frontier: "tuple[PricedGenerationPlan, ...]"
    explanation: tuple[str, ...]
    """Of the chosen plan."""
    gap: float | None
    """How far the chosen plan may be from the best, as a share; None where nothing fits."""
    nothing_fits: NothingFits | None = None


_answers: Recent[tuple[object, ...], GenerationAnswer] = Recent(MAX_ANSWERS)
_problems: "Recent[tuple[object, ...], GenerationProblem]" = Recent(2 * MAX_ANSWERS)
"""With the prices that were asked of them."""
_detailed: "Recent[tuple[object, ...], PricedGenerationPlan]" = Recent(4 * MAX_ANSWERS)
_knobs: "Recent[tuple[object, ...], tuple[GenerationKnob, ...]]" = Recent(MAX_ANSWERS)


def find_generation(question: GenerationQuestion) -> GenerationAnswer:
    """The best plan, or baselines and the error where nothing fits."""
    return _answers.obtain(question.key, lambda: _search(question))


def answer_at_hand(question: GenerationQuestion) -> GenerationAnswer | None:
    """What ``find_generation`` found before; None where it would have to look, which takes seconds."""
    return _answers.get(question.key)


def problem_of_generation(question: GenerationQuestion) -> "GenerationProblem":
    """For prices of single plans, with the prompts' own lengths."""
    return _problems.obtain(question.key, lambda: question.pose(question.workload))


def detail_generation(question: GenerationQuestion, plan: GenerationPlan, *, label: str) -> "PricedGenerationPlan":
    """With its memory over a pass and all that its process takes: ten times the work of a price."""
    key = (*question.key, plan, label)
    return _detailed.obtain(key, lambda: problem_of_generation(question).priced(label, plan))


def detail_at_hand(question: GenerationQuestion, plan: GenerationPlan, *, label: str) -> "PricedGenerationPlan | None":
    return _detailed.get((*question.key, plan, label))


def knobs_of_generation(question: GenerationQuestion, plan: GenerationPlan) -> "tuple[GenerationKnob, ...]":
    """What each single change of a plan would come to, the largest saving first."""
    from optimizer.search.generation.knobs import list_generation_knobs

    return _knobs.obtain((*question.key, plan), lambda: list_generation_knobs(problem_of_generation(question), plan))


def hand_written(question: GenerationQuestion) -> "PricedGenerationPlan | None":
    """Of plans as people write them the first that fits, from fast to small, seen as the search sees them; None if none does."""
    from optimizer.search.generation.baselines import list_generation_baselines, price_generation_baselines
    from optimizer.search.generation.solve import Book

    problem = _as_if_equal(question)
    known = list_generation_baselines(problem)
    for label in ("resident", "stream_host", "stream_disk"):
        if label not in known:
            continue
        priced = price_generation_baselines(Book(problem=problem), labels=(label,), in_detail=False)[label]
        if problem.permits(priced.plan) and priced.verdict == "fits":
            return priced
    return None


def explain_generation(question: GenerationQuestion, priced: "PricedGenerationPlan") -> list[str]:
    from optimizer.plan.explain.generation import explain_generation_plan

    return list(explain_generation_plan(priced.plan, workload=question.workload, prediction=priced.prediction))


def _as_if_equal(question: GenerationQuestion) -> "GenerationProblem":
    """What a search is given."""
    workload = question.workload.as_if_equal(max_sequence_length=question.profile.max_sequence_length)
    if workload is question.workload:
        return problem_of_generation(question)
    return _problems.obtain(("equal", *question.key), lambda: question.pose(workload))


def _search(question: GenerationQuestion) -> GenerationAnswer:
    from optimizer.search.generation.baselines import price_generation_baselines
    from optimizer.search.generation.search import search_generation
    from optimizer.search.generation.solve import Book

    exact, bound = problem_of_generation(question), _as_if_equal(question)

    def shown(found: "PricedGenerationPlan", *, in_detail: bool = True) -> "PricedGenerationPlan":
        return exact.priced(found.label, found.plan, in_detail=in_detail) if bound is not exact else found

    try:
        result = search_generation(bound, profile=question.profile, machine=question.machine)
    except NoFeasiblePlan as error:
        baselines = price_generation_baselines(Book(problem=bound))
        return GenerationAnswer(
            chosen=None,
            baselines={label: shown(priced) for label, priced in baselines.items()},
            frontier=(),
            explanation=(),
            gap=None,
            nothing_fits=NothingFits.of(error),
        )
    chosen = shown(result.chosen)
    sentences = result.explanation if chosen is result.chosen else explain_generation(question, chosen)
    return GenerationAnswer(
        chosen=chosen,
        baselines={label: shown(priced) for label, priced in result.baselines.items()},
        frontier=tuple(shown(priced, in_detail=False) for priced in result.frontier),
        explanation=tuple(sentences),
        gap=result.gap,
    )

