"""Searches for a generate job's plan, remembered like those of training (``training.py``).

Looked for as if every prompt were the longest and asked for the most new tokens, since a search prices hundreds of plans and each
price grows with the number of lengths; what is then shown is priced with the lengths as they are, and never needs more.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.recent import remembered
from optimizer.goal import GenerationGoal
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.baselines import list_generation_baselines, price_generation_baselines
from optimizer.search.generation.knobs import GenerationKnob, list_generation_knobs
from optimizer.search.generation.one_device import generation_problem, search_generation
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.solve import Book
from optimizer.workload import GenerationWorkload
from webapp.accounts.turns import take_turn
from webapp.catalog.models import Model, Profile
from webapp.jobs.specs.generation import GenerateSpec, generation_workload
from webapp.planning.search.profiles import ProfileNeed, read_generation_profile
from webapp.planning.search.question import FoundPlan, FoundPlans, NothingFits, Place, Question

MAX_ANSWERS = 4


@dataclass(frozen=True, kw_only=True)
class GenerationQuestion(Question[GenerationProfile, GenerationWorkload, GenerationGoal]):
    """The question which plan generates for the prompts."""

    @property
    def key(self) -> tuple[object, ...]:
        return self.profile_sha256, self.place.sha256, self.workload, self.goal

    @property
    def is_answered(self) -> bool:
        return answer_at_hand(self) is not None

    def find_plans(self) -> FoundPlans:
        answer = find_generation(self)
        by_hand = [
            FoundPlan(priced=priced, explanation=explain_generation(self, priced), profile_sha256=self.profile_sha256)
            for priced in answer.baselines.values()
        ]
        if answer.chosen is None:
            error = answer.nothing_fits.error() if answer.nothing_fits else None
            return FoundPlans(chosen=None, by_hand=by_hand, nothing_fits=error)
        chosen = FoundPlan(
            priced=answer.chosen, explanation=list(answer.explanation), profile_sha256=self.profile_sha256
        )
        return FoundPlans(chosen=chosen, by_hand=by_hand)

    def find_by_hand(self, *, taken: Plan | None) -> PricedGenerationPlan | None:
        """Seen as the search sees them; from fast to small the first that fits. What was taken before is not looked at."""
        problem = _as_if_equal(self)
        known = list_generation_baselines(problem)
        for label in ("resident", "stream_host", "stream_disk"):
            if label not in known:
                continue
            priced = price_generation_baselines(Book(problem=problem), labels=(label,), in_detail=False)[label]
            if problem.permits(priced.plan) and priced.verdict == "fits":
                return priced
        return None


@dataclass(frozen=True, kw_only=True)
class AskedGeneration:
    """A generation, as it was read."""

    model: Model
    goal: GenerationGoal
    read_workload: Callable[[], GenerationWorkload]
    """Called once there is a profile: a file's tokens are counted for it, which may take seconds."""

    @property
    def need(self) -> ProfileNeed:
        return ProfileNeed(model=self.model, generates=True)

    def complete(self, profile: Profile, places: Sequence[Place]) -> list[GenerationQuestion]:
        workload = self.read_workload()
        return [
            GenerationQuestion(
                model_name=self.model.name,
                profile=read_generation_profile(profile.pk, profile.document_sha256),
                profile_sha256=profile.document_sha256,
                workload=workload,
                goal=replace(self.goal, num_devices=min(self.goal.num_devices, place.machine.num_devices)),
                place=place,
            )
            for place in map(_of_one_kind, places)
        ]


def _of_one_kind(place: Place) -> Place:
    """The place with its largest devices alone, on which a generation is planned; finished runs taught of the first kind."""
    machine = place.machine.of_largest_kind
    if machine is place.machine:
        return place
    is_first = machine.device.name == place.machine.device.name
    return Place(machine=machine, calibration=place.calibration if is_first else None)


def asked_by_generation(spec: GenerateSpec) -> AskedGeneration:
    return AskedGeneration(model=spec.model, goal=spec.goal, read_workload=partial(generation_workload, spec))


@dataclass(frozen=True, kw_only=True)
class GenerationAnswer:
    """Every plan priced with the prompts' own lengths."""

    chosen: PricedGenerationPlan | None
    """None where nothing fits; then the error says what the smallest is."""
    baselines: Mapping[str, PricedGenerationPlan]
    frontier: tuple[PricedGenerationPlan, ...]
    explanation: tuple[str, ...]
    """Reasons for the chosen plan."""
    gap: float | None
    """Bound on the chosen plan's distance from the best, as a share; None where nothing fits."""
    nothing_fits: NothingFits | None = None


def _by_question(question: GenerationQuestion) -> Hashable:
    return question.key


def find_generation(question: GenerationQuestion) -> GenerationAnswer:
    """The best plan, or baselines and the error where nothing fits."""
    found = answer_at_hand(question)
    if found is None:
        with take_turn():
            found = _search(question)
    return found


@remembered(most=MAX_ANSWERS, key=_by_question)
def _search(question: GenerationQuestion) -> GenerationAnswer:
    exact, bound = problem_of_generation(question), _as_if_equal(question)

    def shown(found: PricedGenerationPlan, *, in_detail: bool = True) -> PricedGenerationPlan:
        return exact.priced(found.label, found.plan, in_detail=in_detail) if bound is not exact else found

    try:
        if question.goal.num_devices > 1:
            result = search_generation_plans(question.profile, **{**question.here, "workload": bound.workload})
        else:
            result = search_generation(bound, profile=question.profile, machine=question.place.machine)
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
    layouts = [option.sentence for option in result.layouts]
    sentences = result.explanation if chosen is result.chosen else (*explain_generation(question, chosen), *layouts)
    return GenerationAnswer(
        chosen=chosen,
        baselines={label: shown(priced) for label, priced in result.baselines.items()},
        frontier=tuple(shown(priced, in_detail=False) for priced in result.frontier),
        explanation=tuple(sentences),
        gap=result.gap,
    )


def answer_at_hand(question: GenerationQuestion) -> GenerationAnswer | None:
    """The answer that ``find_generation`` found before; None where it would have to search, which takes seconds."""
    return _search.at_hand(question)


@remembered(most=MAX_ANSWERS, key=_by_question)
def problem_of_generation(question: GenerationQuestion) -> GenerationProblem:
    """For prices of single plans, with the prompts' own lengths; with the prices that were asked of it."""
    return generation_problem(question.profile, **question.here)


@remembered(most=4 * MAX_ANSWERS, key=lambda question, plan, *, label: (*question.key, plan, label))
def detail_generation(question: GenerationQuestion, plan: GenerationPlan, *, label: str) -> PricedGenerationPlan:
    """With its memory over a pass and all that its process takes: ten times the work of a price."""
    return problem_of_generation(question).priced(label, plan)


@remembered(most=MAX_ANSWERS, key=lambda question, plan: (*question.key, plan))
def knobs_of_generation(question: GenerationQuestion, plan: GenerationPlan) -> tuple[GenerationKnob, ...]:
    """Price each single change of a plan, the largest saving first."""
    return list_generation_knobs(problem_of_generation(question), plan)


def explain_generation(question: GenerationQuestion, priced: PricedGenerationPlan) -> list[str]:
    return list(explain_generation_plan(priced.plan, workload=question.workload, prediction=priced.prediction))


def _as_if_equal(question: GenerationQuestion) -> GenerationProblem:
    """The problem that a search is given."""
    workload = question.workload.as_if_equal(max_sequence_length=question.profile.max_sequence_length)
    return problem_of_generation(question) if workload is question.workload else _equal_problem(question)


@remembered(most=MAX_ANSWERS, key=_by_question)
def _equal_problem(question: GenerationQuestion) -> GenerationProblem:
    workload = question.workload.as_if_equal(max_sequence_length=question.profile.max_sequence_length)
    return generation_problem(question.profile, **{**question.here, "workload": workload})
