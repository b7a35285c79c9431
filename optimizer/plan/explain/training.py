"""Explains a training plan in sentences, for the terminal and the page: its decisions, their cost, their savings, the peak.

Predictions are taken by shape (``Costs``), not by type: plan knows nothing of estimate.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final, Protocol

from optimizer.base.units import format_bytes, format_duration
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import describe_cut
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import DECLARATIONS, LOSSY, Technique

_VERBS: Final[dict[BlockChoice, tuple[str, str]]] = {
    "keep": ("keeps its activations", "keep their activations"),
    "recompute": ("is recomputed in backward", "are recomputed in backward"),
    "selective": (
        "keeps products and attention and recomputes the rest",
        "keep products and attention and recompute the rest",
    ),
    "offload": ("moves its activations to the host", "move their activations to the host"),
    "offload_disk": ("moves its activations to disk", "move their activations to disk"),
    "offload_remote": ("moves its activations to the remote store", "move their activations to the remote store"),
}
_LINKS: Final = {
    "device_to_host": "to the host",
    "host_to_device": "back to the device",
    "host_to_disk": "on to disk",
    "disk_to_host": "from disk",
    "host_to_remote": "on to the remote store",
    "remote_to_host": "from the remote store",
}


_HIDDEN_MS: Final = 0.05
"""Copy stalls up to this many ms a step are reported as zero."""


class Peaks(Protocol):
    """The most that each tier holds."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def device_peak_high_bytes(self) -> int: ...
    @property
    def host_peak_bytes(self) -> int: ...
    @property
    def disk_peak_bytes(self) -> int: ...
    @property
    def remote_peak_bytes(self) -> int: ...


class Costs(Peaks, Protocol):
    """The part of a prediction that the sentences need."""

    @property
    def copied_bytes(self) -> Mapping[str, int]: ...
    @property
    def peak_moment(self) -> str: ...
    @property
    def step_ms(self) -> float: ...
    @property
    def exposed_copy_ms(self) -> float: ...
    @property
    def exposed_ms(self) -> Mapping[str, float]: ...
    @property
    def network_bytes(self) -> int: ...
    @property
    def once_s(self) -> float: ...


Without = Mapping[Technique, Costs]
"""Costs of the plan without one technique, by technique."""


def explain_plan(
    plan: Plan, *, prediction: Costs, baseline: Costs | None = None, without: Without | None = None
) -> list[str]:
    """Sentences without a final stop, in order: blocks, batch, loss, gradients, state, weights, representation, cost against
    the baseline, peak, other tiers.

    baseline: predicted costs of plain training (keep all, whole batch at once); None leaves the comparison out.
    """
    worth = _Worth(prediction, without or {})
    sentences = [
        *_layout_sentences(plan, prediction),
        describe_blocks(plan.activations.per_block),
        *_blocks_sentences(plan, prediction, worth),
        *_compression_sentences(plan, worth),
        _batch_sentence(plan, worth),
        *_loss_sentences(plan, worth),
        *_declared_sentences(plan, worth, is_lossy=False),
        *_state_sentences(plan, worth),
        *_weights_sentences(plan, worth),
        *_precision_sentences(plan, worth),
    ]
    if prediction.once_s:
        sentences.append(f"compiling takes about {prediction.once_s:.0f} s before the first step, less where it was done before")
    if baseline is not None:
        sentences.append(_cost_sentence(prediction, baseline))
    sentences.append(
        f"the peak of {format_bytes(prediction.device_peak_bytes)} "
        f"(at most {format_bytes(prediction.device_peak_high_bytes)}) falls in {prediction.peak_moment}"
    )
    return [*sentences, *_tiers_sentences(prediction, num_devices=plan.layout.num_devices)]


def explain_common(plan: Plan, *, prediction: Costs) -> list[str]:
    """Sentences, as ``explain_plan`` has them, on what ranks that differ have in common: all but their batch and their blocks."""
    worth = _Worth(prediction, {})
    return [
        *_layout_sentences(plan, prediction),
        *_loss_sentences(plan, worth),
        *_declared_sentences(plan, worth, is_lossy=False),
        *_state_sentences(plan, worth),
        *_weights_sentences(plan, worth),
        *_precision_sentences(plan, worth),
        *_tiers_sentences(prediction, num_devices=plan.layout.num_devices),
    ]


def describe_blocks(per_block: tuple[BlockChoice, ...]) -> str:
    """Runs of blocks, last first: ``the last 4 of 12 blocks keep their activations; the first 8 are recomputed``."""
    total = len(per_block)
    runs = [(choice, len(list(group))) for choice, group in groupby(per_block)]
    if len(runs) == 1:
        verb = _VERBS[per_block[0]][total != 1]
        return f"all {total} blocks {verb}" if total > 1 else f"the only block {verb}"
    if len(runs) > 4:
        return _describe_counts(per_block)
    last_choice, last_length = runs[-1]
    parts = [f"{_place('the last', last_length)} of {total} blocks {_VERBS[last_choice][last_length > 1]}"]
    places = ["the first", "the next", "the next"]
    for place, (choice, length) in zip(places, runs[:-1], strict=False):
        parts.append(f"{_place(place, length)} {_VERBS[choice][length > 1]}")
    return "; ".join(parts)


def _describe_counts(per_block: tuple[BlockChoice, ...]) -> str:
    """Describe blocks whose choices alternate: counts say more than a list of runs would."""
    counts = {choice: per_block.count(choice) for choice in _VERBS if choice in per_block}
    parts = [f"{count} {_VERBS[choice][count > 1]}" for choice, count in counts.items()]
    return f"of {len(per_block)} blocks " + ", ".join(parts) + ", in turns"


def _place(place: str, length: int) -> str:
    return f"{place} {length}" if length > 1 else place


class _Worth:
    """Writes what single techniques are worth in this plan, as the end of a sentence."""

    def __init__(self, prediction: Costs, without: Without) -> None:
        self._prediction = prediction
        self._without = without

    def clause(self, technique: Technique) -> str:
        """A clause such as ``; that saves 1.00 GiB at the peak and costs 3.0 % of step time``; empty if it is not known."""
        found = self.found(technique)
        return f"; that {found}" if found else ""

    def found(self, technique: Technique) -> str:
        """A comparison with the plan without it: ``saves 1.00 GiB at the peak and costs 3.0 % of step time``; or empty."""
        other = self._without.get(technique)
        if other is None:
            return ""
        saved_bytes = other.device_peak_bytes - self._prediction.device_peak_bytes
        percent = 100 * (self._prediction.step_ms / other.step_ms - 1) if other.step_ms > 0 else 0.0
        time = f"{'costs' if percent > 0 else 'saves'} {abs(percent):.1f} % of step time"
        return f"{_saved(saved_bytes)} and {time if abs(percent) >= 0.05 else 'costs no time'}"


def _saved(num_bytes: int) -> str:
    if num_bytes == 0:
        return "leaves the peak as it is"
    return f"saves {format_bytes(num_bytes)} at the peak" if num_bytes > 0 else f"adds {format_bytes(-num_bytes)} to the peak"


_SHARED_OUT: Final = {
    "replicated": "each keeps all weights, gradients and optimizer state, and the gradients are summed",
    "zero1": "each keeps the optimizer state of the tensors that it updates, and sends the others their new weights (ZeRO-1)",
    "zero2": "each keeps the optimizer state and the gradients of the tensors that it updates, and sends the others their new "
    "weights (ZeRO-2)",
    "zero3": "each keeps the weights, gradients and optimizer state of some tensors, and sends the others the weights of each "
    "block while it runs (ZeRO-3)",
}
_ORDERS: Final = {
    "1f1b": "each begins the backward of a micro-batch as soon as its gradient comes, so that few are under way at once (1F1B)",
    "gpipe": "each runs all micro-batches forward, then all backward (GPipe)",
    "breadth_first": "each runs all micro-batches through some neighbouring blocks before it goes on to its next ones (breadth "
    "first)",
}


_COMMON: Final = {"average": "the mean of", "nesterov": "what an outer step with momentum (DiLoCo) makes of"}


def _layout_sentences(plan: Plan, prediction: Costs) -> Iterator[str]:
    layout = plan.layout
    if layout.is_cut:
        if layout.num_rounds == 1:
            stages = "; ".join(f"rank {own.rank} has {own.words}" for own in layout.rank_stages)
            yield f"the model is cut over {layout.num_devices} devices: {stages}"
        else:
            cut = describe_cut(layout.stage_blocks, layout.num_devices)
            yield f"the model is cut into {cut}, which go around {layout.num_devices} devices"
        yield _ORDERS[layout.schedule]
    elif layout.shares_blocks:
        yield (
            f"{layout.num_devices} devices share each block: every one has some of its heads and neurons, with all that belongs "
            "to them, and works on every sequence; what they add to hidden states is summed, and so are the gradients of these"
        )
    elif layout.steps_alone:
        yield (
            f"{layout.num_devices} devices take a part of the batch each and train alone for {layout.sync_every} steps; then "
            f"they go on from {_COMMON[layout.sync_rule]} their weights, whose differences are sent in {layout.sync_format}"
        )
        longest = format_duration(layout.sync_every * prediction.step_ms / 1000)
        yield (
            f"stopping, evaluations and checkpoints wait for that, up to {longest}, and a checkpoint takes the optimizer state "
            "of the other devices over the link"
        )
    elif layout.num_devices > 1:
        yield f"{layout.num_devices} devices take a part of the batch each; {_SHARED_OUT[layout.data]}"
        if layout.replicas > 1 and layout.shares_state:
            when = "once a step" if plan.gradients.choice == "keep" else "in each micro-batch"
            yield (
                f"that is so among each {layout.num_sharing} neighbouring devices (hybrid sharding): between these replicas each "
                f"gradient is summed {when}, and no weights cross"
            )
    if layout.num_devices > 1:
        sent, waits_ms = format_bytes(prediction.network_bytes), prediction.exposed_ms.get("network", 0.0)
        waits = f"compute waits {waits_ms:.1f} ms for it" if waits_ms >= _HIDDEN_MS else "it hides behind compute"
        on_average = " on average" * layout.steps_alone
        yield f"each device sends {sent} to the others in a step{on_average}; {waits}"


def _blocks_sentences(plan: Plan, prediction: Costs, worth: _Worth) -> Iterator[str]:
    """Yield what rebuilding and moving are worth, each as a whole."""
    num_rebuilt, num_moved = plan.activations.count("recompute", "selective"), plan.activations.num_offloaded
    if worth.found("recompute"):
        yield f"recomputing in {_blocks(num_rebuilt)} {worth.found('recompute')}"
    if worth.found("offload"):
        is_hidden = prediction.exposed_copy_ms < _HIDDEN_MS
        hidden = ", hidden behind compute" * is_hidden
        yield f"offloading the activations of {_blocks(num_moved)} {worth.found('offload')}{hidden}"


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}"


def _compression_sentences(plan: Plan, worth: _Worth) -> Iterator[str]:
    activations = plan.activations
    if activations.compress == "none" or not activations.num_offloaded:
        return
    scales = ", with a scale for each 256 elements" if activations.compress == "int8" else ""
    yield f"offloaded activations travel as {activations.compress}{scales}; results differ slightly{worth.clause('compress')}"


def _batch_sentence(plan: Plan, worth: _Worth) -> str:
    batch = plan.batch
    is_alone, size = plan.layout.num_parts == 1, batch.global_batch_size
    if batch.accumulation_steps == 1:
        return f"{'the whole batch' if is_alone else 'the part of each device'} of {size} runs at once"
    return (
        f"the {'batch' if is_alone else 'part of each device'} of {size} runs as {batch.accumulation_steps} micro-batches "
        f"of {batch.micro_batch_size}, whose gradients are summed{worth.clause('accumulate')}"
    )


def _loss_sentences(plan: Plan, worth: _Worth) -> Iterator[str]:
    count = plan.logits_and_loss.num_chunks
    if count > 1:
        yield f"logits and loss are computed in {count} chunks, never all at once{worth.clause('chunked_loss')}"


def _declared_sentences(plan: Plan, worth: _Worth, *, is_lossy: bool) -> Iterator[str]:
    """Sentences of techniques whose declarations carry one. is_lossy: those that change the numbers, or the others."""
    for technique in plan.techniques:
        explanation = DECLARATIONS[technique].explanation
        if explanation and (technique in LOSSY) == is_lossy:
            differs = "; results differ slightly" * is_lossy
            yield f"{explanation}{differs}{worth.clause(technique)}"


def _state_sentences(plan: Plan, worth: _Worth) -> Iterator[str]:
    state = plan.optimizer_state
    if state.place == "device":
        return
    share = "the optimizer state" if state.fraction == 1 else f"{100 * state.fraction:.0f} % of the optimizer state"
    where = {
        "host": "on the host and is updated there",
        "disk": "in a file on disk and is updated on the host",
        "remote": "in the remote store and is updated on the host",
    }[state.place]
    yield f"{share} lives {where}{worth.clause('offload_optimizer')}"


_COPIES: Final = {
    True: ", to all devices{} from one copy",
    False: ", to all devices{} from one copy of those that are not trained",
}
"""By whether one rank alone updates each trained tensor."""


def _weights_sentences(plan: Plan, worth: _Worth) -> Iterator[str]:
    weights = plan.weights
    if plan.brings_weights:
        sources = {"host": "the host", "disk": "disk", "remote": "the remote store", "device": "the devices that keep them"}
        source = sources[weights.place]
        ahead = {0: "none ahead", 1: "one block ahead"}.get(weights.prefetch, f"{weights.prefetch} blocks ahead")
        copies = ""
        if plan.layout.is_cut:
            copies = ", to the device that has the block"
        elif plan.layout.shares_blocks:
            copies = ", to each device its part of it"
        elif plan.layout.num_devices > 1 and weights.place == "host":
            copies = _COPIES[plan.layout.shares_state].format(" of a replica" * (plan.layout.replicas > 1))
        when = "once for all micro-batches of a pass" if plan.layout.keeps_streamed else "as they are needed"
        words = f"each block's weights come from {source} {when}, {ahead}{copies}"
        yield f"{words}{worth.clause('shard_weights' if plan.layout.shares_weights else 'stream_weights')}"


def _precision_sentences(plan: Plan, worth: _Worth) -> list[str]:
    weights = plan.weights
    sentences = []
    if weights.dtype != "fp32":
        masters = ", beside fp32 master weights" if weights.master_bytes_per_element else ""
        scaled = ", and the loss is scaled so that small gradients survive" if weights.scales_loss else ""
        sentences.append(
            f"weights, gradients and activations are {weights.dtype}{masters}{scaled}; "
            f"results differ slightly{worth.clause(weights.dtype)}"
        )
    if weights.autocast != "off":
        scaled = ", and the loss is scaled so that small gradients survive" if weights.scales_loss else ""
        sentences.append(
            f"products and attention run in {weights.autocast} on fp32 weights{scaled}; "
            f"results differ slightly{worth.clause('autocast')}"
        )
    if weights.frozen != "same":
        sentences.append(
            f"the matrices under the adapters are held in {weights.frozen}; "
            f"results differ slightly{worth.clause('quantize_frozen')}"
        )
    if plan.optimizer_state.bits == 8:
        gain = worth.found("8bit_optimizer")
        opening = f"8-bit optimizer state {gain}" if gain else "the optimizer's moments take 8 bits an element"
        sentences.append(f"{opening}; results differ slightly")
    if plan.layout.steps_alone:
        sentences.append(
            f"gradients are not summed: {plan.layout.sync_every} steps alone are another training than {plan.layout.sync_every} "
            "steps together, and its loss may be higher; set layout.sync_every to 1 for the same numbers as on one device"
        )
    sentences += _declared_sentences(plan, worth, is_lossy=True)
    is_lossy = sentences or not plan.is_lossless
    return sentences if is_lossy else ["the numbers are those of plain fp32 training"]


def _cost_sentence(prediction: Costs, baseline: Costs) -> str:
    saved_bytes = baseline.device_peak_bytes - prediction.device_peak_bytes
    memory = f"saves {format_bytes(saved_bytes)}" if saved_bytes > 0 else f"needs {format_bytes(-saved_bytes)} more"
    percent = 100 * (prediction.step_ms / baseline.step_ms - 1) if baseline.step_ms > 0 else 0.0
    takes_as_long = abs(percent) < 0.5
    if saved_bytes == 0:
        memory = "peaks as high"
        if takes_as_long:
            return "takes as long and peaks as high as keep-all"
    if takes_as_long:
        return f"takes as long as keep-all, {memory}"
    time = f"costs {percent:.0f} % of step time" if percent > 0 else f"takes {-percent:.0f} % less step time"
    return f"{time} against keep-all, {memory}"


def _tiers_sentences(prediction: Costs, *, num_devices: int) -> Iterator[str]:
    """Yield the peaks of the other tiers, and the bytes that a step copies; of several devices those of each."""
    places = {
        "on the host": prediction.host_peak_bytes,
        "on disk": prediction.disk_peak_bytes,
        "in the remote store": prediction.remote_peak_bytes,
    }
    held = [f"{format_bytes(num_bytes)} {place}" for place, num_bytes in places.items() if num_bytes]
    if held:
        yield f"other memory holds up to {_listed(held)}" + " for each device" * (num_devices > 1)
    moved = describe_copies(prediction.copied_bytes)
    if moved or held:
        waits = f"compute waits {prediction.exposed_copy_ms:.1f} ms a step for copies"
        ending = waits if prediction.exposed_copy_ms >= _HIDDEN_MS else "the copies hide behind compute"
        yield f"each step copies {moved}; {ending}" if moved else ending


def describe_left_out(change: str, *, device_change_bytes: int, percent: float) -> str:
    """Say why a change that was allowed is not made.

    device_change_bytes: bytes that it adds to the peak, 0 if next to nothing. percent: of step time, that it would cost.
    """
    if device_change_bytes > 0:
        time = f" and cost {percent:.1f} % of step time" if percent >= 0.05 else ""
        return f"left out: to {_infinitive(change)} would add {format_bytes(device_change_bytes)} to the peak{time}"
    return f"left out: to {_infinitive(change)} would save nothing at the peak and cost {percent:.1f} % of step time"


def _infinitive(change: str) -> str:
    """Turn a knob's change into an infinitive; the change is a verb or names its result."""
    verbs = ("recompute", "offload", "keep", "make", "update", "stream")
    return change if change.split()[0] in verbs else f"have {change}"


def describe_move_or_rebuild(
    left_out: Technique, *, num_bytes: int, move_ms: float, waits_ms: float, rebuild_ms: float
) -> str:
    """Say why one of moving and rebuilding a block is left out. move_ms: on the busier copy lane. waits_ms: compute waits for it.
    """
    moving = f"a block's {format_bytes(num_bytes)} take {move_ms:.1f} ms to move each way"
    if left_out == "offload":
        return f"offloading is left out: {moving}, {waits_ms:.1f} ms of it not hidden, and {rebuild_ms:.1f} ms to rebuild"
    return f"recomputing is left out: a block takes {rebuild_ms:.1f} ms to rebuild; {moving}, {waits_ms:.1f} ms of it not hidden"


def describe_copies(copied_bytes: Mapping[str, int]) -> str:
    """List the copies: ``1.20 GiB to the host and 1.20 GiB back to the device``; empty if nothing moves."""
    return _listed(
        [f"{format_bytes(copied_bytes[link])} {words}" for link, words in _LINKS.items() if copied_bytes.get(link)]
    )


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
