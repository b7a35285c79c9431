"""Names why memory ran out, from what a run noted at that moment and what was predicted of it. Pure and torch-free.

The list is closed, and a generation has a shorter one. Buffers of collectives are a cause where ranks that took steps alone are
brought together: a moment by itself. *Not seen*: those inside a step, which the meter counts as what is made around them; their
cause is the step's.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from optimizer.estimate.prediction import STAGE_WORDS, Prediction

Cause = Literal[
    "load",
    "resume",
    "first_update",
    "longest_batch",
    "logits",
    "save",
    "export",
    "evaluation",
    "reference_model",
    "fragmentation",
    "another_process",
    "kernel_scratch",
    "uneven_placement",
    "collectives",
    "pinned_memory",
    "host_killed",
    "disk",
    "step",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
CAUSE_WORDS: Final[Mapping[Cause, str]] = {
    "load": "loading the model took more than predicted",
    "resume": "going on from the checkpoint took more than predicted",
    "first_update": "the optimizer's state took more than predicted when the first update made it",
    "longest_batch": "a batch was longer than the workload says",
    "logits": "the logits and the loss took more than predicted",
    "save": "saving a checkpoint took more than predicted",
    "export": "writing the weights took more than predicted",
    "evaluation": "an evaluation took more than predicted",
    "reference_model": "the reference of preference training took more than predicted",
    "fragmentation": "the allocator held memory in gaps that nothing fitted into",
    "another_process": "another process had taken part of the device's memory",
    "kernel_scratch": "ops took more scratch than predicted while they ran",
    "uneven_placement": "a step took more than predicted on the device that has most of it; dealt out evenly it had fitted",
    "collectives": "what devices exchanged at once took more than predicted",
    "pinned_memory": "copies on the host took more than predicted",
    "host_killed": "the host ran out of memory and ended the process",
    "disk": "the disk had no room left",
    "step": "the blocks of a step took more than predicted",
}
GenerationCause = Literal["load", "prefill", "decode", "fragmentation", "another_process"]
_GENERATION_WORDS: Final[Mapping[str, str]] = {
    "prefill": "reading the prompts took more than predicted",
    "decode": "making new tokens took more than predicted",
}
PASSING_CAUSES: Final = frozenset({"another_process", "fragmentation", "host_killed", "longest_batch", "disk"})
"""Causes that say nothing of the next run of the same work: they lie in the machine at that time, or in the data."""
_BY_STAGE: Final[Mapping[str, Cause]] = {
    "load": "load",
    "resume": "resume",
    "evaluation": "evaluation",
    "save": "save",
    "merge": "export",
    "export": "export",
}
_BY_EXCESS: Final[Mapping[str, Cause]] = {
    "optimizer_state": "first_update",
    "logits_and_loss": "logits",
    "temporaries": "kernel_scratch",
}
_ANYWHERE = frozenset({"kernel_scratch", "step"})
"""Causes that do not say why one rank of several ran out."""
_HEAD_MOMENTS = ("head and loss", "backward of head and loss")
_PHASES = (("forward", "forward"), ("head and loss", "forward"), ("backward", "backward"), ("optimizer step", "optimizer"))
"""Beginnings of moments, and the phase of a timeline's points that they are in."""
_UPDATE_MOMENTS = ("optimizer step", "gradient clipping")
_COLLECTIVE_MOMENT = "synchronization"


def name_cause(fields: Mapping[str, Any], *, prediction: Prediction | None) -> Cause:
    """The cause of an out-of-memory.

    fields: those of OutOfMemory with what the run adds: ``stage``, ``allowed_bytes`` (the goal's budget), ``batch_tokens`` beside
    ``planned_tokens``, ``rank`` of one of several. prediction: of the plan that ran; without one the moment alone decides.
    """
    if around := _cause_around(fields):
        return around
    if by_stage := _BY_STAGE.get(fields.get("stage", "")):
        return by_stage
    if fields.get("tier") == "host":
        return "pinned_memory"
    if fields.get("batch_tokens", 0) > fields.get("planned_tokens", 0):
        return "longest_batch"
    if fields.get("is_reference"):
        return "reference_model"
    moment = str(fields.get("moment", "")).removeprefix("inside an op ").removeprefix("in ")
    if moment == _COLLECTIVE_MOMENT:
        return "collectives"
    cause = _cause_in_step(moment, excess=_largest_excess(fields, moment, prediction))
    is_uneven = cause in _ANYWHERE and _would_fit_evenly(fields, prediction)
    return "uneven_placement" if is_uneven else cause


def name_generation_cause(fields: Mapping[str, Any]) -> GenerationCause:
    """The cause of an out-of-memory of a generation, on device or host. fields: as ``name_cause``'s."""
    if around := _cause_around(fields):
        return around
    moment = str(fields.get("moment", ""))
    if "decode" in moment:
        return "decode"
    return "prefill" if "prefill" in moment else "load"


def _cause_around(fields: Mapping[str, Any]) -> Literal["fragmentation", "another_process"] | None:
    """The cause that lies outside the run's own tensors; None where they took too much."""
    if fields.get("slack_bytes", 0) >= max(1, missing_bytes(fields)):
        return "fragmentation"
    return "another_process" if fields.get("budget_bytes", 0) < fields.get("allowed_bytes", 0) else None


def describe_cause(cause: str, *, stage: str) -> str:
    """A clause for people: where it happened and why."""
    words = {str(name): text for name, text in STAGE_WORDS.items() if name not in _BY_STAGE}
    where = f"in {words[stage]}: " if stage in words else ""
    why = {**{str(name): text for name, text in CAUSE_WORDS.items()}, **_GENERATION_WORDS}.get(cause, "")
    return f"{where}{why}" if why else ""


def missing_bytes(fields: Mapping[str, Any]) -> int:
    """Bytes by which what was in use and what was asked for went over the limit that was met."""
    wanted = int(fields.get("in_use_bytes", 0)) + int(fields.get("requested_bytes", 0))
    return wanted - int(fields.get("budget_bytes", 0))


def bytes_wanted(fields: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by category at that moment, the request that failed among them."""
    wanted = dict(fields.get("bytes_by_category") or {})
    category = fields.get("category", "temporaries")
    wanted[category] = wanted.get(category, 0) + int(fields.get("requested_bytes", 0))
    return wanted


def _cause_in_step(moment: str, *, excess: str) -> Cause:
    if excess in _BY_EXCESS:
        return _BY_EXCESS[excess]
    if excess:
        return "step"
    if moment.startswith(_HEAD_MOMENTS):
        return "logits"
    return "first_update" if moment.startswith(_UPDATE_MOMENTS) else "step"


def _would_fit_evenly(fields: Mapping[str, Any], prediction: Prediction | None) -> bool:
    """Report whether the rank was predicted to have the least room, and so much less than the mean that all would have fitted."""
    rank: int | None = fields.get("rank")
    if rank is None or prediction is None or rank >= len(prediction.rank_peak_bytes):
        return False
    rooms = [-peak_bytes for peak_bytes in prediction.rank_peak_bytes]
    if prediction.ranks:
        rooms = [each.memory_bytes - each.peak_bytes for each in prediction.ranks]
    return rooms[rank] == min(rooms) and rooms[rank] + max(1, missing_bytes(fields)) <= sum(rooms) / len(rooms)


def _largest_excess(fields: Mapping[str, Any], moment: str, prediction: Prediction | None) -> str:
    """The category that is furthest above what was predicted of it at that moment; empty where none is."""
    if prediction is None:
        return ""
    predicted = _predicted_at(moment, prediction)
    above = {category: size - predicted.get(category, 0) for category, size in bytes_wanted(fields).items()}
    category = max(above, key=lambda name: above[name], default="")
    return category if category and above[category] > 0 else ""


def _predicted_at(moment: str, prediction: Prediction) -> dict[str, int]:
    """Bytes by category, as near to the moment as a prediction's timeline has it: in the head the point with the most logits,
    else the most of each category in that part of the step.
    """
    phase = next((phase for words, phase in _PHASES if moment.startswith(words)), "")
    points = [point.bytes_by_category for point in prediction.timeline if phase in ("", point.phase)]
    if points and moment.startswith(_HEAD_MOMENTS):
        return max(points, key=lambda sizes: sizes.get("logits_and_loss", 0))
    categories = {category for sizes in points for category in sizes}
    return {category: max(sizes.get(category, 0) for sizes in points) for category in categories}
