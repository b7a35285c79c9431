"""Words a priced spec for the new-job page: a verdict, the chosen plan's bytes, its levers, and the table of plans.

Shapes what ``webapp.jobs`` answers; computes no price itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from django.utils import timezone

from optimizer.api.compiled_needs import SECONDS_TO_TRACE, compiled_representations
from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from optimizer.base.units import MIB, format_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.hardware.devices import find_device
from optimizer.plan.plan import Plan
from webapp.catalog.models import Profile
from webapp.jobs.specs.generation import GenerateSpec, read_job_spec
from webapp.jobs.specs.training import JobSpec
from webapp.pages.forms.intents import fields_of
from webapp.pages.forms.pins import written_pins
from webapp.pages.forms.sentences import field_of
from webapp.pages.forms.training import ANY_LOSS
from webapp.pages.forms.work import exact_bytes
from webapp.pages.presentation import (
    StackedBar,
    largest_part,
    signed_bytes,
    signed_percent,
    stacked_bar,
)
from webapp.pages.shown.limits import limits_of
from webapp.pages.shown.offer_rows import OfferRow, offer_cells, offer_rows
from webapp.pages.shown.picks import Pick, choose_picks, mark_picks
from webapp.pages.words.baselines import BASELINE_WORDS
from webapp.planning.glance import glance_at
from webapp.planning.levers import Lever, list_levers
from webapp.planning.offers import PlanAnswer
from webapp.planning.pricing import find_largest_fit, price_job_spec
from webapp.planning.search.resolve import Waiting, place_of, resolve
from webapp.planning.search.training import asked_by_training


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Something else to ask for, as a button that fills fields of the form."""

    words: str
    changes: dict[str, Any]
    """Text of fields, by name; of boxes the list of those that are ticked."""
    gained: str = ""
    """The effect in words: ``−7.1 GiB, +19 % time``."""
    part: str = ""
    """The category that it is a lever of, with its bytes."""
    card: str = ""
    """A card of the table, on which the changed form is looked at on the page of plans."""
    peak_bytes: int | None = None
    """Its peak; this and the time of a step are None for a budget that was not priced by itself."""
    step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """The state of the verdict pane. Only the fields of its kind are set."""

    kind: Literal["priced", "does_not_fit", "largest", "glance", "pending", "incomplete", "refused"]
    budget_bytes: int | None = None
    best: OfferRow | None = None
    offers: tuple[OfferRow, ...] = ()
    picks: tuple[Pick, ...] = ()
    """The few of the offers that are drawn as bars."""
    columns: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Those that the columns are of."""
    several_machines: bool = False
    any_over: bool = False
    smallest_bytes: int | None = None
    usable_bytes: int | None = None
    """The budget or the card, less what a process holds beside tensors: the limit that the verdict goes by."""
    short_of: tuple[str, ...] = ()
    """Sentences on what is too small where the device is not."""
    peak_bytes: int | None = None
    """This and the next two of a first answer's plan."""
    step_ms: float | None = None
    total_s: float | None = None
    """A generation's speed, in the place of a step's time."""
    largest: tuple[str, int] | None = None
    bar: StackedBar | None = None
    since: datetime | None = None
    problems: tuple[str, ...] = ()
    message: str = ""
    hint: str = ""
    awaits_machine: bool = False
    """The page asks again by itself, since a machine that registers gives the answer."""
    awaits_compiled: bool = False
    """The same, since compiled blocks that are being traced may make a better plan."""
    remarks: tuple[str, ...] = ()
    """Sentences on the network between machines that share the job."""
    suggestions: tuple[Suggestion, ...] = ()
    """Levers of the largest parts, or what would fit instead."""

    @property
    def holds_more(self) -> bool:
        """Report whether what a process holds beside tensors takes enough of the budget to be seen."""
        return self.usable_bytes is not None and format_bytes(self.usable_bytes) != format_bytes(self.budget_bytes or 0)

    @property
    def is_any_selected(self) -> bool:
        """Report whether a plan was taken by hand."""
        return any(offer.selected for offer in self.offers)

    @property
    def is_generation(self) -> bool:
        return any(offer.first_token_ms is not None for offer in self.offers)


@dataclass(frozen=True, kw_only=True)
class FieldProblem:
    """An error that belongs beside a field of the form."""

    field: str
    error: HeadroomError


def price_for_page(user: Any, spec: dict[str, Any], *, selected: str = "") -> tuple[Pricing, FieldProblem | None]:
    """Price a spec for the page; an error that names a field comes back beside the pane."""
    budget_bytes = spec["goal"]["device_budget_bytes"]
    try:
        read = read_job_spec(user, spec)
        if isinstance(read, JobSpec) and read.goal.objective in LOOKS_FOR:
            return _most(user, read, budget_bytes=budget_bytes), None
        answer = price_job_spec(user, read)
    except NoFeasiblePlan as error:
        return _nothing_fits(error, budget_bytes=budget_bytes, selected=selected), None
    except HeadroomError as error:
        field = field_of(str(error.fields.get("field", "")))
        pricing = Pricing(kind="refused", message=error.message, hint=error.hint)
        return pricing, FieldProblem(field=field, error=error) if field else None
    if answer.profile == "pending":
        return _pending(answer, read), None
    pricing = _answered(answer, budget_bytes=budget_bytes, selected=selected)
    return replace(pricing, suggestions=_levers(read, answer)) if isinstance(read, JobSpec) else pricing, None


def glance_for_page(user: Any, spec: dict[str, Any], *, taken: Mapping[str, Any] | None) -> Pricing | None:
    """A first answer, where the search for the best plan would take longer than a glance; None where it would not, and where
    the spec is wrong, which ``price_for_page`` says.

    taken: the plan of the offer that was taken before the edit.
    """
    try:
        read = read_job_spec(user, spec)
        if read.goal.objective in LOOKS_FOR and isinstance(read, JobSpec):
            return None
        known = None
        if isinstance(read, JobSpec) and taken and "activations" in taken:
            known = Plan.from_json(dict(taken))
        found = glance_at(user, read, taken=known)
    except HeadroomError:
        return None
    if found is None:
        return None
    budget_bytes = read.goal.device_budget_bytes
    if found.priced is None:
        return Pricing(kind="glance", budget_bytes=budget_bytes, since=timezone.now())
    prediction = found.priced.prediction
    return Pricing(
        kind="glance",
        budget_bytes=budget_bytes,
        since=timezone.now(),
        message=BASELINE_WORDS.get(found.priced.label) or found.priced.label.replace("_", " "),
        peak_bytes=prediction.device_peak_high_bytes,
        largest=largest_part(prediction.device_bytes_by_category),
        bar=stacked_bar(prediction.device_bytes_by_category, budget_bytes=budget_bytes, may_leave_budget=True),
        step_ms=prediction.step_ms if isinstance(prediction, Prediction) else None,
        total_s=None if isinstance(prediction, Prediction) else prediction.total_s,
    )


LOOKS_FOR = {"largest_batch": "global_batch_size", "longest_sequence": "sequence_length"}
"""Objectives that look for the work, with the field that they find."""


def _most(user: Any, read: JobSpec, *, budget_bytes: int) -> Pricing:
    """The most that fits, and a button that asks for just that."""
    found = find_largest_fit(user, read)
    if isinstance(found, PlanAnswer):
        return _pending(found, read)
    answer = found.answer
    field = LOOKS_FOR[answer.objective]
    size = getattr(answer.workload, field)
    unit = "sequences" if field == "global_batch_size" else "tokens"
    chosen = answer.result.chosen.prediction
    return Pricing(
        kind="largest",
        budget_bytes=budget_bytes,
        largest=largest_part(chosen.device_bytes_by_category),
        bar=stacked_bar(chosen.device_bytes_by_category, budget_bytes=budget_bytes, may_leave_budget=True),
        message=f"{size:,} {unit} on {found.machine.name}",
        hint="" if answer.limit is None else answer.limit.reason,
        suggestions=(
            Suggestion(words=f"Use {size:,} {unit}", changes={field: str(size), "objective": "fastest_step"}),
        ),
    )


def _levers(read: JobSpec, answer: PlanAnswer) -> tuple[Suggestion, ...]:
    """Cost of the chosen plan, on its machine; none for a plan over several, of which no decision is tried by itself."""
    if read.joining is not None:
        return ()
    chosen = next(offer for offer in answer.offers if offer.is_chosen)
    questions = resolve(asked_by_training(read), [place_of(chosen.row.machine)])
    if isinstance(questions, Waiting):  # the profile is being made anew since the plan was found
        return ()
    question = questions[0]
    levers = list_levers(question, Plan.from_json(chosen.row.plan), chosen.row.prediction["device_bytes_by_category"])
    return tuple(_lever(lever) for lever in levers)


def _lever(lever: Lever) -> Suggestion:
    allowed = {} if lever.is_lossless else ANY_LOSS
    return Suggestion(
        words=lever.change + ("" if lever.is_lossless else ", which changes the numbers"),
        changes={**written_pins(lever.pins), **allowed},
        gained=f"{signed_bytes(lever.device_change_bytes)}, {signed_percent(lever.step_share)} time",
        part=f"{CATEGORY_LABELS[lever.category]} {format_bytes(lever.num_bytes)}",
    )


def budget_suggestion(error: NoFeasiblePlan) -> Suggestion:
    """The smallest that would do."""
    budget = _whole_mib(_enough_bytes(error))
    return Suggestion(words=f"a budget of {budget}", changes={"device_budget": budget})


def _enough_bytes(error: NoFeasiblePlan) -> int:
    """Rounded up to whole MiB, so that the offered budget is enough."""
    return -(-int(error.fields["smallest_feasible_bytes"]) // MIB) * MIB


def ways_out(error: NoFeasiblePlan, *, on_card: bool = False) -> tuple[Suggestion, ...]:
    """Alternatives that would fit, what costs least first, each of which was priced; else the budget that would do, where the
    device's is what is too small.

    on_card: the work is put on a card of the table, beside which any host and disk may stand.
    """
    ways = error.fields.get("ways_out", ())
    found = tuple(_way_out(way, on_card=on_card) for way in ways)
    return found or (() if error.fields.get("short_of") else (budget_suggestion(error),))


def _way_out(way: Mapping[str, Any], *, on_card: bool) -> Suggestion:
    if way["kind"] in ("host_memory", "disk") and not on_card:
        return Suggestion(
            words=str(way["what"]),
            changes={},
            gained=EXPENSES[way["expense"]],
            peak_bytes=int(way["device_peak_bytes"]),
            step_ms=float(way["step_ms"]),
        )
    card = str(way["change"].get("gpu", ""))
    whole = {"device_budget": exact_bytes(find_device(card).usable_bytes)} if card else {}
    return Suggestion(
        words=str(way["what"]),
        changes={**_fields_of(way["change"]), **whole},
        card=card,
        gained=EXPENSES[way["expense"]],
        peak_bytes=int(way["device_peak_bytes"]),
        step_ms=float(way["step_ms"]),
    )


EXPENSES = {
    "nothing": "same numbers",
    "rounding": "numbers are rounded",
    "training": "trains something else",
    "data": "less text at once",
    "hardware": "needs what is not there",
}
"""The cost of a way out besides its time, in words."""


def _fields_of(change: Mapping[str, Any]) -> dict[str, Any]:
    """A change in the words of a job spec as text of the form's fields."""
    goal = dict(change.get("goal", {}))
    budgets = {name.removesuffix("_bytes"): exact_bytes(goal[name]) for name in goal if name.endswith("_budget_bytes")}
    return {**fields_of(change), **budgets, **({"forbid": goal["forbid"]} if "forbid" in goal else {})}


def _pending(answer: PlanAnswer, read: JobSpec | GenerateSpec) -> Pricing:
    if answer.waiting_for == "machine":
        return Pricing(
            kind="refused",
            message="No machine has registered yet, so there is nothing to price the job on.",
            hint="Start a worker; prices appear here by themselves.",
            awaits_machine=True,
        )
    # since when the profile that the spec needs has been waited for
    rows = Profile.objects.filter(fingerprint=read.profile_fingerprint)
    since = rows.values_list("created_at", flat=True).first()
    forms = compiled_representations(read.workload, read.goal.pins, read.goal.may_use) if isinstance(read, JobSpec) else ()
    return Pricing(kind="pending", since=since, message=describe_compiled_trace(forms))


def describe_compiled_trace(forms: Sequence[str]) -> str:
    """A sentence on what tracing compiled blocks takes with weights in these forms; empty where there are none."""
    if not forms:
        return ""
    return (
        f"Compiled blocks are traced too, with the weights as {', '.join(forms)}: about {SECONDS_TO_TRACE * len(forms)} s; "
        "fewer forms allowed, or one pinned, take less."
    )


def _answered(answer: PlanAnswer, *, budget_bytes: int, selected: str) -> Pricing:
    # a plan that was taken stays taken while its label is still offered; prices were made anew, so ids are new
    documents = [offer.to_json() for offer in answer.offers]
    rows = offer_rows(documents, budget_bytes=budget_bytes, selected=selected)
    chosen = next(document["prediction"] for document in documents if document["id"] == rows[0].id)
    kind = GenerationPrediction if rows[0].first_token_ms is not None else Prediction
    limits = limits_of(kind.from_json(chosen), budget_bytes=budget_bytes)
    return _with_table(
        Pricing(
            kind="priced",
            budget_bytes=budget_bytes,
            usable_bytes=limits.fits_bytes,
            best=rows[0],
            awaits_compiled=answer.awaits_compiled,
            remarks=answer.remarks,
        ),
        rows,
    )


def _nothing_fits(error: NoFeasiblePlan, *, budget_bytes: int, selected: str) -> Pricing:
    fields = error.fields
    sizes: dict[str, int] = fields["bytes_by_category"]
    rows = offer_rows(fields.get("offers", []), budget_bytes=budget_bytes, selected=selected)
    pricing = Pricing(
        kind="does_not_fit",
        budget_bytes=budget_bytes,
        smallest_bytes=_enough_bytes(error),
        short_of=tuple(fields.get("short_of", ())),
        suggestions=ways_out(error),
        largest=largest_part(sizes),
        bar=stacked_bar(sizes, budget_bytes=budget_bytes) if sizes else None,
    )
    return _with_table(pricing, rows)


def _with_table(pricing: Pricing, rows: Sequence[OfferRow]) -> Pricing:
    columns = [category for category in CATEGORIES if any(row.bytes_by_category.get(category) for row in rows)]
    picks = choose_picks(rows, budget_bytes=pricing.usable_bytes or pricing.budget_bytes or 0)
    rows = mark_picks(rows, picks)
    return replace(
        pricing,
        picks=picks,
        columns=tuple(CATEGORY_LABELS[category] for category in columns),
        categories=tuple(columns),
        offers=tuple(replace(row, cells=offer_cells(row, against=rows[0], columns=columns)) for row in rows),
        several_machines=len({row.machine for row in rows}) > 1,
        any_over=any(row.verdict == "does_not_fit" for row in rows),
    )


def _whole_mib(num_bytes: int) -> str:
    text = exact_bytes(num_bytes)
    return text if not text.endswith(" B") else f"{num_bytes // MIB} MiB"
