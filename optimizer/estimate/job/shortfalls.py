"""Bytes by which stages of a job were predicted too low, as attempts that ran out of memory have shown. Pure and torch-free.

An attempt ends at the first request that does not fit, so what it shows is a lower bound. It is likely somewhat more, and twice
as much where the same stage runs out again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from optimizer.base.serialize import from_json
from optimizer.estimate.job.causes import bytes_wanted, missing_bytes
from optimizer.estimate.prediction import CardMemory, Prediction, StagePeak

Moments = dict[str, dict[str, int]]
"""Device bytes by category, by the name that the meter gives the moment (``Meter.moment``)."""
ShortTier = Literal["device", "host", "disk"]
EVERY_STAGE: Final = ""
"""The stage of a shortfall that lowers the room of all of them, as another process does."""
_MARGIN = 1.25
"""A shortfall is likely so many times what was seen of it."""
_LEAST_SHARE = 0.03
"""Least share of the memory that a process may have less of after the host ended it."""
_REQUESTS_TO_COME = 2
"""A request that failed is seldom the last of its kind: of the logits a loss makes three."""
_KEPT = "shortfalls"
_MAX_WORKS = 64
"""Works whose shortfalls a machine remembers, the latest."""
_BETWEEN_PASSES = ("evaluation", "loading", "resume")
"""Moments at which only what stays between steps is there."""
_KILLED_SHARE = 0.15
"""Share of the memory that a process may have less of, after the host ended it without a word of how much was missing."""


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """One stage's on one tier."""

    stage: str
    tier: ShortTier
    num_bytes: int
    """At least so many."""
    likely_bytes: int = 0
    """With the requests that would have followed the one that failed; a plan is looked for with these first."""
    device: str = ""
    """Kind of the device that ran out, where a machine has several; empty: any."""


def find_shortfalls(
    fields: Mapping[str, Any],
    *,
    prediction: Prediction,
    moments: Moments,
    cause: str,
    budgets: Mapping[ShortTier, int],
    on_host: bool = False,
    num_sharing: int = 1,
    earlier: Iterable[Shortfall] = (),
) -> tuple[Shortfall, ...]:
    """The bytes that an out-of-memory or a full disk shows to have been missing, such that the plan that ran no longer fits.

    fields: as ``name_cause``'s, or those of DiskFull. prediction: of a rank, with memory and all stages. moments: predicted of
    that plan. budgets: bytes that a rank may take by tier. on_host: the device is the processor, whose memory is the host's.
    num_sharing: ranks that share a disk. earlier: shown by attempts before.
    """
    if cause == "disk":
        return _on_disk(fields, prediction, budgets["disk"], num_sharing=num_sharing)
    if cause == "host_killed":
        return _after_kill(prediction, budgets, on_host=on_host)
    tier: ShortTier = "host" if fields.get("tier") == "host" else "device"
    if cause in ("another_process", "fragmentation"):
        limit_bytes = min(budgets[tier], int(fields.get("budget_bytes", budgets[tier])))
        least, stage = budgets[tier] - limit_bytes + max(1, missing_bytes(fields)), EVERY_STAGE
        likely_bytes = math.ceil(least * _MARGIN)
    else:
        stage = _planned_stage(str(fields.get("stage", EVERY_STAGE)), cause)
        seen = _seen_bytes(fields, prediction, moments, stage=stage, tier=tier)
        least = max(seen.num_bytes, _longer_bytes(fields, prediction))
        to_come = 0 if seen.is_whole else _REQUESTS_TO_COME * int(fields.get("requested_bytes", 0))
        likely_bytes = math.ceil(least * _MARGIN) + to_come
    # the same pass, and a plan for one of the two is a plan for both
    stage = "steady_step" if stage == "first_step" else stage
    before = [2 * each.num_bytes for each in earlier if (each.stage, each.tier) == (stage, tier)]
    return (Shortfall(stage=stage, tier=tier, num_bytes=least, likely_bytes=max([least, likely_bytes, *before])),)


def _planned_stage(stage: str, cause: str) -> str:
    """The stage whose predicted peak is the nearest: the reference's forward keeps nothing for a backward, as an evaluation's."""
    return "evaluation" if cause == "reference_model" else stage


def _after_kill(
    prediction: Prediction, budgets: Mapping[ShortTier, int], *, on_host: bool
) -> tuple[Shortfall, ...]:
    """The larger part of what steps had in the host's memory must shrink, and the other had better not grow for it.

    Loading, saving and exporting take what they take for a moment under any plan, so they keep room. None where steps had nothing
    there: the host was full of something else.
    """
    held: dict[ShortTier, int] = {"host": held_on_host(prediction.host_peak_bytes, prediction.memory)}
    peaks: dict[ShortTier, int] = {"host": max([held["host"], *(peak.host_peak_bytes for peak in prediction.stages)])}
    if on_host:
        held["device"] = peaks["device"] = prediction.device_peak_high_bytes
    largest = max(held, key=lambda tier: held[tier])
    if not held[largest]:
        return ()
    return tuple(
        Shortfall(
            stage=EVERY_STAGE,
            tier=tier,
            num_bytes=budgets[tier] - num_bytes + math.ceil(held[tier] * _LEAST_SHARE) if tier == largest else 0,
            likely_bytes=budgets[tier] - num_bytes + (math.ceil(held[tier] * _KILLED_SHARE) if tier == largest else 0),
        )
        for tier, num_bytes in peaks.items()
    )


def _on_disk(
    fields: Mapping[str, Any], prediction: Prediction, budget_bytes: int, *, num_sharing: int
) -> tuple[Shortfall, ...]:
    """Scratch files and the job's own files must fit into what the disk had room for: what they held, and what was free. None
    where the plan has no scratch file, since the others are as large under any plan.
    """
    scratch_bytes = prediction.disk_peak_bytes
    if not scratch_bytes or "free_bytes" not in fields:
        return ()
    held_bytes = num_sharing * int(fields.get("in_use_bytes", scratch_bytes)) + int(fields.get("kept_bytes", 0))
    room_bytes = held_bytes + int(fields["free_bytes"]) - int(fields.get("floor_bytes", 0))
    with_scratch = [peak for peak in prediction.stages if peak.disk_peak_bytes > peak.file_bytes]
    needed_bytes = max([num_sharing * scratch_bytes, *(peak.disk_bytes_of(num_sharing) for peak in with_scratch)])
    left_bytes = min(room_bytes, needed_bytes - 1) // num_sharing
    return (Shortfall(stage=EVERY_STAGE, tier="disk", num_bytes=max(0, budget_bytes - left_bytes)),)


def held_on_host(host_peak_bytes: int, memory: CardMemory | None) -> int:
    """The host's bytes of a step or a pass, with what pinning rounds up to. memory: as the prediction has it."""
    if memory is None or not host_peak_bytes:
        return host_peak_bytes
    return max(host_peak_bytes, memory.host_pinned.value + memory.host_pageable.value)


def merge_shortfalls(found: Iterable[Shortfall]) -> tuple[Shortfall, ...]:
    """The largest of each stage, tier and kind of device."""
    largest: dict[tuple[str, ShortTier, str], Shortfall] = {}
    for each in found:
        known = largest.get((each.stage, each.tier, each.device))
        if known is None or known.num_bytes < each.num_bytes:
            largest[each.stage, each.tier, each.device] = each
    return tuple(largest.values())


def raise_prediction(
    prediction: Prediction, stages: Sequence[StagePeak], shortfalls: Sequence[Shortfall]
) -> Prediction:
    """The prediction with each stage's shortfall of the device on top of its peak. stages: of the same plan."""
    known = {peak.stage for peak in stages}
    more = [
        peak.device_peak_bytes + each.num_bytes
        for peak in stages
        for each in shortfalls
        if each.tier == "device" and peak.stage in _stages_of(each, known)
    ]
    return prediction.raised_to(max(more, default=0))


def shortfall_on(tier: ShortTier, shortfalls: Iterable[Shortfall]) -> int:
    """Bytes to leave free of a tier whose stages are not held apart, as those of host and disk are not."""
    return max((each.num_bytes for each in shortfalls if each.tier == tier), default=0)


def toward_likely(shortfalls: Iterable[Shortfall], share: float) -> tuple[Shortfall, ...]:
    """The same, each so far on the way from what was seen of it to what it likely is."""
    return tuple(
        replace(each, num_bytes=each.num_bytes + math.ceil(share * max(0, each.likely_bytes - each.num_bytes)))
        for each in shortfalls
    )


def _stages_of(shortfall: Shortfall, known: Set[str]) -> Set[str]:
    """Stages whose peaks a shortfall is put on. Loading that is not priced leaves what is there when a job goes on; anything else
    that is not priced is put on all.
    """
    if shortfall.stage == "steady_step":
        return {"first_step", "steady_step"}
    stage = "resume" if shortfall.stage == "load" and "load" not in known else shortfall.stage
    return {stage} if stage in known else known


def peak_bytes(peak: StagePeak, tier: ShortTier) -> int:
    found: int = getattr(peak, f"{tier}_peak_bytes")
    return found


class Seen(NamedTuple):
    """A lower bound on a shortfall."""

    num_bytes: int
    is_whole: bool
    """True where moments before the failure were as much higher, or the request itself was what nobody had predicted: nothing
    more is to come."""


def _seen_bytes(
    fields: Mapping[str, Any], prediction: Prediction, moments: Moments, *, stage: str, tier: ShortTier
) -> Seen:
    """At least by how much more there was than predicted."""
    wanted = bytes_wanted(fields)
    peaks = {peak.stage: peak_bytes(peak, tier) for peak in (*prediction.peaks, *prediction.stages)}
    usual = prediction.device_peak_bytes if tier == "device" else prediction.host_peak_bytes
    total = sum(wanted.values()) - peaks.get(stage, usual)  # type: ignore[call-overload]
    if tier != "device":
        # a request larger than all that the stage adds is what nobody had predicted, and what the stage adds was still to come
        resident, requested = peaks.get("resume", usual), int(fields.get("requested_bytes", 0))
        is_other = requested > peaks.get(stage, usual) - resident  # type: ignore[call-overload]
        return Seen(max(1, requested if is_other else total), is_whole=is_other)
    moment = str(fields.get("moment", "")).removeprefix("in ")
    here = _at_moment(moment, moments, wanted, stage=stage)
    if not stage.endswith("_step") and moment in _BETWEEN_PASSES:
        here = sum(wanted.values()) - peaks.get("resume", usual)
    before = [
        num_bytes - _predicted_total(moments[name], wanted, stage=stage)
        for name, num_bytes in (fields.get("moments") or {}).items()
        if name in moments and stage.endswith("_step")
    ]
    earlier = max(before, default=0)
    most = max(1, total, here)
    is_whole = earlier >= most or here >= int(fields.get("requested_bytes", 0))
    return Seen(max(most, earlier), is_whole=is_whole)


def _longer_bytes(fields: Mapping[str, Any], prediction: Prediction) -> int:
    """The bytes that a batch longer than planned takes on top: as much of what comes and goes in a step as it has more tokens."""
    planned = int(fields.get("planned_tokens", 0))
    longer = max(0, int(fields.get("batch_tokens", 0)) - planned)
    if not longer or not prediction.timeline:
        return 0
    resident_bytes = sum(prediction.timeline[0].bytes_by_category.values())
    return math.ceil((prediction.device_peak_bytes - resident_bytes) * longer / planned)


def _at_moment(moment: str, moments: Moments, wanted: Mapping[str, int], *, stage: str) -> int:
    """Category by category, so that what was to come later in the same moment hides less."""
    predicted = moments.get(moment)
    if predicted is None or not stage.endswith("_step"):
        return 0
    return sum(max(0, size - predicted.get(category, 0)) for category, size in wanted.items())


def _predicted_total(predicted: Mapping[str, int], wanted: Mapping[str, int], *, stage: str) -> int:
    """Before the first update there is no optimizer state, which a steady step has."""
    has_no_state = stage == "first_step" and not wanted.get("optimizer_state")
    return sum(predicted.values()) - (predicted.get("optimizer_state", 0) if has_no_state else 0)


# Keeping them, in the object that a machine's calibration is (``hardware/calibration.py``).


def remember_shortfalls(
    calibration: Mapping[str, Any] | None, work: str, shown: Iterable[Shortfall]
) -> dict[str, Any]:
    """The calibration with what attempts at this work have shown on the machine; the argument is left as it is.

    work: names model and workload; other work may miss by other bytes. What is short of every stage is left out: another process
    or a full host may be gone the next time.
    """
    before = dict(calibration or {})
    kept = dict(before.get(_KEPT, {}))
    found = merge_shortfalls([*known_shortfalls(before, work), *(each for each in shown if each.stage != EVERY_STAGE)])
    kept.pop(work, None)
    if found:
        kept[work] = [_to_row(each) for each in found]
    return {**before, _KEPT: dict(list(kept.items())[-_MAX_WORKS:])}


def _to_row(shortfall: Shortfall) -> dict[str, Any]:
    row = {"stage": shortfall.stage, "tier": shortfall.tier, "num_bytes": shortfall.num_bytes}
    return {**row, "device": shortfall.device} if shortfall.device else row


def known_shortfalls(calibration: Mapping[str, Any] | None, work: str) -> tuple[Shortfall, ...]:
    """Shortfalls that were remembered of this work; none where none were."""
    rows = (calibration or {}).get(_KEPT, {}).get(work, [])
    return tuple(from_json(Shortfall, row, path="shortfall") for row in rows)
