"""``/plans`` prices a job's spec and keeps offers; ``/plans/...``: the best plan for a goal, plans side by side, cards ranked,
a plan after one edit, which keep nothing.
"""

from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Body, Router, Schema
from pydantic import Field

from webapp.api.schemas import RETRY_AFTER_S, Pending, PricedPlan
from webapp.http.idempotency import idempotent, remember
from webapp.planning import questions
from webapp.planning.pricing import price_spec
from webapp.planning.search.asked import AskedOfModel

router = Router()
_MAX_PLANS = 6
_MAX_CARDS = 100


class WorkBody(Schema, extra="forbid"):
    """A model and what it is to do."""

    model: str = Field(max_length=200, description="id or name of a model, presets among them")
    workload: dict[str, Any] = Field(default_factory=dict, description="as in a job spec; defaults where left out")
    prompts: str | None = Field(
        default=None, max_length=60, description="id of prompts to generate for; the workload is then that of a generate job"
    )
    goal: dict[str, Any] | None = Field(
        default=None, description="as in a job spec, with objective, pins and forbid; all of the device's memory unless given"
    )


class PlaceBody(WorkBody):
    """The same on one machine, known or only named."""

    machine: str | None = Field(default=None, max_length=60, description="id of a machine that has run a worker")
    gpu: str | None = Field(default=None, max_length=100, description="name of a card of the table, instead of a machine")


class CompareBody(PlaceBody):
    """Two plans or more."""

    plans: dict[str, str | dict[str, Any]] = Field(
        min_length=2,
        max_length=_MAX_PLANS,
        description="by the name to show: a plan, a baseline's label, or `best`",
    )


class CardsBody(WorkBody):
    """Cards of the table."""

    cards: list[str] = Field(
        default_factory=lambda: ["all"], max_length=_MAX_CARDS, description="names of the table, or `all` alone"
    )
    order: Literal["speed", "money"] = Field(
        default="speed", description="tokens per second, or the rent of a million tokens"
    )


class PriceBody(PlaceBody):
    """A plan, and an edit of it."""

    plan: dict[str, Any]
    change: dict[str, Any] = Field(
        description='a part of a plan, such as {"optimizer_state": {"bits": 8}} or {"kv_cache": {"place": "host"}}'
    )


class Limit(Schema):
    """The limit that binds where the most that fits was asked for."""

    unit: Literal["sequences", "tokens", "blocks"]
    largest: int
    peak_bytes: int
    budget_bytes: int
    next: int | None
    next_peak_bytes: int | None
    reason: str


class LeftOut(Schema):
    """A technique that is allowed and would not pay."""

    technique: str
    sentence: str
    device_change_bytes: int
    step_change_ms: float


class LayoutOption(Schema):
    """One layout of several devices, beside the one that was chosen."""

    layout: dict[str, Any]
    least_step_ms: float = Field(description="no plan of it is faster")
    sentence: str = Field(description="how it compares with the layout that was chosen")


class SetupOption(Schema):
    """A setup of several devices that people write by hand, such as FSDP with every block recomputed."""

    setup: str = Field(description="the setup, whatever its blocks do")
    label: str = Field(description="key of its plan in `baselines`, which has none where it cannot be carried out")
    words: str
    finding: str = Field(description="how it compares with the chosen plan, or why it does not fit or cannot be carried out")


class BestAnswer(Schema):
    """The answer for training: the chosen plan, its baselines, and the limit."""

    kind: Literal["training"] = "training"
    profile: Literal["ready"] = "ready"
    machine: dict[str, Any]
    objective: str
    workload: dict[str, Any]
    num_blocks: int
    num_parameters: int
    budget_bytes: dict[str, int]
    chosen: PricedPlan
    baselines: dict[str, PricedPlan]
    frontier: list[PricedPlan]
    bound_step_ms: float | None
    unlimited_step_ms: float
    gap: float | None
    is_optimal: bool
    explanation: list[str]
    left_out: list[LeftOut]
    limit: Limit | None
    layouts: list[LayoutOption]
    """One device first; empty where the goal is one device."""
    setups: list[SetupOption]
    """The same."""
    compiled_blocks: Literal["pending"] | None = None
    """``pending`` while a worker traces compiled blocks, which may make a better plan: ask again."""


class BestGenerationAnswer(Schema):
    """The answer for a batch generation."""

    kind: Literal["generation"]
    profile: Literal["ready"] = "ready"
    machine: dict[str, Any]
    objective: str
    workload: dict[str, Any]
    chosen: PricedPlan
    baselines: dict[str, PricedPlan]
    frontier: list[PricedPlan]
    explanation: list[str]


class Cell(Schema):
    """One decision on which the plans differ; values in their order."""

    category: str
    aspect: Literal["lifetime", "place", "representation"]
    values: list[str]


class BytesAtPeak(Schema):
    """Bytes of one category, in the order of the plans."""

    category: str
    values: list[int]


class CompareAnswer(Schema):
    """Plans for training side by side; only what differs."""

    kind: Literal["training"] = "training"
    profile: Literal["ready"] = "ready"
    plans: list[PricedPlan]
    cells: list[Cell]
    bytes_at_peak: list[BytesAtPeak]


class Cost(Schema):
    """The cost of the whole run, with the date of its price."""

    kind: Literal["rented", "energy"]
    amount: float
    amount_low: float
    amount_high: float
    per_million_tokens: float | None
    currency: str
    price: float
    price_date: str
    provider: str


class Decision(Schema):
    """One knob of a generation's plan (``kv_cache.place``) on which the plans differ; values in their order."""

    knob: str
    values: list[Any]


class CompareGenerationsAnswer(Schema):
    """Plans for a batch generation side by side; only what differs."""

    kind: Literal["generation"]
    profile: Literal["ready"] = "ready"
    plans: list[PricedPlan]
    decisions: list[Decision]
    bytes_at_peak: list[BytesAtPeak]


class CardAnswer(Schema):
    """One card; ``chosen`` is null where nothing fits."""

    card: str
    memory_bytes: int
    chosen: PricedPlan | None
    what: str
    tokens_per_s: float | None
    costs: list[Cost]


class CardsAnswer(Schema):
    """Best first."""

    profile: Literal["ready"] = "ready"
    order: Literal["speed", "money"]
    cards: list[CardAnswer]


class Difference(Schema):
    """One field of the plan, before and after."""

    path: str
    a: Any
    b: Any


class PriceAnswer(Schema):
    """The plan after the edit; changes are new minus old."""

    kind: Literal["training"] = "training"
    profile: Literal["ready"] = "ready"
    priced: PricedPlan
    differences: list[Difference]
    device_change_bytes: int
    host_change_bytes: int
    step_change_ms: float
    is_lossless: bool


class PriceGenerationAnswer(Schema):
    """The answer for a batch generation."""

    kind: Literal["generation"]
    profile: Literal["ready"] = "ready"
    priced: PricedPlan
    differences: list[Difference]
    device_change_bytes: int
    host_change_bytes: int
    disk_change_bytes: int
    remote_change_bytes: int
    total_change_s: float
    is_lossless: bool


@router.post("/plans", response={200: dict[str, Any], 202: dict[str, Any]}, tags=["plans"])
@idempotent
def create_plans(request: HttpRequest, spec: Annotated[dict[str, Any], Body()]) -> HttpResponse:
    """Price a job spec on each known machine. 202 while the model is profiled: ask again after Retry-After.

    With `compiled_blocks: pending` a plan with compiled blocks may be better, which a worker traces now: ask again likewise.
    """
    answer = price_spec(request.user, spec)
    if answer.profile == "pending":
        # not remembered: the same request is meant to be sent again
        return JsonResponse(answer.to_json(), status=202, headers={"Retry-After": RETRY_AFTER_S})
    if answer.awaits_compiled:
        return JsonResponse(answer.to_json(), headers={"Retry-After": RETRY_AFTER_S})
    with transaction.atomic():
        return remember(request, status=200, body=answer.to_json())


@router.post("/plans/best", response={200: BestAnswer | BestGenerationAnswer, 202: Pending}, tags=["plans"])
def find_best(request: HttpRequest, response: HttpResponse, body: PlaceBody) -> HttpResponse | dict[str, Any]:
    """The best plan for `goal.objective`; with `kind: generation` in the workload, of a batch generation.

    422 where nothing fits; of training with `extra.ways_out`, each priced. `compiled_blocks: pending` as in `POST /plans`.
    """
    found = questions.find_best(request.user, _question(body))
    if found is not None and "compiled_blocks" in found:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return _answer(found)


@router.post("/plans/compare", response={200: CompareAnswer | CompareGenerationsAnswer, 202: Pending}, tags=["plans"])
def compare_plans(request: HttpRequest, body: CompareBody) -> HttpResponse | dict[str, Any]:
    """Plans side by side: what of the table differs, bytes at each plan's peak, time; with `kind: generation` in the workload,
    plans of a batch generation.
    """
    return _answer(questions.compare(request.user, _question(body), body.plans))


@router.post("/plans/cards", response={200: CardsAnswer, 202: Pending}, tags=["plans"])
def rank_cards(request: HttpRequest, body: CardsBody) -> HttpResponse | dict[str, Any]:
    """Cards of the table ranked for this work, training or `kind: generation`, each with its best plan; those on which nothing
    fits come last.
    """
    question = AskedOfModel(model=body.model, workload=body.workload, goal=body.goal, prompts=body.prompts)
    return _answer(questions.rank_cards(request.user, question, body.cards, by_money=body.order == "money"))


@router.post("/plans/price", response={200: PriceAnswer | PriceGenerationAnswer, 202: Pending}, tags=["plans"])
def price_change(request: HttpRequest, body: PriceBody) -> HttpResponse | dict[str, Any]:
    """A plan, of training or with `kind: generation` of a batch generation, after one edit, against what it was.

    Of training what comes on top of tensors on a card is not worked out anew.
    """
    return _answer(questions.price_change(request.user, _question(body), body.plan, body.change))


def _question(body: PlaceBody) -> AskedOfModel:
    return AskedOfModel(
        model=body.model,
        workload=body.workload,
        goal=body.goal,
        machine=body.machine,
        gpu=body.gpu,
        prompts=body.prompts,
    )


def _answer(found: dict[str, Any] | None) -> HttpResponse | dict[str, Any]:
    """202 while the model is profiled: ask again after Retry-After."""
    if found is None:
        return JsonResponse(Pending().dict(), status=202, headers={"Retry-After": RETRY_AFTER_S})
    return found
