"""Why a generation's plan was chosen, in sentences: what it does, what each lever bought, and what was left out and why."""

from collections.abc import Iterator
from dataclasses import replace

from optimizer.base.units import format_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.formats.kv_prefix import SHORTEST_PREFIX
from optimizer.hardware.machine import Machine
from optimizer.plan.explain.generation import explain_generation_plan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.techniques import Technique
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan
from optimizer.search.generation.solve import largest_of


def explain_choice(
    problem: GenerationProblem,
    chosen: PricedGenerationPlan,
    *,
    profile: GenerationProfile | None,
    machine: Machine | None,
) -> Iterator[str]:
    """profile and machine: for what keys and values elsewhere would cost; nothing is said of that without them."""
    prediction = chosen.prediction
    yield from explain_generation_plan(chosen.plan, workload=problem.workload, prediction=prediction)
    here = problem.price(chosen.plan)
    for technique, other in _without(problem, chosen.plan).items():
        yield _bought(technique, here, problem.price(other))
    if chosen.plan.kv_cache.prefix_tokens:
        yield _made_again(chosen.plan, here, problem.price(_with_prefix(chosen.plan, 0)))
    if chosen.plan.num_micro_batches > 1:
        yield _shared(here, problem.price(replace(chosen.plan, num_micro_batches=1)))
    yield _limit(problem, chosen)
    if profile is not None and machine is not None:
        yield from explain_kv_left_out(profile, chosen, machine=machine)
        yield from _explain_kept(problem, chosen, profile)


def _without(problem: GenerationProblem, plan: GenerationPlan) -> dict[Technique, GenerationPlan]:
    """The plan with one of its levers left out."""
    weights = plan.weights
    without: dict[Technique, GenerationPlan] = {
        "stream_weights": replace(plan, num_micro_batches=1, weights=replace(weights, place="device", prefetch=1)),
        "quantize_frozen": replace(plan, weights=replace(weights, frozen="same")),
        "offload_kv": replace(plan, kv_cache=replace(plan.kv_cache, place="device", attention="device", prefix_tokens=0)),
        "host_attention": replace(plan, kv_cache=replace(plan.kv_cache, attention="device")),
        "quantize_kv": replace(plan, kv_cache=replace(plan.kv_cache, dtype="same")),
    }
    return {
        technique: without[technique]
        for technique in plan.techniques
        if technique in without and problem.is_known(without[technique].weights.representation)
    }


def _bought(technique: Technique, here: GenerationPrediction, there: GenerationPrediction) -> str:
    names = {
        "stream_weights": "streaming the weights",
        "quantize_frozen": "packing the blocks' matrices",
        "offload_kv": "moving keys and values",
        "host_attention": "attention on the host",
        "quantize_kv": "packing keys and values",
    }
    saved_bytes = there.device_peak_bytes - here.device_peak_bytes
    percent = 100 * (here.total_s / there.total_s - 1)
    return f"{names[technique]} saves {format_bytes(saved_bytes)} and takes {time_words(percent)} at this batch"


def time_words(percent: float) -> str:
    """``3.1 % longer``, ``0.5 % less time``."""
    return f"{percent:.1f} % longer" if percent >= 0 else f"{-percent:.1f} % less time"


def _shared(here: GenerationPrediction, alone: GenerationPrediction) -> str:
    """here: with several micro-batches to a pass."""
    more_bytes = format_bytes(here.device_peak_bytes - alone.device_peak_bytes)
    times = alone.total_s / here.total_s
    return f"passes shared by several micro-batches take {more_bytes} more and are {times:.1f} times as fast as one for each"


def _made_again(plan: GenerationPlan, here: GenerationPrediction, kept: GenerationPrediction) -> str:
    """kept: with all keys and values."""
    less_bytes = kept.copied_bytes_per_token.get("host_to_device", 0) - here.copied_bytes_per_token.get("host_to_device", 0)
    percent = 100 * (here.total_s / kept.total_s - 1)
    return (
        f"making keys and values of {plan.kv_cache.prefix_tokens:,} tokens again moves {format_bytes(less_bytes)} less for each "
        f"token and takes {time_words(percent)} at this batch"
    )


def _with_prefix(plan: GenerationPlan, num_tokens: int) -> GenerationPlan:
    return replace(plan, kv_cache=replace(plan.kv_cache, prefix_tokens=num_tokens))


def _limit(problem: GenerationProblem, chosen: PricedGenerationPlan) -> str:
    """The limit that holds the batch where it is."""
    plan, room_bytes = chosen.plan, problem.goal.device_budget_bytes - chosen.prediction.device_peak_high_bytes
    is_held = problem.goal.pins.batch_size is not None
    if is_held or plan.batch_size >= largest_of(plan, problem.workload.num_sequences):
        return f"{format_bytes(room_bytes)} of the budget stay free"
    larger = problem.price(replace(plan, batch_size=plan.batch_size + 1))
    if problem.fits(larger):
        return f"{format_bytes(room_bytes)} of the budget stay free; more sequences at once would not be better"
    return (
        f"one sequence more at once could take {format_bytes(larger.device_peak_high_bytes)}, of a budget of "
        f"{format_bytes(problem.goal.device_budget_bytes)}"
    )


def explain_kv_left_out(
    profile: GenerationProfile, chosen: PricedGenerationPlan, *, machine: Machine
) -> Iterator[str]:
    """The time of moving keys and values for each token at this shape, and whether it could pay to make some of them again
    of hidden states.

    For one token and block a hidden state weighs ``h p`` bytes and its keys and values ``k p``, where ``k`` numbers are kept.
    Moving states to make keys and values from them pays only where ``h < k``: mostly not with grouped queries. Source: KVPR
    (arXiv 2411.17089) for the split, carried over to grouped queries.
    """
    plan, prediction = chosen.plan, chosen.prediction
    size = plan.weights.bytes_per_element
    if not prediction.decode_ms:
        yield "no token is decoded after the first, so keys and values need no other place"
        return
    if plan.kv_cache.place == "device":
        moved_ms = prediction.kv_cache_bytes / machine.rates.host_to_device_bytes_per_s * 1000
        yield (
            f"keys and values stay on the device: from the host their {format_bytes(prediction.kv_cache_bytes)} would come for "
            f"every token, up to {moved_ms:,.1f} ms beside the {prediction.decode_ms:,.1f} ms a token takes"
        )
    state_bytes = profile.hidden_size * size
    kept_bytes = min(tensors.elements_per_token for tensors in profile.kv) * size
    sizes = f"a hidden state weighs {format_bytes(state_bytes)}, a token's keys and values {format_bytes(kept_bytes)} a block"
    if state_bytes >= kept_bytes:
        yield f"making keys and values again from hidden states would not pay anywhere: {sizes}"
    elif plan.kv_cache.is_plain or plan.kv_cache.dtype != "same":
        share = 100 * (1 - state_bytes / kept_bytes)
        moved = "if they were moved" if plan.kv_cache.place == "device" else "if they were not packed"
        yield f"making keys and values again from hidden states could save up to {share:.0f} % of their moves {moved}: {sizes}"


def _explain_kept(
    problem: GenerationProblem, chosen: PricedGenerationPlan, profile: GenerationProfile
) -> Iterator[str]:
    """The reason where keys and values could be made again and are not."""
    plan, cache = chosen.plan, chosen.plan.kv_cache
    half = problem.workload.prompt_length // 2
    if cache.prefix_tokens or cache.place == "device" or cache.dtype != "same" or profile.rebuild is None:
        return
    other = _with_prefix(plan, half)
    if half < SHORTEST_PREFIX or not problem.permits(other) or not chosen.prediction.decode_ms:
        return
    percent = 100 * (problem.price(other).total_s / problem.price(plan).total_s - 1)
    yield f"keys and values are moved and none made again: of {half:,} tokens that would cost {percent:.1f} % of the time"
