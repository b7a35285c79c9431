"""Explains a generation's plan in sentences, for the terminal and the page, as ``training.py`` does for training.

Predictions are taken by shape (``GenerationCosts``), not by type: plan knows nothing of estimate.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from optimizer.base.units import format_bytes
from optimizer.plan.explain.training import Peaks
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.passes.arrange import passes_of
from optimizer.workload import GenerationWorkload

_MOVES: Final = {
    "disk_to_host": "from disk", "remote_to_host": "from the remote store", "host_to_device": "to the device"
}  # fmt: skip


class StageShown(Protocol):
    """The part of a stage's prediction that the sentences need."""

    @property
    def device_peak_bytes(self) -> int: ...


class GenerationCosts(Peaks, Protocol):
    """The part of a prediction that the sentences need."""

    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def copied_bytes_per_token(self) -> Mapping[str, int]: ...
    @property
    def exposed_ms(self) -> Mapping[str, float]: ...
    @property
    def peak_moment(self) -> str: ...
    @property
    def prefill_ms(self) -> float: ...
    @property
    def decode_ms(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def stages(self) -> Sequence[StageShown]: ...


def explain_generation_plan(
    plan: GenerationPlan, *, workload: GenerationWorkload, prediction: GenerationCosts
) -> list[str]:
    """Sentences without a final stop, in order: passes, weights, representation, cache, time, peak, other tiers."""
    peak_bytes = format_bytes(prediction.device_peak_bytes)
    at_most = format_bytes(prediction.device_peak_high_bytes)
    return [
        *_stages_sentences(plan, prediction),
        _passes_sentence(plan, workload),
        *_prefill_sentences(plan, workload),
        *_weights_sentences(plan),
        *_precision_sentences(plan),
        _cache_sentence(plan, workload, prediction),
        *_time_sentences(plan, prediction),
        f"the peak of {peak_bytes} (at most {at_most}) falls in {prediction.peak_moment}",
        *_tiers_sentences(plan, prediction),
    ]


def _stages_sentences(plan: GenerationPlan, prediction: GenerationCosts) -> Iterator[str]:
    """Say where a cut model's blocks are."""
    layout = plan.layout
    if not layout.is_cut:
        return
    stages = [
        f"blocks {first + 1} to {first + number}{_peak_of(prediction, index)}"
        for index, (first, number) in enumerate(zip(layout.first_blocks, layout.stage_blocks, strict=True))
    ]
    yield f"the model is cut over {layout.num_devices} devices: {'; '.join(stages)}"
    if plan.num_micro_batches > 1:
        yield f"{plan.num_micro_batches} micro-batches follow one another through the devices, each token of each in turn"
    waits_ms = prediction.exposed_ms.get("network", 0.0)
    yield f"the busiest device waits for the others, and hands over, for {waits_ms:,.1f} ms of a pass"


def _peak_of(prediction: GenerationCosts, stage: int) -> str:
    if stage >= len(prediction.stages):
        return ""
    return f" with a peak of {format_bytes(prediction.stages[stage].device_peak_bytes)}"


def _passes_sentence(plan: GenerationPlan, workload: GenerationWorkload) -> str:
    num_sequences = workload.num_sequences
    passes = passes_of(plan, workload)
    num_passes = sum(count for _, count in passes)
    apart = f", in micro-batches of {plan.batch_size}" if plan.num_micro_batches > 1 else ""
    if workload.prompt_lengths or workload.new_token_counts:
        lengths = _lengths_text(workload)
        passes_text = "one pass" if num_passes == 1 else f"{num_passes} passes of up to {plan.sequences_per_pass}"
        return f"{num_sequences} sequences run in {passes_text}{apart}: {lengths}"
    if num_passes == 1:
        return f"all {num_sequences} sequences run in one pass{apart}" if num_sequences > 1 else "one sequence runs"
    rest = num_sequences % plan.sequences_per_pass
    last = f", the last with {rest}" if rest else ""
    return f"{num_sequences} sequences run in {num_passes} passes of {plan.sequences_per_pass}{apart}{last}"


def _lengths_text(workload: GenerationWorkload) -> str:
    texts = []
    if workload.prompt_lengths:
        texts.append(f"prompts of {min(workload.prompt_lengths):,} to {workload.prompt_length:,} tokens, sorted by length")
    if workload.new_token_counts:
        fewest = min(workload.new_token_counts)
        texts.append(f"{fewest:,} to {workload.num_new_tokens:,} new tokens each, similar numbers together if that saves steps")
    return " and ".join(texts)


def _prefill_sentences(plan: GenerationPlan, workload: GenerationWorkload) -> Iterator[str]:
    tokens = plan.prefill_tokens
    if tokens is not None and tokens < workload.prompt_length:
        yield f"the first {tokens} tokens of a prompt run at once, the others one by one, so its activations stay small"


def _weights_sentences(plan: GenerationPlan) -> Iterator[str]:
    weights = plan.weights
    if weights.place != "device":
        source = {"host": "the host", "disk": "disk", "remote": "the remote store"}[weights.place]
        ahead = {0: "none ahead", 1: "one block ahead"}.get(weights.prefetch, f"{weights.prefetch} blocks ahead")
        shared = "" if plan.num_micro_batches == 1 else f", once for all {plan.num_micro_batches} micro-batches"
        yield f"each block's weights come from {source} for the prompt and again for every token{shared}, {ahead}"


def _precision_sentences(plan: GenerationPlan) -> list[str]:
    sentences = []
    if plan.weights.dtype != "fp32":
        sentences.append(f"weights, activations, keys and values are {plan.weights.dtype}; results differ slightly")
    if plan.weights.frozen != "same":
        sentences.append(
            f"the matrices inside the blocks are held in {plan.weights.frozen}, and unpacked for each product; results "
            "differ slightly"
        )
    if plan.kv_cache.dtype != "same":
        sentences.append(f"keys and values are rounded to {plan.kv_cache.dtype}; results differ slightly")
    return sentences or ["the numbers are those of plain fp32"]


def _cache_sentence(plan: GenerationPlan, workload: GenerationWorkload, prediction: GenerationCosts) -> str:
    cache, num_bytes = plan.kv_cache, format_bytes(prediction.kv_cache_bytes)
    form = f" in {cache.dtype}, packed once in blocks of 64" if cache.dtype != "same" else ""
    made = f"keys and values of {workload.cache_length:,} tokens{form} take {num_bytes}"
    if cache.place == "device":
        return f"{made} on the device, allocated once with the prompt"
    if cache.attention == "host":
        return (
            f"{made} on the host and stay there, where attention is computed: each token's key, value and query are copied "
            "there, and the result comes back"
        )
    place = {"host": "on the host", "disk": "on disk", "remote": "in the remote store"}[cache.place]
    again = ""
    if cache.prefix_tokens:
        again = (
            f"; for a prompt's first {cache.prefix_tokens:,} tokens, hidden states are kept and copied instead, and each block "
            "rebuilds their keys and values while the rest still arrives"
        )
    return f"{made} {place}; each block's are copied to the device for every token, and only new ones go back{again}"


def _time_sentences(plan: GenerationPlan, prediction: GenerationCosts) -> Iterator[str]:
    later = f", then one every {prediction.decode_ms:.2f} ms" if prediction.decode_ms else ""
    what = "the first token comes" if plan.prefill_tokens is None else "the first step ends"
    yield f"{what} after {prediction.prefill_ms:.1f} ms{later}: {prediction.tokens_per_s:,.1f} tokens/s in all"


def _tiers_sentences(plan: GenerationPlan, prediction: GenerationCosts) -> Iterator[str]:
    sizes = {
        "on the host": prediction.host_peak_bytes,
        "on disk": prediction.disk_peak_bytes,
        "in the remote store": prediction.remote_peak_bytes,
    }
    held = [f"{format_bytes(num_bytes)} {place}" for place, num_bytes in sizes.items() if num_bytes]
    if held:
        yield f"other memory holds up to {' and '.join(held)}"
    moved = [
        f"{format_bytes(prediction.copied_bytes_per_token[link])} {words}"
        for link, words in _MOVES.items()
        if prediction.copied_bytes_per_token.get(link)
    ]
    if moved:
        waits_ms = sum(prediction.exposed_ms.values())
        what = "that and the host's attention" if plan.kv_cache.attention == "host" else "that"
        ending = f"compute waits {waits_ms:.1f} ms a pass for {what}" if waits_ms >= 0.05 else "that hides behind compute"
        yield f"each token copies {' and '.join(moved)}; {ending}"
