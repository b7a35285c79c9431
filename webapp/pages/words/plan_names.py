"""Names plans in a few words that say how each differs from keeping everything on the device."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from optimizer.plan.devices.generation_layout import count_devices
from optimizer.plan.devices.stages import describe_cut
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan

_BLOCKS: Final = {
    "recompute": "recompute {}",
    "selective": "recompute {} in part",
    "offload": "offload {} to the host",
    "offload_disk": "offload {} to disk",
    "offload_remote": "offload {} to the remote store",
}
_PLACES: Final = {"host": "on the host", "disk": "on disk", "remote": "in the remote store"}


_SHARED_OUT: Final = {
    "replicated": "",
    "zero1": ", optimizer state shared (ZeRO-1)",
    "zero2": ", optimizer state and gradients shared (ZeRO-2)",
    "zero3": ", optimizer state, gradients and weights shared (ZeRO-3)",
}


def layout_words(document: Mapping[str, Any]) -> str:
    """``on 2 devices, optimizer state shared (ZeRO-1)``, of a plan; empty for one device."""
    layout: Mapping[str, Any] = document.get("layout") or {}
    num_devices = count_devices(document)
    if num_devices == 1:
        return ""
    cut = layout.get("stage_blocks") or ()
    if "num_devices" in layout and not cut:
        if int(layout.get("tensor", 1)) > 1:
            return f"on {num_devices} devices that share each block"
        every = int(layout.get("sync_every", 1))
        rarely = f", synchronized every {every} steps" if every > 1 else ""
        replicas = int(layout.get("replicas", 1))
        within = f" in each of {replicas} replicas" * (replicas > 1 and layout["data"] != "replicated")
        return f"on {num_devices} devices{_SHARED_OUT[layout['data']]}{within}{rarely}"
    how = f"cut into {describe_cut(cut, num_devices)}" if cut else "a copy of the model on each"
    return f"on {num_devices} devices, {how}"


def steps_alone(document: Mapping[str, Any]) -> bool:
    """Report whether a plan's devices take steps alone, so that a step's loss is one device's."""
    layout: Mapping[str, Any] = document.get("layout") or {}
    return int(layout.get("sync_every", 1)) > 1


def devices_differ(document: Mapping[str, Any]) -> bool:
    """Report whether a plan's devices hold different things: parts of a model, or unequal shares of the work."""
    layout: Mapping[str, Any] = document.get("layout") or {}
    return bool(layout.get("stage_blocks")) or len(layout.get("ranks") or ()) > 1


def plan_name(document: Mapping[str, Any]) -> str:
    """``Offload 14 of 16 blocks to the host, optimizer state on the host``; a plan is a training's or a generation's."""
    known = dict(document)
    parts = _of_generation(GenerationPlan.from_json(known)) if "kv_cache" in known else _of_training(Plan.from_json(known))
    devices = layout_words(known)
    words = ", ".join([*([devices] if devices else []), *parts])
    return words[:1].upper() + words[1:] if words else "Everything stays on the device"


def _of_training(plan: Plan) -> Iterator[str]:
    blocks, weights, state = plan.activations.per_block, plan.weights, plan.optimizer_state
    for choice, words in _BLOCKS.items():
        if count := sum(block == choice for block in blocks):
            yield words.format("every block" if count == len(blocks) else f"{count} of {len(blocks)} blocks")
    if state.place != "device":
        share = "" if state.fraction == 1 else f"{100 * state.fraction:.0f} % of "
        yield f"{share}optimizer state {_PLACES[state.place]}"
    if weights.place != "device":
        yield f"weights {_PLACES[weights.place]}"
    yield from _formats(plan)
    if plan.logits_and_loss.num_chunks > 1:
        yield f"loss in {plan.logits_and_loss.num_chunks} chunks"
    if plan.batch.accumulation_steps > 1:
        yield f"{plan.batch.accumulation_steps} micro-batches of {plan.batch.micro_batch_size}"


def _formats(plan: Plan) -> Iterator[str]:
    weights = plan.weights
    if weights.frozen != "same":
        yield f"{weights.frozen} weights"
    elif weights.dtype != "fp32" or weights.autocast != "off":
        yield f"{weights.dtype if weights.dtype != 'fp32' else weights.autocast} arithmetic"
    if plan.optimizer_state.bits == 8:
        yield "8-bit optimizer state"


def _of_generation(plan: GenerationPlan) -> Iterator[str]:
    weights, cache = plan.weights, plan.kv_cache
    if weights.place != "device":
        yield f"weights {_PLACES[weights.place]}"
    if cache.place != "device":
        yield f"KV cache {_PLACES[cache.place]}"
    if weights.frozen != "same":
        yield f"{weights.frozen} weights"
    elif weights.dtype != "fp32":
        yield f"{weights.dtype} weights"
    if cache.dtype != "same":
        yield f"{cache.dtype} KV cache"
