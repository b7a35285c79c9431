"""A prediction explained: each category at the peak and at its own highest, with the reason why it is there. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.base.categories import CATEGORIES, Category
from optimizer.base.serialize import to_json
from optimizer.estimate.categories.stores import PLACE_WORDS
from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class CategoryAtPeak:
    """Device bytes of one category of a steady step."""

    category: Category
    peak_bytes: int
    """Bytes at the moment when all categories together are highest."""
    highest_bytes: int
    """Bytes at the category's own highest moment, as far as the timeline's points show it."""
    reason: str
    """The category in words, and why it is there at the peak."""


@dataclass(frozen=True, kw_only=True)
class LaneUse:
    """Milliseconds of one lane in a step."""

    lane: str
    busy_ms: float
    hidden_ms: float
    """Milliseconds hidden behind compute."""
    exposed_ms: float
    """While compute stands still; of compute itself all it does."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A breakdown of the bytes and the milliseconds of one prediction."""

    peak_moment: str
    categories: tuple[CategoryAtPeak, ...]
    """Categories that hold anything at any moment, in the order of CATEGORIES."""
    lanes: tuple[LaneUse, ...]

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def explain_prediction(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, prediction: Prediction
) -> Explanation:
    highest = {
        name: max(
            [
                prediction.device_bytes_by_category.get(name, 0),
                *(point.bytes_by_category.get(name, 0) for point in prediction.timeline),
            ]
        )
        for name in CATEGORIES
    }
    reasons = _reasons(profile.of_layout(plan.layout), plan, workload, prediction)
    categories = tuple(
        CategoryAtPeak(
            category=name,
            peak_bytes=prediction.device_bytes_by_category.get(name, 0),
            highest_bytes=highest[name],
            reason=reasons[name],
        )
        for name in CATEGORIES
        if highest[name]
    )
    lanes = list_lanes(prediction.lane_busy_ms, prediction.exposed_ms)
    return Explanation(peak_moment=prediction.peak_moment, categories=categories, lanes=lanes)


def list_lanes(lane_busy_ms: Mapping[str, float], lane_exposed_ms: Mapping[str, float]) -> tuple[LaneUse, ...]:
    """Work of each lane, and the time that compute waits for it."""
    lanes = []
    for lane, busy_ms in lane_busy_ms.items():
        exposed_ms = busy_ms if lane == "compute" else min(busy_ms, lane_exposed_ms.get(lane, 0.0))
        lanes.append(LaneUse(lane=lane, busy_ms=busy_ms, hidden_ms=busy_ms - exposed_ms, exposed_ms=exposed_ms))
    return tuple(lanes)


def _reasons(profile: Profile, plan: Plan, workload: TrainingWorkload, prediction: Prediction) -> dict[Category, str]:
    return {
        "weights": _weights_reason(profile, plan, workload),
        "gradients": _gradients_reason(plan),
        "optimizer_state": _state_reason(profile, plan, workload),
        "activations": _activations_reason(plan, workload),
        "logits_and_loss": _loss_reason(profile, plan, workload),
        "kv_cache": "keys and values of the tokens so far",
        "temporaries": f"inputs, and what {prediction.peak_moment} makes and drops",
    }


def _weights_reason(profile: Profile, plan: Plan, workload: TrainingWorkload) -> str:
    place = (
        "all step long"
        if plan.weights.place == "device"
        else f"of the blocks only those at work; the rest is {PLACE_WORDS[plan.weights.place]}"
    )
    trained = f"{profile.num_parameters:,} parameters in {plan.weights.dtype}"
    if workload.adapter is not None:
        return f"{trained} are trained beside frozen ones ({plan.weights.representation}), {place}"
    return f"{trained}, {place}"


def _gradients_reason(plan: Plan) -> str:
    return {
        "keep": f"one of {plan.weights.dtype} for each trained weight, from backward to the update",
        "consume": "each only until its weight is updated, inside backward",
        "host": "each only until it has gone to the host",
    }[plan.gradients.choice]


def _state_reason(profile: Profile, plan: Plan, workload: TrainingWorkload) -> str:
    numbers = workload.kept_state.declared.describes[workload.num_moments]
    has_masters = plan.weights.master_bytes_per_element > 0 or plan.optimizer_state.place != "device"
    masters = " and an fp32 copy" if has_masters else ""
    where = plan.optimizer_state.place
    share = (
        "between steps too"
        if where == "device"
        else f"{100 * plan.optimizer_state.fraction:.0f} % of it {PLACE_WORDS[where]} between updates"
    )
    return f"{numbers}{masters} of each trained weight in {plan.optimizer_state.bits} bits, {share}"


def _activations_reason(plan: Plan, workload: TrainingWorkload) -> str:
    counts = {choice: plan.activations.count(choice) for choice in dict.fromkeys(plan.activations.per_block)}
    blocks = ", ".join(f"{count} block{'s' * (count != 1)} {choice.replace('_', ' to ')}" for choice, count in counts.items())
    tokens = workload.tokens_per_step // plan.batch.accumulation_steps
    return f"saved for backward, of {tokens:,} tokens at once: {blocks}"


def _loss_reason(profile: Profile, plan: Plan, workload: TrainingWorkload) -> str:
    tokens = -(-workload.tokens_per_step // plan.batch.accumulation_steps // plan.logits_and_loss.num_chunks)
    return f"logits of {tokens:,} tokens by {profile.vocab_size:,} words at once, and their gradient"
