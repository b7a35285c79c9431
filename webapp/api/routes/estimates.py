"""``/estimates``: what a plan takes, and why, without making a job."""

from typing import Any, Literal

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Router, Schema
from pydantic import Field

from webapp.api.schemas import RETRY_AFTER_S, Pending, PricedPlan
from webapp.planning import estimates

router = Router()


class EstimateBody(Schema, extra="forbid"):
    """A model on one machine, known or only named."""

    model: str = Field(max_length=200, description="id or name of a model, presets among them")
    workload: dict[str, Any] = Field(
        default_factory=dict,
        description="as in a job spec; defaults where left out. With `kind: generation` a batch generation: `prompt_length`, "
        "`num_new_tokens`, `num_sequences`, `seed`",
    )
    goal: dict[str, Any] | None = Field(
        default=None,
        description="as in a job spec; all of the device's memory unless given. Of a generation `objective` is `throughput`, "
        "`first_token` or `largest_batch`",
    )
    machine: str | None = Field(default=None, max_length=60, description="id of a machine that has run a worker")
    gpu: str | None = Field(default=None, max_length=100, description="name of a card of the table, instead of a machine")
    plan: str | dict[str, Any] | None = Field(
        default=None,
        description="a plan, a baseline's label or `best`; plain training and the best beside it unless given. Of a generation a "
        "plan with `batch_size`, and other baselines; resident weights and the best unless given",
    )
    knobs: bool = Field(default=True, description="whether one-change neighbours of the plan are priced too")


class CategoryAtPeak(Schema):
    """Device bytes of one category, at the peak and at its own highest."""

    category: str
    peak_bytes: int
    highest_bytes: int
    reason: str


class LaneUse(Schema):
    """Milliseconds of one lane in a step."""

    lane: str
    busy_ms: float
    hidden_ms: float
    exposed_ms: float


class Explanation(Schema):
    """An explanation of the last plan."""

    peak_moment: str
    categories: list[CategoryAtPeak]
    lanes: list[LaneUse]


class Knob(Schema):
    """One change of the last plan; differences are new minus old."""

    technique: str
    change: str
    plan: dict[str, Any]
    verdict: str
    is_lossless: bool
    device_peak_bytes: int
    device_change_bytes: int
    host_change_bytes: int
    disk_change_bytes: int
    remote_change_bytes: int
    step_ms: float
    step_change_ms: float


class Estimated(Schema):
    """The part that estimates of training and of generation share."""

    profile: Literal["ready"] = "ready"
    model_type: str
    num_blocks: int
    machine: dict[str, Any]
    workload: dict[str, Any]
    goal: dict[str, Any]
    host_budget_bytes: int
    plans: list[PricedPlan]
    nothing_fits: str | None
    explanation: Explanation


class EstimateAnswer(Estimated):
    """The estimate of a training job. ``plans`` holds the plan asked for, or plain training and the best."""

    kind: Literal["training"] = "training"
    num_parameters: int
    knobs: list[Knob]


class GenerationAnswer(Estimated):
    """The estimate of a batch generation. ``plans`` holds the plan asked for, or resident weights and the best."""

    kind: Literal["generation"]
    sentences: list[str] = Field(description="what the last plan does")


@router.post("/estimates", response={200: EstimateAnswer | GenerationAnswer, 202: Pending}, tags=["plans"])
def create_estimate(request: HttpRequest, body: EstimateBody) -> HttpResponse | dict[str, Any]:
    """Price a plan to train or to generate, and explain it; nothing is kept.

    202 while the model is profiled: ask again after Retry-After.
    """
    found = estimates.estimate(
        request.user,
        estimates.EstimateRequest(
            model=body.model,
            workload=body.workload,
            goal=body.goal,
            machine=body.machine,
            gpu=body.gpu,
            plan=body.plan,
            with_knobs=body.knobs,
        ),
    )
    if found is None:
        return JsonResponse(Pending().dict(), status=202, headers={"Retry-After": RETRY_AFTER_S})
    return found
