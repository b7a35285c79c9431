"""The devices of a job that runs on several, as rows: what each holds at its peak, predicted and measured, the fullest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.base.units import format_bytes
from optimizer.plan.devices.stages import deal_stages
from webapp.jobs.models import Job
from webapp.pages.presentation import bar_percent
from webapp.pages.shown.job_head import budget_bytes, rank_budgets


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One device of the job."""

    rank: int
    place: int | None
    """Counted from its machine's first device; None before the job has begun."""
    measured_bytes: int | None
    predicted_bytes: int | None
    width_percent: str
    """Part of the bar's width that the peak takes, measured if it is known."""
    predicted_percent: str
    budget_percent: str
    part: str
    """Its device and its part of a step in words, where ranks differ: ``RTX 4090, 18 sequences of a step, 7,516 ms, the
    slowest``, or of a model that is cut ``RTX 4090, at work for 310 ms of a step``; else empty."""
    summary: str
    """The row's bar as a sentence, for those who do not see it."""
    holds: str = ""
    """Blocks of a model that is cut over the devices: ``blocks 1 to 6``."""


def rank_rows(job: Job) -> list[RankRow]:
    """None for a job of one device."""
    if job.need_devices == 1:
        return []
    measured = _sizes(job.summary.get("rank_peak_bytes"), job.need_devices)
    predicted = _sizes(_predicted_of(job), job.need_devices)
    blocks = _blocks_of(job)
    parts = _parts((job.prediction or {}).get("ranks") or [], job.need_devices, is_cut=any(blocks))
    places = _places(job)
    own = rank_budgets(job)
    budgets = own if len(own) == job.need_devices else [budget_bytes(job) or 0] * job.need_devices
    scale_bytes = max([1, *budgets, *(size for size in (*measured, *predicted) if size)]) * 1.04
    rows = [
        RankRow(
            rank=rank,
            place=places[rank],
            measured_bytes=measured[rank],
            predicted_bytes=predicted[rank],
            width_percent=bar_percent(int(measured[rank] or predicted[rank] or 0), scale_bytes),
            predicted_percent=_percent(predicted[rank], scale_bytes),
            budget_percent=_percent(budgets[rank], scale_bytes),
            part=parts[rank],
            summary=_summary(rank, measured[rank], predicted[rank], budgets[rank]),
            holds=blocks[rank],
        )
        for rank in range(job.need_devices)
    ]
    return sorted(rows, key=lambda row: -(row.measured_bytes or row.predicted_bytes or 0))


def _places(job: Job) -> list[int | None]:
    """The device of each rank in the newest attempt; on other machines those of its members."""
    found: list[int | None] = [None] * job.need_devices
    newest = job.attempts.order_by("-number").prefetch_related("members").first()
    if newest is None:
        return found
    members = [(member.ranks, member.devices) for member in newest.members.all()]
    elsewhere = {rank for ranks, _ in members for rank in ranks}
    own = [rank for rank in range(job.need_devices) if rank not in elsewhere]
    for ranks, devices in [(own, newest.devices), *members]:
        for rank, place in zip(ranks, devices, strict=False):
            found[rank] = place
    return found


def _predicted_of(job: Job) -> list[Any] | None:
    """Peaks by rank; of copies of a model all that of the first, which has no less to do than another."""
    prediction = job.prediction or {}
    stages = prediction.get("stages") or []
    if stages and "first_block" in stages[0]:  # a training job's stages are those of its time
        return [stage["device_peak_bytes"] for stage in stages]
    if (copies := int(prediction.get("num_replicas", 1))) > 1:
        return [prediction["device_peak_bytes"]] * copies
    return prediction.get("rank_peak_bytes")


def _blocks_of(job: Job) -> list[str]:
    """The blocks of each rank of a model that is cut; empty texts otherwise."""
    numbers = ((job.plan or {}).get("layout") or {}).get("stage_blocks") or []
    if not numbers or len(numbers) % job.need_devices:
        return [""] * job.need_devices
    return [own.words for own in deal_stages(numbers, job.need_devices)]


def _parts(ranks: Sequence[Any], num_ranks: int, *, is_cut: bool) -> list[str]:
    """Words for each rank; empty ones where all are alike. is_cut: True if all of them see every sequence."""
    if len(ranks) != num_ranks:
        return [""] * num_ranks
    slowest_ms = max(rank["step_ms"] for rank in ranks)
    return [
        f"{rank['device']}, "
        + (
            f"at work for {rank['step_ms']:,.0f} ms of a step"
            if is_cut
            else f"{rank['num_sequences']} sequence{'s' * (rank['num_sequences'] > 1)} of a step, {rank['step_ms']:,.0f} ms"
        )
        + (", the slowest" if rank["step_ms"] == slowest_ms else "")
        for rank in ranks
    ]


def _percent(size: int | None, scale_bytes: float) -> str:
    """Empty where there is nothing to draw."""
    return bar_percent(size, scale_bytes) if size else ""


def _sizes(found: Sequence[Any] | None, num_ranks: int) -> list[int | None]:
    """One for each rank, also where a document holds none or those of another plan."""
    return list(found) if found and len(found) == num_ranks else [None] * num_ranks


def _summary(rank: int, measured: int | None, predicted: int | None, budget: int) -> str:
    holds = f"{format_bytes(measured)} measured" if measured is not None else "not measured yet"
    foreseen = f", {format_bytes(predicted)} predicted" if predicted is not None else ""
    allowed = f", of {format_bytes(budget)}" if budget else ""
    return f"rank {rank}: {holds}{foreseen}{allowed}"
