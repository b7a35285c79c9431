"""A plan in sentences, for the terminal and the page: what it does, what that costs, what it saves, where the peak is.

Predictions are taken by shape (``Costs``), not by type: plan knows nothing of estimate.
"""

from itertools import groupby
from typing import Protocol

from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.units import format_bytes

_VERBS: dict[BlockChoice, tuple[str, str]] = {
    "keep": ("keeps its activations", "keep their activations"),
    "recompute": ("is recomputed in backward", "are recomputed in backward"),
    "offload": ("moves its activations to the host", "move their activations to the host"),
}


class Costs(Protocol):
    """The part of a prediction that the sentences need."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def device_peak_high_bytes(self) -> int: ...
    @property
    def host_peak_bytes(self) -> int: ...
    @property
    def peak_moment(self) -> str: ...
    @property
    def step_ms(self) -> float: ...
    @property
    def exposed_copy_ms(self) -> float: ...


def explain_plan(plan: Plan, *, prediction: Costs, baseline: Costs | None = None) -> list[str]:
    """Sentences without a final stop, in order: blocks, batch, representation, cost against the baseline, peak, host.

    baseline: what plain training (keep all, whole batch at once) is predicted to cost; None leaves the comparison out.
    """
    sentences = [_blocks_sentence(plan.activations.per_block), _batch_sentence(plan), *_precision_sentences(plan)]
    if baseline is not None:
        sentences.append(_cost_sentence(prediction, baseline))
    sentences.append(
        f"the peak of {format_bytes(prediction.device_peak_bytes)} "
        f"(at most {format_bytes(prediction.device_peak_high_bytes)}) falls in {prediction.peak_moment}"
    )
    if prediction.host_peak_bytes:
        sentences.append(_host_sentence(prediction))
    return sentences


def describe_blocks(per_block: tuple[BlockChoice, ...]) -> str:
    """Runs of blocks, last first: ``the last 4 of 12 blocks keep their activations; the first 8 are recomputed``."""
    total = len(per_block)
    runs = [(choice, len(list(group))) for choice, group in groupby(per_block)]
    if len(runs) == 1:
        verb = _VERBS[per_block[0]][total != 1]
        return f"all {total} blocks {verb}" if total > 1 else f"the only block {verb}"
    if len(runs) > 3:
        return _describe_counts(per_block)
    last_choice, last_length = runs[-1]
    parts = [f"{_place('the last', last_length)} of {total} blocks {_VERBS[last_choice][last_length > 1]}"]
    places = ["the first", "the next"] if len(runs) == 3 else ["the first"]
    for place, (choice, length) in zip(places, runs[:-1], strict=True):
        parts.append(f"{_place(place, length)} {_VERBS[choice][length > 1]}")
    return "; ".join(parts)


def _describe_counts(per_block: tuple[BlockChoice, ...]) -> str:
    """For blocks that take turns, where a list of runs would say less than the counts."""
    counts = {choice: per_block.count(choice) for choice in _VERBS if choice in per_block}
    parts = [f"{count} {_VERBS[choice][count > 1]}" for choice, count in counts.items()]
    return f"of {len(per_block)} blocks " + ", ".join(parts) + ", in turns"


def _place(place: str, length: int) -> str:
    return f"{place} {length}" if length > 1 else place


def _blocks_sentence(per_block: tuple[BlockChoice, ...]) -> str:
    return describe_blocks(per_block)


def _batch_sentence(plan: Plan) -> str:
    batch = plan.batch
    if batch.accumulation_steps == 1:
        return f"the whole batch of {batch.global_batch_size} runs at once"
    return (
        f"the batch of {batch.global_batch_size} runs as {batch.accumulation_steps} micro-batches "
        f"of {batch.micro_batch_size}, whose gradients are summed"
    )


def _precision_sentences(plan: Plan) -> list[str]:
    sentences = []
    if plan.weights.dtype == "bf16":
        sentences.append(
            "weights, gradients and activations are bf16, beside fp32 master weights; results differ slightly"
        )
    if plan.optimizer_state.bits == 8:
        sentences.append("the optimizer's moments take 8 bits an element; results differ slightly")
    return sentences or ["the numbers are those of plain fp32 training"]


def _cost_sentence(prediction: Costs, baseline: Costs) -> str:
    saved_bytes = baseline.device_peak_bytes - prediction.device_peak_bytes
    memory = f"saves {format_bytes(saved_bytes)}" if saved_bytes >= 0 else f"needs {format_bytes(-saved_bytes)} more"
    percent = 100 * (prediction.step_ms / baseline.step_ms - 1) if baseline.step_ms > 0 else 0.0
    if abs(percent) < 0.5:
        return f"takes as long as keep-all, {memory}"
    time = f"costs {percent:.0f} % of step time" if percent > 0 else f"takes {-percent:.0f} % less step time"
    return f"{time} against keep-all, {memory}"


def _host_sentence(prediction: Costs) -> str:
    waits = f"compute waits {prediction.exposed_copy_ms:.1f} ms a step for copies"
    hidden = "the copies hide behind compute"
    return (
        f"{format_bytes(prediction.host_peak_bytes)} of activations pass through host memory; "
        f"{waits if prediction.exposed_copy_ms >= 0.05 else hidden}"
    )
