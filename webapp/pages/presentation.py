"""Turns plans, predictions and measurements into what a page shows: pure functions from JSON documents to rows and bars.

Reads no database and writes no HTML. Documents are those of the API: ``plan`` is ``Plan.to_json()``, ``prediction`` is
``Prediction.to_json()``, ``measured`` is the block of the same name in an attempt's ``result.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.utils import timezone

from optimizer.base.categories import CATEGORIES, CATEGORY_LABELS
from optimizer.base.units import format_bytes, format_duration
from optimizer.plan.activations import BlockChoice
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan

BLOCK_CHOICES = {
    "keep": ("K", "kept on the device"),
    "recompute": ("R", "recomputed in the backward pass"),
    "selective": ("S", "products and attention kept, the rest recomputed"),
    "offload": ("O", "offloaded to the host"),
    "offload_disk": ("D", "offloaded to disk"),
    "offload_remote": ("N", "offloaded to a remote store"),
}
PLACE_WORDS: Final = {"remote": "remote store"}
"""Labels of places that are not called as they are written."""

FAR_ABOVE: Final = 4
"""A budget that is so many times what is used would leave a bar without visible parts."""
STATE_MEANINGS = {
    "queued": "waiting for a worker",
    "starting": "claimed by a worker, its process is starting",
    "running": "on a worker",
    "succeeded": "finished",
    "failed": "ended with an error",
    "cancelled": "ended on request",
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One category's stretch of a stacked bar, in percent of the bar's width."""

    category: str
    label: str
    num_bytes: int
    start_percent: str
    width_percent: str


@dataclass(frozen=True, kw_only=True)
class StackedBar:
    """Bytes by category against a budget. The bar is as wide as the larger of the two."""

    segments: tuple[Segment, ...]
    total_bytes: int
    budget_bytes: int | None
    budget_percent: str | None
    summary: str
    """The whole bar as one sentence, for those who do not see it."""

    @property
    def largest_words(self) -> str:
        """Sizes of the three largest parts, and what the others come to."""
        largest = sorted(self.segments, key=lambda segment: -segment.num_bytes)
        parts = [f"{segment.label} {format_bytes(segment.num_bytes)}" for segment in largest[:3]]
        rest_bytes = sum(segment.num_bytes for segment in largest[3:])
        return " · ".join([*parts, f"the rest {format_bytes(rest_bytes)}"] if rest_bytes else parts)


def stacked_bar(
    bytes_by_category: Mapping[str, int], *, budget_bytes: int | None, widest_bytes: int = 0, may_leave_budget: bool = False
) -> StackedBar:
    """Categories in their fixed order, empty ones left out. Bars drawn with the same ``widest_bytes`` share a scale.

    may_leave_budget: a budget far above all bytes is left out of the picture, which would be blank otherwise.
    """
    total_bytes = sum(bytes_by_category.values())
    # 4 % of air at the right, so that the budget's line is inside the picture when it is the larger
    used_bytes = max(total_bytes, widest_bytes, 1)
    is_beyond = may_leave_budget and (budget_bytes or 0) > FAR_ABOVE * used_bytes
    scale_bytes = (used_bytes if is_beyond else max(used_bytes, budget_bytes or 0)) * 1.04
    segments = []
    start_bytes = 0
    for category in (*CATEGORIES, *sorted(set(bytes_by_category) - set(CATEGORIES))):
        num_bytes = bytes_by_category.get(category, 0)
        if num_bytes <= 0:
            continue
        segments.append(
            Segment(
                category=category,
                label=CATEGORY_LABELS.get(category, category.replace("_", " ")),  # type: ignore[call-overload]
                num_bytes=num_bytes,
                start_percent=bar_percent(start_bytes, scale_bytes),
                width_percent=bar_percent(num_bytes, scale_bytes),
            )
        )
        start_bytes += num_bytes
    listed = ", ".join(f"{segment.label} {format_bytes(segment.num_bytes)}" for segment in segments)
    against = f" of a budget of {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    return StackedBar(
        segments=tuple(segments),
        total_bytes=total_bytes,
        budget_bytes=budget_bytes,
        budget_percent=None if budget_bytes is None or is_beyond else bar_percent(budget_bytes, scale_bytes),
        summary=f"{format_bytes(total_bytes)}{against}: {listed or 'nothing yet'}",
    )


@dataclass(frozen=True, kw_only=True)
class CategoryRow:
    """One category of the plan table: what was decided, what was predicted, what was measured."""

    category: str
    label: str
    lifetime: str
    place: str
    representation: str
    predicted_bytes: int | None
    measured_bytes: int | None


def plan_rows(
    plan: Mapping[str, Any] | None, *, prediction: Mapping[str, Any] | None, measured: Mapping[str, Any] | None
) -> list[CategoryRow]:
    """The plan as its table, one row a category; categories that this job does not have are left out."""
    if plan is None:
        return []
    predicted = (prediction or {}).get("device_bytes_by_category", {})
    found = (measured or {}).get("device_bytes_by_category") or {}
    decisions = _decisions(plan)
    rows = []
    for category in CATEGORIES:
        if category not in decisions and not predicted.get(category) and not found.get(category):
            continue
        lifetime, place, representation = decisions.get(category, ("counted, not decided", "device", ""))
        rows.append(
            CategoryRow(
                category=category,
                label=CATEGORY_LABELS[category],
                lifetime=lifetime,
                place=place,
                representation=representation,
                predicted_bytes=predicted.get(category),
                measured_bytes=found.get(category),
            )
        )
    return rows


def _decisions(document: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Category to (lifetime, place, representation), in words."""
    if "kv_cache" in document:
        return _generation_decisions(document)
    plan = Plan.from_json(dict(document))
    weights, state, chunks = plan.weights, plan.optimizer_state, plan.logits_and_loss.num_chunks
    computed = weights.dtype if weights.autocast == "off" else f"{weights.dtype}, products in {weights.autocast}"
    frozen = "" if weights.frozen == "same" else f", frozen ones {weights.frozen}"
    masters = ", with fp32 masters" if weights.master_bytes_per_element else ""
    return {
        "weights": (
            _WEIGHTS_LIFETIMES[weights.place == "device"], PLACE_WORDS.get(weights.place, weights.place), computed + frozen
        ),
        "gradients": (*_GRADIENTS[plan.gradients.choice], weights.dtype),
        "optimizer_state": ("kept", _state_place(plan), f"{'fp32' if state.bits == 32 else '8-bit'}{masters}"),
        "activations": _activations_decision(plan),
        "logits_and_loss": ("whole" if chunks == 1 else f"in {chunks} chunks", "device", weights.dtype),
    }


def _generation_decisions(document: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    plan = GenerationPlan.from_json(dict(document))
    weights, cache = plan.weights, plan.kv_cache
    packed = "" if weights.frozen == "same" else f", matrices in the blocks {weights.frozen}"
    lifetime = "kept" if weights.place == "device" else "each block's fetched for every forward pass"
    again = f", {cache.prefix_tokens:,} tokens made again for each" if cache.prefix_tokens else ""
    attended = ", attended to where it is" if cache.attention == "host" else ""
    return {
        "weights": (lifetime, PLACE_WORDS.get(weights.place, weights.place), f"{weights.dtype}{packed}"),
        "kv_cache": (
            f"kept until its pass ends{attended}{again}",
            PLACE_WORDS.get(cache.place, cache.place),
            weights.dtype if cache.dtype == "same" else cache.dtype,
        ),
        "activations": ("while their block runs", "device", weights.dtype),
        "logits_and_loss": ("of the newest position", "device", weights.dtype),
    }


_WEIGHTS_LIFETIMES = {True: "kept", False: "each block's fetched for its forward and backward"}
_GRADIENTS = {
    "keep": ("kept until the optimizer step", "device"),
    "consume": ("used up as they appear", "device"),
    "host": ("moved as they appear", "host"),
}


def _state_place(plan: Plan) -> str:
    state = plan.optimizer_state
    place = PLACE_WORDS.get(state.place, state.place)
    if state.place == "device" or state.fraction == 1:
        return place
    return f"{place} {100 * state.fraction:.0f} %, device {100 * (1 - state.fraction):.0f} %"


def _activations_decision(plan: Plan) -> tuple[str, str, str]:
    activations, total = plan.activations, len(plan.activations.per_block)
    counts = [(activations.per_block.count(choice), verb) for choice, verb in _CHOICE_VERBS.items()]
    lifetime = ", ".join(f"{count} {verb}" for count, verb in counts if count) + " blocks"
    places = [(activations.per_block.count(choice), place) for choice, place in _CHOICE_PLACES.items()]
    place = ", ".join(f"{place} for {count} of {total} blocks" for count, place in places if count) or "device"
    packed = (
        f", {activations.compress} on the way" if activations.compress != "none" and activations.num_offloaded else ""
    )
    return lifetime, place, plan.weights.dtype + packed


_CHOICE_VERBS: dict[BlockChoice, str] = {
    "keep": "kept",
    "recompute": "recomputed",
    "selective": "recomputed in part",
    "offload": "offloaded",
    "offload_disk": "offloaded to disk",
    "offload_remote": "offloaded to a remote store",
}
_CHOICE_PLACES: dict[BlockChoice, str] = {
    "offload": "host", "offload_disk": "disk", "offload_remote": PLACE_WORDS["remote"]
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One predicted number beside its measurement."""

    name: str
    predicted: str
    interval: str
    measured: str
    error: str


def comparisons(
    prediction: Mapping[str, Any] | None, *, measured: Mapping[str, Any] | None, has_ended: bool = False
) -> list[Comparison]:
    """Peak bytes and times, predicted against measured: of training a step's, of a generation those of a pass."""
    if not prediction:
        return []
    found = measured or {}
    peak = found.get("device_peak_bytes")
    memory = Comparison(
        name="peak device memory",
        predicted=format_bytes(prediction["device_peak_bytes"]),
        interval=" to ".join(format_bytes(prediction[f"device_peak_{end}_bytes"]) for end in ("low", "high")),
        measured=format_bytes(peak) if peak else _MEASURED_LATER[has_ended],
        error=signed_error(prediction["device_peak_bytes"], measured=peak),
    )
    timed = [("step time", "step"), ("first token of a pass", "prefill"), ("each later token", "decode")]
    known = [(name, key) for name, key in timed if f"{key}_low_ms" in prediction]
    return [memory, *(_compare_time(name, key, prediction, found, has_ended=has_ended) for name, key in known)]


_MEASURED_LATER = {False: "not yet", True: "not measured"}


def _compare_time(
    name: str, key: str, prediction: Mapping[str, Any], found: Mapping[str, Any], *, has_ended: bool
) -> Comparison:
    measured = found.get(f"{key}_ms")
    return Comparison(
        name=name,
        predicted=step_words(prediction[f"{key}_ms"]),
        interval=f"{step_words(prediction[f'{key}_low_ms'])} to {step_words(prediction[f'{key}_high_ms'])}",
        measured=step_words(measured) if measured else _MEASURED_LATER[has_ended],
        error=signed_error(prediction[f"{key}_ms"], measured=measured),
    )


def setting_words(value: Any) -> str:
    """A setting of a spec as people write it: ``rank 8, alpha 16``, ``yes``, ``none``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if each not in ([], None)}
        return ", ".join(f"{name.replace('_', ' ')} {setting_words(each)}" for name, each in given.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting_words(each) for each in value) or "none"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def clock_words(when: datetime) -> str:
    """The clock today, the day with it otherwise."""
    local = timezone.localtime(when)
    return local.strftime("%H:%M:%S" if local.date() == timezone.localdate() else "%d %b %Y %H:%M")


def signed_bytes(num_bytes: int) -> str:
    """``−7.1 GiB``."""
    return f"{'−' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"


def signed_percent(share: float) -> str:
    """``+19 %``; what rounds to nothing is said to be none."""
    percent = round(100 * share)
    return f"{percent:+d} %".replace("-", "−") if percent else "no more"


def signed_error(predicted: float, *, measured: float | None) -> str:
    """The prediction's distance from the measurement: ``-0.7 %`` is a prediction that was too low."""
    if not measured:
        return ""
    return f"{(predicted - measured) / measured * 100:+.1f} %".replace("-", "−")


def largest_part(bytes_by_category: Mapping[str, int]) -> tuple[str, int] | None:
    """The category that takes most, with its bytes."""
    if not bytes_by_category:
        return None
    category = max(bytes_by_category, key=lambda name: bytes_by_category[name])
    return CATEGORY_LABELS.get(category, category), bytes_by_category[category]  # type: ignore[call-overload]


def eta_words(eta_s: float | None, *, state: str) -> str:
    """``6 min left`` for a running job whose pace is known, else nothing."""
    return f"{format_duration(eta_s)} left" if eta_s is not None and state == "running" else ""


def step_words(step_ms: float) -> str:
    """``0.54 ms``, ``412 ms``, ``1.84 s``, then as people say it."""
    if step_ms < 1000:
        return f"{step_ms:.3g} ms" if step_ms < 100 else f"{step_ms:.0f} ms"
    return f"{step_ms / 1000:.3g} s" if step_ms < 60_000 else format_duration(step_ms / 1000)


def bar_percent(part: float, whole: float) -> str:
    """Write a number as an SVG attribute: a point as decimal sign whatever the locale."""
    return f"{part / whole * 100:.3f}%"


def batch_words(plan: Mapping[str, Any]) -> str:
    """Sequences of a micro-batch, and how many of them make a step or share a pass."""
    if "kv_cache" in plan:
        return f"{plan['batch_size']} × {plan.get('num_micro_batches', 1)}"
    return f"{plan['batch']['micro_batch_size']} × {plan['batch']['accumulation_steps']}"
