"""What the new-job page says of a priced spec: a verdict in words, the chosen plan's bytes, and the table of plans.

Shapes what ``webapp.jobs.planning`` answers; computes no price itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from optimizer.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.errors import HeadroomError, NoFeasiblePlan
from optimizer.units import MIB
from webapp.catalog.models import Profile
from webapp.jobs.generation_spec import read_job_spec
from webapp.jobs.planning import PlanAnswer, price_spec
from webapp.pages.forms import exact_bytes, field_of
from webapp.pages.presentation import BLOCK_CHOICES, StackedBar, largest_part, stacked_bar


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One category of one plan, and whether it differs from the plan at the top."""

    num_bytes: int
    differs: bool


@dataclass(frozen=True, kw_only=True)
class OfferRow:
    """One plan, priced on one machine."""

    id: str
    label: str
    chosen: bool
    selected: bool
    verdict: str
    machine: str
    lossless: bool
    explanation: tuple[str, ...]
    peak_bytes: int
    host_bytes: int
    step_ms: float
    total_s: float
    tokens_per_s: float
    time_source: str
    bytes_by_category: dict[str, int]
    cells: tuple[Cell, ...]
    bar: StackedBar
    largest: tuple[str, int] | None
    blocks: str
    """One letter a block, runs shortened: ``K2 R10``."""
    batch: str
    first_token_ms: float | None = None
    """Of a generation, whose ``step_ms`` is that of each later token of a pass."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """The state of the verdict pane. Only the fields of its kind are set."""

    kind: Literal["priced", "does_not_fit", "pending", "incomplete", "refused"]
    budget_bytes: int | None = None
    best: OfferRow | None = None
    offers: tuple[OfferRow, ...] = ()
    columns: tuple[str, ...] = ()
    several_machines: bool = False
    any_over: bool = False
    smallest_bytes: int | None = None
    smallest_text: str = ""
    largest: tuple[str, int] | None = None
    bar: StackedBar | None = None
    since: datetime | None = None
    problems: tuple[str, ...] = ()
    message: str = ""
    hint: str = ""

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
        answer = price_spec(user, spec)
    except NoFeasiblePlan as error:
        return _nothing_fits(error, budget_bytes=budget_bytes, selected=selected), None
    except HeadroomError as error:
        field = field_of(str(error.fields.get("field", "")))
        pricing = Pricing(kind="refused", message=error.message, hint=error.hint)
        return pricing, FieldProblem(field=field, error=error) if field else None
    pricing = _answered(answer, budget_bytes=budget_bytes, selected=selected)
    if pricing.kind == "pending":
        pricing = replace(pricing, since=_asked_at(user, spec))
    return pricing, None


def _asked_at(user: Any, spec: dict[str, Any]) -> datetime | None:
    """Since when the profile that the spec needs has been waited for."""
    rows = Profile.objects.filter(fingerprint=read_job_spec(user, spec).profile_fingerprint)
    return rows.values_list("created_at", flat=True).first()


def _answered(answer: PlanAnswer, *, budget_bytes: int, selected: str) -> Pricing:
    if answer.profile == "pending" and answer.waiting_for == "machine":
        return Pricing(
            kind="refused",
            message="No machine has registered yet, so there is nothing to price the job on.",
            hint="Start a worker; this page prices the job again with the next edit.",
        )
    if answer.profile == "pending":
        return Pricing(kind="pending")
    # a plan that was taken stays taken while its label is still offered; prices were made anew, so ids are new
    documents = [offer.to_json() for offer in answer.offers]
    rows = _rows(documents, budget_bytes=budget_bytes, selected=selected)
    return _with_table(Pricing(kind="priced", budget_bytes=budget_bytes, best=rows[0]), rows)


def _nothing_fits(error: NoFeasiblePlan, *, budget_bytes: int, selected: str) -> Pricing:
    fields = error.fields
    sizes: dict[str, int] = fields["bytes_by_category"]
    rows = _rows(fields.get("offers", []), budget_bytes=budget_bytes, selected=selected)
    # rounded up to whole MiB, so that the offered budget is enough
    smallest_bytes = -(-int(fields["smallest_feasible_bytes"]) // MIB) * MIB
    pricing = Pricing(
        kind="does_not_fit",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest_bytes,
        smallest_text=_whole_mib(smallest_bytes),
        largest=largest_part(sizes),
        bar=stacked_bar(sizes, budget_bytes=budget_bytes) if sizes else None,
        hint=error.hint,
    )
    return _with_table(pricing, rows)


def _with_table(pricing: Pricing, rows: Sequence[OfferRow]) -> Pricing:
    columns = [category for category in CATEGORIES if any(row.bytes_by_category.get(category) for row in rows)]
    return replace(
        pricing,
        columns=tuple(CATEGORY_LABELS[category] for category in columns),
        offers=tuple(replace(row, cells=_cells(row, against=rows[0], columns=columns)) for row in rows),
        several_machines=len({row.machine for row in rows}) > 1,
        any_over=any(row.verdict == "does_not_fit" for row in rows),
    )


def _cells(row: OfferRow, *, against: OfferRow, columns: Sequence[str]) -> tuple[Cell, ...]:
    first = against.bytes_by_category
    return tuple(
        Cell(
            num_bytes=row.bytes_by_category.get(category, 0),
            differs=row is not against and row.bytes_by_category.get(category, 0) != first.get(category, 0),
        )
        for category in columns
    )


def _rows(documents: Sequence[Mapping[str, Any]], *, budget_bytes: int, selected: str) -> list[OfferRow]:
    """The chosen plan first; of the others the faster ones first. ``selected`` is ``label@machine``."""
    ordered = sorted(documents, key=lambda offer: (not offer["chosen"], offer["prediction"]["total_s"]))
    known = any(_key(offer) == selected for offer in ordered)
    return [
        _row(offer, budget_bytes=budget_bytes, selected=_key(offer) == selected if known else bool(offer["chosen"]))
        for offer in ordered
    ]


def _key(offer: Mapping[str, Any]) -> str:
    return f"{offer['label']}@{offer['machine']['id']}"


def _row(offer: Mapping[str, Any], *, budget_bytes: int, selected: bool) -> OfferRow:
    prediction, plan = offer["prediction"], offer["plan"]
    sizes = prediction["device_bytes_by_category"]
    is_generation = "kv_cache" in plan
    return OfferRow(
        id=offer["id"],
        label=offer["label"],
        chosen=offer["chosen"],
        selected=selected,
        verdict=offer["verdict"],
        machine=offer["machine"]["name"],
        lossless=offer["lossless"],
        explanation=tuple(offer["explanation"]),
        peak_bytes=prediction["device_peak_bytes"],
        host_bytes=prediction["host_peak_bytes"],
        step_ms=prediction["decode_ms" if is_generation else "step_ms"],
        first_token_ms=prediction["prefill_ms"] if is_generation else None,
        total_s=prediction["total_s"],
        tokens_per_s=prediction["tokens_per_s"],
        time_source=prediction["time_source"],
        bytes_by_category=sizes,
        cells=(),
        bar=stacked_bar(sizes, budget_bytes=budget_bytes),
        largest=largest_part(sizes),
        blocks=weights_words(plan["weights"]) if is_generation else block_letters(plan["activations"]["per_block"]),
        batch=_batch_words(plan),
    )


def weights_words(weights: Mapping[str, Any]) -> str:
    """``fp32 on the device``, ``bf16 int8 on the host``."""
    packed = "" if weights["frozen"] == "same" else f" {weights['frozen']}"
    return f"{weights['dtype']}{packed} on the {weights['place']}"


def _batch_words(plan: Mapping[str, Any]) -> str:
    """Sequences of a micro-batch, and how many of them make a step or share a pass."""
    if "kv_cache" in plan:
        return f"{plan['batch_size']} × {plan.get('num_micro_batches', 1)}"
    return f"{plan['batch']['micro_batch_size']} × {plan['batch']['accumulation_steps']}"


def block_letters(choices: Sequence[str]) -> str:
    """``["keep", "keep", "recompute"]`` as ``K2 R1``."""
    runs: list[tuple[str, int]] = []
    for choice in choices:
        letter = BLOCK_CHOICES[choice][0]
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return " ".join(f"{letter}{length}" for letter, length in runs)


def _whole_mib(num_bytes: int) -> str:
    text = exact_bytes(num_bytes)
    return text if not text.endswith(" B") else f"{num_bytes // MIB} MiB"
