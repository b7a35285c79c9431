"""Asks the library for the page Plans, alike for both kinds of work: an answer, one of its plans edited, its neighbours.

A search for a generation takes seconds, a price milliseconds. So without ``whole`` a generation's page is answered with what is
at hand: the edit's own price, which needs no search where the address names every decision, and what a search found before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from optimizer.plan.explain.diff import Difference, diff_plans
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import change_generation, pins_of_generation_change, read_generation_change
from optimizer.plan.pins.training import pins_of_change
from optimizer.plan.plan import Plan
from optimizer.search.answer.compare import change_plan, reprice
from optimizer.search.answer.knobs import Knob, list_knobs
from optimizer.search.generation.knobs import GenerationKnob
from optimizer.search.problem import PricedPlan
from webapp.pages.forms.pins import GENERATION, TRAINING, Decisions, typed_knobs, written_pins
from webapp.pages.forms.sentences import pin_field
from webapp.pages.forms.training import ANY_LOSS
from webapp.pages.shown.plans import YOURS, AnyPriced
from webapp.planning.search.generation import (
    GenerationQuestion,
    answer_at_hand,
    detail_generation,
    find_generation,
    knobs_of_generation,
    problem_of_generation,
)
from webapp.planning.search.training import TrainingQuestion, find_offered, problem_of


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """A search's answer, of either kind of work."""

    model: str
    device: str
    budget_bytes: int
    work: str
    """In words: how much of it there is."""
    limit: str = ""
    """The limit that binds, where the most that fits was asked for."""
    chosen: "AnyPriced | None" = None
    """None while it is looked for, and where nothing fits."""
    baselines: Mapping[str, AnyPriced] = field(default_factory=dict)
    frontier: Sequence[AnyPriced] = ()
    findings: Mapping[str, str] = field(default_factory=dict)
    """By a baseline's label, how it compares with the chosen plan or why it does not fit; of setups of several devices."""
    refused: tuple[str, ...] = ()
    """Setups of several devices that cannot be carried out here, each with why."""
    explanation: tuple[str, ...] = ()
    bound: str = ""
    """The chosen plan's distance from the best, in words; empty where that is not known."""
    nothing_fits: NoFeasiblePlan | None = None
    """The reason why nothing fits; a generation's baselines are shown all the same."""
    is_whole: bool = True
    """False while the best plan is still to be looked for."""
    awaits_compiled: bool = False
    """Compiled blocks may make a better plan; a worker traces them now."""


@dataclass(frozen=True, kw_only=True)
class Edited:
    """A plan after an edit."""

    priced: AnyPriced
    differences: Sequence[Difference]
    is_whole: bool = True
    """False while its memory over a pass is still to be worked out."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """The price of one change of a plan."""

    change: str
    verdict: str
    is_lossless: bool
    device_change_bytes: int
    host_change_bytes: int
    time_change_ms: float
    """Milliseconds of a step; of a generation those of all its prompts."""
    tried: dict[str, str]
    """Texts of the edit's fields, without their prefix."""
    held: dict[str, str] | None
    """Texts of the form's fields that make a search keep the change; None where a goal cannot hold it."""


class Work(Protocol):
    """One question of the page."""

    @property
    def decisions(self) -> Decisions: ...

    @property
    def card_question(self) -> TrainingQuestion | GenerationQuestion: ...

    def find(self, *, whole: bool) -> PlanAnswer: ...

    def read_edit(self, typed: Mapping[str, Any], *, prefix: str) -> Any:
        """The plan that is typed in full; None where it is not, or where it is none."""

    def edit(self, plan: Any, change: Any, *, whole: bool) -> Edited: ...

    def neighbours(self, plan: Any) -> Iterable[Neighbour]: ...


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """Always whole: its search takes about a second, and is remembered."""

    question: TrainingQuestion
    decisions: Decisions = TRAINING

    @property
    def card_question(self) -> TrainingQuestion:
        return self.question

    def find(self, *, whole: bool) -> PlanAnswer:
        question = self.question
        offered = find_offered(question)
        answer, found = offered.answer, offered.answer.result
        bound = f" by more than {100 * found.gap:.2g} %" if found.gap is not None and not found.is_optimal else ""
        return PlanAnswer(
            model=question.model_name,
            device=_devices_of(question, found.chosen),
            budget_bytes=question.goal.device_budget_bytes,
            work=f"sequences of {answer.workload.sequence_length:,} tokens, batch of {answer.workload.global_batch_size:,}",
            limit="" if answer.limit is None else answer.limit.reason,
            chosen=found.chosen,
            baselines=found.baselines,
            frontier=found.frontier,
            findings={setup.label: setup.finding for setup in answer.setups if setup.label in found.baselines},
            refused=tuple(setup.sentence for setup in answer.setups if setup.label not in found.baselines),
            explanation=(*found.explanation, *(option.sentence for option in answer.layouts)),
            bound="" if found.gap is None else f"No allowed plan that fits is faster{bound}",
            awaits_compiled=offered.awaits_compiled,
        )

    def read_edit(self, typed: Mapping[str, Any], *, prefix: str) -> None:
        return None

    def edit(self, plan: Plan, change: Any, *, whole: bool) -> Edited:
        problem = problem_of(self.question, plan, change_plan(plan, change))
        found = reprice(problem, plan, change=change)
        return Edited(priced=found.priced, differences=found.differences)

    def neighbours(self, plan: Plan) -> Iterable[Neighbour]:
        if plan.layout.ranks:  # a change on one device is another search for all: ``problem_of``
            return
        for knob in list_knobs(problem_of(self.question, plan), plan):
            fields = written_pins(pins_of_change(plan, knob.plan))
            yield _neighbour(
                knob,
                time_change_ms=knob.step_change_ms,
                tried=fields,
                held=fields | ({} if knob.is_lossless else ANY_LOSS),
            )


@dataclass(frozen=True, kw_only=True)
class GenerationWork:
    """Prompts by a model."""

    question: GenerationQuestion
    decisions: Decisions = GENERATION

    @property
    def card_question(self) -> GenerationQuestion:
        return self.question

    def find(self, *, whole: bool) -> PlanAnswer:
        question = self.question
        workload = question.workload
        work = f"{workload.num_sequences:,} prompts, up to {workload.num_new_tokens:,} new tokens each"
        facts: dict[str, Any] = {
            "model": question.model_name,
            "device": question.place.machine.device.name,
            "budget_bytes": question.goal.device_budget_bytes,
            "work": work,
        }
        answer = find_generation(question) if whole else answer_at_hand(question)
        if answer is None:
            return PlanAnswer(**facts, is_whole=False)
        return PlanAnswer(
            **facts,
            chosen=answer.chosen,
            baselines=answer.baselines,
            frontier=answer.frontier,
            explanation=answer.explanation,
            bound=self._bound_words(answer.gap),
            nothing_fits=answer.nothing_fits.error() if answer.nothing_fits else None,
        )

    def _bound_words(self, gap: float | None) -> str:
        """Said of what was searched, which sees prompts of many lengths as if they were alike."""
        if gap is None or not self.question.workload.is_even:
            return ""
        better = {"throughput": "faster", "first_token": "sooner at the first token", "largest_batch": "of more prompts at once"}
        more = f" by more than {100 * gap:.2g} %" if gap >= _NOTHING else ""
        return f"No allowed plan that fits is {better[self.question.goal.objective]}{more}"

    def read_edit(self, typed: Mapping[str, Any], *, prefix: str) -> GenerationPlan | None:
        texts = typed_knobs(typed, decisions=self.decisions, prefix=prefix)
        try:
            plan = change_generation(GenerationPlan(), read_generation_change(texts)) if texts else None
            if plan is not None:
                problem_of_generation(self.question).check(plan)
        except HeadroomError:
            return None  # The whole page says what is wrong with it, beside its field.
        return plan

    def edit(self, plan: GenerationPlan, change: Mapping[str, Any], *, whole: bool) -> Edited:
        problem, changed = problem_of_generation(self.question), change_generation(plan, change)
        problem.check(changed)
        known = detail_generation.at_hand(self.question, changed, label=YOURS)
        differences = diff_plans(plan, changed)
        if known is not None or whole:
            priced = known or detail_generation(self.question, changed, label=YOURS)
            return Edited(priced=priced, differences=differences)
        return Edited(
            priced=problem.priced(YOURS, changed, in_detail=False), differences=differences, is_whole=False
        )

    def neighbours(self, plan: GenerationPlan) -> Iterable[Neighbour]:
        looks_for_batch = self.question.goal.objective == "largest_batch"
        for knob in knobs_of_generation(self.question, plan):
            yield _neighbour(
                knob,
                time_change_ms=knob.total_change_s * 1000,
                # all of it, so that it is priced without a search
                tried={pin_field(path): text for path, text in self.decisions.write(knob.plan).items()},
                held=None if looks_for_batch and knob.knob == "batch_size" else self._held(plan, knob),
            )

    def _held(self, plan: GenerationPlan, knob: GenerationKnob) -> dict[str, str]:
        fields = written_pins(pins_of_generation_change(plan, knob.plan).to_json())
        return fields | ({} if knob.is_lossless else {"allow_lossy": "on"})


def _devices_of(question: TrainingQuestion, chosen: PricedPlan | None) -> str:
    """Names of the devices that the plan runs on; of all that the machine has where there is no plan."""
    names = dict.fromkeys(rank.device for rank in chosen.prediction.ranks) if chosen is not None else {}
    return " and ".join(names) or question.place.machine.device_names


def _neighbour(
    knob: Knob | GenerationKnob, *, time_change_ms: float, tried: dict[str, str], held: dict[str, str] | None
) -> Neighbour:
    return Neighbour(
        change=knob.change,
        verdict=knob.verdict,
        is_lossless=knob.is_lossless,
        device_change_bytes=knob.device_change_bytes,
        host_change_bytes=knob.host_change_bytes,
        time_change_ms=time_change_ms,
        tried=tried,
        held=held,
    )


_NOTHING = 1e-9
"""A gap that is only rounding."""
